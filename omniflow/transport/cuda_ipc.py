"""CUDA IPC: device tensors between two processes without the host: one copy on the device in, none out.

A host that sends has one pool of device memory for its GPU, taken once. Each peer maps it once. A value's tensors are
copied to a block of the pool in the order of the default stream; the message names the block, and the receiver's
tensors are views of it. When the last of them dies, the block returns by the same message as a slab's.

Between two GPUs it is the receiver that has the pool, one for each sender, which maps it and copies to it: a copy to
another GPU begins before the receiver has heard of it, and what arrives is near.

What orders the two devices is not an event but a pair of words for each slot, in host memory that both processes and
both GPUs see: the producer's stream writes which generation it has filled, the consumer's which it is through with.
A stream waits for a word only where it is not there yet, and where a process has died the other one writes
the word in its place, so that no stream waits for ever (docs/adr/0011).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from omniflow.errors import DeviceError, ProtocolError
from omniflow.messages import Block, LaneAnswer, LaneOffer
from omniflow.transport.codec import DEVICE_ALIGNMENT, Part
from omniflow.transport.deaths import Key
from omniflow.transport.descriptors import close_all
from omniflow.transport.lane import LANE_SLAB, Fetched, Lane, LanePort, Origin
from omniflow.transport.slabs import BlockPool

if TYPE_CHECKING:
    import torch

NUM_SLOTS = 512
"""Blocks of a pool that may be in use at once."""
FILLED, FREED = 0, 1
"""The two words of a slot: the generation that was filled last, and the one that its reader is through with."""


class DeviceMemory(ABC):
    """Device memory that two processes see, and the words that order what their devices do with it.

    All but `close` is called in the event loop's thread. "The stream" is the default stream of the process.
    """

    size_bytes: int
    device: str
    """The device by a name that is the same in all processes; empty for the host."""
    words: memoryview
    """uint32 [NUM_SLOTS, 2], as the host sees them."""

    @abstractmethod
    def descriptors(self) -> tuple[int, int]:
        """Of the memory and of the words, for another process; whoever gets them closes them."""

    @abstractmethod
    def copy_in(self, offset: int, tensor: torch.Tensor, num_bytes: int) -> None:
        """Copy a tensor that lies in one piece, in the order of the stream."""

    @abstractmethod
    def view(self, offset: int, length: int) -> tuple[torch.Tensor, object]:
        """A tensor (uint8) over a range, and what lives as long as any view of it; both keep the memory mapped."""

    @abstractmethod
    def write(self, slot: int, word: int, value: int) -> None:
        """Let the stream write a word once it is through with all that it was given so far."""

    @abstractmethod
    def wait(self, slot: int, word: int, value: int) -> None:
        """Let the stream wait until a word is `value` or beyond before it does what it is given from now on."""


class Arena:
    """Which ranges of a pool are free: first fit, neighbours joined."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]

    def take(self, size: int) -> int | None:
        """The offset of a free range, or None."""
        for index, (offset, length) in enumerate(self._free):
            if length >= size:
                self._free[index : index + 1] = [(offset + size, length - size)] if length > size else []
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Free a range that was taken."""
        index = bisect(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            before, length = self._free.pop(index - 1)
            offset, size, index = before, length + size, index - 1
        self._free.insert(index, (offset, size))


class DevicePool(BlockPool):
    """The device memory of one producing process; links share it. `make` takes it, once, of a fixed size.

    A block that was given back may still be read by kernels of its last reader. It is free once its word says so; where
    there is nothing else, it is taken all the same, and our stream waits for the word before it writes.
    """

    def __init__(
        self, limit_bytes: int, make: Callable[[int], DeviceMemory], memory: DeviceMemory | None = None
    ) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.make = make
        self._memory = memory
        self._problem: str | None = None
        self._opening = anyio.Lock()
        self._arena = Arena(limit_bytes)
        # The slot free for longest is used next: a process that is being killed may still write its words.
        self._slots = deque(range(NUM_SLOTS))
        self._generations = [0] * NUM_SLOTS
        self._blocks: dict[int, Block] = {}
        self._read: deque[Block] = deque()

    async def open(self) -> DeviceMemory:
        """The memory, taken at the first call. Raises DeviceError where it cannot be had, at each call."""
        async with self._opening:
            if self._memory is None and self._problem is None:
                found = await anyio.to_thread.run_sync(_outcome, self.make, self.limit_bytes)
                if isinstance(found, str):
                    self._problem = found
                elif self._problem is None:
                    self._memory = found
            if self._memory is None:
                raise DeviceError(self._problem or "there is no memory")
            return self._memory

    @property
    def memory(self) -> DeviceMemory:
        """The memory, once it was opened."""
        assert self._memory is not None
        return self._memory

    @property
    def blocks_in_use(self) -> int:
        """Blocks that a peer may hold."""
        return len(self._blocks)

    def close(self) -> None:
        """Let go of the memory: it is given back once no peer has it mapped."""
        self._memory, self._problem = None, "the pool is closed"

    def refuse_too_large(self, size: int) -> None:
        if size > self.limit_bytes:
            raise ProtocolError(f"{size} bytes do not fit into the device memory for values ({self.limit_bytes} bytes)")

    def _take_now(self, size: int) -> Block | None:
        length = size
        size = -(-size // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT
        if self._read:
            self._collect()
        offset = self._arena.take(size) if self._slots else None
        while (offset is None or not self._slots) and self._read:
            last = self._read.popleft()
            self.memory.wait(last.slot, FREED, last.generation)
            self._free(last)
            offset = self._arena.take(size) if offset is None else offset
        if offset is None:
            return None
        slot = self._slots.popleft()
        self._generations[slot] = generation = self._generations[slot] + 1 & 0x7FFFFFFF
        self._blocks[slot] = block = Block(LANE_SLAB, slot, generation, offset, length)
        return block

    def _collect(self) -> None:
        """Free what was given back and read to the end."""
        for block in [each for each in self._read if self._is_read(each)]:
            self._read.remove(block)
            self._free(block)

    def _is_read(self, block: Block) -> bool:
        # Once the pool is closed, nothing is written there any more.
        return self._memory is None or reached(self._memory.words[block.slot, FREED], block.generation)

    def _free(self, block: Block) -> None:
        self._arena.give(block.offset, -(-block.length // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT)
        self._slots.append(block.slot)

    def give_back(self, slab: int, slot: int, generation: int) -> None:
        block = self._blocks.get(slot)
        if block is not None and block.generation == generation:
            del self._blocks[slot]
            self._read.append(block)
            self._serve_waiters()


def reached(word: int, generation: int) -> bool:
    """True where a word is at `generation` or beyond; both count around, as the device compares them."""
    return (word - generation) & 0xFFFFFFFF < 0x80000000


class CudaIpcLane(Lane):
    """One end. `attach` maps the peer's memory from its offer: (memory's and words' descriptors, size, device).

    `far`: the other end is on another GPU, and the receiver has the memory; `pool` gives what is sent otherwise.
    """

    kind = "cuda_ipc"

    def __init__(
        self,
        pool: DevicePool,
        attach: Callable[[int, int, int, str], DeviceMemory],
        *,
        sends: bool,
        receives: bool,
        far: bool = False,
        device_type: str = "cuda",
    ) -> None:
        super().__init__(sends=sends, receives=receives)
        self._shared = pool
        self.pool: DevicePool = pool
        self.device_type = device_type
        self._attach = attach
        self._far = far
        self._offered = anyio.Event()
        self._offer: tuple[LaneOffer, Sequence[int]] | None = None
        self._answered = anyio.Event()
        self._answer: tuple[LaneAnswer, tuple[int, int]] | None = None
        self._theirs: DeviceMemory | None = None
        """What we read: the peer's memory, or what it writes to."""
        self._awaited: dict[int, tuple[int, Origin]] = {}
        self._sent: dict[int, int] = {}
        self._closed = False

    async def serve(self, port: LanePort) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._make_offer, port)
            tasks.start_soon(self._accept, port)

    async def _make_offer(self, port: LanePort) -> None:
        if not self.sends:
            return
        if self._far:
            port.send(LaneOffer(self.kind, "", self.pool.limit_bytes))
            await self._answered.wait()
            await self._write_there(port)
            return
        try:
            memory = await self.pool.open()
        except DeviceError as error:
            self.refuse(str(error), port.peer)
            port.send(LaneOffer(self.kind))
            return
        if not self._closed:
            port.send(LaneOffer(self.kind, memory.device, memory.size_bytes), memory.descriptors())

    async def _write_there(self, port: LanePort) -> None:
        """Send by the memory of the peer, for this lane alone, if it has answered with some."""
        if self._answer is None:
            return
        (answer, descriptors), self._answer = self._answer, None
        found = await anyio.to_thread.run_sync(_outcome, self._attach, *descriptors, answer.size_bytes, answer.device)
        close_all(descriptors)
        if isinstance(found, str):
            self.refuse(found, port.peer)
        elif not self._closed:
            self.pool = DevicePool(answer.size_bytes, self.pool.make, found)
            super().on_answer(LaneAnswer(), port.peer)

    async def _accept(self, port: LanePort) -> None:
        await self._offered.wait()
        if self._offer is None:
            return
        (offer, descriptors), self._offer = self._offer, None
        size = offer.size_bytes
        if self._far:
            found = await anyio.to_thread.run_sync(_outcome, self.pool.make, size)
        else:
            memory, words = descriptors
            found = await anyio.to_thread.run_sync(_outcome, self._attach, memory, words, size, offer.device)
        close_all(descriptors)
        if isinstance(found, str):
            port.send(LaneAnswer(found))
        elif not self._closed:
            self._theirs = found
            port.send(LaneAnswer(None, found.device, found.size_bytes), found.descriptors() if self._far else ())
        self.decided()

    def on_answer(self, answer: LaneAnswer, peer: str, descriptors: Sequence[int] = ()) -> None:
        if self._far and len(descriptors) == 2 and not self._closed:
            self._answer = answer, (descriptors[0], descriptors[1])
        else:
            close_all(descriptors)
            super().on_answer(answer, peer)
        self._answered.set()

    def on_offer(self, offer: LaneOffer, descriptors: Sequence[int]) -> None:
        if len(descriptors) != (0 if self._far else 2) or not offer.size_bytes or self._closed:
            close_all(descriptors)  # an offer of nothing: the peer has no memory
            self.decided()
            return
        self._offer = offer, descriptors
        self._offered.set()

    def takes(self, size: int) -> bool:
        return size <= self.pool.limit_bytes

    def put(self, block: Block, parts: Sequence[Part]) -> None:
        memory = self.pool.memory
        self._sent[block.slot] = block.generation
        try:
            for offset, tensor, num_bytes in parts:
                memory.copy_in(block.offset + offset, tensor, num_bytes)
            memory.write(block.slot, FILLED, block.generation)
        except DeviceError:
            # This request fails here; its reader must not wait for what does not come.
            memory.words[block.slot, FILLED] = block.generation
            raise

    def fetch(self, block: Block, origin: Origin) -> Fetched:
        memory = self._theirs
        if memory is None:
            raise DeviceError("the memory that they lie in is not mapped here")
        if not reached(memory.words[block.slot, FILLED], block.generation):
            memory.wait(block.slot, FILLED, block.generation)
            self._awaited[block.slot] = block.generation, origin
        return Fetched(*memory.view(block.offset, block.length))

    def lost(self) -> Sequence[Origin]:
        return [origin for _slot, _generation, origin in self._missing()]

    def _missing(self) -> list[tuple[int, int, Origin]]:
        """What our stream waits for now: (slot, generation, what for)."""
        memory = self._theirs
        awaited = self._awaited.items() if memory is not None else ()
        return [
            (slot, generation, origin)
            for slot, (generation, origin) in awaited
            if memory is not None and not reached(memory.words[slot, FILLED], generation)
        ]

    def died(self, keys: Sequence[Key]) -> None:
        if self._theirs is not None:
            for _slab, slot, generation in keys:
                self._theirs.write(slot, FREED, generation)

    def reclaim(self, keys: Sequence[Key]) -> None:
        # Also of what it has returned already: its stream may have died before it wrote so.
        for slot, generation in self._sent.items():
            if not reached(self.pool.memory.words[slot, FREED], generation):
                self.pool.memory.words[slot, FREED] = generation
        for key in keys:
            self.pool.give_back(*key)

    def close(self) -> None:
        self._closed, self.is_open = True, False
        self._decided.set()
        for waiting in (self._offer, self._answer):
            if waiting is not None:
                close_all(waiting[1])
        self._offer = self._answer = None
        self._offered.set()
        self._answered.set()
        if self.pool is not self._shared:
            self.pool.close()
        if self._theirs is not None:
            # What our stream waits for, even for tensors that nobody has any more, a dead producer does not write.
            for slot, generation, _origin in self._missing():
                self._theirs.words[slot, FILLED] = generation
            self._theirs = None


def _outcome(call: Callable[..., DeviceMemory], *arguments: Any) -> DeviceMemory | str:
    """What `call` gives, or why it gives nothing: an error that comes out of a thread holds what its frames hold."""
    try:
        return call(*arguments)
    except DeviceError as error:
        return str(error)
