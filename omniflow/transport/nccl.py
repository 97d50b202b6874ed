"""NCCL: device tensors between two processes on different GPUs, point to point.

Each direction of a link has a communicator of its own, so the two never wait for each other, and what breaks or is made
again concerns one pair of hosts. A value's tensors leave in one send and arrive in one receive, on streams beside the
default one; the message that tells the receiver of them is what pairs the two. On the CPU the same class runs on gloo.

A communicator whose peer has died is aborted, which ends the kernels that wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.to_thread

from omniflow.errors import DeviceError, ProtocolError
from omniflow.messages import Block, LaneAnswer, LaneNote, LaneOffer
from omniflow.transport.codec import Part
from omniflow.transport.deaths import Key
from omniflow.transport.lane import LANE_SLAB, Fetched, Lane, LanePort, Origin
from omniflow.transport.nccl_library import Communicator, new_id
from omniflow.transport.slabs import BlockPool

if TYPE_CHECKING:
    import torch

_OPEN_S = 60.0
"""What making a communicator may take: 1-3 s, where both processes are up."""
_SENDER, _RECEIVER = 0, 1
_BROKEN = "broken"
"""The note of a sender that could not send what a message has promised."""


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


class Notes:
    """What the two ends of a communicator write for each other; the far end's notes come over the link."""

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        self._tell = tell
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """The far end has written; called in the event loop."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def write(self, key: str, value: bytes) -> None:
        """Write for both ends; called in a thread."""
        self.put(key, value)
        self._tell(key, value)

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for notes. Raises RuntimeError where they do not come, because the link is closed or time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.known(keys), _OPEN_S)
            if not self.known(keys):
                raise RuntimeError(f"the other end has not said {', '.join(keys)}")
            return [self._values[key] for key in keys]

    def known(self, keys: Sequence[str]) -> bool:
        """True where all of them are there."""
        return all(key in self._values for key in keys)

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _store_of(notes: Notes) -> Any:
    """`notes` as torch's processes find each other by: without a port that others could reach, or a file."""
    import torch.distributed

    store: Any = torch.distributed

    class LinkStore(store.Store):  # type: ignore[misc]
        def set(self, key: str, value: bytes | str) -> None:
            notes.write(key, value.encode() if isinstance(value, str) else bytes(value))

        def get(self, key: str) -> bytes:
            return notes.read([key])[0]

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            notes.read(keys)

        def check(self, keys: list[str]) -> bool:
            return notes.known(keys)

        def set_timeout(self, timeout: Any) -> None:
            """Waits end when the link does, or after `_OPEN_S`."""

        def clone(self) -> LinkStore:
            return self

    return LinkStore()


class _Way(ABC):
    """One direction: a communicator of two processes, of which this one is `rank`. What fails raises RuntimeError."""

    def __init__(self, rank: int, notes: Notes) -> None:
        self.notes = notes
        self._rank = rank

    @abstractmethod
    def open(self) -> None:
        """Make it, and let one byte through: only then it is known to work. Waits for the other end."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, size: int) -> object:
        """Send a tensor's bytes once the default stream is through with what it was given so far; gives what to hold
        meanwhile. It lies in one piece.
        """

    @abstractmethod
    def receive(self, size: int) -> tuple[torch.Tensor, Any]:
        """Receive before the default stream does what it is given from now on; gives what tells whether it is through,
        or None where it is.
        """

    @abstractmethod
    def abort(self) -> None:
        """End what is under way, and with it every kernel that waits for the other end."""


class _NcclWay(_Way):
    """Between two GPUs, by NCCL itself, which orders what one communicator is given on several streams."""

    def __init__(self, rank: int, notes: Notes) -> None:
        super().__init__(rank, notes)
        self._communicator: Communicator | None = None
        self._aborted = False
        self._changing = threading.Lock()
        self._default: Any = None
        self._stream: Any = None
        self._ready: Any = None

    def open(self) -> None:
        import torch  # and with it NCCL

        self._meet()
        self._default = torch.cuda.default_stream()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        byte = torch.zeros(1, dtype=torch.uint8, device="cuda")
        self._default.synchronize()
        at = byte.data_ptr(), 1, self._stream.cuda_stream
        self._there().send(*at) if self._rank == _SENDER else self._there().receive(*at)
        self._stream.synchronize()

    def _meet(self) -> None:
        """NCCL waits for the other end for as long as that may take, so it must be known to come."""
        if self._rank == _SENDER:
            name = new_id()
            self.notes.write("name", name)
            self.notes.read(["coming"])
        else:
            (name,) = self.notes.read(["name"])
            self.notes.write("coming", b"")
        made = Communicator(name, self._rank)
        with self._changing:
            self._communicator, aborted = made, self._aborted
        if aborted:
            self.abort()
        made.open()

    def _there(self) -> Communicator:
        if self._communicator is None:
            raise RuntimeError("the communicator was closed")
        return self._communicator

    def send(self, tensor: torch.Tensor, size: int) -> object:
        # Not in the default stream, which would wait with it for a receiver that is busy.
        if not self._default.query():
            self._ready.record(self._default)
            self._stream.wait_event(self._ready)
        self._there().send(tensor.data_ptr(), size, self._stream.cuda_stream)
        tensor.record_stream(self._stream)
        return None

    def receive(self, size: int) -> tuple[torch.Tensor, Any]:
        import torch

        if self._default.query():  # a stream that is idle holds the sender up with nothing
            region = torch.empty(size, dtype=torch.uint8, device="cuda")
            self._there().receive(region.data_ptr(), size, self._default.cuda_stream)
            return region, self._default.record_event()
        before = torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)  # by itself: `with torch.cuda.stream` asks for streams and devices twice
        try:
            region = torch.empty(size, dtype=torch.uint8, device="cuda")
        finally:
            torch.cuda.set_stream(before)
        self._there().receive(region.data_ptr(), size, self._stream.cuda_stream)
        through = self._stream.record_event()
        self._default.wait_event(through)
        region.record_stream(self._default)
        return region, through

    def abort(self) -> None:
        with self._changing:
            self._aborted = True
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()


class _GlooWay(_Way):
    """Between two processes on CPUs, by torch.distributed: what tests on machines without a GPU have."""

    def __init__(self, rank: int, notes: Notes) -> None:
        super().__init__(rank, notes)
        self._group: Any = None
        # Torch holds its part of a store, not ours, and asks it again when the first tensor is sent.
        self._store: Any = None

    def open(self) -> None:
        import torch

        self._store = _store_of(self.notes)
        self._group = _make_group(self._rank, self._store)
        byte = torch.zeros(1, dtype=torch.uint8)
        if self._rank == _SENDER:
            self._group.send([byte], _RECEIVER, 0).wait()
        else:
            self._group.recv([byte], _SENDER, 0).wait()

    def send(self, tensor: torch.Tensor, size: int) -> object:
        return self._group.send([_bytes_of(tensor)], _RECEIVER, 0)

    def receive(self, size: int) -> tuple[torch.Tensor, Any]:
        import torch

        region = torch.empty(size, dtype=torch.uint8)
        self._group.recv([region], _SENDER, 0).wait()
        return region, None

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it has failed by itself already
                group.abort()


def _make_group(rank: int, store: Any) -> Any:
    import torch.distributed

    distributed: Any = torch.distributed
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = datetime.timedelta(seconds=_OPEN_S)
    return distributed.ProcessGroupGloo(store, rank, 2, options)


class NcclLane(Lane):
    """One end. At most `limit_bytes` are on their way in each direction."""

    kind = "nccl"

    def __init__(self, backend: Literal["nccl", "gloo"], limit_bytes: int, *, sends: bool, receives: bool) -> None:
        super().__init__(sends=sends, receives=receives)
        self.pool: InFlight = InFlight(limit_bytes)
        self.device_type = "cuda" if backend == "nccl" else "cpu"
        self._backend = backend
        self._offered = anyio.Event()
        self._out: _Way | None = None
        self._in: _Way | None = None
        self._early: list[LaneNote] = []
        self._coming: deque[tuple[Any, Origin]] = deque()
        """Receives that may not be through yet."""
        self._closed = False
        self._port: LanePort | None = None

    async def serve(self, port: LanePort) -> None:
        self._port = port
        async with anyio.create_task_group() as tasks:
            if self.sends and not self._closed:
                self._out = self._way(_SENDER, port)
                port.send(LaneOffer(self.kind))
                tasks.start_soon(self._open_out, self._out, port)
            if self.receives:
                await self._offered.wait()
                if not self._closed:
                    self._in = self._way(_RECEIVER, port)
                    self._hear_early()
                    await self._open_in(self._in, port)

    def _way(self, rank: int, port: LanePort) -> _Way:
        loop = asyncio.get_running_loop()

        def tell(key: str, value: bytes) -> None:
            loop.call_soon_threadsafe(port.send, LaneNote(rank == _SENDER, key, value))

        return (_NcclWay if self._backend == "nccl" else _GlooWay)(rank, Notes(tell))

    async def _open_out(self, way: _Way, port: LanePort) -> None:
        problem = await anyio.to_thread.run_sync(_opened, way, abandon_on_cancel=True)
        if problem is not None and not self._closed:
            self.refuse(problem, port.peer)
            port.send(LaneNote(True, _BROKEN, b""))  # the receiver waits for the other end

    async def _open_in(self, way: _Way, port: LanePort) -> None:
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
        elif way is not None:
            way.notes.put(note.key, note.value)
        elif not self._closed:
            self._early.append(note)

    def on_answer(self, answer: LaneAnswer, peer: str, descriptors: Sequence[int] = ()) -> None:
        super().on_answer(answer, peer)
        if answer.problem is not None and self._out is not None:
            _abort_soon(self._out)
            self._out = None

    def _hear_early(self) -> None:
        early, self._early = self._early, []
        for note in early:
            self.on_note(note)

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
            region, through = self._in.receive(block.length)
            while self._coming and self._coming[0][0].query():
                self._coming.popleft()
            if through is not None:
                self._coming.append((through, origin))
            return Fetched(region, None)
        except RuntimeError as error:  # the peer has died, or there is no memory for them
            self._break_in(_first_line(error))
            raise DeviceError(_first_line(error)) from None

    def lost(self) -> Sequence[Origin]:
        # By the stream, not by torch: that takes a transfer which has failed for one that is completed.
        return [origin for through, origin in self._coming if not through.query()]

    def _break_in(self, problem: str) -> None:
        """What was not received would be taken for what comes next: nothing comes by this communicator any more."""
        way, self._in = self._in, None
        if way is not None and self._port is not None:
            self._port.lose(self.lost())
            self._coming.clear()
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
        for way in (self._out, self._in):
            if way is not None:
                _abort_soon(way)
        self._out = self._in = None


def _opened(way: _Way) -> str | None:
    """Open it; gives what went wrong."""
    try:
        way.open()
    except (RuntimeError, ImportError, AttributeError) as error:  # torch has no such backend: AttributeError
        return _first_line(error)
    return None


def _abort_soon(way: _Way) -> None:
    """Abort it in a thread: that waits for the GPU, and for threads of NCCL's."""
    way.notes.close()
    threading.Thread(target=way.abort, daemon=True).start()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _may_leave(parts: Sequence[Part]) -> bool:
    """True for one tensor in memory of torch's allocator, which keeps it until the stream that sends is through. A view
    of a peer's memory, which goes back when the default stream is through, is sent as a copy.
    """
    return len(parts) == 1 and parts[0].tensor.untyped_storage().resizable()


def _packed(parts: Sequence[Part], size: int) -> torch.Tensor:
    """Several tensors in one piece, on their device."""
    first = _bytes_of(parts[0].tensor)
    region = first.new_empty(size)
    for offset, tensor, num_bytes in parts:
        region[offset : offset + num_bytes].copy_(_bytes_of(tensor), non_blocking=True)
    return region
