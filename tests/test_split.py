"""A stage of several processes lives and dies as one: no rank outlives another, and all of them come back."""

from __future__ import annotations

import asyncio
import functools
import os
import select
import signal
from collections.abc import Callable

import anyio
import multiprocess.resource_tracker
import pytest

from omniflow import supervisor
from omniflow.errors import StageDiedError, StartError
from omniflow.planner import Cluster, Gpu
from omniflow.runtime import Runtime
from omniflow.supervisor import Child, Follower, Supervisor
from omniflow.transport.base import Link

from .chaos.scenes import gone_after, marked, program, up
from .conftest import hosts_below
from .graphs import choir
from .graphs.choir import RANKS, Song
from .running import running, unstarted, up_again
from .waiting import HANGS_S

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]

MACHINE = Cluster("gpus", 8, 0, gpus=(Gpu("any", 2**36),) * RANKS)
"""GPUs that no process here uses."""


@pytest.fixture(scope="module", autouse=True)
def resource_tracker() -> None:
    """Started before descriptors are counted: it outlives each runtime."""
    multiprocess.resource_tracker.ensure_running()


def pids(runtime: Runtime) -> list[int]:
    """Of all ranks, in their order."""
    child = runtime._supervisor.children["sing"]
    return [child.process.pid, *(follower.process.pid for follower in child.followers)]


async def sung(runtime: Runtime, song: Song | None = None) -> list[object]:
    return [output.value async for output in await runtime.submit("ask", song or Song())]


async def died(runtime: Runtime, song: Song, match: str) -> None:
    """`song` ends with the death of its stage."""
    with anyio.fail_after(HANGS_S), pytest.raises(StageDiedError, match=match):
        await sung(runtime, song)


@pytest.mark.parametrize("rank", [0, RANKS - 1])
async def test_the_death_of_any_rank_is_the_death_of_the_stage(rank: int) -> None:
    async with running(choir.build(), MACHINE) as runtime:
        before = pids(runtime)
        assert len({*before, os.getpid()}) == RANKS + 1
        reply = await runtime.submit("ask", Song(holds_s=30))
        assert (await anext(reply)).value == "la"
        os.kill(before[rank], signal.SIGKILL)
        with anyio.fail_after(HANGS_S), pytest.raises(StageDiedError, match="killed by SIGKILL"):
            await anext(reply)
        await up_again(runtime)
        assert not hosts_below(os.getpid()) & set(before)
        assert not set(pids(runtime)) & set(before)
        assert await sung(runtime) == ["la"]
        assert runtime.status().stages[0].restarts == 1


async def test_a_first_rank_that_lives_is_heard_out_once_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that goes on sending would hold up the event loop."""
    hear_out = supervisor._hear_out
    async with running(choir.build(), MACHINE) as runtime:
        child = runtime._supervisor.children["sing"]
        is_dead: list[bool] = []

        def heard(link: Link) -> None:
            is_dead.append(child.pidfd is None or bool(select.select([child.pidfd], [], [], 5.0)[0]))
            hear_out(link)

        monkeypatch.setattr(supervisor, "_hear_out", heard)
        os.kill(pids(runtime)[RANKS - 1], signal.SIGKILL)
        with anyio.fail_after(HANGS_S):
            while not child.restarts:
                await runtime._wait_change()
        assert is_dead == [True]
        await up_again(runtime)


@pytest.mark.parametrize(("rank", "why"), [(0, "killed by SIGKILL"), (1, "its process is gone")])
async def test_a_death_is_known_before_the_kernel_has_freed_all(
    rank: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process on a GPU is dead 0.2 s after it has begun to end. Older kernels do not say meanwhile how it ends."""
    late: list[Callable[[], None]] = []
    if why == "its process is gone":
        monkeypatch.setattr(supervisor, "_ending", lambda pid: 0)
    for seen in (Supervisor._on_exit, Supervisor._on_follower_exit):
        monkeypatch.setattr(Supervisor, seen.__name__, held(seen, late))
    async with running(choir.build(), MACHINE) as runtime:
        reply = await runtime.submit("ask", Song(holds_s=30))
        await anext(reply)
        os.kill(pids(runtime)[rank], signal.SIGKILL)
        with anyio.fail_after(HANGS_S), pytest.raises(StageDiedError, match=why):
            await anext(reply)
        with anyio.fail_after(HANGS_S):
            while len(late) < RANKS:
                await anyio.sleep(0.001)
        assert runtime._supervisor.children["sing"].restarts == 1
        assert not runtime._supervisor.children["sing"].gone.is_set()
        monkeypatch.undo()
        for tell in late:
            tell()
        await up_again(runtime)
        assert await sung(runtime) == ["la"]


def held(tell: Callable[..., None], late: list[Callable[[], None]]) -> Callable[..., None]:
    """`tell` for later: it is not told now that a process is dead."""

    def hold(supervisor: Supervisor, child: Child, *follower: Follower) -> None:
        pidfd = follower[0].pidfd if follower else child.pidfd
        assert pidfd is not None
        asyncio.get_running_loop().remove_reader(pidfd)
        late.append(functools.partial(tell, supervisor, child, *follower))

    return hold


async def test_a_rank_that_is_stopped_cannot_hold_up_the_end_of_the_others() -> None:
    """As one in a collective that never ends: it is killed, and what it says no more is not waited for."""
    async with running(choir.build(), MACHINE) as runtime:
        first, second, third = pids(runtime)
        for pid in (first, second):
            os.kill(pid, signal.SIGSTOP)
        os.kill(third, signal.SIGKILL)
        with anyio.fail_after(HANGS_S):
            while runtime.status().stages[0].restarts == 0:
                await runtime._wait_change()
        await up_again(runtime)
        assert await sung(runtime) == ["la"]


async def test_what_a_rank_dies_of_is_said() -> None:
    async with running(choir.build(), MACHINE) as runtime:
        await died(runtime, Song("2 fails", holds_s=30), "rank 2: it has lost its voice")
        await up_again(runtime)
        await died(runtime, Song("1 dies", holds_s=30), "rank 1: exit code 7")
        await up_again(runtime)
        assert await sung(runtime) == ["la"]


async def test_a_first_rank_that_the_others_have_left_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_KILL_AFTER_S", 0.05)
    async with running(choir.build(), MACHINE) as runtime:
        await died(runtime, Song("1 leaves", holds_s=30), "killed by SIGKILL")


@pytest.mark.parametrize(("rank", "said"), [(0, "it has no voice"), (1, "rank 1: it has no voice")])
async def test_a_rank_that_does_not_start(rank: int, said: str) -> None:
    with pytest.raises(StartError, match=f"failed to start: {said}") as caught:
        await unstarted(choir.build(fails_in=rank), MACHINE).__aenter__()
    assert caught.value.stage == "sing"


async def test_kill_while_it_starts() -> None:
    """Each death counts as one, whichever rank it is and however many follow."""
    async with running(choir.build(), MACHINE) as runtime:
        child = runtime._supervisor.children["sing"]
        for deaths in range(1, 2 * RANKS + 1):
            os.kill(pids(runtime)[deaths % RANKS], signal.SIGKILL)
            with anyio.fail_after(HANGS_S):
                while child.restarts < deaths or child.pid is None:
                    await anyio.sleep(0.001)
        await up_again(runtime)
        assert child.restarts == 2 * RANKS
        assert await sung(runtime) == ["la"]


def test_kill_of_the_main_process_leaves_no_rank() -> None:
    """Not even one that is stopped, as it is in a collective that never ends."""
    with program(module="choir") as (process, mark):
        up(process)
        ranks = [pid for pid, command in marked(mark).items() if "spawn_main" in command]
        assert len(ranks) >= RANKS
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        process.kill()
        gone_after(mark)
