"""The runtime with all stages in its own process: each request ends once, and nothing of it stays."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from omniflow.actor import Actor, Context, Emit, Outputs, Stream
from omniflow.errors import (
    CancelledError,
    DeadlineError,
    InvalidInputError,
    OverloadedError,
    ProtocolError,
    RequestError,
    StageError,
    StartError,
    UnavailableError,
    UnsupportedError,
)
from omniflow.graph import Graph, absent
from omniflow.media import Options, TextDelta
from omniflow.runtime import Runtime

from .graphs import row, words
from .graphs.row import Job
from .graphs.words import Line
from .running import running, settled, unstarted
from .waiting import HANGS_S, exact_time

pytestmark = pytest.mark.anyio


async def ask(runtime: Runtime, entry: str, value: object, **how: Any) -> dict[str, Any]:
    return await (await runtime.submit(entry, value, **how)).collect()


async def error_of(runtime: Runtime, entry: str, value: object, **how: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await ask(runtime, entry, value, **how)
    return caught.value


# -- results -----------------------------------------------------------------------------------------------------------


async def test_all_outputs_of_a_request() -> None:
    async with running(words.build()) as runtime:
        found = await ask(runtime, "line", Line("what is this?"))
        assert [delta.text for delta in found["text"]] == ["WHAT ", "IS ", "THIS?! "]
        assert [chunk.duration_s for chunk in found["audio"]] == [0.1] * 3
        assert found["num_words"] == 3


async def test_a_skip_reaches_the_optional_port() -> None:
    async with running(words.build()) as runtime:
        assert (await ask(runtime, "line", Line("no question")))["num_words"] == -1


async def test_outputs_arrive_one_by_one_and_in_order() -> None:
    async with running(words.build()) as runtime, await runtime.submit("line", Line("a b c")) as reply:
        seen = [output async for output in reply]
    assert [output.value.text for output in seen if output.name == "text"] == ["A ", "B ", "C! "]
    assert {output.name for output in seen} == {"text", "audio", "num_words"}


async def test_a_request_may_enter_in_the_middle() -> None:
    async with running(words.build()) as runtime:
        assert len((await ask(runtime, "speech", [TextDelta("a"), TextDelta("b")]))["audio"]) == 2
        assert len((await ask(runtime, "speech", TextDelta("alone")))["audio"]) == 1
        assert (await ask(runtime, "speech", []))["audio"] == []


async def test_only_the_needed_stages_run() -> None:
    class Dead(words.Echo):
        async def run(self, text: Stream[TextDelta], emit: Emit[words.AudioChunk]) -> None:
            raise AssertionError("nobody asked for audio")

    graph = words.build()
    graph._stages["echo"] = msgspec.structs.replace(graph._stages["echo"], actor=Dead)
    async with running(graph) as runtime:
        assert len((await ask(runtime, "line", Line("a b"), outputs=["text"]))["text"]) == 2
        assert (await error_of(runtime, "line", Line("a b"), outputs=["audio"])).stage == "echo"
        found = await ask(runtime, "line", Line("a b?"), outputs={"num_words"})
        assert found == {"num_words": 2}


async def test_a_reader_that_returns_early_does_not_stop_the_writer() -> None:
    async with running(words.build()) as runtime:
        found = await ask(runtime, "line", Line("a stop " + "more " * 50 + "x"))
        assert len(found["text"]) == 53
        assert len(found["audio"]) == 1


async def test_many_requests_at_once_do_not_mix() -> None:
    async with running(words.build(), max_in_flight=500) as runtime, anyio.create_task_group() as tasks:

        async def one(number: int) -> None:
            found = await ask(runtime, "line", Line(f"w{number} " * (number % 7 + 1) + "?"))
            assert [delta.text for delta in found["text"]][:-1] == [f"W{number} "] * (number % 7 + 1)
            assert len(found["audio"]) == len(found["text"]) == found["num_words"] == number % 7 + 2

        for number in range(200):
            tasks.start_soon(one, number)


async def test_options_id_and_deadline_reach_the_stages() -> None:
    seen: list[Context] = []

    class Sees(Actor):
        async def run(self, job: Job, ctx: Context) -> int:
            seen.append(ctx)
            return 1

    graph = Graph("g")
    stage = graph.stage("sees", Sees)
    graph.input(job=stage)
    graph.output(out=stage)
    async with running(graph) as runtime:
        await ask(runtime, "job", Job(), options=Options(seed=7), request_id="mine", deadline_s=9)
        await ask(runtime, "job", Job())
    assert seen[0] == Context("mine", Options(seed=7), 9, seen[0].run_id)
    assert (len(seen[1].request_id), seen[1].deadline_s) == (32, 200.0)
    assert len(seen[0].run_id) == len(seen[1].run_id)
    assert seen[0].run_id != seen[1].run_id


async def test_an_id_may_be_used_again() -> None:
    async with running(words.build()) as runtime:
        for _ in range(3):
            reply = await runtime.submit("line", Line("a hang x"), request_id="same")
            await reply.cancel()
            assert len((await ask(runtime, "line", Line("a b"), request_id="same"))["text"]) == 2


async def test_an_entry_stream_longer_than_its_bound() -> None:
    async with running(row.numbers()) as runtime:
        assert (await ask(runtime, "numbers", list(range(1000))))["total"] == 499_500
        assert (await ask(runtime, "numbers", [1, 2, -1, *range(500)]))["total"] == 3


async def test_an_optional_output_that_is_skipped_is_none() -> None:
    class Maybe(Actor):
        async def run(self, job: Job) -> Job | None:
            return None

    graph = Graph("g")
    stage = graph.stage("maybe", Maybe)
    graph.input(job=stage)
    graph.output(out=stage)
    async with running(graph) as runtime:
        assert await ask(runtime, "job", Job()) == {"out": None}


async def test_a_stream_that_is_skipped_once_its_reader_runs_is_empty() -> None:
    """Whether the skip comes before or after the start, the reader does not wait for items."""
    told = anyio.Event()

    class MaySkip(Actor):
        async def run(self, job: Job) -> Job | None:
            if job.do == "late":
                await told.wait()
            return None

    class Emits(Actor):
        async def run(self, job: Job, emit: Emit[int]) -> None: ...

    class Reads(Actor):
        async def run(self, job: Job, numbers: Stream[int] | None) -> str:
            if numbers is None:
                return "none"
            told.set()
            return str([number async for number in numbers])

    graph = Graph("g")
    first, may_skip = graph.stage("first", row.Step, name="first"), graph.stage("may_skip", MaySkip)
    emits, reads = graph.stage("emits", Emits), graph.stage("reads", Reads)
    graph.result(first, may_skip)
    graph.result(may_skip, emits)
    graph.stream(emits, reads)
    graph.result(first, reads)
    graph.input(job=first)
    graph.output(out=reads)
    async with running(graph) as runtime:
        assert (await ask(runtime, "job", Job(do="late")))["out"] == "[]"
        assert (await ask(runtime, "job", Job()))["out"] in ("none", "[]")


async def test_an_absent_stage_is_refused_where_it_is_needed_and_passed_over_where_not() -> None:
    class Sees(Outputs):
        text: Job
        image: Job | None

    class Look(Actor):
        async def run(self, job: Job) -> Sees:
            return Sees(job, job if job.do == "image" else None)

    class Describe(Actor):
        async def run(self, image: Job | None) -> int:
            return 0 if image is None else 1

    Look.run.__annotations__ = {"job": Job, "return": Sees}
    graph = Graph("g")
    look, encode = graph.stage("look", Look), graph.stage("encode", row.Step, name="encode")
    describe = graph.stage("describe", Describe)
    graph.result(look["image"], encode)
    graph.result(encode, describe)
    graph.input(job=look, image=encode)
    graph.output(text=look["text"], described=describe, encoded=encode)
    graph.profile("p", "why", encode=absent("no encoder here; send text"))
    async with running(graph) as runtime:
        assert await ask(runtime, "job", Job()) == {"text": Job(), "described": 0}
        refused = await error_of(runtime, "job", Job(do="image"))
        assert isinstance(refused, UnsupportedError)
        assert (refused.message, refused.stage) == ("no encoder here; send text", "encode")
        assert await ask(runtime, "job", Job(do="image"), outputs=["text"])
        for how in ({"entry": "job", "outputs": ["encoded"]}, {"entry": "image"}):
            entry = how.pop("entry")
            refused = await error_of(runtime, str(entry), Job(), **how)
            assert isinstance(refused, UnsupportedError)
            assert refused.message == "no encoder here; send text"


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ({"entry": "lin"}, InvalidInputError, "graph 'words' has no input 'lin'; did you mean 'line'?"),
        ({"outputs": ["txt"]}, UnsupportedError, "input 'line' cannot give output 'txt'; did you mean 'text'?"),
        ({"outputs": []}, InvalidInputError, "a request must ask for at least one output"),
        ({"value": "text"}, InvalidInputError, "input 'line' takes Line, but got str"),
        (
            {"entry": "speech", "outputs": ["text"]},
            UnsupportedError,
            "input 'speech' cannot give output 'text'; known: audio",
        ),
        (
            {"entry": "speech", "value": [TextDelta("a"), 5]},
            InvalidInputError,
            "input 'speech' takes TextDelta, but got int",
        ),
    ],
)
async def test_what_cannot_be_submitted(how: dict[str, Any], kind: type[RequestError], message: str) -> None:
    async with running(words.build()) as runtime:
        with pytest.raises(kind) as caught:
            await runtime.submit(**{"entry": "line", "value": Line("a"), **how})
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("do", "kind", "message"),
    [
        ("raise", StageError, "ZeroDivisionError: a bug in run"),
        ("refuse", InvalidInputError, "no such thing"),
        ("out of memory", StageError, "MemoryError: "),
        ("wrong type", ProtocolError, "port 'result' gives Job, but got int"),
    ],
)
async def test_errors_name_stage_and_request(do: str, kind: type[RequestError], message: str) -> None:
    async with running(row.row("one", "two", "three")) as runtime:
        for stage in ("one", "two", "three"):
            error = await error_of(runtime, "job", Job(stage, do), request_id="mine")
            assert type(error) is kind
            assert (error.message, error.stage, error.request_id) == (message, stage, "mine")
            assert error.info().param == ("thing" if do == "refuse" else None)
        assert (await ask(runtime, "job", Job()))["job"].seen == ("one", "two", "three")


async def test_a_text_as_long_as_a_book_in_an_error_is_cut() -> None:
    async with running(row.row("one")) as runtime:
        assert len((await error_of(runtime, "job", Job("one", "refuse at length"))).message) == 8000


async def test_only_the_bad_line_of_a_batch_fails() -> None:
    async with running(words.build()) as runtime, anyio.create_task_group() as tasks:

        async def one(text: str) -> None:
            if text.startswith("bad"):
                error = await error_of(runtime, "line", Line(text))
                assert (error.message, error.stage) == ("a bad line", "count")
            else:
                assert (await ask(runtime, "line", Line(text)))["num_words"] == 2

        for text in ("a b?", "bad b?", "c d?", "e f?"):
            tasks.start_soon(one, text)


async def test_a_failure_after_the_last_item_is_no_good_end() -> None:
    """The stream of a stage whose result breaks the contract does not end well first."""

    class Lies(Actor):
        async def run(self, job: Job, emit: Emit[int]) -> Job:
            await emit.send(1)
            return 5  # type: ignore[return-value]

    graph = Graph("g")
    stage = graph.stage("lies", Lies)
    graph.input(job=stage)
    graph.output(numbers=stage["emit"], out=stage["result"])
    async with running(graph) as runtime:
        error = await error_of(runtime, "job", Job(), outputs=["numbers"])
        assert error.message == "port 'result' gives Job, but got int"


class Pair(Outputs):
    left: int
    right: int


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "run() gives its outputs as one Outputs, but got NoneType"),
        (Job(), "run() gives its outputs as one Outputs, but got Job"),
        (Pair(1, "x"), "port 'right' gives int, but got str"),  # type: ignore[arg-type]
    ],
)
async def test_outputs_of_the_wrong_type(result: object, message: str) -> None:
    class Splits(Actor):
        async def run(self, job: Job) -> Pair:
            return result  # type: ignore[return-value]

    graph = Graph("g")
    stage = graph.stage("splits", Splits)
    graph.input(job=stage)
    graph.output(left=stage["left"])
    async with running(graph) as runtime:
        assert str(await error_of(runtime, "job", Job())) == f"stage 'splits': {message}"


async def test_a_wrong_item_on_a_stream() -> None:
    class Mixed(Actor):
        async def run(self, job: Job, emit: Emit[int]) -> None:
            await emit.send(1)
            await emit.send("two")  # type: ignore[arg-type]

    graph = Graph("g")
    stage = graph.stage("mixed", Mixed)
    graph.input(job=stage)
    graph.output(numbers=stage)
    async with running(graph) as runtime:
        assert str(await error_of(runtime, "job", Job())) == "stage 'mixed': port 'emit' gives int, but got str"


async def test_a_run_that_is_cancelled_from_within_fails_its_request() -> None:
    class Awaits(Actor):
        async def run(self, job: Job) -> Job:
            cancelled = asyncio.get_running_loop().create_future()
            cancelled.cancel()
            await cancelled
            return job

    graph = Graph("g")
    stage = graph.stage("awaits", Awaits)
    graph.input(job=stage)
    graph.output(out=stage)
    async with running(graph) as runtime:
        with anyio.fail_after(HANGS_S):
            error = await error_of(runtime, "job", Job())
        assert str(error) == "stage 'awaits': run() was cancelled from within"


async def test_an_emit_that_outlives_its_run_fails_the_request() -> None:
    kept: list[Emit[int]] = []

    class Keeps(Actor):
        async def run(self, job: Job, emit: Emit[int]) -> Job:
            kept.append(emit)
            return job

    class Late(Actor):
        async def run(self, job: Job) -> Job:
            await kept.pop().send(1)
            return job

    graph = Graph("g")
    keeps, late = graph.stage("keeps", Keeps), graph.stage("late", Late)
    graph.result(keeps, late)
    graph.input(job=keeps)
    graph.output(numbers=keeps["emit"], out=late)
    async with running(graph) as runtime:
        error = await error_of(runtime, "job", Job())
        assert str(error) == "stage 'keeps': output 'numbers': item 0 came after its end"


async def test_a_broken_actor_fails_the_graph() -> None:
    async with unstarted(row.row("one", "two")) as runtime:
        error = await error_of(runtime, "job", Job("two", "broken"))
        assert (type(error), error.message, error.stage) == (StageError, "the device is gone", "two")
        failure = await runtime.wait_failed()
        assert str(failure) == "stage 'two': the device is gone"
        assert runtime.status().state == "failed"
        assert runtime.status().reason == str(failure)
        with pytest.raises(UnavailableError, match="the graph has failed: stage 'two': the device is gone"):
            await runtime.submit("job", Job())


# -- deadlines ---------------------------------------------------------------------------------------------------------


exactly = pytest.mark.parametrize("anyio_backend", [exact_time], ids=["exact time"])


async def test_a_deadline_names_the_stage_that_ran() -> None:
    async with running(words.build()) as runtime:
        error = await error_of(runtime, "line", Line("a hang x"), deadline_s=0.3)
        assert isinstance(error, DeadlineError)
        assert str(error) == "stage 'words': the deadline of 0.3 s passed while stage 'words' was running"


@exactly
async def test_a_deadline_while_the_caller_does_not_read() -> None:
    async with running(row.numbers()) as runtime:
        began = anyio.current_time()
        reply = await runtime.submit("job", Job(), deadline_s=0.05)
        await settled(runtime)
        assert anyio.current_time() - began == pytest.approx(0.05), "the stage hears of it at once"
        with pytest.raises(DeadlineError, match="while stage 'count' was running"):
            await reply.collect()


async def test_a_deadline_while_the_request_waits_for_a_place() -> None:
    async with running(words.build(), max_in_flight=1) as runtime:
        first = await runtime.submit("line", Line("hang x"))
        with pytest.raises(DeadlineError, match=r"the deadline of 0.05 s passed while the request waited for a place"):
            await runtime.submit("line", Line("a"), deadline_s=0.05)
        await first.cancel()
        assert len((await ask(runtime, "line", Line("a")))["text"]) == 1


async def test_a_stage_that_waits_in_a_thread_ends_late_but_its_request_does_not() -> None:
    async with running(words.build()) as runtime:
        assert isinstance(await error_of(runtime, "line", Line("block x"), deadline_s=0.02), DeadlineError)
        assert runtime.status().in_flight == 1


# -- cancelling --------------------------------------------------------------------------------------------------------


async def test_cancel_stops_every_stage_and_is_idempotent() -> None:
    async with running(words.build()) as runtime:
        reply = await runtime.submit("line", Line("a b hang x"))
        assert (await anext(reply)).name == "text"
        for _ in range(2):
            await reply.cancel()
        with pytest.raises(CancelledError, match="the request was cancelled"):
            await anext(reply)
        await settled(runtime)
        await reply.cancel()


async def test_leaving_early_cancels() -> None:
    async with running(words.build()) as runtime:
        async with await runtime.submit("line", Line("a hang x")) as reply:
            async for _output in reply:
                break
        await settled(runtime)
        assert isinstance(reply.error, CancelledError)


async def test_a_second_reader_of_a_reply_is_told_and_the_first_not_forgotten() -> None:
    async with running(words.build()) as runtime, anyio.create_task_group() as tasks:
        reply = await runtime.submit("line", Line("hang x"), outputs=["text"], deadline_s=0.5)

        async def read() -> None:
            with pytest.raises(DeadlineError):
                await anext(reply)

        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="one reader"):
            await anext(reply)


@exactly
async def test_an_abandoned_reply_ends_by_its_deadline() -> None:
    async with running(row.numbers()) as runtime:
        reply = await runtime.submit("job", Job(), deadline_s=0.05)
        async for _output in reply:
            break
        del reply
        await settled(runtime)


async def test_a_cancelled_caller_cancels_its_request() -> None:
    async with running(words.build()) as runtime:
        with anyio.move_on_after(0.02) as scope:
            await ask(runtime, "line", Line("a hang x"))
        assert scope.cancelled_caught
        await settled(runtime)


async def test_a_cancel_after_the_end_changes_nothing() -> None:
    async with running(words.build()) as runtime:
        reply = await runtime.submit("line", Line("a b"))
        await settled(runtime)
        await reply.cancel()
        assert len((await reply.collect())["text"]) == 2


async def test_cancels_at_any_moment_leave_nothing() -> None:
    dice = random.Random(0)
    async with running(words.build(), max_in_flight=8, max_queued=500) as runtime:

        async def one() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(swallow, runtime)
                for _ in range(dice.randrange(60)):
                    await anyio.sleep(0)
                tasks.cancel_scope.cancel()

        async def swallow(runtime: Runtime) -> None:
            await ask(runtime, "line", Line("a b many c?"))

        async with anyio.create_task_group() as tasks:
            for _ in range(300):
                tasks.start_soon(one)
        await settled(runtime)
        assert len((await ask(runtime, "line", Line("a b")))["text"]) == 2


async def test_payloads_die_with_their_request_without_the_garbage_collector() -> None:
    class Load(msgspec.Struct, frozen=True):
        rows: np.ndarray

    class Pass(Actor):
        async def run(self, load: Load, emit: Emit[Load]) -> Load:
            await emit.send(load)
            return load

    Pass.run.__annotations__ = {"load": Load, "emit": Emit[Load], "return": Load}
    graph = Graph("g")
    stage = graph.stage("pass_on", Pass)
    graph.input(load=stage)
    graph.output(stream=stage["emit"], value=stage["result"])
    async with running(graph) as runtime:
        gc.collect()
        gc.disable()
        try:
            load = Load(np.zeros(10))
            seen = weakref.ref(load.rows)
            assert await ask(runtime, "load", load)
            cancelled = await runtime.submit("load", load)
            await cancelled.cancel()
            del load, cancelled
            await settled(runtime)
            await anyio.sleep(0)
            assert seen() is None
        finally:
            gc.enable()


# -- flow control ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1, 4, 16])
async def test_a_caller_that_does_not_read_suspends_the_stage(bound: int) -> None:
    async with running(row.numbers(), stream_bound=bound) as runtime:
        async with await runtime.submit("job", Job()) as reply:
            for number in range(40):
                await anyio.wait_all_tasks_blocked() if number == 0 else await anyio.sleep(0)
                assert len(reply._items) <= bound
                assert (await anext(reply)).value == number


async def test_a_slow_reader_does_not_hold_up_others() -> None:
    async with running(words.build()) as runtime:
        slow = await runtime.submit("line", Line("many many x"))
        for _ in range(5):
            assert len((await ask(runtime, "line", Line("many x")))["text"]) == 101
        assert len((await slow.collect())["text"]) == 201


async def test_tasks_of_one_stage_may_share_a_port() -> None:
    class Shares(Actor):
        async def run(self, job: Job, emit: Emit[int]) -> None:
            async def send(start: int) -> None:
                for number in range(start, start + 50):
                    await emit.send(number)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send, 0)
                tasks.start_soon(send, 100)

    graph = Graph("g")
    stage = graph.stage("shares", Shares)
    graph.input(job=stage)
    graph.output(numbers=stage)
    async with running(graph, stream_bound=3) as runtime:
        found = (await ask(runtime, "job", Job()))["numbers"]
    assert sorted(found) == [*range(50), *range(100, 150)]
    assert [number for number in found if number < 100] == list(range(50))


@exactly
async def test_a_send_that_times_out_may_be_tried_again() -> None:
    class Tries(Actor):
        async def run(self, job: Job, emit: Emit[int]) -> int:
            given_up = 0
            for number in range(6):
                while True:
                    with anyio.move_on_after(0.005) as scope:
                        await emit.send(number)
                    if not scope.cancelled_caught:
                        break
                    given_up += 1
            return given_up

    graph = Graph("g")
    stage = graph.stage("tries", Tries)
    graph.input(job=stage)
    graph.output(numbers=stage["emit"], given_up=stage["result"])
    async with running(graph, stream_bound=2) as runtime:
        reply = await runtime.submit("job", Job())
        await anyio.sleep(0.03)
        found = await reply.collect()
    assert found["numbers"] == list(range(6))
    assert found["given_up"] > 0


async def test_a_feedback_edge_ends_at_its_bound() -> None:
    class Loops(Actor):
        async def run(self, job: Job, back: Stream[int], again: Emit[int]) -> int:
            await again.send(0)
            async for number in back:
                if number == int(job.do):
                    return number
                await again.send(number + 1)
            return -1

    graph = Graph("g")
    stage = graph.stage("loops", Loops)
    graph.stream(stage, stage, loop=10)
    graph.input(job=stage["job"])
    graph.output(out=stage["result"])
    async with running(graph) as runtime:
        assert (await ask(runtime, "job", Job(do="9")))["out"] == 9
        error = await error_of(runtime, "job", Job(do="10"))
        assert str(error) == "stage 'loops': feedback port 'again' sent more than its bound"


# -- admission ---------------------------------------------------------------------------------------------------------


async def test_requests_over_the_bound_wait_in_their_order_and_over_the_queue_are_refused() -> None:
    async with running(words.build(), max_in_flight=1, max_queued=3) as runtime:
        first = await runtime.submit("line", Line("hang x"))
        order: list[int] = []

        async def one(number: int) -> None:
            await ask(runtime, "line", Line("a"))
            order.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(one, number)
            await anyio.wait_all_tasks_blocked()
            status = runtime.status()
            assert (status.in_flight, status.queued) == (1, 3)
            with pytest.raises(OverloadedError, match="1 requests run and 3 wait; try again later") as caught:
                await runtime.submit("line", Line("a"))
            assert caught.value.retry_after_s == 1.0
            await first.cancel()
        assert order == [0, 1, 2]


async def test_cancelling_while_queued_gives_the_place_to_the_next() -> None:
    async with running(words.build(), max_in_flight=1) as runtime:
        first = await runtime.submit("line", Line("hang x"))
        second = anyio.CancelScope()

        async def wait() -> None:
            with second:
                await ask(runtime, "line", Line("b"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(ask, runtime, "line", Line("c"))
            await anyio.wait_all_tasks_blocked()
            second.cancel()
            await first.cancel()


async def test_a_place_that_is_given_to_a_caller_who_just_left_is_not_lost() -> None:
    """Cancel and hand-over in the same turn of the loop, in both orders."""
    async with running(words.build(), max_in_flight=1) as runtime:
        for cancel_first in (True, False):
            first = await runtime.submit("line", Line("hang x"))
            waiting = asyncio.get_running_loop().create_task(runtime.submit("line", Line("b")))
            await anyio.wait_all_tasks_blocked()
            if cancel_first:
                waiting.cancel()
                await first.cancel()
            else:
                await first.cancel()
                waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await settled(runtime)


async def test_stopping_while_a_queued_caller_leaves() -> None:
    async with unstarted(words.build(), max_in_flight=1) as runtime:
        await runtime.submit("line", Line("hang x"))
        waiting = asyncio.get_running_loop().create_task(runtime.submit("line", Line("b")))
        await anyio.wait_all_tasks_blocked()
        runtime.state = "draining"
        runtime._refuse_queued()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert runtime._admission.num_taken == 0


# -- life --------------------------------------------------------------------------------------------------------------


async def test_drain_refuses_the_new_and_finishes_the_old() -> None:
    async with running(words.build(), max_in_flight=1) as runtime:
        reply = await runtime.submit("line", Line("slow a"))
        refused: list[UnavailableError] = []

        async def queued() -> None:
            with pytest.raises(UnavailableError, match="the runtime is draining") as caught:
                await runtime.submit("line", Line("b"))
            refused.append(caught.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(queued)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(runtime.drain)
            assert len((await reply.collect())["text"]) == 2
        assert refused[0].retry_after_s == 5.0
        with pytest.raises(UnavailableError, match="the runtime is draining"):
            await runtime.submit("line", Line("c"))


async def test_drain_is_bounded() -> None:
    async with unstarted(words.build(), drain_s=0.05) as runtime:
        reply = await runtime.submit("line", Line("hang x"))
        with anyio.fail_after(HANGS_S):
            await runtime.drain()
        assert not reply.ended
    with pytest.raises(UnavailableError, match="the runtime is stopping"):
        await reply.collect()


async def test_leaving_the_runtime_ends_what_runs_and_refuses_what_comes() -> None:
    async with unstarted(words.build()) as runtime:
        reply = await runtime.submit("line", Line("a hang x"))
    with pytest.raises(UnavailableError, match="the runtime is stopping"):
        await reply.collect()
    with pytest.raises(UnavailableError, match="the runtime is stopped"):
        await runtime.submit("line", Line("a"))
    assert runtime._requests == {}
    assert runtime._admission.num_taken == 0
    assert reply.expiry is not None and reply.expiry.cancelled()


async def test_an_error_in_the_body_stops_the_runtime() -> None:
    with pytest.raises(ZeroDivisionError):
        async with unstarted(words.build()) as runtime:
            await runtime.submit("line", Line("a hang x"))
            raise ZeroDivisionError
    assert runtime.state == "stopped"


async def test_a_stage_that_fails_in_setup() -> None:
    graph = row.row("one", "two", two={"in_setup": "raise"})
    runtime = unstarted(graph)
    with pytest.raises(StartError) as caught:
        await runtime.__aenter__()
    assert str(caught.value) == "stage 'two': FileNotFoundError: no weights here"
    assert "in setup" in caught.value.detail
    assert "row.py" in caught.value.detail


async def test_a_stage_that_is_never_ready() -> None:
    runtime = unstarted(row.row("one", one={"in_setup": "hang"}), start_timeout_s=0.3)
    with pytest.raises(StartError, match=r"not ready after 0.3 s \(still setting up: one\)"):
        await runtime.__aenter__()


async def test_actors_are_closed_even_if_one_fails_in_close(tmp_path: Path) -> None:
    graph = row.row("one", "two", one={"in_close": "raise"}, two={"in_close": str(tmp_path / "closed")})
    async with running(graph) as runtime:
        assert await ask(runtime, "job", Job())
    assert (tmp_path / "closed").exists()


async def test_status() -> None:
    async with running(words.build()) as runtime:
        reply = await runtime.submit("line", Line("hang x"))
        status = runtime.status()
        assert (status.state, status.in_flight, status.queued, status.reason) == ("ready", 1, 0, None)
        assert [stage.name for stage in status.stages] == ["split", "shout", "count", "join", "words", "echo"]
        assert {(stage.host, stage.state, stage.restarts, stage.in_flight) for stage in status.stages} == {
            ("main", "ready", 0, 1)
        }
        assert set(runtime.stage_seconds) == {"split", "shout", "count", "join", "words", "echo"}
        await reply.cancel()


async def test_two_runtimes_in_one_process() -> None:
    async with running(words.build()) as one, running(row.row("one", "two")) as two:
        assert len((await ask(one, "line", Line("a b")))["text"]) == 2
        assert (await ask(two, "job", Job()))["job"].seen == ("one", "two")
