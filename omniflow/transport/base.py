"""What a transport is: a `Link` between two hosts that carries messages in order and values by its own means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import NamedTuple, Protocol

from omniflow.errors import ErrorInfo
from omniflow.messages import Message
from omniflow.transport.codec import Region


class Receiver(Protocol):
    """Who a link delivers to. Called in the event loop, in the order in which the peer sent; must not block."""

    def on_item(self, link: Link, edge: int, request: int, seq: int, value: object) -> None:
        """A value arrived on an edge; buffers in it are read-only and stay valid as long as anybody holds them."""

    def on_bad_item(self, link: Link, edge: int, request: int, error: ErrorInfo) -> None:
        """A value arrived that is not of its edge's type, or that there is no room for here; or a part of one that was
        delivered already never will.
        """

    def on_message(self, link: Link, message: Message, descriptors: Sequence[int]) -> None:
        """Anything else arrived; the receiver owns `descriptors`."""

    def on_closed(self, link: Link) -> None:
        """The peer is gone; nothing follows."""


class LinkStatistics(NamedTuple):
    """What went over a link so far, and what it holds now."""

    sent: int
    received: int
    backlog: int
    """Messages that the peer has not taken off the socket's buffer yet."""
    blocks_held: int
    """Blocks of our memory that the peer still has views of."""
    lane: str | None = None
    """How tensors on devices go to the peer: "cuda_ipc", "nccl", or through the host."""


class Link(ABC):
    """One end of the connection between two hosts.

    Order: what is sent by `send` and `send_item` arrives in that order, whole, once, or not at all where the peer dies.
    """

    peer: str

    @abstractmethod
    def send(self, message: Message, descriptors: Sequence[int] = (), *, more: bool = False) -> None:
        """Send a control message; never waits. Sending on a closed link does nothing: `on_closed` has told so. Owns
        `descriptors`, whatever becomes of the message.

        `more`: another message follows at once, so the two may travel together.
        """

    @abstractmethod
    def send_item(self, edge: int, request: int, seq: int, value: object) -> Awaitable[None] | None:
        """Send a value. None: it is under way. Otherwise the caller awaits room in the transport, or a GPU that still
        computes tensors which go through the host.

        Raises ProtocolError where `value` cannot travel (its type has no wire form, it is larger than the memory).
        """

    @abstractmethod
    def allocate(self, num_bytes: int) -> Region | None:
        """Writable memory whose contents the peer can read where it lies, so that sending it copies nothing.

        None where there is none (left), or no need of it. May be called from any thread.
        """

    @abstractmethod
    def poll(self) -> None:
        """Deliver what has arrived already, now, instead of in the loop's next turn."""

    @abstractmethod
    def push(self) -> bool:
        """Send what a link may hold back for a moment to send it together; False where the peer has no room for all."""

    @abstractmethod
    async def flushed(self) -> None:
        """Returns once all that was sent has left this process: it arrives even if this process dies now."""

    @abstractmethod
    def close(self) -> None:
        """Close this end; the peer sees `on_closed`. Views of the other's memory stay mapped, at both ends.

        What they show stays only where the other process is gone: one that goes on uses its memory again, by other
        links. So a link is closed once its peer is gone, or as this process ends.
        """

    @abstractmethod
    def statistics(self) -> LinkStatistics:
        """Counts for metrics and tests."""
