"""The choices of one request: `n` submits that are answered as one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from omniflow.errors import RequestError
from omniflow.server.scopes import unwrapped

if TYPE_CHECKING:
    from omniflow.runtime import Reply

Submit = Callable[[int], Awaitable["Reply"]]
"""Starts the choice of this index."""


class ChoiceOutput(NamedTuple):
    """An output of the graph of the choice of this number; `name` None: this choice has ended well."""

    number: int
    name: str | None
    value: Any = None


ChoiceOutputs = AsyncGenerator[ChoiceOutput]


@asynccontextmanager
async def choices(submit: Submit, n: int) -> AsyncIterator[ChoiceOutputs]:
    """The outputs of `n` choices, as they come; leaving the block cancels what still runs.

    Only one choice waits for its place at a time, so that a request for many stands in the queue like any other. The
    first choice that fails ends the request.
    """
    if n == 1:
        async with await submit(0) as reply, aclosing(_of_one(reply)) as outputs:
            yield outputs
        return
    sending, receiving = anyio.create_memory_object_stream[ChoiceOutput | RequestError](n)
    turn = anyio.Lock()
    with unwrapped():
        async with anyio.create_task_group() as group, receiving, aclosing(_of_many(receiving)) as outputs:
            for index in range(n):
                group.start_soon(_forward, index, submit, turn, sending.clone())
            sending.close()
            yield outputs
            group.cancel_scope.cancel()


async def _of_one(reply: Reply) -> ChoiceOutputs:
    async for name, value in reply:
        yield ChoiceOutput(0, name, value)
    yield ChoiceOutput(0, None)


async def _of_many(receiving: MemoryObjectReceiveStream[ChoiceOutput | RequestError]) -> ChoiceOutputs:
    async for item in receiving:
        if isinstance(item, RequestError):
            raise item
        yield item


async def _forward(
    index: int, submit: Submit, turn: anyio.Lock, sending: MemoryObjectSendStream[ChoiceOutput | RequestError]
) -> None:
    with sending:
        try:
            async with turn:
                reply = await submit(index)
            async with reply:
                async for name, value in reply:
                    await sending.send(ChoiceOutput(index, name, value))
            await sending.send(ChoiceOutput(index, None))
        except RequestError as error:
            await sending.send(error)
