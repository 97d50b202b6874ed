"""Runs an engine in a thread of its own and hands its outputs to asyncio.

    loop = EngineLoop(build)
    await loop.setup()
    async with loop.generate(request) as outputs:
        async for output in outputs: ...
    await loop.close()

The thread sleeps on a condition while there is no work. Commands reach the engine at step boundaries, in order; all
outputs of a step come back in one wake-up of the event loop.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, NamedTuple

import anyio

from omniflow.engine.base import Engine, EngineOutput, EngineRequest
from omniflow.engine.gathering import Gathering
from omniflow.engine.stats import EngineStats
from omniflow.errors import ActorBrokenError, OmniflowError, ProtocolError, RequestError, UnavailableError

if TYPE_CHECKING:
    import torch


class Command(NamedTuple):
    """Something to tell the engine about one request."""

    request_id: str
    apply: Callable[[Engine], None]


class Generation(AsyncIterator[EngineOutput]):
    """The outputs of one request, in order; at most `max_tokens` + 1 wait here unread.

    It runs within `async with`: leaving the block aborts what is left of it at the next step.
    """

    def __init__(self, request: EngineRequest, loop: EngineLoop) -> None:
        self.id = request.id
        self._request = request
        self._loop = loop
        self._outputs: deque[EngineOutput] = deque()
        self._error: OmniflowError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.finished = False
        """True once no further output can come."""
        self.left = False
        """True once nobody reads it any more. What it began keeps its id until that has ended, too."""

    def feed(self, rows: torch.Tensor, done: bool) -> None:
        """Append input embeddings [n, hidden] to a request started with `open=True`; `done` lets it generate.

        Never waits. Where the engine has no room for them, the next output raises.
        """
        self._loop.tell(self.id, lambda engine: engine.feed(self.id, rows, done))

    # Not by @asynccontextmanager: with it 64 tasks hand their requests over in 0.9 ms, without in 0.7.
    async def __aenter__(self) -> Generation:
        request = self._request
        self._loop.add(self)
        self._loop.tell(self.id, lambda engine: engine.start(request))
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._loop.remove(self)
        if not self.finished:
            self._loop.tell(self.id, lambda engine: engine.abort(self.id))

    async def __anext__(self) -> EngineOutput:
        while not self._outputs:
            if self._error is not None:
                # A copy: what was raised holds the frames that it passed, and they hold this object.
                raise copy.copy(self._error) from self._error.__cause__
            if self.finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._outputs.popleft()

    def put(self, output: EngineOutput) -> None:
        """Called by the loop: one more output."""
        if not self.left:
            self._outputs.append(output)
        self.finished = output.finish_reason is not None
        self._wake()

    def fail(self, error: OmniflowError) -> None:
        """Called by the loop: the request ended with `error`, raised after the outputs that wait here."""
        self._error = error
        self.finished = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineLoop:
    """Owns the engine that `build` makes in its thread.

    If the engine raises in `step`, the loop is broken for good: `broken` holds the error, every open generation and
    every later `generate` raises ActorBrokenError with it as the cause, and `on_broken` is called with it in the event
    loop.

    Outputs are handed over at the end of each step, or of as many as take `gather_s` (`gathering.py`): waking every
    reader takes the time of a GPU's step from the engine's thread. None waits while prompts are read.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        *,
        on_broken: Callable[[BaseException], None] | None = None,
        gather_s: float = 0.0,
    ) -> None:
        self._build = build
        self._on_broken = on_broken
        self._gather_s = gather_s
        self._gathering = Gathering(gather_s)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._wake = threading.Condition()
        self._said: list[Command] = []
        """Of this turn of the event loop: those that come at once are read as one batch, and wake the engine once."""
        self._commands: list[Command] = []
        self._closing = False
        self._step_began: float | None = None
        self._generations: dict[str, Generation] = {}
        self.broken: BaseException | None = None
        self.stats = EngineStats(0, 0, 0, 0)
        """What the engine held when its outputs were last handed over, it was last told something, or it went to sleep:
        whichever came last.
        """

    def busy_s(self) -> float:
        """How long the engine's present step has run; 0 between steps."""
        began = self._step_began
        return time.monotonic() - began if began is not None else 0.0

    async def setup(self) -> None:
        """Start the thread and wait for the engine. Raises what `build` raised."""
        self._asyncio = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._asyncio.create_future()
        self._ended = asyncio.Event()
        self._thread.start()
        await self._ready

    async def close(self) -> None:
        """End the thread after its current step; open generations raise UnavailableError."""
        if not self._thread.is_alive():
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()
        self._thread.join()
        self._fail_all(lambda: UnavailableError("the engine is closing"))

    def generate(self, request: EngineRequest) -> Generation:
        """Run `request` in `async with`, which raises ActorBrokenError, UnavailableError, or ProtocolError where one of
        its id runs already. Iteration raises ContextLengthError or OverloadedError where the engine refuses it.
        """
        return Generation(request, self)

    def add(self, generation: Generation) -> None:
        """Called by a generation that begins."""
        if self.broken is not None:
            raise _broken(self.broken)
        if not self._thread.is_alive():
            raise UnavailableError("the engine is closed", request_id=generation.id)
        if generation.id in self._generations:
            raise ProtocolError(f"request {generation.id} runs already", request_id=generation.id)
        self._generations[generation.id] = generation

    def remove(self, generation: Generation) -> None:
        """Called by a generation that ends. One that has not finished stays until its last output comes: outputs know
        their id alone, and would be those of the next one that has it.
        """
        generation.left = True
        self._drop_if_over(generation)

    def _drop_if_over(self, generation: Generation) -> None:
        if generation.left and generation.finished:
            self._generations.pop(generation.id, None)

    def tell(self, request_id: str, apply: Callable[[Engine], None]) -> None:
        """Have `apply` called with the engine, in its thread, before its next step. A RequestError is the request's."""
        if not self._said:
            self._asyncio.call_soon(self._hand_in)
        self._said.append(Command(request_id, apply))

    def _hand_in(self) -> None:
        with self._wake:
            self._commands += self._said
            self._wake.notify()
        self._said.clear()

    def _run(self) -> None:
        engine: Engine | None = None
        try:
            engine = self._build()
            self._post(self._started)
            self._serve(engine)
            engine.close()
        except OmniflowError as error:  # it says what to do, and those who wait tell it
            self._post(self._break, error)
        except BaseException as error:  # whatever it is, those who wait must learn of it; then the thread dies of it
            self._post(self._break, error)
            if engine is not None:  # else `setup` raises it
                raise
        finally:
            self._post(self._ended.set)

    def _serve(self, engine: Engine) -> None:
        while True:
            with self._wake:
                self._sleep(engine)
                if self._closing:
                    return
                commands, self._commands = self._commands, []
            self._apply(engine, commands)
            self._step(engine)

    def _sleep(self, engine: Engine) -> None:
        """Until there is something to do. What an idle engine holds is noted first: its last steps may have had no
        outputs to hand over.
        """
        if not self._is_due(engine):
            self.stats = engine.stats()
            self._wake.wait_for(lambda: self._is_due(engine))

    def _is_due(self, engine: Engine) -> bool:
        return bool(self._commands) or self._closing or engine.has_work()

    def _apply(self, engine: Engine, commands: list[Command]) -> None:
        """Leaves `commands` empty: while the loop sleeps it must not hold what its last requests were made of."""
        for command in commands:
            try:
                command.apply(engine)
            except RequestError as error:
                engine.abort(command.request_id)
                self._post(self._refuse, command.request_id, error.with_traceback(None))
        if commands:
            self.stats = engine.stats()  # the step that comes may read a long prompt
        commands.clear()

    def _step(self, engine: Engine) -> None:
        if self._gathering.holds and engine.is_reading():
            self._post(self._deliver, self._gathering.rest())
        self._step_began = time.monotonic()
        outputs = engine.step()
        self._step_began = None
        outputs = self._gathering.add(outputs)
        if outputs or not self._gather_s:
            self.stats = engine.stats()
        if outputs:
            self._post(self._deliver, outputs)

    def _post(self, call: Callable[..., object], *args: object) -> None:
        self._asyncio.call_soon_threadsafe(call, *args)

    def _started(self) -> None:
        if not self._ready.done():  # a cancelled `setup` waits no more
            self._ready.set_result(None)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            generation = self._generations.get(output.id)
            if generation is None or generation.finished:  # a refused one still gets its 'abort'
                continue
            if output.error is not None:
                generation.fail(output.error.with_traceback(None))
            else:
                generation.put(output)
            self._drop_if_over(generation)

    def _refuse(self, request_id: str, error: RequestError) -> None:
        generation = self._generations.get(request_id)
        if generation is not None:
            generation.fail(error)
            self._drop_if_over(generation)

    def _break(self, error: BaseException) -> None:
        if not self._ready.done():
            # No future takes a StopIteration, which a bare `next` of a loader raises.
            self._ready.set_exception(_broken(error) if isinstance(error, StopIteration) else error)
            return
        self.broken = error
        self._fail_all(lambda: _broken(error))
        if self._on_broken is not None:
            self._on_broken(error)

    def _fail_all(self, error: Callable[[], OmniflowError]) -> None:
        for generation in self._generations.values():
            generation.fail(error())
        self._generations.clear()


def _broken(error: BaseException) -> ActorBrokenError:
    broken = ActorBrokenError(f"the engine failed: {type(error).__name__}: {error}")
    broken.__cause__ = error
    return broken
