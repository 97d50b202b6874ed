"""Where death is awkward: in setup, in a batch, in a wait for memory, for a fan-in, for a client, while all stops."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import multiprocess.forkserver
import pytest

from omniflow import supervisor
from omniflow.errors import DeadlineError, RequestError, StageDiedError, StartError
from omniflow.graph import Restart
from omniflow.prctl import PARENT
from omniflow.runtime import Runtime

from ..doubles import counted_turns
from ..graphs import fork, perils
from ..graphs.perils import Task
from ..graphs.row import Job
from ..running import CPU, pid_of, running, settled, unstarted, up_again
from ..waiting import HANGS_S, until
from .conftest import rounds

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]

KIB = 2**10


async def kill(runtime: Runtime, stage: str, sign: signal.Signals = signal.SIGKILL) -> None:
    """Kill the process of a stage, and wait until the runtime has noticed."""
    pid = pid_of(runtime, stage)
    os.kill(pid, sign)
    await until(lambda: all(status.pid != pid for status in runtime.status().stages))


async def ask(runtime: Runtime, entry: str, value: object, **how: Any) -> dict[str, Any]:
    return await (await runtime.submit(entry, value, **how)).collect()


class Asked:
    """Requests under way, and how each of them ended."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.errors: list[RequestError] = []

    async def one(self, runtime: Runtime, entry: str, value: object, **how: Any) -> None:
        try:
            self.found.append(await ask(runtime, entry, value, **how))
        except RequestError as error:
            self.errors.append(error)

    def died(self) -> list[str | None]:
        """The stages that the errors name, all of which must be deaths."""
        assert {type(error) for error in self.errors} <= {StageDiedError}, self.errors
        return [error.stage for error in self.errors]


# -- setup -------------------------------------------------------------------------------------------------------------


async def test_killed_again_and_again_while_it_is_set_up(dice: random.Random) -> None:
    """From the fork on, at any moment: each death counts as one, and the host is started again."""
    async with running(perils.build(setup_s=0.3), CPU, restart_wait_s=HANGS_S) as runtime:
        child = runtime._supervisor.children["start"]
        async with anyio.create_task_group() as tasks:
            await kill(runtime, "start")
            asked = Asked()
            for _ in range(4):
                tasks.start_soon(asked.one, runtime, "task", Task())
            for _ in range(12):
                await until(lambda: child.pid is not None)
                await anyio.sleep(dice.choice([0, 0.001, 0.01, 0.03, 0.05]))
                if child.state == "starting":
                    await kill(runtime, "start")
                else:
                    break
        assert len(asked.found) == 4, asked.errors
        assert child.restarts >= 3


async def test_dead_before_anybody_could_watch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    open_pidfd = os.pidfd_open
    killed = []

    def late(pid: int) -> int:
        if len(killed) < 3:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
            while os.path.exists(f"/proc/{pid}"):
                pass
        return open_pidfd(pid)

    async with running(perils.build(), CPU) as runtime:
        monkeypatch.setattr(os, "pidfd_open", late)
        await kill(runtime, "hold")
        assert (await ask(runtime, "task", Task()))["numbers"] == [0]
        assert len(killed) == 3
        assert runtime._supervisor.children["hold"].restarts == 4


async def test_a_fork_server_that_dies_while_it_starts_a_host(dice: random.Random) -> None:
    """All hosts are its children and die with it; all are started again by a new one."""
    async with running(perils.build(), CPU) as runtime:
        for number in range(rounds(4)):
            await kill(runtime, "hold")
            await anyio.sleep(dice.random() * 0.02)
            os.kill(multiprocess.forkserver._forkserver._forkserver_pid, signal.SIGKILL)
            await until(lambda: min(s.restarts for s in runtime.status().stages) > number)  # noqa: B023
            assert (await ask(runtime, "task", Task()))["numbers"] == [0]


async def test_no_host_outlives_a_fork_server_that_dies_as_it_forks(dice: random.Random) -> None:
    """A host that finds itself without its parent ends: nothing would end it together with the main process."""
    async with running(perils.build(), CPU) as runtime:
        for _ in range(rounds(4)):
            server = multiprocess.forkserver._forkserver._forkserver_pid
            before = children_of(server)
            os.kill(pid_of(runtime, "hold"), signal.SIGKILL)
            await until(lambda: children_of(server) - before)  # noqa: B023
            await anyio.sleep(dice.random() * 0.002)
            os.kill(server, signal.SIGKILL)
            await until(lambda: multiprocess.forkserver._forkserver._forkserver_pid != server)  # noqa: B023
            await up_again(runtime)
            assert (await ask(runtime, "task", Task()))["numbers"] == [0]
            server = multiprocess.forkserver._forkserver._forkserver_pid
            assert {status.pid for status in runtime.status().stages} <= children_of(server)


async def test_a_fork_server_that_dies_just_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that asks starts another one, which would die with that thread, and all its hosts with it."""
    start, ensure_forkserver, killed, is_asked = supervisor._start, supervisor._ensure_forkserver, [], threading.Event()

    def late(process: Any) -> str | None:
        if not killed:
            killed.append(multiprocess.forkserver._forkserver._forkserver_pid)
            os.kill(killed[0], signal.SIGKILL)
            os.waitid(os.P_PID, killed[0], os.WEXITED | os.WNOWAIT)
        failure = start(process)
        is_asked.set()
        return failure

    def later() -> None:
        """The other hosts have died with it: what restarts them comes behind the thread."""
        if killed:
            is_asked.wait(HANGS_S)
        ensure_forkserver()

    async with running(perils.build(), CPU) as runtime:
        monkeypatch.setattr(supervisor, "_start", late)
        monkeypatch.setattr(supervisor, "_ensure_forkserver", later)
        await kill(runtime, "hold")
        assert (await ask(runtime, "task", Task()))["numbers"] == [0]
        # Two, or three: the one that the thread has started may be found before it is quite dead.
        assert runtime._supervisor.children["hold"].restarts >= 2
        server = Path(f"/proc/{multiprocess.forkserver._forkserver._forkserver_pid}")
        assert f"{PARENT}={os.getpid()}".encode() in (server / "environ").read_bytes().split(b"\0")


@pytest.mark.parametrize("then", ["start", "restart", "stop"])
async def test_a_fork_server_that_hangs(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports from a disk that does not answer, say: it is killed when the time to start is over, or to stop."""
    if then == "stop":
        monkeypatch.setattr(supervisor, "_KILL_AFTER_S", 0.1)
    runtime = unstarted(perils.build(), CPU, start_timeout_s=1.0 if then == "start" else 100.0)
    if then == "start":
        hold_up_the_fork_server()
        with pytest.raises(StartError, match="not ready after 1 s"):
            await runtime.__aenter__()
        return
    async with runtime:
        server = hold_up_the_fork_server()
        if then == "restart":
            hurry_once(runtime._supervisor, monkeypatch)
        await kill(runtime, "hold")
        if then == "restart":
            await until(lambda: multiprocess.forkserver._forkserver._forkserver_pid != server)
            await up_again(runtime)
            assert (await ask(runtime, "task", Task()))["numbers"] == [0]
        else:
            await until(lambda: not runtime._supervisor.children["hold"].launched.is_set())


async def test_a_fork_server_that_is_in_time_is_not_killed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    call_later, timers = loop.call_later, list[asyncio.TimerHandle]()

    def seen(delay_s: float, call: Callable[..., object], *arguments: object) -> asyncio.TimerHandle:
        timer = call_later(delay_s, call, *arguments)
        timers.extend([timer] if call is supervisor._kill_forkserver else [])
        return timer

    monkeypatch.setattr(loop, "call_later", seen)
    async with running(perils.build(), CPU) as runtime:
        assert len(timers) == len(runtime.plan.hosts)
        assert all(timer.cancelled() for timer in timers)
    assert all(timer.cancelled() for timer in timers), "the stop has one, too"


def hold_up_the_fork_server() -> int:
    supervisor._ensure_forkserver()
    server: int = multiprocess.forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)
    return server


def hurry_once(its: supervisor.Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts may take 0.1 s to be forked until the fork server is killed for it, and then as long as before."""
    before, kill_forkserver = its._config, supervisor._kill_forkserver

    def kill_late() -> None:
        its._config = before
        kill_forkserver()

    monkeypatch.setattr(supervisor, "_kill_forkserver", kill_late)
    its._config = msgspec.structs.replace(before, start_timeout_s=0.1)


def children_of(pid: int) -> set[int]:
    try:
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except (FileNotFoundError, ProcessLookupError):
        return set()


async def test_a_death_of_which_its_parent_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server is busy, or stopped: its word is waited for by nobody for long, and not by the event loop."""
    async with running(perils.build(), CPU) as runtime:
        server = multiprocess.forkserver._forkserver._forkserver_pid
        reply = await runtime.submit("task", Task(reads=1, holds_s=30))
        await anext(reply)
        monkeypatch.setattr(supervisor, "_TOLD_WITHIN_S", 0.5)
        os.kill(server, signal.SIGSTOP)
        try:
            child = runtime._supervisor.children["hold"]
            process = child.process
            os.kill(process.pid, signal.SIGKILL)
            await until(lambda: child.silence is not None)
            async with counted_turns() as turns:
                with pytest.raises(StageDiedError, match="its process is gone"):
                    await anext(reply)
            assert turns.num > 100, "the event loop stood still"
            assert process.exitcode is None, "its parent has said nothing yet"
        finally:
            os.kill(server, signal.SIGCONT)
        assert (await ask(runtime, "task", Task()))["numbers"] == [0]


async def test_killed_during_the_first_start() -> None:
    """Nothing was ever up: that is an error of the start, which names the stage; no other host stays."""
    for delay_s in (0.0, 0.002, 0.01, 0.05):
        runtime = unstarted(perils.build(setup_s=2.0), CPU)
        child = runtime._supervisor.children["start"]

        async def kill_it() -> None:
            await until(lambda: child.pid is not None)  # noqa: B023
            await anyio.sleep(delay_s)  # noqa: B023
            os.kill(child.pid or 0, signal.SIGKILL)  # noqa: B023

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill_it)
            with pytest.raises(StartError, match="failed to start: (killed by SIGKILL|its process is gone)") as caught:
                await runtime.__aenter__()
        assert caught.value.stage == "start"


# -- while something runs or waits -------------------------------------------------------------------------------------


async def test_while_a_batch_runs() -> None:
    """Those in the batch and those behind it end; those that come afterwards do not."""
    async with running(perils.build(), CPU) as runtime:
        asked = Asked()
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(asked.one, runtime, "seconds", 5.0)
            await until(lambda: runtime.status().in_flight == 10)
            await anyio.sleep(0.1)
            await kill(runtime, "batch")
        assert asked.died() == ["batch"] * 10
        assert (await ask(runtime, "seconds", 0.0))["batched"] == 0.0


@pytest.mark.parametrize("victim", ["start", "hold"])
async def test_while_a_sender_waits_for_shared_memory(victim: str) -> None:
    """The reader holds all of 1 MiB: its sender waits. Afterwards all of it is there again."""
    async with running(perils.build(bound=32), CPU, shm_bytes=2**20) as runtime:
        task = Task(num=20, size=200 * KIB, reads=5, holds_s=30)
        asked = Asked()
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(asked.one, runtime, "task", task)
            await until(lambda: runtime.status().in_flight == 3)
            await anyio.sleep(0.3)
            await kill(runtime, victim)
        assert asked.died() == [victim] * 3
        for _ in range(5):
            found = await ask(runtime, "task", Task(num=20, size=200 * KIB, reads=3))
            assert found["held"] == 600 * KIB


async def test_a_sender_that_waits_for_memory_hears_of_its_deadline() -> None:
    async with running(perils.build(bound=32), CPU, shm_bytes=2**20) as runtime:
        with pytest.raises(DeadlineError), anyio.fail_after(HANGS_S):
            await ask(runtime, "task", Task(num=20, size=200 * KIB, reads=5, holds_s=2 * HANGS_S), deadline_s=0.3)
        await settled(runtime)
        assert (await ask(runtime, "task", Task(num=20, size=200 * KIB, reads=2)))["held"] == 400 * KIB


@pytest.mark.parametrize("victim", ["start", "hold"])
async def test_while_the_client_does_not_read(victim: str) -> None:
    async with running(perils.build(), CPU) as runtime:
        replies = [await runtime.submit("task", Task(num=1000, size=20 * KIB)) for _ in range(3)]
        for reply in replies:
            await anext(reply)
        await anyio.sleep(0.1)
        await kill(runtime, victim)
        for reply in replies:
            with pytest.raises(StageDiedError):
                await anext(reply)
        await settled(runtime)
        assert len((await ask(runtime, "task", Task(num=10)))["numbers"]) == 10


async def test_what_had_left_a_host_before_it_died_arrives() -> None:
    """Its last words are in the socket when its death is noticed; a request that is whole is no victim.

    The socket holds 278 small packets: all that is said here, even where each word is one.
    """
    async with running(perils.build(bound=300), CPU, stream_bound=300) as runtime:
        replies = [await runtime.submit("task", Task(num=60)) for _ in range(4)]
        await anyio.sleep(0)
        victim = pid_of(runtime, "hold")
        hold_up_the_event_loop_while_at_work(pid_of(runtime, "start"), victim)
        os.kill(victim, signal.SIGKILL)
        hold_up_the_event_loop(0.2)
        for reply in replies:
            assert len((await reply.collect())["numbers"]) == 60


@pytest.mark.parametrize("victim", ["start", "left", "right", "join"])
async def test_while_a_fan_in_waits(victim: str) -> None:
    """One source has given its part, the other sleeps; whoever dies, the request hears of it at once."""
    async with running(fork.build(), CPU) as runtime:
        asked = Asked()
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(asked.one, runtime, "job", Job("left", "sleep"))
            await until(lambda: runtime.status().in_flight == 4)
            await anyio.sleep(0.1)
            await kill(runtime, victim)
            await until(lambda: len(asked.errors) + len(asked.found) == 4 or victim in ("start", "right"))
            if not asked.errors:
                await kill(runtime, "left")
                victim = "left"
        assert asked.died() == [victim] * 4
        await up_again(runtime)
        assert (await ask(runtime, "job", Job()))["job"].seen == ("start", "left", "start", "right")


# -- strategies under load ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "swept"), [("rest_for_one", {"hold", "batch"}), ("one_for_all", {"start", "hold", "batch"})]
)
async def test_strategies_under_load(strategy: Any, swept: set[str], dice: random.Random) -> None:
    restart = Restart(strategy, max_restarts=1_000_000, within_s=0.001, backoff_s=0.001)
    async with running(perils.build(restart=restart), CPU) as runtime:
        for _ in range(4):
            before = {stage.host: stage.pid for stage in runtime.status().stages}
            asked = Asked()
            async with anyio.create_task_group() as tasks:
                for number in range(16):
                    entry, value = ("seconds", 0.05) if number % 4 == 0 else ("task", Task(num=50, size=20 * KIB))
                    tasks.start_soon(asked.one, runtime, entry, value)
                await anyio.sleep(dice.random() * 0.05)
                await kill(runtime, "hold")
            assert len(asked.found) + len(asked.errors) == 16
            assert set(asked.died()) <= swept
            await until(lambda: not any(child.swept for child in runtime._supervisor.children.values()))
            await up_again(runtime)
            after = {stage.host: stage.pid for stage in runtime.status().stages}
            assert {host for host in after if before[host] != after[host]} == swept
            await settled(runtime)
        assert len((await ask(runtime, "task", Task(num=10)))["numbers"]) == 10


async def test_all_die_at_once_where_one_would_take_along_all() -> None:
    """The others are dead already, and their numbers free, when they are to be killed for the first."""
    restart = Restart("one_for_all", max_restarts=1_000_000, within_s=0.001, backoff_s=0.001)
    async with running(perils.build(restart=restart), CPU) as runtime:
        for _ in range(5):
            pids = {status.pid or 0 for status in runtime.status().stages}
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            hold_up_the_event_loop(0.1)
            await until(lambda: not pids & {status.pid for status in runtime.status().stages})  # noqa: B023
            await up_again(runtime)
            assert len((await ask(runtime, "task", Task(num=10)))["numbers"]) == 10


# -- stopping ----------------------------------------------------------------------------------------------------------


async def test_while_it_drains() -> None:
    """The requests of the dead host end, the others are finished, and no request is left to wait for."""
    async with running(perils.build(), CPU, drain_s=3 * HANGS_S) as runtime:
        asked = Asked()
        task = Task(num=2, reads=1, holds_s=2 * HANGS_S)
        with anyio.fail_after(HANGS_S):
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    entry, value = ("seconds", 0.3) if number % 2 == 0 else ("task", task)
                    tasks.start_soon(asked.one, runtime, entry, value)
                await until(lambda: runtime.status().in_flight == 8)
                tasks.start_soon(runtime.drain)
                await anyio.sleep(0.05)
                await kill(runtime, "hold")
        assert asked.died() == ["hold"] * 4
        assert [found["batched"] for found in asked.found] == [0.3] * 4


async def test_stopped_while_the_fork_server_is_held_up() -> None:
    """It says late that hosts have ended. What is open for them is closed before the runtime is: nobody would later."""
    async with running(perils.build(), CPU):
        server = multiprocess.forkserver._forkserver._forkserver_pid
        os.kill(server, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (server, signal.SIGCONT)).start()


async def test_stopped_at_any_moment_of_a_restart(dice: random.Random) -> None:
    for _ in range(5):
        async with unstarted(perils.build(setup_s=0.02), CPU) as runtime:
            await kill(runtime, "start")
            await anyio.sleep(dice.random() * 0.06)


# -- hangs -------------------------------------------------------------------------------------------------------------


async def test_a_stopped_host_is_noticed_by_its_heart() -> None:
    """SIGSTOP: it is not dead, it only does nothing more. It is treated as dead."""
    async with running(perils.build(), CPU, hang_s=1.0) as runtime:
        replies = [await runtime.submit("task", Task(num=1000)) for _ in range(4)]
        for reply in replies:
            await anext(reply)
        began = time.monotonic()
        await kill(runtime, "hold", signal.SIGSTOP)
        assert time.monotonic() - began > 0.7
        for reply in replies:
            with pytest.raises(StageDiedError):
                await reply.collect()
        assert len((await ask(runtime, "task", Task(num=10)))["numbers"]) == 10


async def test_a_runtime_that_was_stopped_itself_kills_nobody() -> None:
    """A container that is paused, a machine that was asleep: silence while nobody listened says nothing."""
    async with running(perils.build(), CPU, hang_s=1.0) as runtime:
        hosts = [status.pid or 0 for status in runtime.status().stages]
        for host in hosts:
            os.kill(host, signal.SIGSTOP)
        hold_up_the_event_loop(2.0)
        for host in hosts:
            os.kill(host, signal.SIGCONT)
        for _ in range(3):
            await anyio.sleep(0.2)
            assert len((await ask(runtime, "task", Task(num=10)))["numbers"]) == 10
        assert {status.restarts for status in runtime.status().stages} == {0}


def hold_up_the_event_loop(seconds: float) -> None:
    time.sleep(seconds)


def hold_up_the_event_loop_while_at_work(*pids: int) -> None:
    """Until all of these processes have slept for 0.3 s, in which none waited for a core."""
    used, since = 0, time.monotonic()
    while time.monotonic() < since + 0.3:
        time.sleep(0.01)
        states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        now = sum(int(state[11]) + int(state[12]) for state in states)
        if now != used or {state[0] for state in states} != {"S"}:
            used, since = now, time.monotonic()
