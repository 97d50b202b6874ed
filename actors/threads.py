"""Blocking work of which several pieces may run at the same time, in threads: what decodes lets go of Python's lock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from omniflow.actor import in_thread
from omniflow.errors import OmniflowError

K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R")


class Threads:
    """Runs steps in threads, `most` at a time, whoever's they are; others wait in the order of their calls."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._limiter = anyio.CapacityLimiter(most)
        self._began: dict[object, float] = {}

    async def run(self, call: Callable[..., R], *args: Any) -> R:
        """What `call` gives or raises. A cancelled caller waits for its end, so a step should be short (< 100 ms)."""
        async with self._limiter:
            step = object()
            self._began[step] = time.monotonic()
            try:
                return await in_thread(call, *args)
            finally:
                del self._began[step]

    def busy_s(self) -> float:
        """How long the longest of the steps that run now has been running: part of an actor's `busy_s`."""
        return time.monotonic() - min(self._began.values()) if self._began else 0.0


async def in_order(
    call: Callable[[T], Awaitable[R]], items: Mapping[K, T], most: int, take: Callable[[K, R], Awaitable[None]]
) -> None:
    """Give `take` what `call` makes of each of `items`, one after the other and in their order.

    Up to `most` are being made, or made and not taken yet: while `take` works, the next ones are on their way. What
    `call` raises for an item is raised when it is that item's turn, so it is the first bad one that is told of.
    """
    coming: deque[tuple[K, _Coming[R]]] = deque((key, _Coming()) for key in items)
    room = anyio.Semaphore(most)

    async def begin(tasks: TaskGroup, whole: list[tuple[_Coming[R], T]]) -> None:
        for one, item in whole:
            await room.acquire()
            tasks.start_soon(one.make, call, item)

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(begin, tasks, [(one, items[key]) for key, one in coming])
            while coming:
                key, one = coming.popleft()
                await take(key, await one.get())
                room.release()


class _Coming(Generic[R]):
    """A result that is being made."""

    def __init__(self) -> None:
        self._is_there = anyio.Event()
        self._results: list[R] = []
        self._error: OmniflowError | None = None

    async def make(self, call: Callable[[T], Awaitable[R]], item: T) -> None:
        try:
            self._results.append(await call(item))
        except OmniflowError as error:
            self._error = error
        self._is_there.set()

    async def get(self) -> R:
        await self._is_there.wait()
        if self._error is not None:
            raise self._error
        return self._results.pop()


@contextmanager
def ungrouped() -> Iterator[None]:
    """Put around a task group: what one of its tasks raised, which has ended the others, is raised as itself."""
    try:
        yield
    except ExceptionGroup as group:
        raise group.exceptions[0] from group.exceptions[0].__cause__
