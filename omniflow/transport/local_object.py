"""LOCAL_OBJECT: both hosts are one process, so the object itself is handed over, by reference, at once.

Values are frozen Structs and read-only by contract; nothing is copied or encoded, and delivery is a function call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from omniflow.messages import Message
from omniflow.transport.base import Link, LinkStatistics, Receiver
from omniflow.transport.codec import Region
from omniflow.transport.descriptors import close_all


class LocalObjectLink(Link):
    """One end of an in-process link; made in pairs by `local_pair`."""

    def __init__(self, peer: str, receiver: Receiver) -> None:
        self.peer = peer
        self._receiver = receiver
        self._other: LocalObjectLink | None = None
        self._sent = 0
        self._received = 0

    def send(self, message: Message, descriptors: Sequence[int] = (), *, more: bool = False) -> None:
        other = self._other
        if other is not None:
            self._sent += 1
            other._received += 1
            other._receiver.on_message(other, message, descriptors)
        else:
            close_all(descriptors)

    def send_item(self, edge: int, request: int, seq: int, value: object) -> Awaitable[None] | None:
        other = self._other
        if other is not None:
            self._sent += 1
            other._received += 1
            other._receiver.on_item(other, edge, request, seq, value)
        return None

    def allocate(self, num_bytes: int) -> Region | None:
        return None

    def poll(self) -> None:
        """Nothing is ever under way."""

    def push(self) -> bool:
        return True

    async def flushed(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        other, self._other = self._other, None
        if other is not None:
            other._other = None
            other._receiver.on_closed(other)

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(self._sent, self._received, 0, 0)


def local_pair(a: str, b: str, on_a: Receiver, on_b: Receiver) -> tuple[LocalObjectLink, LocalObjectLink]:
    """The two ends of a link between hosts `a` and `b`: the end that `a` holds delivers to `on_a`."""
    end_a, end_b = LocalObjectLink(b, on_a), LocalObjectLink(a, on_b)
    end_a._other, end_b._other = end_b, end_a
    return end_a, end_b


def loopback(name: str, receiver: Receiver) -> LocalObjectLink:
    """The link of a host with itself, for edges between its own stages."""
    link = LocalObjectLink(name, receiver)
    link._other = link
    return link
