from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
import torch

from omniflow.engine.base import EngineOutput, EngineRequest, Sampling
from omniflow.engine.loop import EngineLoop
from omniflow.engine.stats import EngineStats
from omniflow.engine.transformers import TransformersEngine
from omniflow.errors import (
    ActorBrokenError,
    ContextLengthError,
    InvalidInputError,
    ProtocolError,
    StartError,
    UnavailableError,
)
from tests.engine.tiny import CONTEXT, HIDDEN, ids_of, prompt, request, run, tiny_llama
from tests.waiting import HANGS_S

pytestmark = pytest.mark.anyio


class CountingEngine:
    """Says 0, 1, 2, ... for every request, one a step, and notes what it was told. Steps wait for `gate`."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.told: list[str] = []
        self.aborted: list[str] = []
        self.fail: Exception | None = None
        self.num_steps = 0
        self.gate = threading.Event()
        self.gate.set()
        self.limits: dict[str, int] = {}

    def start(self, request: EngineRequest) -> None:
        self.told.append(f"start {request.id}")
        if not request.ids:
            raise InvalidInputError("the prompt is empty")
        self.running[request.id] = 0
        self.limits[request.id] = request.sampling.max_tokens

    def feed(self, request_id: str, rows: torch.Tensor, done: bool) -> None:
        self.told.append(f"feed {request_id}")

    def step(self) -> list[EngineOutput]:
        assert self.gate.wait(HANGS_S)
        self.num_steps += 1
        if self.fail:
            raise self.fail
        outputs = [EngineOutput(id, (), "abort") for id in self.aborted]
        self.aborted.clear()
        for id, number in list(self.running.items()):
            self.running[id] += 1
            last = number + 1 == self.limits[id]
            outputs.append(EngineOutput(id, (number,), "length" if last else None))
            if last:
                del self.running[id]
        return outputs

    def abort(self, request_id: str) -> None:
        self.told.append(f"abort {request_id}")
        if self.running.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def has_work(self) -> bool:
        return bool(self.running or self.aborted)

    def is_reading(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats(len(self.running), 0, 0, 100)

    def close(self) -> None:
        self.told.append("close")


@asynccontextmanager
async def running(build: Callable[[], object], **options: object) -> AsyncIterator[EngineLoop]:
    loop = EngineLoop(build, **options)
    await loop.setup()
    try:
        yield loop
    finally:
        await loop.close()


async def test_generations_run_together_and_each_gets_its_own() -> None:
    got: dict[str, list[int]] = {}

    async def generate(loop: EngineLoop, id: str, count: int) -> None:
        async with loop.generate(request(id, [1], max_tokens=count)) as outputs:
            got[id] = ids_of([output async for output in outputs])

    async with running(CountingEngine) as loop, anyio.create_task_group() as tasks:
        for number in range(1, 6):
            tasks.start_soon(generate, loop, str(number), number)
    assert got == {str(number): list(range(number)) for number in range(1, 6)}


async def test_requests_of_one_turn_of_the_event_loop_are_one_batch() -> None:
    engine, batches, began = CountingEngine(), list[int](), threading.Event()
    engine_step = engine.step

    def step() -> list[EngineOutput]:
        batches.append(len(engine.running))
        began.set()
        return engine_step()

    engine.step = step  # type: ignore[method-assign]
    async with (
        running(lambda: engine) as loop,
        loop.generate(request("a", [1], max_tokens=2)) as first,
    ):
        assert not began.wait(0.05)  # its thread is free to begin
        async with loop.generate(request("b", [1], max_tokens=2)) as second:
            assert ids_of([output async for output in first]) == ids_of([output async for output in second]) == [0, 1]
    assert batches == [2, 2]


async def test_the_real_engine_gives_what_it_gives_alone() -> None:
    expected = run(TransformersEngine(tiny_llama()), [request("a", prompt(20), seed=3, temperature=1.0)])["a"]
    async with (
        running(lambda: TransformersEngine(tiny_llama())) as loop,
        loop.generate(request("a", prompt(20), seed=3, temperature=1.0)) as outputs,
    ):
        assert [output async for output in outputs] == expected


async def test_leaving_the_block_aborts() -> None:
    engine = CountingEngine()
    async with running(lambda: engine) as loop:
        async with loop.generate(request("a", [1], max_tokens=10**9)) as outputs:
            assert (await anext(outputs)).ids == (0,)
        async with loop.generate(request("b", [1], max_tokens=1)) as outputs:
            assert len([output async for output in outputs]) == 1
    assert engine.told == ["start a", "abort a", "start b", "close"]
    assert engine.running == {}


async def test_a_cancelled_reader_aborts() -> None:
    engine = CountingEngine()
    engine.gate.clear()
    async with running(lambda: engine) as loop:
        with anyio.move_on_after(0.01) as scope:
            async with loop.generate(request("a", [1])) as outputs:
                await anext(outputs)
        assert scope.cancelled_caught
        engine.gate.set()
        async with loop.generate(request("b", [1], max_tokens=1)) as outputs:
            assert len([output async for output in outputs]) == 1
    assert engine.told == ["start a", "abort a", "start b", "close"]


async def test_a_refusal_concerns_one_request() -> None:
    async with running(lambda: TransformersEngine(tiny_llama())) as loop:
        with pytest.raises(ContextLengthError, match=f"at most {CONTEXT - 1} fit"):
            async with loop.generate(request("a", prompt(CONTEXT))) as outputs:
                await anext(outputs)
        async with loop.generate(request("b", prompt(3), max_tokens=2)) as outputs:
            assert len([output async for output in outputs]) == 2


async def test_an_error_in_the_middle_concerns_one_request_and_comes_after_its_outputs() -> None:
    class Refusing(CountingEngine):
        def step(self) -> list[EngineOutput]:
            outputs = super().step()
            if self.running.get("a") == 3:
                del self.running["a"]
                outputs.append(EngineOutput("a", (), "abort", error=InvalidInputError("too complex", param="tools")))
            return outputs

    engine, got = Refusing(), list[int]()
    async with running(lambda: engine) as loop:
        with pytest.raises(InvalidInputError, match="too complex") as raised:
            async with loop.generate(request("a", [1], max_tokens=10**9)) as outputs:
                async for output in outputs:
                    got += output.ids
        assert (got, raised.value.param) == ([0, 1, 2], "tools")
        async with loop.generate(request("b", [1], max_tokens=2)) as outputs:
            assert len([output async for output in outputs]) == 2
    assert engine.told == ["start a", "start b", "close"]


async def test_feed_reaches_the_engine_and_its_refusal_the_reader() -> None:
    open_request = EngineRequest(id="a", ids=[1, 2], sampling=Sampling(max_tokens=3), open=True)
    async with running(lambda: TransformersEngine(tiny_llama())) as loop:
        async with loop.generate(open_request) as outputs:
            outputs.feed(torch.zeros(4, HIDDEN), done=False)
            outputs.feed(torch.zeros(4, HIDDEN), done=True)
            assert len([output async for output in outputs]) == 3
        with pytest.raises(ContextLengthError):
            async with loop.generate(open_request) as outputs:
                outputs.feed(torch.zeros(CONTEXT, HIDDEN), done=False)
                await anext(outputs)


class LateEngine(CountingEngine):
    """Holds what has ended for two more steps, which give nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def step(self) -> list[EngineOutput]:
        outputs = super().step()
        self.left = 2 if any(output.finish_reason for output in outputs) else max(0, self.left - 1)
        return outputs

    def has_work(self) -> bool:
        return super().has_work() or self.left > 0

    def stats(self) -> EngineStats:
        return EngineStats(len(self.running), 0, self.left, 100)


@pytest.mark.parametrize("gather_s", [0.0, 1e9])
async def test_what_an_idle_engine_holds_is_known(gather_s: float) -> None:
    async with running(LateEngine, gather_s=gather_s) as loop:
        with anyio.fail_after(HANGS_S):
            while loop.stats != EngineStats(0, 0, 0, 100):  # before any request
                await anyio.sleep(0.001)
            async with loop.generate(request("a", [1], max_tokens=3)) as outputs:
                assert (await anext(outputs)).ids == (0,)
                [output async for output in outputs]
            while loop.stats != EngineStats(0, 0, 0, 100):
                await anyio.sleep(0.001)


async def test_what_an_engine_holds_is_known_while_its_first_step_goes_on() -> None:
    engine = CountingEngine()
    engine.gate.clear()
    async with running(lambda: engine) as loop, loop.generate(request("a", [1], max_tokens=1)) as outputs:
        with anyio.fail_after(HANGS_S):
            while loop.stats.num_running != 1:
                await anyio.sleep(0.001)
        assert engine.num_steps == 0
        engine.gate.set()
        assert len([output async for output in outputs]) == 1


async def test_the_thread_sleeps_without_work() -> None:
    engine = CountingEngine()
    async with running(lambda: engine) as loop:
        async with loop.generate(request("a", [1], max_tokens=3)) as outputs:
            assert len([output async for output in outputs]) == 3
        await anyio.sleep(0.02)
        assert engine.num_steps == 3
        assert loop.stats.num_running == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_engine_that_raises_breaks_the_loop_for_good() -> None:
    engine = CountingEngine()
    cause = RuntimeError("out of memory")
    heard: list[BaseException] = []
    errors: list[ActorBrokenError] = []

    async def generate(loop: EngineLoop, id: str) -> None:
        with pytest.raises(ActorBrokenError, match="RuntimeError: out of memory") as raised:
            async with loop.generate(request(id, [1], max_tokens=10**9)) as outputs:
                async for output in outputs:
                    if output.ids == (3,):
                        engine.fail = cause
        errors.append(raised.value)

    async with running(lambda: engine, on_broken=heard.append) as loop:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate, loop, "a")
            tasks.start_soon(generate, loop, "b")
        assert heard == [cause]
        assert loop.broken is cause
        with pytest.raises(ActorBrokenError, match="out of memory"):
            async with loop.generate(request("c", [1])):
                raise AssertionError("a broken loop took a request")
    assert len(errors) == 2
    assert errors[0] is not errors[1]
    assert all(error.__cause__ is cause for error in errors)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [StartError("no such engine here"), ModuleNotFoundError("no such engine here")])
async def test_setup_raises_what_build_raises_and_nobody_else_does(error: Exception) -> None:
    def build() -> CountingEngine:
        raise error

    loop = EngineLoop(build)
    with pytest.raises(type(error), match="no such engine here"):
        await loop.setup()
    await loop.close()


async def test_close_ends_open_generations_and_the_thread() -> None:
    engine = CountingEngine()
    loop = EngineLoop(lambda: engine)
    await loop.setup()
    async with loop.generate(request("a", [1], max_tokens=10**9)) as outputs:
        await anext(outputs)
        await loop.close()
        with pytest.raises(UnavailableError, match="closing"):
            [output async for output in outputs]
    assert engine.told[-1] == "close"
    assert not any(thread.name == "engine" for thread in threading.enumerate())
    await loop.close()
    with pytest.raises(UnavailableError, match="closed"):
        async with loop.generate(request("b", [1])):
            raise AssertionError("a closed loop took a request")


async def test_an_id_runs_once() -> None:
    engine = CountingEngine()
    async with running(lambda: engine) as loop, loop.generate(request("a", [1], max_tokens=10**9)):
        with pytest.raises(ProtocolError, match="runs already"):
            async with loop.generate(request("a", [1])):
                raise AssertionError("two generations have one id")


async def test_an_id_is_free_again_once_what_it_was_has_ended() -> None:
    """Not when its generation is left: outputs that are on their way would be those of the next one."""
    engine = CountingEngine()
    async with running(lambda: engine) as loop:
        async with loop.generate(request("a", [1], max_tokens=10**9)) as outputs:
            await anext(outputs)
            engine.gate.clear()
        with pytest.raises(ProtocolError, match="runs already"):
            async with loop.generate(request("a", [1])):
                raise AssertionError("it got the outputs of another")
        engine.gate.set()
        async with loop.generate(request("b", [1], max_tokens=10**9)) as outputs:
            while "abort a" not in engine.told:
                await anext(outputs)
            await anext(outputs)
            await anext(outputs)
        async with loop.generate(request("a", [1], max_tokens=3)) as outputs:
            assert ids_of([output async for output in outputs]) == [0, 1, 2]


async def test_an_id_that_was_refused_is_free_again() -> None:
    engine = CountingEngine()
    async with running(lambda: engine) as loop:
        async with loop.generate(request("a", [])) as outputs:
            with pytest.raises(InvalidInputError):
                await anext(outputs)
        async with loop.generate(request("a", [])):
            pass  # left before it is refused
        with anyio.fail_after(HANGS_S):
            while engine.told.count("abort a") < 3:  # twice refused, once left
                await anyio.sleep(0.001)
        await anyio.sleep(0.01)
        async with loop.generate(request("a", [1], max_tokens=2)) as outputs:
            assert ids_of([output async for output in outputs]) == [0, 1]


async def test_setup_raises_a_stop_iteration_of_build_as_what_it_is() -> None:
    """No future takes one, so nobody would be told."""
    loop = EngineLoop(lambda: next(iter([])))
    with anyio.fail_after(HANGS_S), pytest.raises(ActorBrokenError, match="StopIteration"):
        await loop.setup()
    await loop._ended.wait()


@pytest.mark.parametrize("ids", [[1], []], ids=["served", "refused"])
async def test_no_request_outlives_its_generation(ids: list[int]) -> None:
    """Without the help of the garbage collector, and while the loop sleeps."""

    async def generate(loop: EngineLoop) -> weakref.ref[torch.Tensor]:
        rows = torch.zeros(1, HIDDEN)
        asked = EngineRequest(id="a", ids=ids, sampling=Sampling(max_tokens=2), embeds=rows, positions=(0,))
        with contextlib.suppress(InvalidInputError):
            async with loop.generate(asked) as outputs:
                async for _output in outputs:
                    pass
        return weakref.ref(rows)

    async with running(CountingEngine) as loop:
        gc.disable()
        try:
            rows = await generate(loop)
            with anyio.fail_after(HANGS_S):
                while rows() is not None:
                    await anyio.sleep(0.001)
        finally:
            gc.enable()


async def test_outputs_of_quick_steps_travel_together_and_first_and_last_ones_at_once() -> None:
    engine = CountingEngine()
    loop = EngineLoop(lambda: engine, gather_s=1e9)
    await loop.setup()
    async with loop.generate(request("a", [1], max_tokens=20)) as outputs:
        first = await anext(outputs)
        assert first.ids == (0,)
        (rest,) = [output async for output in outputs]  # the last output brings all that waited before it
        assert rest.ids == tuple(range(1, 20))
        assert rest.finish_reason == "length"
    await loop.close()


async def test_gathered_outputs_are_handed_over_in_time() -> None:
    engine = CountingEngine()
    loop = EngineLoop(lambda: engine, gather_s=0.001)
    await loop.setup()
    async with loop.generate(request("a", [1], max_tokens=1_000_000)) as outputs:
        ids: list[int] = []
        while len(ids) < 100:  # it never ends: only time hands these over
            ids += (await anext(outputs)).ids
        assert ids == list(range(len(ids)))
    await loop.close()


class PatientEngine(CountingEngine):
    """Gives nothing in two of three steps, and then the tokens of all three."""

    def step(self) -> list[EngineOutput]:
        (output,) = super().step()
        if output.ids[0] % 3:
            return []
        number = output.ids[0]
        return [EngineOutput(output.id, tuple(range(max(0, number - 2), number + 1)))]


async def test_what_an_engine_has_gathered_itself_does_not_wait_again() -> None:
    loop = EngineLoop(PatientEngine, gather_s=1e9)
    await loop.setup()
    async with loop.generate(request("a", [1], max_tokens=1_000_000)) as outputs:
        found = [(await anext(outputs)).ids for _ in range(3)]
        assert found == [(0,), (1, 2, 3), (4, 5, 6)]
    await loop.close()


class ReadingEngine(CountingEngine):
    """Its third step reads a prompt: it waits for `gate`."""

    def is_reading(self) -> bool:
        if self.num_steps == 2:
            self.gate.clear()
        return self.num_steps == 2


async def test_nothing_waits_while_a_prompt_is_read() -> None:
    engine = ReadingEngine()
    async with (
        running(lambda: engine, gather_s=1e9) as loop,
        loop.generate(request("a", [1], max_tokens=9)) as outputs,
    ):
        try:
            with anyio.fail_after(HANGS_S):
                assert [(await anext(outputs)).ids for _ in range(2)] == [(0,), (1,)]
                assert engine.num_steps == 2
        finally:
            engine.gate.set()
        assert ids_of([output async for output in outputs]) == list(range(2, 9))
