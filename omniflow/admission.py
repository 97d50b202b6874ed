"""Admission: a bounded number of requests run, a bounded number wait, first come first served; more are refused.

Early rather than late: a request is refused at once if it would wait for a place

- longer than its deadline allows, or
- longer than `max_wait_share` of the time in which requests have got their first output lately. So under any load the
  first output of an admitted request comes at most so much later than with all places taken and nobody waiting.
  Nobody hears a wait of 0.1 s: it is not refused, however fast the graph is. Where the estimate was wrong, the refusal
  comes after the longest such wait.

The n-th in the queue gets the place of the n-th oldest request, once that has run for as long as requests did lately.
Where these times differ, even the oldest may run on: then it is not had before n - 1/2 gaps between two places that
become free, if requests ran for as long as their times differ. (Mean and deviation are those of TCP's round trips.)
`retry_after_s` of a refusal is the same estimate. Until a first request has ended there is none, and only the bound of
the queue holds.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from omniflow.errors import OverloadedError, RequestError

_UNNOTICED_S = 0.1


class Place:
    """The right to run one request."""

    __slots__ = ("_began_s",)

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def age_s(self) -> float:
        """For how long it has been held."""
        return time.monotonic() - self._began_s


class Recent:
    """What a time was lately: its mean, where a new value counts for an eighth, and its deviation, for a quarter."""

    def __init__(self) -> None:
        self.mean_s: float | None = None
        self.deviation_s = 0.0

    def add(self, seconds: float) -> None:
        """One more value."""
        if self.mean_s is None:
            self.mean_s = seconds
        else:
            self.deviation_s += (abs(seconds - self.mean_s) - self.deviation_s) / 4
            self.mean_s += (seconds - self.mean_s) / 8


class Admission:
    """Hands out places. `take` waits for one; `free` passes it on to whoever has waited longest."""

    def __init__(self, max_in_flight: int, max_queued: int, max_wait_share: float) -> None:
        self.held = Recent()
        """How long requests hold their places."""
        self.first_output = Recent()
        """How long it takes from a place to the first item of an output."""
        self._max_in_flight = max_in_flight
        self._max_queued = max_queued
        self._max_wait_share = max_wait_share
        self._places: dict[Place, None] = {}
        self._num_waiting = 0
        self._queue: deque[asyncio.Future[Place]] = deque()

    @property
    def num_taken(self) -> int:
        """Places in use."""
        return len(self._places)

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

    async def take(self, within_s: float) -> Place:
        """Take a place. Raises OverloadedError at once where too many wait, or none is to be had `within_s`."""
        if len(self._places) < self._max_in_flight:
            return self._new_place()
        self._refuse_if_full()
        wait_s, longest_s = self.wait_s, self._longest_s
        if wait_s is not None and wait_s > min(within_s, longest_s):
            raise self._too_late(min(within_s, longest_s))
        with anyio.move_on_after(longest_s):
            return await self._passed_on()
        raise self._too_late(longest_s)

    async def _passed_on(self) -> Place:
        waiter: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._queue.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                # `free` may have passed over it already.
                self._queue = deque(other for other in self._queue if other is not waiter)
            elif waiter.exception() is None:
                self.free(waiter.result())
            raise

    def finish(self, place: Place) -> None:
        """The request that held a place has ended."""
        self.held.add(place.age_s)
        self.free(place)

    def free(self, place: Place) -> None:
        """Give a place back."""
        del self._places[place]
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(self._new_place())
                return

    def _new_place(self) -> Place:
        place = Place()
        self._places[place] = None
        return place

    @property
    def wait_s(self) -> float | None:
        """How long a request that came now would wait; None where that is not known."""
        held_s = self.held.mean_s
        if held_s is None or len(self._places) < self._max_in_flight:
            return None
        rounds, nth = divmod(len(self._queue), self._max_in_flight)
        oldest = next(itertools.islice(self._places, nth, None))
        left_s = max(0.0, held_s - oldest.age_s) + rounds * held_s
        return max(left_s, (len(self._queue) + 0.5) * self.held.deviation_s / self._max_in_flight)

    def _refuse_if_full(self) -> None:
        if self.num_queued >= self._max_queued:
            raise OverloadedError(
                f"{self.num_taken} requests run and {self.num_queued} wait; try again later",
                retry_after_s=self.wait_s or 1.0,
            )

    @property
    def _longest_s(self) -> float:
        """The longest that anybody should wait for a place."""
        first_s = self.first_output.mean_s
        return math.inf if first_s is None else max(_UNNOTICED_S, self._max_wait_share * first_s)

    def _too_late(self, within_s: float) -> OverloadedError:
        return OverloadedError(
            f"{self.num_taken} requests run and {self.num_queued} wait: no place is expected within {within_s:.2g} s; "
            f"try again later",
            retry_after_s=self.wait_s or 1.0,
        )

    def refuse_all(self, error: RequestError) -> None:
        """End the waiting of everybody who waits."""
        for waiter in self._queue:
            if not waiter.done():
                waiter.set_exception(error)
        self._queue.clear()
