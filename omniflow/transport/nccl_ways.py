"""What `nccl.py` sends by: a communicator of two processes for each direction of a link, by NCCL (or `gloo_way.py`)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from omniflow.transport.lane import Origin
from omniflow.transport.nccl_library import Communicator, new_id

if TYPE_CHECKING:
    import torch

OPEN_S = 60.0
"""What one end may take to write what the other waits for: milliseconds, once both are there."""
SENDER, RECEIVER = 0, 1
_LOOK_EVERY = 8
"""Receives after which is looked which of them are through: a look takes 2.7 us, and a receive 15."""


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
            self._changed.wait_for(lambda: self._closed or self.known(keys), OPEN_S)
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


class Way(ABC):
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
    def receive(self, size: int, origin: Origin) -> torch.Tensor:
        """Receive before the default stream does what it is given from now on."""

    @abstractmethod
    def lost(self) -> list[Origin]:
        """What was received for them may never come, now that the other end is gone."""

    @abstractmethod
    def abort(self) -> None:
        """End what is under way, and with it every kernel that waits for the other end."""


class NcclWay(Way):
    """Between two GPUs, by NCCL itself, which orders what one communicator is given on several streams."""

    def __init__(self, rank: int, notes: Notes) -> None:
        super().__init__(rank, notes)
        self._communicator: Communicator | None = None
        self._aborted = False
        self._changing = threading.Lock()
        self._default: Any = None
        self._stream: Any = None
        self._ready: Any = None
        self._byte: Any = None
        self._coming: deque[tuple[Any, Origin]] = deque()
        """The events of receives that may not be through yet."""
        self._spare: list[Any] = []

    def open(self) -> None:
        import torch  # and with it NCCL

        self._meet()
        self._default = torch.cuda.default_stream()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._byte = torch.zeros(1, dtype=torch.uint8, device="cuda")
        self._default.synchronize()
        self._there().connect(self._byte.data_ptr(), self._stream.cuda_stream)
        self._stream.synchronize()

    def _meet(self) -> None:
        """NCCL waits for the other end for as long as that may take, so it must be known to come."""
        if self._rank == SENDER:
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

    def receive(self, size: int, origin: Origin) -> torch.Tensor:
        import torch

        region: torch.Tensor
        if self._default.query():  # a stream that is idle holds the sender up with nothing
            region = self._byte.new_empty(size)  # of its kind: torch.empty reads a dtype and a device each time
            self._there().receive(region.data_ptr(), size, self._default.cuda_stream)
            self._comes(self._default, origin)
            return region
        before = torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)  # by itself: `with torch.cuda.stream` asks for streams and devices twice
        try:
            region = self._byte.new_empty(size)
        finally:
            torch.cuda.set_stream(before)
        self._there().receive(region.data_ptr(), size, self._stream.cuda_stream)
        self._default.wait_event(self._comes(self._stream, origin))
        region.record_stream(self._default)
        return region

    def _comes(self, stream: Any, origin: Origin) -> Any:
        """The event of what `stream` was just given to receive. Those that are through serve again."""
        import torch

        if len(self._coming) % _LOOK_EVERY == 0:
            while self._coming and self._coming[0][0].query():
                self._spare.append(self._coming.popleft()[0])
        through = self._spare.pop() if self._spare else torch.cuda.Event()  # type: ignore[no-untyped-call]
        through.record(stream)
        self._coming.append((through, origin))
        return through

    def lost(self) -> list[Origin]:
        # By the stream, not by torch: that takes a transfer which has failed for one that is completed.
        return [origin for through, origin in self._coming if not through.query()]

    def abort(self) -> None:
        with self._changing:
            self._aborted = True
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()
