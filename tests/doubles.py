"""Stand-ins for the two ends of a stream edge, to drive an actor without a runtime, and a count of the loop's turns."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import anyio
import msgspec

from omniflow.actor import Context, Emit, Stream
from omniflow.media import Options

T = TypeVar("T")


class Pause(msgspec.Struct, frozen=True):
    """Among the items of a `ListStream`: the producer takes `seconds` before the next item."""

    seconds: float


class ListStream(Stream[T], Generic[T]):
    """Gives `items` one after the other, then ends; an exception among them is raised.

    A receive that is cancelled during a `Pause` loses nothing: the pause goes on where it was.
    """

    def __init__(self, items: Iterable[T | Pause | Exception]) -> None:
        self._items = list(items)
        self._due_s: float | None = None

    async def __anext__(self) -> T:
        while self._items and isinstance(self._items[0], Pause):
            if self._due_s is None:
                self._due_s = anyio.current_time() + self._items[0].seconds
            await anyio.sleep_until(self._due_s)
            self._due_s = None
            self._items.pop(0)
        if not self._items:
            raise StopAsyncIteration
        item = self._items.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    @property
    def left(self) -> list[T | Pause | Exception]:
        """What nobody has read."""
        return self._items


class ListEmit(Emit[T], Generic[T]):
    """Keeps what is sent in `items`, and the time of each in `times_s`."""

    def __init__(self, wanted: bool = True) -> None:
        self.items: list[T] = []
        self.times_s: list[float] = []
        self._wanted = wanted

    @property
    def wanted(self) -> bool:
        return self._wanted

    async def send(self, value: T) -> None:
        if self._wanted:
            self.items.append(value)
            self.times_s.append(anyio.current_time())
        await anyio.lowlevel.checkpoint()


_numbers = itertools.count(1)


def context(**options: object) -> Context:
    """A context with these `Options`; its `run_id` is its own, as a runtime would make it."""
    return Context("req-0", Options(**options), 60.0, f"{next(_numbers):016x}")


class Turns:
    """How often the event loop came round."""

    def __init__(self) -> None:
        self.num = 0

    async def count(self) -> None:
        while True:
            await anyio.sleep(0)
            self.num += 1


@asynccontextmanager
async def counted_turns() -> AsyncIterator[Turns]:
    """Counts the turns of the event loop during the block: next to none while something holds the loop, or the GIL."""
    turns = Turns()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turns.count)
        yield turns
        tasks.cancel_scope.cancel()
