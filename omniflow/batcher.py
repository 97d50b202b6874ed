"""Puts calls of several requests into one call of a `@batched` run; a lone request never waits for company."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anyio

from omniflow.actor import BatchPolicy
from omniflow.cancellation import is_cancelled
from omniflow.errors import OmniflowError, ProtocolError, StageError

CallBatch = Callable[[list[Any]], Awaitable[list[Any]]]


class _Call(NamedTuple):
    value: Any
    answer: asyncio.Future[Any]


class Batcher:
    """One for each batched stage of a host; `serve` runs in the host's task group."""

    def __init__(self, stage: str, policy: BatchPolicy, call: CallBatch) -> None:
        self._stage = stage
        self._policy = policy
        self._call = call
        self._waiting: deque[_Call] = deque()
        self._arrival = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Calls that no batch has taken yet."""
        return len(self._waiting)

    async def run(self, value: Any) -> Any:
        """The result for `value`; a cancelled caller leaves the queue, or its result is dropped."""
        call = _Call(value, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._arrival.set()
        try:
            return await call.answer
        finally:
            del call  # an error that it holds would hold this frame, and the frame it

    async def serve(self) -> None:
        """Collect and run batches, one at a time, for ever."""
        while True:
            if not self._waiting:
                self._arrival.clear()
                await self._arrival.wait()
            if self._policy.max_wait_ms > 0:
                await self._fill()
            # Not kept in a variable: it would hold the last batch until the next one comes.
            await self._answer(self._take())

    async def _fill(self) -> None:
        with anyio.move_on_after(self._policy.max_wait_ms / 1000):
            while len(self._waiting) < self._policy.max_size:
                self._arrival.clear()
                await self._arrival.wait()

    def _take(self) -> list[_Call]:
        batch: list[_Call] = []
        while self._waiting and len(batch) < self._policy.max_size:
            call = self._waiting.popleft()
            if not call.answer.done():
                batch.append(call)
        return batch

    async def _answer(self, batch: list[_Call]) -> None:
        if not batch:
            return
        results = await self._results(batch)
        if not isinstance(results, Exception):
            for call, result in zip(batch, results, strict=True):
                failed = isinstance(result, OmniflowError)
                _settle(call.answer, None if failed else result, result if failed else None)
        elif len(batch) > 1 and not isinstance(results, ProtocolError):
            for call in batch:
                await self._answer([call])
        else:
            for call in batch:
                _settle(call.answer, None, results)

    async def _results(self, batch: list[_Call]) -> list[Any] | Exception:
        """What `run` gave for each call, or what it raised."""
        try:
            results = await self._call([call.value for call in batch])
            if len(results) != len(batch):
                raise ProtocolError(
                    f"run() got a batch of {len(batch)} and returned {len(results)} results", stage=self._stage
                )
            return results
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return StageError("run() was cancelled from within", stage=self._stage)
        except SystemExit as error:
            return StageError(f"run() called sys.exit({error.code!r})", stage=self._stage)
        except Exception as error:  # noqa: BLE001 - the boundary to actor code: it must not end the other requests
            # Less this frame: it holds the calls, they their answers, and those will hold the error.
            return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def _settle(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
