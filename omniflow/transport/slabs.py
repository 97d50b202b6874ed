"""Pooled slabs of shared memory in sealed memfds: nothing has a name, so nothing can be left behind.

The producer owns all bookkeeping: which slots are free, who holds the others, which generation a slot is in. A
consumer only maps slabs read-only and reports the death of its last view. First touch of fresh shared memory costs 8x a
reused page (1 against 8 GB/s), so slots are reused, by size class, newest first.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from omniflow.errors import ProtocolError, UnavailableError
from omniflow.messages import Block
from omniflow.transport.codec import Region
from omniflow.transport.deaths import Deaths

log = logging.getLogger("omniflow.transport")

_SMALLEST = 64 * 1024
_SLAB = 4 * 2**20
_MAX_SLOTS = 16
_LITTLE_LARGER = 4
"""A slot so many times larger is used as it is; beyond that, fresh memory is cheaper than what would lie idle."""
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 1033, 0x2, 0x4, 0x10


class Slab:
    """One memfd cut into equal slots. Writable here, read-only for whoever gets its descriptor."""

    def __init__(self, number: int, slot_bytes: int, num_slots: int) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self.size_bytes = slot_bytes * num_slots
        self.descriptor = os.memfd_create(f"omniflow-slab-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.size_bytes)
            self.memory = mmap.mmap(self.descriptor, self.size_bytes)
        except OSError:
            os.close(self.descriptor)
            raise
        self.bytes: Region = np.frombuffer(self.memory, np.uint8)
        self.address = self.bytes.ctypes.data
        # No reader can be hit by SIGBUS through truncation, and none can map it writable.
        fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE)
        self.free = list(range(num_slots))
        self.num_slots = num_slots
        self.generations = [0] * num_slots
        self.holders = [0] * num_slots

    def close(self) -> None:
        """Give the memory back once the last reader has unmapped it."""
        os.close(self.descriptor)


class BlockPool(ABC):
    """Memory in blocks, given out first come, first served. Belongs to the thread of the event loop."""

    nothing_left: ClassVar[str] = "no memory for values can be had"
    """What is said where there is no block, and none in use that could come back."""

    def __init__(self) -> None:
        self._waiters: deque[tuple[int, asyncio.Future[Block]]] = deque()

    @property
    @abstractmethod
    def blocks_in_use(self) -> int:
        """Blocks that somebody may still read or write."""

    @abstractmethod
    def refuse_too_large(self, size: int) -> None:
        """Raise ProtocolError where a block of `size` bytes can never be had."""

    @abstractmethod
    def _take_now(self, size: int) -> Block | None:
        """A block, or None where all memory is in use."""

    @abstractmethod
    def give_back(self, slab: int, slot: int, generation: int) -> None:
        """One holder less; without any the block is free. What was given back already is ignored."""

    def try_take(self, size: int) -> Block | None:
        """A block of `size` bytes with one holder, or None where all memory is in use.

        Raises ProtocolError where it can never fit.
        """
        self.refuse_too_large(size)
        return None if self._waiters else self._take_now(size)

    async def take(self, size: int) -> Block:
        """A block of `size` bytes; first come, first served.

        Raises UnavailableError where there is none, and none in use that could come back.
        """
        block = self.try_take(size)
        if block is not None:
            return block
        if not self._waiters and not self.blocks_in_use:
            raise UnavailableError(self.nothing_left)
        waiter: asyncio.Future[Block] = asyncio.get_running_loop().create_future()
        self._waiters.append((size, waiter))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._serve_waiters()
            elif waiter.exception() is None:
                self.give_back(waiter.result().slab, waiter.result().slot, waiter.result().generation)
            raise

    def _serve_waiters(self) -> None:
        while self._waiters:
            size, waiter = self._waiters[0]
            if waiter.done():
                self._waiters.popleft()
                continue
            block = self._take_now(size)
            if block is not None:
                waiter.set_result(block)
            elif self.blocks_in_use:
                return
            else:
                waiter.set_exception(UnavailableError(self.nothing_left))
            self._waiters.popleft()


class SlabPool(BlockPool):
    """All slabs of one producer process, at most `limit_bytes`. `on_dropped` hears of slabs that were given back.

    Only `allocate` may be called from other threads than the event loop's.
    """

    nothing_left = "no shared memory can be had: are too many files open?"

    def __init__(self, limit_bytes: int, on_dropped: Callable[[int], None]) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._on_dropped = on_dropped
        self._slabs: dict[int, Slab] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._loans: dict[tuple[int, int], Block] = {}
        self._deaths: Deaths | None = None

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on memory may be allocated; `loop` runs in this thread."""
        if self._deaths is None:
            self._deaths = Deaths(loop, self._give_back_all)

    @property
    def total_bytes(self) -> int:
        """Memory of all slabs."""
        return sum(slab.size_bytes for slab in self._slabs.values())

    @property
    def blocks_in_use(self) -> int:
        """Slots that somebody may still read or write."""
        return sum(slab.num_slots - len(slab.free) for slab in tuple(self._slabs.values()))

    def slab(self, number: int) -> Slab:
        """The slab with this number."""
        return self._slabs[number]

    # -- blocks to copy into ---------------------------------------------------------------------------------------

    def refuse_too_large(self, size: int) -> None:
        if size > self.limit_bytes:
            raise ProtocolError(
                f"a value of {size} bytes is larger than the shared memory of its host ({self.limit_bytes} bytes); "
                f"send it in pieces or raise runtime.shm_bytes"
            )

    def _take_now(self, size: int) -> Block | None:
        with self._lock:
            return self._take(size, self._grow)

    def hold(self, block: Block) -> None:
        """One more holder of a block that is in use."""
        self._slabs[block.slab].holders[block.slot] += 1

    def give_back(self, slab: int, slot: int, generation: int) -> None:
        owner = self._slabs.get(slab)
        if owner is None or owner.generations[slot] != generation:
            return
        owner.holders[slot] -= 1
        if owner.holders[slot] == 0:
            owner.generations[slot] += 1
            owner.free.append(slot)
            self._serve_waiters()

    def close(self) -> None:
        """Give all memory back."""
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()

    # -- blocks to write in place ----------------------------------------------------------------------------------

    def allocate(self, size: int) -> Region | None:
        """`size` writable bytes of a slab, or None where there is no room; may be called from any thread.

        The array itself holds its block, until the last view of it dies; links to which it was sent hold it, too.
        """
        if self._deaths is None or size > self.limit_bytes or self._waiters:
            return None
        with self._lock:
            block = self._take(size, self._new_slab)
            if block is None:
                return None
            region = np.frombuffer(self._slabs[block.slab].memory, np.uint8, size, block.offset)
            self._loans[block.slab, block.slot] = block
        self._deaths.watch(region, (block.slab, block.slot, block.generation))
        return region

    def find(self, flat: Region) -> tuple[Block, int] | None:
        """The block that a buffer was allocated in, and where in it the buffer begins; None where it was not."""
        if not self._loans:
            return None
        address = flat.ctypes.data
        for slab in tuple(self._slabs.values()):
            position = address - slab.address
            if 0 <= position < slab.size_bytes:
                slot, offset = divmod(position, slab.slot_bytes)
                block = self._loans.get((slab.number, slot))
                return (block, offset) if block is not None else None
        return None

    def _give_back_all(self, dead: list[tuple[int, int, int]]) -> None:
        for slab, slot, generation in dead:
            self._loans.pop((slab, slot), None)
            self.give_back(slab, slot, generation)

    # -- slabs -----------------------------------------------------------------------------------------------------

    def _take(self, size: int, grow: Callable[[int, int], Slab | None]) -> Block | None:
        wanted = max(_SMALLEST, 1 << (size - 1).bit_length())
        slab = None
        for one in self._slabs.values():
            if one.slot_bytes == wanted and one.free:
                slab = one
        slab = slab or grow(wanted, size)
        if slab is None:
            return None
        slot = slab.free.pop()
        slab.holders[slot] = 1
        return Block(slab.number, slot, slab.generations[slot], slot * slab.slot_bytes, size)

    def _grow(self, wanted: int, size: int) -> Slab | None:
        """A new slab; else a slot a little larger; else a slab in place of those that nobody uses; else any slot."""
        slab = self._new_slab(wanted, size)
        if slab is not None:
            return slab
        larger = sorted((s for s in self._slabs.values() if s.free and s.slot_bytes >= size), key=_slot_bytes)
        if larger and larger[0].slot_bytes <= _LITTLE_LARGER * wanted:
            return larger[0]
        self._drop_unused(min(wanted, self.limit_bytes))
        return self._new_slab(wanted, size) or next((slab for slab in larger if slab.number in self._slabs), None)

    def _new_slab(self, wanted: int, size: int) -> Slab | None:
        slot_bytes = min(wanted, self.limit_bytes)
        if self._room() < slot_bytes:
            return None
        num_slots = max(1, min(_MAX_SLOTS, _SLAB // slot_bytes, self._room() // slot_bytes))
        try:
            slab = Slab(self._count + 1, slot_bytes, num_slots)
        except OSError as error:  # no open file more, no memory: as where all of it is in use
            log.warning("no slab of shared memory can be made: %s", error)
            return None
        self._count += 1
        self._slabs[self._count] = slab
        return slab

    def _drop_unused(self, room: int) -> None:
        for slab in [slab for slab in self._slabs.values() if len(slab.free) == slab.num_slots]:
            if self._room() >= room:
                return
            self._slabs.pop(slab.number).close()
            self._on_dropped(slab.number)

    def _room(self) -> int:
        return self.limit_bytes - self.total_bytes


def _slot_bytes(slab: Slab) -> int:
    return slab.slot_bytes
