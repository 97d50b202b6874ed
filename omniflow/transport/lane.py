"""What a lane is: the way of the device tensors of a link's values, beside its messages.

A link's messages carry a value's Struct and what lies in host memory; its tensors on a device go by the lane of the
link, where it has one that is open, and through the host otherwise. Both ends of a link have a lane of one kind.

Tensors are ready in the order of the process's default stream, as torch's tensors are: a sender that computes on a
stream of its own lets the default stream wait for it before it sends, and a receiver that reads on a stream of its
own lets that wait for the default stream, and holds the tensor until it is through.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import anyio

from omniflow.errors import ProtocolError
from omniflow.messages import Block, LaneAnswer, LaneNote, LaneOffer, Message
from omniflow.transport.codec import Part
from omniflow.transport.deaths import Key
from omniflow.transport.slabs import BlockPool

if TYPE_CHECKING:
    import torch

log = logging.getLogger("omniflow.transport")

LANE_SLAB = 0
"""The slab number of blocks of a lane; slabs of host memory count from 1."""


class Fetched(NamedTuple):
    """The bytes of a value's device tensors. The block returns when `owner` dies; at once where there is none."""

    region: torch.Tensor
    owner: object | None


Origin = tuple[int, int]
"""What a value came for: its edge and its request."""


class LanePort(Protocol):
    """The link of a lane, as the lane sees it."""

    peer: str

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message to the lane at the other end."""

    def lose(self, origins: Sequence[Origin]) -> None:
        """Tell who got these values that their tensors never come; called before our stream goes on without them."""


class Lane(ABC):
    """One end. `sends` and `receives` say which directions the plan has edges for.

    Everything but `serve` is called in the event loop and does not wait for the device.
    """

    kind: str
    device_type: str
    """Tensors on devices of this type go by this lane."""
    pool: BlockPool
    """Where the blocks of what we send come from."""

    def __init__(self, *, sends: bool, receives: bool) -> None:
        self.sends = sends
        self.receives = receives
        self.is_open = False
        """True where what we send may go by this lane."""
        self.problem: str | None = None
        """Why it is not open, where that will not change."""
        self._undecided = int(sends) + int(receives)
        self._decided = anyio.Event()

    @abstractmethod
    async def serve(self, port: LanePort) -> None:
        """Open the lane, and keep what it needs while the link lasts. Returns, or is cancelled, after `close`."""

    @abstractmethod
    def takes(self, size: int) -> bool:
        """True where tensors of `size` bytes can go by this lane."""

    @abstractmethod
    def put(self, block: Block, parts: Sequence[Part]) -> None:
        """Send what `block` was taken for, after all that the default stream was given so far. The message that names
        `block` is on its way already.
        """

    @abstractmethod
    def fetch(self, block: Block, origin: Origin) -> Fetched:
        """What the peer has put, before all that the default stream is given from now on. Raises DeviceError."""

    @abstractmethod
    def lost(self) -> Sequence[Origin]:
        """The peer is gone: what was fetched and had not been put yet. What is computed from it is worth nothing, but
        our stream goes on once the lane is closed.
        """

    @abstractmethod
    def died(self, keys: Sequence[Key]) -> None:
        """Views of these blocks of the peer have died; it is told after this."""

    @abstractmethod
    def reclaim(self, keys: Sequence[Key]) -> None:
        """The peer is gone, and these blocks of ours, which it had, with it."""

    @abstractmethod
    def close(self) -> None:
        """The link is closed. Views of the peer's memory stay valid."""

    @abstractmethod
    def on_offer(self, offer: LaneOffer, descriptors: Sequence[int]) -> None:
        """The peer wants to send by this lane; we own `descriptors`."""

    def on_note(self, note: LaneNote) -> None:
        """The other end of a communicator says something. Raises ProtocolError in a lane that has none."""
        raise ProtocolError("this lane has no communicator that a note could be for")

    def decided(self) -> None:
        """It is known whether one direction is open. Called once for each."""
        self._undecided -= 1
        if self._undecided <= 0:
            self._decided.set()

    async def settled(self) -> None:
        """Returns once it is known how tensors go, in both directions, or the link is closed."""
        await self._decided.wait()

    def on_answer(self, answer: LaneAnswer, peer: str, descriptors: Sequence[int] = ()) -> None:
        """The peer can take what we send by this lane, or cannot (any more); we own `descriptors`."""
        if answer.problem is not None:
            self.refuse(answer.problem, peer)
        elif self.problem is None:
            self.is_open = True
            self.decided()

    def refuse(self, problem: str, peer: str) -> None:
        """From now on what we send goes through the host."""
        if self.problem is None:
            if not self.is_open:
                self.decided()
            self.problem, self.is_open = problem, False
            log.warning("device tensors to %s go through the host, not by %s: %s", peer, self.kind, problem)
