"""The two ends of a stream edge for one request: a bounded mailbox, and the credits that guard it.

The reader's `Mailbox` holds at most `bound` items. The writer's `Credits` start at `bound`; each item takes one; the
reader gives them back in batches once half are consumed, so a slow reader suspends its writer and nobody else.
Where the policy is to drop the oldest item, credit returns as items arrive, and a full mailbox makes room by itself.
A deque with one waiting future moves an item in 2-7 us, an AnyIO memory stream in 20-56 us (docs/adr/0002).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, Literal, NamedTuple, TypeVar

from omniflow.errors import ProtocolError
from omniflow.messages import READER_GONE

T = TypeVar("T")

Policy = Literal["block", "drop_oldest", "fail"]
"""What a stream edge does when it is full: its writer waits, the oldest item is lost, or the request fails."""
_FAIR = 32
"""A reader that always finds items yields to the event loop after so many."""


class MailboxStatistics(NamedTuple):
    """What a mailbox holds now and has seen so far."""

    queued: int
    bound: int
    received: int
    ended: bool
    dropped: int = 0
    """Items that came and made room for later ones before the reader took them."""


class Mailbox(AsyncIterator[T], Generic[T]):
    """The reader's end. One reader; `put`, `end` and `discard` never wait."""

    __slots__ = (
        "_bound", "_drops", "_ended", "_found", "_give_credit", "_gone", "_queue", "_received", "_refill", "_taken",
        "_waiter", "dropped",
    )  # fmt: skip

    def __init__(self, bound: int, give_credit: Callable[[int], None], policy: Policy = "block") -> None:
        self._bound = bound
        self._give_credit = give_credit
        self._drops = policy == "drop_oldest"
        # A writer that fails where it has no credit must know of every place at once.
        self._refill = 1 if policy == "fail" else (bound + 1) // 2
        self.dropped = 0
        """Items that the reader has missed."""
        self._queue: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._received = 0
        self._taken = 0
        self._found = 0
        self._ended = False
        self._gone = False

    def put(self, seq: int, value: T) -> None:
        """Store item number `seq`. Raises ProtocolError where order or bound is broken."""
        if seq != self._received:
            raise ProtocolError(f"item {seq} arrived where item {self._received} was due")
        if self._ended:
            raise ProtocolError(f"item {seq} arrived after the end of its stream")
        self._received += 1
        if self._gone:
            return
        if self._drops:
            self._make_room()
        elif len(self._queue) >= self._bound:
            raise ProtocolError(f"more than {self._bound} items are waiting: the writer ignored its credits")
        self._queue.append(value)
        if self._waiter is not None:
            self._wake()

    def end(self, count: int) -> None:
        """No item follows. Raises ProtocolError where items were lost on the way."""
        if count != self._received:
            raise ProtocolError(f"the stream ended after {count} items, but {self._received} arrived")
        self._ended = True
        self._wake()

    def discard(self) -> None:
        """The reader is done: drop what waits and tell the writer to stop."""
        if self._gone:
            return
        self._gone = True
        self._queue.clear()
        if not self._ended:
            self._give_credit(READER_GONE)

    async def __anext__(self) -> T:
        self._found += 1
        if self._found == _FAIR:
            self._found = 0
            await asyncio.sleep(0)
        while not self._queue:
            if self._ended:
                raise StopAsyncIteration
            if self._waiter is not None and not self._waiter.done():
                raise RuntimeError("a stream has one reader, and another task waits for its next item already")
            self._found = 0
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        value = self._queue.popleft()
        if not self._drops:
            self._taken += 1
            if self._taken >= self._refill:
                self._give_taken()
        return value

    def statistics(self) -> MailboxStatistics:
        """Counts for metrics and tests."""
        return MailboxStatistics(len(self._queue), self._bound, self._received, self._ended, self.dropped)

    def _make_room(self) -> None:
        if len(self._queue) >= self._bound:
            self._queue.popleft()
            self.dropped += 1
        self._taken += 1
        if self._taken >= self._refill:
            self._give_taken()

    def _give_taken(self) -> None:
        taken, self._taken = self._taken, 0
        self._give_credit(taken)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Credits:
    """The writer's end: how many items it may still send, and the number of the next one."""

    __slots__ = ("_free", "_waiter", "gone", "seq")

    def __init__(self, bound: int) -> None:
        self._free = bound
        self._waiter: asyncio.Future[None] | None = None
        self.seq = 0
        self.gone = False
        """True once the reader wants nothing more."""

    @property
    def exhausted(self) -> bool:
        """True where `take` would wait."""
        return self._free == 0 and not self.gone

    async def take(self) -> int:
        """Wait for a credit and use it; gives the sequence number of the item, or -1 where the reader is gone."""
        await self.wait()
        return self.try_take()

    async def wait(self) -> None:
        """Returns once there is a credit, or the reader is gone."""
        while self._free == 0 and not self.gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def try_take(self) -> int:
        """As `take`, without waiting: -1 too where there is no credit."""
        if self._free == 0 or self.gone:
            return -1
        self._free -= 1
        self.seq += 1
        return self.seq - 1

    def untake(self) -> None:
        """The item of the last `take` was not sent."""
        self._free += 1
        self.seq -= 1

    def give(self, count: int) -> None:
        """Credit came back from the reader."""
        if count == READER_GONE:
            self.gone = True
        else:
            self._free += count
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
