"""A pool of device memory that two processes see, in blocks, and the words by which their devices take turns in it.

A slot has two words in host memory that both processes and both devices see: the producer's stream writes which
generation it has filled, the consumer's which it is through with (docs/adr/0011).
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
from omniflow.messages import Block
from omniflow.transport.codec import DEVICE_ALIGNMENT
from omniflow.transport.lane import LANE_SLAB
from omniflow.transport.slabs import BlockPool

if TYPE_CHECKING:
    import torch

NUM_SLOTS = 512
"""Blocks of a pool that may be in use at once."""
FILLED, FREED = 0, 1
"""The two words of a slot: the generation that was filled last, and the one that its reader is through with."""


class DeviceMemory(ABC):
    """Device memory that two processes see, and the words that order what their devices do with it.

    All is called in the event loop's thread. "The stream" is the default stream of the process.
    """

    size_bytes: int
    device: str
    """The device by a name that is the same in all processes; empty for the host."""
    words: memoryview
    """uint32 [NUM_SLOTS, 2], as the host sees them."""

    @abstractmethod
    def descriptors(self) -> Sequence[int]:
        """Of the memory and of the words, for another process; whoever gets them closes them. Raises OSError where this
        process may open no more files.
        """

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
        self.limit_bytes = limit_bytes // DEVICE_ALIGNMENT * DEVICE_ALIGNMENT
        self.make = make
        self._memory = memory
        self._problem: str | None = None
        self._opening = anyio.Lock()
        self._arena = Arena(self.limit_bytes)
        # The slot free for longest is used next: a process that is being killed may still write its words.
        self._slots = deque(range(NUM_SLOTS))
        self._generations = [0] * NUM_SLOTS
        self._blocks: dict[int, Block] = {}
        self._read: deque[Block] = deque()

    async def open(self) -> DeviceMemory:
        """The memory, taken at the first call. Raises DeviceError where it cannot be had, at each call."""
        async with self._opening:
            if self._memory is None and self._problem is None:
                found = await anyio.to_thread.run_sync(outcome_of, self.make, self.limit_bytes)
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
        if self._read:
            self._collect()
        offset = self._arena.take(_aligned(size)) if self._slots else None
        while (offset is None or not self._slots) and self._read:
            last = self._read.popleft()
            self.memory.wait(last.slot, FREED, last.generation)
            self._free(last)
            offset = self._arena.take(_aligned(size)) if offset is None else offset
        if offset is None:
            return None
        slot = self._slots.popleft()
        self._generations[slot] = generation = self._generations[slot] + 1 & 0xFFFFFFFF
        self._blocks[slot] = block = Block(LANE_SLAB, slot, generation, offset, size)
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
        self._arena.give(block.offset, _aligned(block.length))
        self._slots.append(block.slot)

    def give_back(self, slab: int, slot: int, generation: int) -> None:
        block = self._blocks.get(slot)
        if block is not None and block.generation == generation:
            del self._blocks[slot]
            self._read.append(block)
            self._serve_waiters()


def _aligned(size: int) -> int:
    return -(-size // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT


def reached(word: int, generation: int) -> bool:
    """True where a word is at `generation` or beyond; both count around, as the device compares them."""
    return (word - generation) & 0xFFFFFFFF < 0x80000000


def outcome_of(call: Callable[..., DeviceMemory], *arguments: Any) -> DeviceMemory | str:
    """What `call` gives, or why it gives nothing: an error that comes out of a thread holds what its frames hold."""
    try:
        return call(*arguments)
    except (DeviceError, OSError) as error:  # OSError: this process may open no more files
        return str(error)
