"""The runtime with real host processes: what travels, what dies, what comes back, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import anyio
import msgspec
import multiprocess.forkserver
import pytest

from omniflow import supervisor
from omniflow.engine.stats import EngineStats
from omniflow.errors import (
    CancelledError,
    DeadlineError,
    InvalidInputError,
    OverloadedError,
    ProtocolError,
    RequestError,
    StageDiedError,
    StageError,
    StartError,
    UnavailableError,
)
from omniflow.graph import Restart
from omniflow.media import Options, TextDelta, Tool
from omniflow.messages import MAX_OPTIONS_BYTES, MAX_REQUEST_ID_CHARS, Unconnected
from omniflow.runtime import Runtime, StageStatus
from omniflow.telemetry import Metrics
from omniflow.transport.arrow_shm import socket_pair

from .conftest import descendants, hosts_below, left_in_shared_memory, shared_memory
from .files import few_files
from .graphs import row, tally, words
from .graphs.row import Job
from .graphs.words import Line
from .running import CPU, pid_of, running, settled, unstarted, up_again
from .waiting import HANGS_S, until

AGAIN = Restart("one_for_one", backoff_s=0.01)


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Started before descriptors are counted: it outlives each runtime."""
    graphs = [graph.__name__ for graph in (words, row, tally)]
    supervisor._start_forkserver(["omniflow.forkserver_start", "omniflow.process", *graphs])


pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]


async def ask(runtime: Runtime, entry: str, value: object, **how: Any) -> dict[str, Any]:
    return await (await runtime.submit(entry, value, **how)).collect()


async def error_of(runtime: Runtime, entry: str, value: object, **how: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await ask(runtime, entry, value, **how)
    return caught.value


async def kill(runtime: Runtime, stage: str) -> None:
    """kill -9 the process of a stage, and wait until the runtime has noticed."""
    pid = pid_of(runtime, stage)
    os.kill(pid, signal.SIGKILL)
    with anyio.fail_after(HANGS_S):
        while any(status.pid == pid for status in runtime.status().stages):
            await runtime._wait_change()


# -- results -----------------------------------------------------------------------------------------------------------


async def test_three_processes_give_what_one_gives() -> None:
    async with running(words.build(), CPU) as runtime, running(words.build()) as single:
        stages = runtime.status().stages
        assert {(stage.name, stage.host) for stage in stages} == {
            ("split", "shout"),
            ("shout", "shout"),
            ("join", "shout"),
            ("words", "shout"),
            ("count", "count"),
            ("echo", "echo"),
        }
        assert len({stage.pid for stage in stages} | {os.getpid()}) == 4
        for text in ("what is this?", "no question", "many words x?"):
            found, expected = await ask(runtime, "line", Line(text)), await ask(single, "line", Line(text))
            assert (found["text"], found["num_words"]) == (expected["text"], expected["num_words"])
            assert [chunk.samples.tolist() for chunk in found["audio"]] == [
                chunk.samples.tolist() for chunk in expected["audio"]
            ]
        assert len((await ask(runtime, "speech", [TextDelta("a"), TextDelta("b")]))["audio"]) == 2


async def test_many_requests_at_once_do_not_mix() -> None:
    async with running(words.build(), CPU, max_in_flight=100) as runtime, anyio.create_task_group() as tasks:

        async def one(number: int) -> None:
            found = await ask(runtime, "line", Line(f"w{number} " * (number % 5 + 1) + "?"))
            assert [delta.text for delta in found["text"]][:-1] == [f"W{number} "] * (number % 5 + 1)
            assert len(found["audio"]) == len(found["text"]) == found["num_words"] == number % 5 + 2

        for number in range(100):
            tasks.start_soon(one, number)


async def test_only_the_needed_hosts_hear_of_a_request() -> None:
    async with running(words.build(), CPU) as runtime:
        echo = pid_of(runtime, "echo")
        assert len((await ask(runtime, "line", Line("a killecho b"), outputs=["text"]))["text"]) == 3
        await settled(runtime)
        reply = await runtime.submit("line", Line("a hang x"), outputs=["text"])
        assert {stage.host: stage.in_flight for stage in runtime.status().stages} == {"shout": 1, "count": 1, "echo": 0}
        await reply.cancel()
        assert pid_of(runtime, "echo") == echo


async def test_a_reader_that_returns_early_does_not_stop_the_writer() -> None:
    async with running(words.build(), CPU) as runtime:
        found = await ask(runtime, "line", Line("a stop " + "more " * 50 + "x"))
        assert (len(found["text"]), len(found["audio"])) == (53, 1)


async def test_an_entry_stream_longer_than_its_bound() -> None:
    async with running(row.numbers(), CPU) as runtime:
        assert (await ask(runtime, "numbers", list(range(1000))))["total"] == 499_500
        assert (await ask(runtime, "numbers", [1, 2, -1, *range(500)]))["total"] == 3


async def test_what_travels_returns_its_memory() -> None:
    """Each counted line takes 200 KB of 1 MiB."""
    async with running(words.build(), CPU, shm_bytes=2**20) as runtime, anyio.create_task_group() as tasks:

        async def some() -> None:
            for _ in range(10):
                assert (await ask(runtime, "line", Line("a b?")))["num_words"] == 2

        for _ in range(5):
            tasks.start_soon(some)


async def test_items_that_overtake_their_open_wait_for_it() -> None:
    """The runtime has not got rid of all its `Open`s when another host sends for them: its socket was full."""
    async with running(words.build(), CPU, max_in_flight=1000) as runtime:
        count = pid_of(runtime, "count")
        os.kill(count, signal.SIGSTOP)
        replies = []
        for number in range(600):
            long = f"{number:02000}"
            replies.append(await runtime.submit("line", Line("a b?"), outputs=["num_words"], request_id=long))
        await anyio.wait_all_tasks_blocked()
        assert runtime._supervisor.children["count"].link.statistics().backlog > 0  # type: ignore[union-attr]
        os.kill(count, signal.SIGCONT)
        hold_up_the_event_loop(0.3)
        with anyio.fail_after(HANGS_S):
            assert [await reply.collect() for reply in replies] == [{"num_words": 2}] * 600


def hold_up_the_event_loop(seconds: float) -> None:
    time.sleep(seconds)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("do", "kind", "message"),
    [
        ("raise", StageError, "ZeroDivisionError: a bug in run"),
        ("refuse", InvalidInputError, "no such thing"),
        ("out of memory", StageError, "MemoryError: "),
        ("wrong type", ProtocolError, "port 'result' gives Job, but got int"),
        ("refuse at length", InvalidInputError, "x" * 8000),
    ],
)
async def test_errors_arrive_as_what_they_are(do: str, kind: type[RequestError], message: str) -> None:
    async with running(row.row("one", "two"), CPU) as runtime:
        pids = {stage.pid for stage in runtime.status().stages}
        for stage in ("one", "two"):
            error = await error_of(runtime, "job", Job(stage, do), request_id="mine")
            assert type(error) is kind
            assert (error.message, error.stage, error.request_id) == (message, stage, "mine")
            assert error.param == ("thing" if do == "refuse" else None)
        assert (await ask(runtime, "job", Job()))["job"].seen == ("one", "two")
        assert {stage.pid for stage in runtime.status().stages} == pids


async def test_an_input_that_is_wrong_inside_is_the_callers_fault() -> None:
    async with running(words.build(), CPU, shm_bytes=2**20) as runtime:
        error = await error_of(runtime, "line", Line(5))  # type: ignore[arg-type]
        assert (type(error), error.param) == (InvalidInputError, "line")
        assert "Expected `str`, got `int` - at `$.text`" in error.message
        for value, message in [
            (Line(object()), "a value of type object cannot travel"),  # type: ignore[arg-type]
            (Line("\ud800"), "cannot travel between processes"),
            (Line("x" * 2**21), "is larger than the shared memory of its host"),
        ]:
            with pytest.raises(InvalidInputError, match=message) as caught:
                await runtime.submit("line", value)
            assert caught.value.param == "line"
        many: list[object] = [TextDelta("a")] * 40
        error = await error_of(runtime, "speech", [*many, TextDelta(object())])  # type: ignore[arg-type]
        assert (type(error), error.param) == (InvalidInputError, "speech")
        assert len((await ask(runtime, "line", Line("a b")))["text"]) == 2


LONG = "x" * 100_000


@pytest.mark.parametrize("value", [Line(LONG), [*[TextDelta("a")] * 40, TextDelta(LONG)]], ids=["one", "many"])
async def test_a_runtime_that_can_open_no_file_more_fails_the_request_and_lives(value: Any) -> None:
    """Many items go in by a task of their own, which must not end the runtime."""
    entry = "line" if isinstance(value, Line) else "speech"
    async with running(words.build(), CPU) as runtime:
        with few_files(2), pytest.raises(UnavailableError, match="memory .* files"):
            await ask(runtime, entry, value)
        assert len((await ask(runtime, "line", Line(LONG)))["text"]) == 1


LARGE = [
    (Options(tools=(Tool("f", "x" * 100_000), Tool("g", "x" * 20_000))), "tools"),
    (Options(json_schema="x" * 120_000, stop=("a",)), "response_format"),
    (Options(voice="x" * 10_000_000), "voice"),
]


@pytest.mark.parametrize(("options", "param"), LARGE, ids=[param for _, param in LARGE])
async def test_options_that_cannot_travel_are_the_callers_fault(options: Options, param: str) -> None:
    async with running(words.build(), CPU) as runtime:
        with pytest.raises(InvalidInputError, match="the options of a request may have 106496 bytes") as refused:
            await runtime.submit("line", Line("a b"), options=options)
        assert refused.value.param == param and runtime.status().in_flight == 0
        largest = Options(voice="x" * (MAX_OPTIONS_BYTES - 20))
        assert await ask(runtime, "line", Line("a b"), options=largest, request_id="👍" * MAX_REQUEST_ID_CHARS)
        with pytest.raises(InvalidInputError, match="a request_id may have"):
            await runtime.submit("line", Line("a b"), request_id="x" * (MAX_REQUEST_ID_CHARS + 1))


async def test_a_result_too_large_for_the_memory_names_its_stage() -> None:
    async with running(words.build(), CPU, shm_bytes=2**20) as runtime:
        error = await error_of(runtime, "line", Line("x" * (2**20 - 11)), outputs=["text"])
        assert (type(error), error.stage) == (ProtocolError, "words")
        assert len((await ask(runtime, "line", Line("a b")))["text"]) == 2


# -- deadlines and cancels ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("heard_out")
async def test_a_deadline_names_the_stage_that_ran() -> None:
    async with running(words.build(), CPU) as runtime:
        error = await error_of(runtime, "line", Line("a hang x"), deadline_s=0.3)
        assert str(error) == "stage 'words': the deadline of 0.3 s passed while stage 'words' was running"
        assert isinstance(error, DeadlineError)


@pytest.mark.usefixtures("heard_out")
async def test_a_deadline_names_the_port_of_a_fan_in_that_waited() -> None:
    async with running(words.build(), CPU) as runtime:
        count = pid_of(runtime, "count")
        os.kill(count, signal.SIGSTOP)
        try:
            error = await error_of(runtime, "line", Line("a b?"), deadline_s=0.3)
            assert str(error) == "stage 'join': the deadline of 0.3 s passed while port 'counted' waited for count"
            assert runtime.status().in_flight == 1
        finally:
            os.kill(count, signal.SIGCONT)
        await settled(runtime)


@pytest.mark.parametrize("ends", ["cancel", "deadline"])
async def test_a_request_that_ends_while_it_waits_for_room_to_enter(ends: str) -> None:
    """The first of two lines takes all memory of the runtime, and its reader is stopped."""
    async with running(words.build(), CPU, shm_bytes=2**20) as runtime:
        shout = pid_of(runtime, "shout")
        os.kill(shout, signal.SIGSTOP)
        first = await runtime.submit("line", Line("x" * 600_000), outputs=["num_words"])
        if ends == "deadline":
            with pytest.raises(DeadlineError, match="passed while the request waited for room to enter"):
                await runtime.submit("line", Line("y" * 600_000), deadline_s=0.1)
        else:
            with anyio.move_on_after(0.1) as scope:
                await runtime.submit("line", Line("y" * 600_000))
            assert scope.cancelled_caught
        os.kill(shout, signal.SIGCONT)
        assert await first.collect() == {"num_words": -1}


async def test_a_cancel_reaches_every_host() -> None:
    async with running(words.build(), CPU) as runtime:
        replies = [await runtime.submit("line", Line("a hang x?")) for _ in range(5)]
        for reply in replies:
            await anext(reply)
        for reply in replies:
            await reply.cancel()
        await settled(runtime)
        with pytest.raises(CancelledError):
            await anext(replies[0])


async def test_a_caller_that_does_not_read_suspends_the_stage_in_its_process() -> None:
    async with running(row.numbers(), CPU, stream_bound=8) as runtime:
        reply = await runtime.submit("job", Job())
        await anext(reply)
        assert len(await ask(runtime, "numbers", [1, 2])) == 1  # the host is there, and busy with nothing else
        sent = runtime._supervisor.children["total"].link.statistics().received  # type: ignore[union-attr]
        assert len(reply._items) <= 8
        assert (await ask(runtime, "numbers", [1, 2]))["total"] == 3
        now = runtime._supervisor.children["total"].link.statistics().received  # type: ignore[union-attr]
        assert now - sent <= 4, "nothing but what the other request sends"
        for number in range(1, 100):
            assert (await anext(reply)).value == number
        await reply.cancel()


async def test_cancels_at_any_moment_leave_nothing() -> None:
    dice = random.Random(1)
    async with running(words.build(), CPU, max_in_flight=16, max_queued=500, shm_bytes=2**20) as runtime:

        async def one(delay_s: float) -> None:
            with anyio.move_on_after(delay_s):
                await ask(runtime, "line", Line("a b slow many c?"))

        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(one, dice.random() * 0.2)
        await settled(runtime)
        assert len((await ask(runtime, "line", Line("a b?")))["text"]) == 2
        assert [stage.restarts for stage in runtime.status().stages] == [0] * 6


# -- death -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "text"), [("shout", "a hang x"), ("echo", "a b hang x"), ("count", "a b?")])
async def test_a_killed_host_ends_its_requests_and_comes_back(host: str, text: str) -> None:
    async with running(words.build(), CPU) as runtime:
        pids = {stage.host: stage.pid for stage in runtime.status().stages}
        if host == "count":  # so that the fan-in waits for it
            os.kill(pids[host] or 0, signal.SIGSTOP)
        bound = [await runtime.submit("line", Line(text)) for _ in range(4)]
        if host != "count":
            for reply in bound:
                await anext(reply)
        await kill(runtime, host)
        for reply in bound:
            with pytest.raises(StageDiedError) as caught:
                await reply.collect()
            message = f"stage '{host}': its process died (killed by SIGKILL); it is being restarted"
            assert str(caught.value) == message
        await up_again(runtime)
        assert (await ask(runtime, "line", Line("a b?")))["num_words"] == 2
        for stage in runtime.status().stages:
            assert (stage.pid != pids[stage.host], stage.restarts) == ((True, 1) if stage.host == host else (False, 0))


async def test_requests_on_other_hosts_do_not_notice_a_death() -> None:
    async with running(words.build(), CPU) as runtime:
        async with await runtime.submit("speech", [TextDelta("a")] * 200) as untouched:
            await anext(untouched)
            await kill(runtime, "shout")
            assert len([output async for output in untouched]) == 199
        await up_again(runtime)


@pytest.mark.parametrize("text", ["kill shout", "a killecho b"])
async def test_a_request_that_kills_its_host_fails_alone(text: str) -> None:
    async with running(words.build(), CPU) as runtime:
        assert isinstance(await error_of(runtime, "line", Line(text)), StageDiedError)
        assert len((await ask(runtime, "line", Line("a b")))["text"]) == 2


def test_a_host_comes_back_in_an_event_loop_that_is_not_anyios() -> None:
    """As in a notebook, or under uvicorn: what runs is known there in tasks, not in what the loop calls."""

    async def whole() -> None:
        async with unstarted(words.build(), CPU) as runtime:
            await kill(runtime, "count")
            await up_again(runtime)

    asyncio.run(whole())


async def test_a_request_waits_for_a_host_that_restarts() -> None:
    async with running(row.row("one", restart=AGAIN), CPU) as runtime:
        for _ in range(3):
            await kill(runtime, "one")
            assert (await ask(runtime, "job", Job()))["job"].seen == ("one",)


async def test_a_request_that_may_not_wait_is_refused() -> None:
    slow = Restart("one_for_one", backoff_s=30)
    async with unstarted(row.row("one", restart=slow), CPU, restart_wait_s=0.01) as runtime:
        await kill(runtime, "one")
        with pytest.raises(UnavailableError, match="stage 'one': it is restarting") as caught:
            await runtime.submit("job", Job())
        assert caught.value.retry_after_s == 2.0


async def test_requests_that_wait_for_a_restart_take_no_places_from_others() -> None:
    slow = Restart("one_for_one", backoff_s=30)
    async with unstarted(row.row("one", "two", restart=slow), CPU, max_in_flight=1, max_queued=2) as runtime:
        await kill(runtime, "two")
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(ask, runtime, "job", Job())
            await anyio.wait_all_tasks_blocked()
            assert (runtime.status().queued, runtime.status().in_flight) == (2, 0)
            assert (await ask(runtime, "job", Job(), outputs=["early"]))["early"].seen == ("one",)
            with pytest.raises(OverloadedError, match="requests run and 2 wait"):
                await runtime.submit("job", Job())
            tasks.cancel_scope.cancel()
        assert runtime.status().queued == 0


async def test_backoff_doubles_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_LONGEST_BACKOFF_S", 0.02)
    often = Restart("one_for_one", max_restarts=50, backoff_s=0.005)
    async with running(row.row("one", restart=often), CPU) as runtime:
        relaunch = Mock(wraps=runtime._supervisor._relaunch)
        monkeypatch.setattr(runtime._supervisor, "_relaunch", relaunch)
        for _ in range(5):
            await kill(runtime, "one")
            await up_again(runtime)
    assert [call.args[1] for call in relaunch.call_args_list] == [0.005, 0.01, 0.02, 0.02, 0.02]


async def test_chaos() -> None:
    """Hosts are killed at any moment under streaming requests: each ends, soon, and all of them come back."""
    dice = random.Random(0)
    graph = words.build()
    for name in ("shout", "count", "echo"):
        often = Restart("one_for_one", max_restarts=1000, within_s=0.001, backoff_s=0.001)
        graph._stages[name] = msgspec.structs.replace(graph._stages[name], restart=often)
    async with running(graph, CPU, shm_bytes=2**21) as runtime:

        async def one(number: int) -> None:
            text = dice.choice(["a many b many c?", "a slow b?", "many x?", "a stop many many y"])
            entry, value = ("speech", [TextDelta("a")] * 40) if number % 4 == 0 else ("line", Line(text))
            with anyio.fail_after(HANGS_S), contextlib.suppress(StageDiedError):
                await ask(runtime, entry, value)

        for _ in range(12):
            async with anyio.create_task_group() as tasks:
                for number in range(16):
                    tasks.start_soon(one, number)
                await anyio.sleep(dice.random() * 0.03)
                await up_again(runtime)
                await kill(runtime, dice.choice(["shout", "count", "echo"]))
            await settled(runtime)
        assert (await ask(runtime, "line", Line("a b?")))["num_words"] == 2


async def test_stopping_while_a_request_waits_for_a_restart() -> None:
    slow = Restart("one_for_one", backoff_s=30)
    async with anyio.create_task_group() as tasks:
        async with unstarted(row.row("one", restart=slow), CPU) as runtime:
            await kill(runtime, "one")

            async def wait() -> None:
                with pytest.raises(UnavailableError, match="the runtime is stopped"):
                    await runtime.submit("job", Job())

            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize(
    ("do", "reason"), [("exit", "exit code 7"), ("kill", "killed by SIGKILL"), ("broken", "the device is gone")]
)
async def test_a_stage_whose_strategy_is_to_stop_fails_the_graph(do: str, reason: str) -> None:
    async with unstarted(row.row("one", "two"), CPU) as runtime:
        error = await error_of(runtime, "job", Job("two", do))
        assert isinstance(error, StageError if do == "broken" else StageDiedError)
        failure = await runtime.wait_failed()
        assert str(failure) == f"stage 'two': died ({reason}), and its restart strategy is to stop"
        status = runtime.status()
        assert (status.state, status.reason) == ("failed", str(failure))
        assert {stage.name: stage.state for stage in status.stages} == {"one": "ready", "two": "failed"}
        with pytest.raises(UnavailableError, match="the graph has failed: stage 'two': died"):
            await runtime.submit("job", Job())
        await settled(runtime)


async def test_a_broken_actor_is_restarted_by_its_strategy() -> None:
    async with running(row.row("one", "two", restart=AGAIN), CPU) as runtime:
        error = await error_of(runtime, "job", Job("two", "broken"))
        assert (type(error), error.message, error.stage) == (StageError, "the device is gone", "two")
        with anyio.fail_after(HANGS_S):
            while not runtime.status().stages[1].restarts:
                await runtime._wait_change()
        assert (await ask(runtime, "job", Job()))["job"].seen == ("one", "two")


async def test_a_host_that_dies_too_often_is_given_up() -> None:
    twice = Restart("one_for_one", max_restarts=2, backoff_s=0.01)
    async with unstarted(row.row("one", restart=twice), CPU) as runtime:
        for _ in range(2):
            await kill(runtime, "one")
            await up_again(runtime)
        await kill(runtime, "one")
        failure = await runtime.wait_failed()
        assert str(failure) == "stage 'one': died 3 times within 60 s, the last time: killed by SIGKILL"


async def test_deaths_long_ago_do_not_count() -> None:
    short = Restart("one_for_one", max_restarts=1, within_s=0.001, backoff_s=0.01)
    async with running(row.row("one", restart=short), CPU) as runtime:
        for _ in range(4):
            await kill(runtime, "one")
            await up_again(runtime)


@pytest.mark.parametrize(
    ("strategy", "restarted"),
    [("one_for_one", {"two"}), ("rest_for_one", {"two", "three"}), ("one_for_all", {"one", "two", "three"})],
)
async def test_strategies(strategy: Any, restarted: set[str]) -> None:
    restart = Restart(strategy, max_restarts=1, backoff_s=0.01)
    async with unstarted(row.row("one", "two", "three", restart=restart), CPU) as runtime:
        before = {stage.name: stage.pid for stage in runtime.status().stages}
        await kill(runtime, "two")
        with anyio.fail_after(HANGS_S):
            while {stage.name for stage in runtime.status().stages if stage.restarts} != restarted:
                await runtime._wait_change()
        await up_again(runtime)
        after = {stage.name: stage.pid for stage in runtime.status().stages}
        assert {name for name in after if after[name] != before[name]} == restarted
        assert (await ask(runtime, "job", Job()))["job"].seen == ("one", "two", "three")
        # Being swept along is no death of one's own: one more is allowed to the others, and a second one is too many.
        await kill(runtime, "three")
        await up_again(runtime)
        assert (await ask(runtime, "job", Job()))["job"].seen == ("one", "two", "three")
        await kill(runtime, "three")
        assert str(await runtime.wait_failed()).startswith("stage 'three': died 2 times within 60 s")


async def test_a_host_that_cannot_start_again_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = tmp_path / "weights"
    there.touch()
    often = Restart("one_for_one", max_restarts=50, backoff_s=0.01)
    async with running(row.row("one", restart=often, one={"in_setup": str(there)}), CPU) as runtime:
        there.unlink()
        await kill(runtime, "one")
        with anyio.fail_after(HANGS_S):
            while runtime.status().stages[0].restarts < 3:
                await runtime._wait_change()
        assert "is not there yet" in caplog.text and "in require\n" in caplog.text, "its traceback is in the log"
        there.touch()
        assert (await ask(runtime, "job", Job()))["job"].seen == ("one",)


async def test_a_stage_that_blocks_its_event_loop_is_killed_as_hung() -> None:
    async with running(row.row("one", "two", restart=AGAIN), CPU, hang_s=1.0) as runtime:
        with anyio.fail_after(HANGS_S):
            error = await error_of(runtime, "job", Job("two", "block"))
        assert isinstance(error, StageDiedError)
        assert error.stage == "two"
        assert (await ask(runtime, "job", Job("two", "block a thread")))["job"].seen == ("one", "two")
        assert [stage.restarts for stage in runtime.status().stages] == [0, 1]


def engine_samples(runtime: Runtime) -> set[str]:
    lines = Metrics(runtime.status).exposition().decode().splitlines()
    return {line for line in lines if line.startswith("omniflow_engine_")}


async def engine_holds(runtime: Runtime, *wanted: int) -> StageStatus:
    """Wait until the host of the first stage has told that its engine holds so much."""
    with anyio.fail_after(HANGS_S):
        while (stage := runtime.status().stages[0]).engine != EngineStats(*wanted):
            await anyio.sleep(0.005)
    return stage


async def test_heartbeats_tell_what_engines_hold(tmp_path: Path) -> None:
    later = tmp_path / "later"
    async with running(tally.tally(later), CPU, step_s=1.0) as runtime:
        await engine_holds(runtime, 0, 0, 0, 100)
        replies = [await runtime.submit("number", number) for number in range(3)]
        where = (await engine_holds(runtime, 1, 2, 10, 100)).host
        labels = f'{{host="{where}",stage="asks"}}'
        assert engine_samples(runtime) == {
            f"omniflow_engine_running{labels} 1.0",
            f"omniflow_engine_waiting{labels} 2.0",
            f"omniflow_engine_kv_tokens_used{labels} 10.0",
            f"omniflow_engine_kv_tokens_capacity{labels} 100.0",
        }
        await kill(runtime, "asks")
        assert runtime.status().stages[0].engine is None and not engine_samples(runtime)
        for reply in replies:
            with pytest.raises(StageDiedError):
                await reply.collect()
        await engine_holds(runtime, 0, 0, 0, 100)
        later.touch()
        assert (await ask(runtime, "number", 4))["number"] == 5
        await engine_holds(runtime, 0, 0, 0, 100)
        assert f"omniflow_engine_running{labels} 0.0" in engine_samples(runtime)


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import anyio\n"
        "from omniflow import Runtime, cluster_named, plan\n"
        "from tests.graphs.row import row\n"
        "async def main():\n"
        "    async with Runtime(plan(row('one').spec(), cluster_named('cpu'))):\n"
        "        pass\n"
        "anyio.run(main)\n"
    )
    root = Path(__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert ran.returncode == 1
    assert "if __name__ == '__main__':" in ran.stderr.splitlines()[-1]


async def test_a_stage_whose_step_never_returns_is_killed_as_stuck() -> None:
    """Its event loop turns, so it beats; what it says there is that the step goes on and on."""
    async with running(row.row("one", "two", restart=AGAIN), CPU, step_s=1.0) as runtime:
        with anyio.fail_after(HANGS_S):
            error = await error_of(runtime, "job", Job("two", "never return"))
        assert isinstance(error, StageDiedError)
        assert error.stage == "two"
        assert (await ask(runtime, "job", Job("two", "block a thread")))["job"].seen == ("one", "two")
        assert [stage.restarts for stage in runtime.status().stages] == [0, 1]


async def test_a_killed_fork_server_takes_its_hosts_along_and_all_come_back() -> None:
    async with running(row.row("one", "two", restart=AGAIN), CPU) as runtime:
        os.kill(multiprocess.forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        with anyio.fail_after(HANGS_S):
            while [stage.restarts for stage in runtime.status().stages] != [1, 1]:
                await runtime._wait_change()
        assert (await ask(runtime, "job", Job()))["job"].seen == ("one", "two")


async def test_a_neighbour_that_may_open_no_file_more_refuses_until_it_may() -> None:
    """The kernel drops the descriptor of its new socket to a host that was restarted."""
    async with running(words.build(), CPU) as runtime:
        await ask(runtime, "line", Line("a b?"))  # it has its first sockets
        shout = pid_of(runtime, "shout")
        limits = resource.prlimit(shout, resource.RLIMIT_NOFILE)
        resource.prlimit(shout, resource.RLIMIT_NOFILE, (3, limits[1]))
        await kill(runtime, "echo")
        await up_again(runtime)
        for _ in range(2):
            error = await error_of(runtime, "line", Line("a b?"))
            assert isinstance(error, UnavailableError)
            assert "is not connected to that of 'echo' yet: it may open no more files" in str(error)
        assert len((await ask(runtime, "speech", [TextDelta("a")]))["audio"]) == 1, "which does without `shout`"
        resource.prlimit(shout, resource.RLIMIT_NOFILE, limits)
        with anyio.fail_after(HANGS_S):
            while True:
                with contextlib.suppress(UnavailableError):
                    assert len((await ask(runtime, "line", Line("a b?")))["audio"]) == 2
                    break
                await anyio.sleep(0.01)
        assert pid_of(runtime, "shout") == shout


async def test_a_neighbour_that_stays_unable_to_open_files_is_restarted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_CONNECT_AGAIN_S", 0.001)
    monkeypatch.setattr(supervisor, "_MOST_CONNECTS", 3)
    async with running(words.build(), CPU) as runtime:
        await ask(runtime, "line", Line("a b?"))
        shout = pid_of(runtime, "shout")
        resource.prlimit(shout, resource.RLIMIT_NOFILE, (3, resource.prlimit(shout, resource.RLIMIT_NOFILE)[1]))
        await kill(runtime, "echo")
        with anyio.fail_after(HANGS_S):
            while not runtime.status().stages[0].restarts:
                await runtime._wait_change()
        await up_again(runtime)
        assert len((await ask(runtime, "line", Line("a b?")))["audio"]) == 2
        assert "host shout died: it cannot be connected to 'echo': it may open no more files" in caplog.text


async def test_a_socket_is_not_given_again_where_there_is_another_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_CONNECT_AGAIN_S", 0.001)
    async with running(words.build(), CPU) as runtime:
        its = runtime._supervisor
        pair = frozenset((its.children["echo"], its.children["shout"]))
        first, last = its._wires[pair], max(wire.number for wire in its._wires.values())
        for one, peer in (("shout", "echo"), ("echo", "shout")):  # neither could take its end
            its.heard(one, Unconnected(peer, first.number))
        await until(lambda: its._wires[pair] != first)
        its.heard("shout", Unconnected("echo", first.number))
        await anyio.sleep(0.02)
        assert its._wires[pair] == (last + 1, 2)
        assert len((await ask(runtime, "line", Line("a b?")))["audio"]) == 2


async def test_a_runtime_that_cannot_open_a_socket_for_two_hosts_starts_one_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuses = Mock(side_effect=[socket_pair(), OSError(errno.EMFILE, "Too many open files")])
    async with running(words.build(), CPU) as runtime:
        with monkeypatch.context() as patch:
            patch.setattr(supervisor, "socket_pair", refuses)
            await kill(runtime, "echo")
            with anyio.fail_after(HANGS_S):
                while refuses.call_count < 2:
                    await anyio.sleep(0.001)
        with anyio.fail_after(HANGS_S):
            while runtime.status().stages[-1].restarts < 2:
                await runtime._wait_change()
        await up_again(runtime)
        assert len((await ask(runtime, "line", Line("a b?")))["audio"]) == 2
        assert "host echo died: it cannot be connected to 'shout': Too many open files" in caplog.text


async def test_a_host_that_cannot_start_for_want_of_files_takes_no_other_along() -> None:
    """The fork server dies of a start that breaks off once it has heard of it."""
    often = Restart("one_for_one", max_restarts=50, backoff_s=0.01)
    async with running(row.row("one", "two", restart=often), CPU) as runtime:
        one = pid_of(runtime, "one")
        with few_files(1):
            await kill(runtime, "two")
            with anyio.fail_after(HANGS_S):
                while runtime.status().stages[1].restarts < 3:
                    await anyio.sleep(0.005)
        assert (await ask(runtime, "job", Job()))["job"].seen == ("one", "two")
        assert pid_of(runtime, "one") == one


async def test_restarts_leave_no_descriptors_in_neighbours() -> None:
    often = Restart("one_for_one", max_restarts=50, backoff_s=0.001)
    async with running(row.row("one", "two", restart=often), CPU) as runtime:
        await ask(runtime, "job", Job())
        of_one, own = f"/proc/{pid_of(runtime, 'one')}/fd", "/proc/self/fd"
        before = len(os.listdir(of_one)), len(os.listdir(own))
        for _ in range(5):
            await kill(runtime, "two")
            await ask(runtime, "job", Job())
        assert (len(os.listdir(of_one)), len(os.listdir(own))) == before


# -- start and stop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_setup", "message", "detail"),
    [
        ("raise", "stage 'two': failed to start: FileNotFoundError: no weights here", "raise FileNotFoundError"),
        ("kill", "stage 'two': failed to start: killed by SIGKILL", ""),
    ],
)
async def test_death_in_setup_shows_stage_and_traceback(in_setup: str, message: str, detail: str) -> None:
    """The others are stopped at once, even one that hangs in its own setup."""
    graph = row.row("one", "two", "three", restart=AGAIN, two={"in_setup": in_setup}, three={"in_setup": "hang"})
    with anyio.fail_after(HANGS_S):
        with pytest.raises(StartError) as caught:
            await unstarted(graph, CPU).__aenter__()
    assert str(caught.value) == message
    assert detail in caught.value.detail
    assert ("Traceback" in caught.value.detail) == bool(detail)


async def test_a_stage_that_is_never_ready_is_named() -> None:
    graph = row.row("one", "two", two={"in_setup": "hang"})
    with pytest.raises(StartError, match=r"stage 'two': not ready after 2 s \(still setting up: two\)"):
        await unstarted(graph, CPU, start_timeout_s=2.0).__aenter__()


async def test_a_cancelled_start_leaves_nothing() -> None:
    for delay_s in (0.0, 0.005, 0.02, 0.05):
        with anyio.move_on_after(delay_s):
            async with unstarted(words.build(), CPU):
                await anyio.sleep_forever()


async def test_actors_are_closed(tmp_path: Path) -> None:
    graph = row.row("one", "two", one={"in_close": "raise"}, two={"in_close": str(tmp_path / "closed")})
    async with running(graph, CPU):
        pass
    assert (tmp_path / "closed").exists()


async def test_a_host_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_KILL_AFTER_S", 0.2)
    with anyio.fail_after(HANGS_S):
        async with running(row.row("one", "two", two={"in_close": "hang"}), CPU):
            pass


async def test_a_broken_host_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_KILL_AFTER_S", 0.2)
    async with running(row.row("one", restart=AGAIN, one={"in_close": "hang"}), CPU) as runtime:
        assert (await error_of(runtime, "job", Job("one", "broken"))).message == "the device is gone"
        with anyio.fail_after(HANGS_S):
            while not runtime.status().stages[0].restarts:
                await runtime._wait_change()
        assert await ask(runtime, "job", Job())


async def test_leaving_with_requests_in_flight_ends_them_and_all_processes() -> None:
    async with unstarted(words.build(), CPU) as runtime:
        replies = [await runtime.submit("line", Line("a hang x")) for _ in range(3)]
        below = hosts_below(os.getpid())
        assert len(below) >= 3
    for reply in replies:
        with pytest.raises(UnavailableError, match="the runtime is stopping"):
            await reply.collect()
    assert runtime._requests == {}
    assert {stage.state for stage in runtime.status().stages} == {"stopped"}


async def test_drain_finishes_what_runs() -> None:
    async with running(words.build(), CPU) as runtime:
        reply = await runtime.submit("line", Line("slow a b"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.drain)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(UnavailableError, match="the runtime is draining"):
                await runtime.submit("line", Line("c"))
            assert len((await reply.collect())["audio"]) == 3


async def test_a_death_while_draining_does_not_hold_it_up() -> None:
    async with unstarted(row.row("one", "two"), CPU) as runtime:
        reply = await runtime.submit("job", Job("two", "sleep"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.drain)
            await anyio.wait_all_tasks_blocked()
            os.kill(pid_of(runtime, "two"), signal.SIGKILL)
            with anyio.fail_after(HANGS_S), pytest.raises(StageDiedError):
                await reply.collect()


async def test_signals_for_the_whole_group_do_not_end_hosts() -> None:
    """Ctrl-C and a stop signal reach every process; the runtime drains, so its hosts go on."""
    async with running(words.build(), CPU) as runtime:
        for host in hosts_below(os.getpid()):
            os.kill(host, signal.SIGINT)
            os.kill(host, signal.SIGTERM)
        assert len((await ask(runtime, "line", Line("a b?")))["audio"]) == 2
        assert [stage.restarts for stage in runtime.status().stages] == [0] * 6


async def test_two_runtimes_in_one_process() -> None:
    async with running(words.build(), CPU) as one, running(row.row("one", "two", restart=AGAIN), CPU) as two:
        await kill(two, "one")
        assert len((await ask(one, "line", Line("a b?")))["text"]) == 2
        assert (await ask(two, "job", Job()))["job"].seen == ("one", "two")


@pytest.fixture(params=["", "hang"], ids=["serving", "starting"])
def program(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, leader of its own group, that runs hosts."""
    command = [sys.executable, "-m", "tests.serving", *([request.param] if request.param else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process


@pytest.mark.parametrize("whole_group", [False, True])
async def test_killing_the_main_process_leaves_nothing(program: subprocess.Popen[bytes], whole_group: bool) -> None:
    shm = shared_memory()
    below = descendants(program.pid)
    assert len(below) >= 4, "the fork server, the resource tracker and the hosts"
    watched = [os.pidfd_open(pid) for pid in below]
    if whole_group:
        os.killpg(program.pid, signal.SIGKILL)
    else:
        program.kill()
    until = time.monotonic() + HANGS_S
    left = set(watched)
    while left and time.monotonic() < until:
        left -= set(select.select(left, [], [], until - time.monotonic())[0])
    for descriptor in watched:
        os.close(descriptor)
    assert not left, f"processes live {HANGS_S} s after their main process"
    assert left_in_shared_memory(shm) == set()
