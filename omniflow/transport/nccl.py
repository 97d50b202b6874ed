"""NCCL: device tensors between two processes on different GPUs, point to point.

Each direction of a link has a communicator of its own, so the two never wait for each other, and what breaks or is made
again concerns one pair of hosts. A value's tensors leave in one send and arrive in one receive, on streams beside the
default one; the message that tells the receiver of them is what pairs the two. On the CPU the same class runs on gloo.

A communicator whose peer has died is aborted, which ends the kernels that wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.to_thread

from omniflow.errors import DeviceError, ProtocolError
from omniflow.messages import Block, LaneAnswer, LaneNote, LaneOffer
from omniflow.transport.codec import Part, bytes_of
from omniflow.transport.deaths import Key
from omniflow.transport.gloo_way import GlooWay
from omniflow.transport.lane import LANE_SLAB, Fetched, Lane, LanePort, Origin
from omniflow.transport.nccl_ways import RECEIVER, SENDER, NcclWay, Notes, Way
from omniflow.transport.slabs import BlockPool

if TYPE_CHECKING:
    import torch

ABORTS = "omniflow aborts"
"""The name of threads that end communicators."""
_HERE, _BROKEN = "here", "broken"
"""The notes of a receiver that is there, and of a sender that could not send what a message has promised."""


class InFlight(BlockPool):
    """Counts the bytes on their way: what was sent lies in the sender's tensors until the peer has it."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self._taken: dict[int, int] = {}
        self._numbers = itertools.count()
        self.held: dict[int, tuple[object, torch.Tensor]] = {}
        """What must not be let go of while it is sent."""

    @property
    def blocks_in_use(self) -> int:
        """Values on their way."""
        return len(self._taken)

    def refuse_too_large(self, size: int) -> None:
        if size > self.limit_bytes:
            raise ProtocolError(f"{size} bytes are more than may be on their way at once ({self.limit_bytes} bytes)")

    def _take_now(self, size: int) -> Block | None:
        if self._taken and sum(self._taken.values()) + size > self.limit_bytes:
            return None
        number = next(self._numbers)
        self._taken[number] = size
        return Block(LANE_SLAB, number, 0, 0, size)

    def give_back(self, slab: int, slot: int, generation: int) -> None:
        if self._taken.pop(slot, None) is not None:
            self.held.pop(slot, None)
            self._serve_waiters()


class NcclLane(Lane):
    """One end. At most `limit_bytes` are on their way in each direction."""

    kind = "nccl"

    def __init__(self, backend: Literal["nccl", "gloo"], limit_bytes: int, *, sends: bool, receives: bool) -> None:
        super().__init__(sends=sends, receives=receives)
        self.pool: InFlight = InFlight(limit_bytes)
        self.device_type = "cuda" if backend == "nccl" else "cpu"
        self._backend = backend
        self._offered = anyio.Event()
        self._met = anyio.Event()
        """Our receiver is there, or will not be."""
        self._out: Way | None = None
        self._in: Way | None = None
        self._closed = False
        self._port: LanePort | None = None

    async def serve(self, port: LanePort) -> None:
        self._port = port
        async with anyio.create_task_group() as tasks:
            if self.sends and not self._closed:
                port.send(LaneOffer(self.kind))
                tasks.start_soon(self._open_out, port)
            if self.receives:
                tasks.start_soon(self._open_in, port)

    def _way(self, rank: int, port: LanePort) -> Way:
        loop = asyncio.get_running_loop()

        def tell(key: str, value: bytes) -> None:
            loop.call_soon_threadsafe(port.send, LaneNote(rank == SENDER, key, value))

        return (NcclWay if self._backend == "nccl" else GlooWay)(rank, Notes(tell))

    async def _open_out(self, port: LanePort) -> None:
        await self._met.wait()  # it may load its weights for minutes
        if self._out is None:
            return
        problem = await anyio.to_thread.run_sync(_opened, self._out, abandon_on_cancel=True)
        if problem is not None and not self._closed:
            self.refuse(problem, port.peer)
            port.send(LaneNote(True, _BROKEN, b""))  # the receiver waits for the other end

    async def _open_in(self, port: LanePort) -> None:
        await self._offered.wait()
        if self._closed:
            return
        way = self._in = self._way(RECEIVER, port)
        port.send(LaneNote(False, _HERE, b""))
        problem = await anyio.to_thread.run_sync(_opened, way, abandon_on_cancel=True)
        if not self._closed:
            port.send(LaneAnswer(problem))
            self.decided()

    def on_offer(self, offer: LaneOffer, descriptors: Sequence[int]) -> None:
        self._offered.set()

    def on_note(self, note: LaneNote) -> None:
        way = self._in if note.incoming else self._out
        if note.key == _BROKEN:
            self._break_in("the other end could not send")
        elif note.key == _HERE:
            self._meet()
        elif way is not None:
            way.notes.put(note.key, note.value)

    def _meet(self) -> None:
        if self._port is not None and self.problem is None and not self._closed:
            self._out = self._way(SENDER, self._port)
        self._met.set()

    def on_answer(self, answer: LaneAnswer, peer: str, descriptors: Sequence[int] = ()) -> None:
        super().on_answer(answer, peer)
        if answer.problem is not None:
            self._met.set()
            out, self._out = self._out, None
            if out is not None:
                _abort_soon(out)

    def takes(self, size: int) -> bool:
        return size <= self.pool.limit_bytes

    def put(self, block: Block, parts: Sequence[Part]) -> None:
        if self._out is None or self._port is None:
            return
        try:
            tensor = parts[0].tensor if _may_leave(parts) else _packed(parts, block.length)
            self.pool.held[block.slot] = (self._out.send(tensor, block.length), tensor)
        except RuntimeError as error:  # whatever torch.distributed cannot do: mostly, the peer has died
            self.refuse(_first_line(error), self._port.peer)
            self._port.send(LaneNote(True, _BROKEN, b""))

    def fetch(self, block: Block, origin: Origin) -> Fetched:
        if self._in is None:
            raise DeviceError("the communicator that they come by is not there")
        try:
            return Fetched(self._in.receive(block.length, origin), None)
        except RuntimeError as error:  # the peer has died, or there is no memory for them
            self._break_in(_first_line(error))
            raise DeviceError(_first_line(error)) from None

    def lost(self) -> Sequence[Origin]:
        return self._in.lost() if self._in is not None else []

    def _break_in(self, problem: str) -> None:
        """What was not received would be taken for what comes next: nothing comes by this communicator any more."""
        way, self._in = self._in, None
        if way is not None and self._port is not None:
            self._port.lose(way.lost())
            _abort_soon(way)
            self._port.send(LaneAnswer(problem))

    def died(self, keys: Sequence[Key]) -> None:
        """What was received is a copy."""

    def reclaim(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.pool.give_back(*key)

    def close(self) -> None:
        self._closed, self.is_open = True, False
        self._decided.set()
        self._offered.set()
        self._met.set()
        for way in (self._out, self._in):
            if way is not None:
                _abort_soon(way)
        self._out = self._in = None


def _opened(way: Way) -> str | None:
    """Open it; gives what went wrong."""
    try:
        way.open()
    except (RuntimeError, ImportError, AttributeError) as error:  # torch has no such backend: AttributeError
        return _first_line(error)
    return None


def _abort_soon(way: Way) -> None:
    """Abort it in a thread: that waits for the GPU, and for threads of NCCL's."""
    way.notes.close()
    threading.Thread(target=way.abort, name=ABORTS, daemon=True).start()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _may_leave(parts: Sequence[Part]) -> bool:
    """True for one tensor in memory of torch's allocator, which keeps it until the stream that sends is through. A view
    of a peer's memory, which goes back when the default stream is through, is sent as a copy.
    """
    return len(parts) == 1 and parts[0].tensor.untyped_storage().resizable()


def _packed(parts: Sequence[Part], size: int) -> torch.Tensor:
    """Several tensors in one piece, on their device."""
    first = bytes_of(parts[0].tensor)
    region = first.new_empty(size)
    for offset, tensor, num_bytes in parts:
        region[offset : offset + num_bytes].copy_(bytes_of(tensor), non_blocking=True)
    return region
