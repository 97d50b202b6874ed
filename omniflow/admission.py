"""Admission: a bounded number of requests run, a bounded number wait, first come first served; more are refused."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from omniflow.errors import OverloadedError, RequestError


class Admission:
    """Counts places. `take` waits for one; `free` hands it to whoever has waited longest."""

    def __init__(self, max_in_flight: int, max_queued: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_queued = max_queued
        self._taken = 0
        self._num_waiting = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def num_taken(self) -> int:
        """Places in use."""
        return self._taken

    @property
    def num_queued(self) -> int:
        """Callers that wait, for a place or before they take one."""
        return len(self._queue) + self._num_waiting

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a caller that waits for something else first. Raises OverloadedError where too many wait already."""
        self._refuse_if_full()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    async def take(self) -> None:
        """Take a place. Raises OverloadedError at once where too many wait already."""
        if self._taken < self._max_in_flight:
            self._taken += 1
            return
        self._refuse_if_full()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                # `free` may have passed over it already.
                self._queue = deque(other for other in self._queue if other is not waiter)
            elif waiter.exception() is None:
                self.free()
            raise

    def free(self) -> None:
        """Give a place back."""
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._taken -= 1

    def _refuse_if_full(self) -> None:
        if self.num_queued >= self._max_queued:
            raise OverloadedError(
                f"{self._taken} requests run and {self.num_queued} wait; try again later", retry_after_s=1.0
            )

    def refuse_all(self, error: RequestError) -> None:
        """End the waiting of everybody who waits."""
        for waiter in self._queue:
            if not waiter.done():
                waiter.set_exception(error)
        self._queue.clear()
