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

from collections.abc import Callable, Sequence

import anyio
import anyio.to_thread

from omniflow.errors import DeviceError
from omniflow.messages import Block, LaneAnswer, LaneOffer
from omniflow.transport.codec import Part
from omniflow.transport.deaths import Key
from omniflow.transport.descriptors import close_all
from omniflow.transport.device_pool import FILLED, FREED, DeviceMemory, DevicePool, outcome_of, reached
from omniflow.transport.lane import Fetched, Lane, LanePort, Origin

_LOST = "the descriptors of its memory did not arrive: are too many files open?"


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
            descriptors = memory.descriptors()
        except (DeviceError, OSError) as error:
            self.refuse(str(error), port.peer)
            port.send(LaneOffer(self.kind))
            return
        port.send(LaneOffer(self.kind, memory.device, memory.size_bytes), descriptors)

    async def _write_there(self, port: LanePort) -> None:
        """Send by the memory of the peer, for this lane alone, if it has answered with some."""
        if self._answer is None:
            return
        (answer, descriptors), self._answer = self._answer, None
        size, device = answer.size_bytes, answer.device
        try:
            found = await anyio.to_thread.run_sync(outcome_of, self._attach, *descriptors, size, device)
        finally:
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
        try:
            found = await anyio.to_thread.run_sync(outcome_of, self._memory_for, offer, descriptors)
        finally:
            close_all(descriptors)
        if isinstance(found, str):
            port.send(LaneAnswer(found))
        elif not self._closed:
            self._read_from(found, port)
        self.decided()

    def _memory_for(self, offer: LaneOffer, descriptors: Sequence[int]) -> DeviceMemory:
        """What we shall read: the memory that is offered, or new memory for the other end to write to."""
        if self._far:
            return self.pool.make(offer.size_bytes)
        if len(descriptors) != 2:
            raise DeviceError(_LOST)
        return self._attach(descriptors[0], descriptors[1], offer.size_bytes, offer.device)

    def _read_from(self, memory: DeviceMemory, port: LanePort) -> None:
        """Read what comes by `memory` from now on, and tell the other end."""
        try:
            descriptors = memory.descriptors() if self._far else ()
        except OSError as error:
            port.send(LaneAnswer(str(error)))
            return
        self._theirs = memory
        port.send(LaneAnswer(None, memory.device, memory.size_bytes), descriptors)

    def on_answer(self, answer: LaneAnswer, peer: str, descriptors: Sequence[int] = ()) -> None:
        if self._far and answer.problem is None and len(descriptors) != 2:
            answer = LaneAnswer(_LOST)
        if self._far and answer.problem is None and not self._closed:
            self._answer = answer, (descriptors[0], descriptors[1])
        else:
            close_all(descriptors)
            super().on_answer(answer, peer)
        self._answered.set()

    def on_offer(self, offer: LaneOffer, descriptors: Sequence[int]) -> None:
        if not offer.size_bytes or self._closed:
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
        if self._theirs is None:
            return []
        words = self._theirs.words
        return [
            (slot, generation, origin)
            for slot, (generation, origin) in self._awaited.items()
            if not reached(words[slot, FILLED], generation)
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
