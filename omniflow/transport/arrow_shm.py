"""Arrow shared memory: values between processes of one node, one copy in, none out.

Messages travel over a Unix seqpacket socket (order, boundaries, descriptors and end-of-file in one object). A value's
buffers lie in blocks of the sender's slabs; the receiver gets read-only views, and when the last of them dies the
block returns. What is small rides in the message itself. Tensors on a device go by the lane of the link, if it has one.
How messages share datagrams is in `datagrams.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import socket
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import msgspec
import numpy as np

from omniflow.errors import DeviceError, ProtocolError, RequestError, StageDiedError, UnavailableError
from omniflow.messages import (
    Block,
    Item,
    LaneAnswer,
    LaneNote,
    LaneOffer,
    Message,
    Release,
    SlabClosed,
    SlabMissing,
    SlabOpened,
)
from omniflow.transport.base import Link, LinkStatistics, Receiver
from omniflow.transport.codec import ALIGNMENT, Encoded, Encoder, Region, StillComputed, decoder_for
from omniflow.transport.datagrams import DATAGRAM_BYTES, MOST_MESSAGES, ONE, DatagramWriter
from omniflow.transport.deaths import Deaths, Key
from omniflow.transport.descriptors import close_all, descriptors_in
from omniflow.transport.hot_window import HotWindow
from omniflow.transport.lane import LANE_SLAB, Lane, Origin
from omniflow.transport.slabs import SlabPool

if TYPE_CHECKING:
    import torch

log = logging.getLogger("omniflow.transport")

_INLINE_BYTES = 8 * 1024
"""Buffers that ride in the message: copied into the datagram and out of it, they beat a block and its release."""
_BODY_BYTES = 32 * 1024
"""A larger msgpack form lies in a block."""
_LARGEST_INLINE_BYTES = 96 * 1024
"""What fits into a datagram where there is no block left."""
_STUCK_BYTES = 256 * 1024
"""What may wait for a slow peer before senders of values wait with it."""
_RELEASES = 1024
"""Blocks that one message gives back; it must fit into a datagram."""
_RECEIVED = socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
"""Room for descriptors, and what becomes of them."""
_NIL = msgspec.Raw(b"\xc0")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection between hosts, for `ArrowShmLink`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class SharedMemory:
    """The slabs of this process, and the links that must hear of changes. One for each host.

    `hot_window_s` is how long the event loop looks for more after traffic on any link before it sleeps; 0: not at all.
    """

    def __init__(self, limit_bytes: int, hot_window_s: float = 0.0) -> None:
        self.links: set[ArrowShmLink] = set()
        self.pool = SlabPool(limit_bytes, self._tell_dropped)
        self.hot_window = HotWindow(hot_window_s)

    def _tell_dropped(self, slab: int) -> None:
        for link in self.links:
            link.forget_slab(slab)

    def close(self) -> None:
        """Give all memory back; links must be closed before."""
        self.pool.close()


class ArrowShmLink(Link):
    """One end of a link between two processes. `types` gives the type of the values of each edge.

    With `keeps_views=False` arriving values are copied out of the peer's memory at once: for a receiver whose callers
    may hold on to what they get for as long as they like. `lane` carries tensors on devices; those that come through
    the host all the same are copied to `home`, the device of this process, if it has one.
    """

    def __init__(
        self,
        peer: str,
        receiver: Receiver,
        connection: socket.socket,
        memory: SharedMemory,
        types: Mapping[int, Any],
        *,
        keeps_views: bool = True,
        lane: Lane | None = None,
        home: str | None = None,
    ) -> None:
        self.peer = peer
        self._receiver = receiver
        self._socket = connection
        self._memory = memory
        self._types = types
        self._keeps_views = keeps_views
        self._lane = lane
        self._home = home
        self._loop = asyncio.get_running_loop()
        self._encoder = Encoder(memory.pool.find, waits=False)
        self._lane_encoder = Encoder(memory.pool.find, device_type=lane.device_type) if lane is not None else None
        self._writer = DatagramWriter(connection, self._loop, memory.hot_window)
        self._buffer = bytearray(len(ONE) + DATAGRAM_BYTES)
        self._view = memoryview(self._buffer)
        self._closed = False
        self._is_reset = False
        self._received = 0
        self._told: set[int] = set()
        self._lent: dict[Key, int] = {}
        self._mapped: dict[int, mmap.mmap] = {}
        self._deaths = Deaths(self._loop, self._release)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._readable)
        memory.links.add(self)
        memory.pool.serve(self._loop)
        memory.hot_window.serve(self._loop)

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, message: Message, descriptors: Sequence[int] = (), *, more: bool = False) -> None:
        data = _encoder.encode(message)
        if len(data) > DATAGRAM_BYTES:
            close_all(descriptors)
            raise ProtocolError(f"a {type(message).__name__} message of {len(data)} bytes is too large")
        self._writer.write(data, descriptors, more)

    def send_item(self, edge: int, request: int, seq: int, value: object) -> Awaitable[None] | None:
        if self._closed:
            return None
        try:
            encoded = self._encode(value)
        except StillComputed:
            return self._send_computed(edge, request, seq, value)
        return self._send_encoded(edge, request, seq, encoded)

    def _send_encoded(self, edge: int, request: int, seq: int, encoded: Encoded) -> Awaitable[None] | None:
        if self._writer.stuck_bytes < _STUCK_BYTES:
            blocks = self._blocks(encoded)
            if blocks is not None:
                self._send_made(self._item(edge, request, seq, encoded, blocks), encoded)
                return None
        return self._send_later(edge, request, seq, encoded)

    def push(self) -> bool:
        return self._writer.push()

    async def flushed(self) -> None:
        await self._writer.flushed()

    def allocate(self, num_bytes: int) -> Region | None:
        # What is small is cheaper to copy into the message.
        return self._memory.pool.allocate(num_bytes) if num_bytes > _INLINE_BYTES else None

    def _encode(self, value: object) -> Encoded:
        if self._lane is not None and self._lane_encoder is not None and self._lane.is_open:
            encoded = self._lane_encoder.encode(value)
            if not encoded.device or self._lane.takes(encoded.device_size):
                return encoded
        return self._encoder.encode(value)

    async def _send_computed(self, edge: int, request: int, seq: int, value: object) -> None:
        """Tensors of `value` go through the host, and a GPU is not through with them."""
        encoded = await anyio.to_thread.run_sync(Encoder(self._memory.pool.find).encode, value)
        pending = None if self._closed else self._send_encoded(edge, request, seq, encoded)
        if pending is not None:
            await pending

    async def _send_later(self, edge: int, request: int, seq: int, encoded: Encoded) -> None:
        await self.flushed()
        blocks = None if self._closed else self._blocks(encoded)
        if blocks is None and not self._closed:
            taken: list[Block] = []
            try:
                if self._lane is not None and encoded.device:
                    taken.append(await self._lane.pool.take(encoded.device_size))
                if not _is_small(encoded):
                    taken.append(await self._memory.pool.take(_block_size(encoded)))
                if not self._closed:
                    self._introduce(taken, encoded)
                    blocks, taken = taken, []
            finally:
                self._give_back_all(taken)
        if blocks is not None:
            self._send_made(self._item(edge, request, seq, encoded, blocks), encoded)

    def _send_made(self, item: Item, encoded: Encoded) -> None:
        """The message first, then the device's work: the lane orders them, and the peer wakes up meanwhile."""
        self._writer.write(_encoder.encode(item))
        if item.device is not None and self._lane is not None:
            self._lane.put(item.device, encoded.device)

    def _item(self, edge: int, request: int, seq: int, encoded: Encoded, blocks: Sequence[Block]) -> Item:
        """The message for a value, its buffers on the host in place; `blocks` are what `_blocks` says it needs."""
        body, size, loans = encoded.body, encoded.size, encoded.loans
        block = next((each for each in blocks if each.slab != LANE_SLAB), None)
        device = next((each for each in blocks if each.slab == LANE_SLAB), None)
        lent = tuple(loan.block for loan in loans)
        if block is not None:
            body_length = self._fill(block, encoded)
            rest = _NIL if body_length else msgspec.Raw(body)
            item = Item(edge, request, seq, rest, b"", block, body_length, lent, device)
            self._lend(block)
        else:
            inline = _joined(encoded.parts, size) if encoded.parts else b""
            item = Item(edge, request, seq, msgspec.Raw(body), inline, loans=lent, device=device)
        for loan in lent:
            self._memory.pool.hold(loan)
            self._lend(loan)
        if device is not None:
            self._lent[LANE_SLAB, device.slot, device.generation] = 1
        return item

    def _blocks(self, encoded: Encoded) -> list[Block] | None:
        """The blocks that a value needs, if all of them can be had now."""
        found: list[Block] = []
        if not _is_small(encoded):
            block = self._memory.pool.try_take(_block_size(encoded))
            # Where a receiver holds all memory, what fits into a message goes on at the price of two more copies.
            if block is None and encoded.size + len(encoded.body) > _LARGEST_INLINE_BYTES:
                return None
            found += [block] if block is not None else []
        if encoded.device and self._lane is not None:
            device = self._lane.pool.try_take(encoded.device_size)
            if device is None:
                self._give_back_all(found)
                return None
            found.append(device)
        try:
            self._introduce(found, encoded)
        except UnavailableError:
            self._give_back_all(found)
            raise
        return found

    def _introduce(self, blocks: Sequence[Block], encoded: Encoded) -> None:
        """The peer is about to hear of these blocks and of the value's loans, and before that of their slabs.

        Raises UnavailableError where there is no descriptor left to send.
        """
        slabs = [block.slab for block in blocks if block.slab != LANE_SLAB]
        for number in (*slabs, *(loan.block.slab for loan in encoded.loans)):
            if number not in self._told:
                slab = self._memory.pool.slab(number)
                try:
                    descriptor = os.dup(slab.descriptor)
                except OSError as error:
                    raise UnavailableError(f"memory cannot be shared with {self.peer}: {error.strerror}") from None
                self.send(SlabOpened(number, slab.size_bytes), (descriptor,))
                self._told.add(number)

    def _fill(self, block: Block, encoded: Encoded) -> int:
        """Copy a value's buffers into a block, after its msgpack form where that is large; gives the length of that."""
        body = encoded.body
        region = self._memory.pool.slab(block.slab).bytes
        start = block.offset
        body_length = len(body) if len(body) > _BODY_BYTES else 0
        if body_length:
            region[start : start + body_length] = np.frombuffer(body, np.uint8)
            start += _aligned(body_length)
        for offset, flat in encoded.parts:
            region[start + offset : start + offset + flat.nbytes] = flat
        return body_length

    def _lend(self, block: Block) -> None:
        """The peer is about to hear of a block."""
        key = (block.slab, block.slot, block.generation)
        self._lent[key] = self._lent.get(key, 0) + 1

    def forget_slab(self, slab: int) -> None:
        """Tell the peer that a slab is gone; none of its blocks is lent any more."""
        if slab in self._told:
            self._told.remove(slab)
            self.send(SlabClosed(slab))

    # -- receiving -------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        while self._receive():
            pass

    def _readable(self) -> None:
        """Something has come. Where it came alone, the next is not here yet: finding that out costs 1.3 us."""
        delivered = count = self._receive()
        while (count > 1 and delivered < MOST_MESSAGES) or (count and self._is_last_call):
            count = self._receive()
            delivered += count

    @property
    def _is_last_call(self) -> bool:
        """A socket with an error is looked at no more by libuv: all that is left must be read at once."""
        return self._is_reset or self._writer.is_refused

    def _receive(self) -> int:
        """Deliver one datagram; gives the number of its messages, 0 where there was none."""
        if self._closed:
            return 0
        try:
            size, ancillary = self._next_datagram()
        except (BlockingIOError, InterruptedError):
            return 0
        if size == 0:
            self._lost()
            return 0
        # A copy (0.1 us for 200 bytes, 0.4 for 8 KB): fields of msgspec.Raw or memoryview are views of what is decoded.
        messages = _decoder.decode(bytes(self._view[:size]))
        descriptors = descriptors_in(ancillary) if ancillary else []
        self._received += len(messages)
        self._memory.hot_window.hit()
        for message in messages:
            if not self._closed:
                self._deliver(message, descriptors)
        return len(messages)

    def _next_datagram(self) -> tuple[int, list[tuple[int, int, bytes]]]:
        """The size of what now lies in the buffer, and what came beside it; size 0 where the peer is gone."""
        try:
            size, ancillary, _, _ = self._socket.recvmsg_into((self._buffer,), *_RECEIVED)
        except ConnectionResetError:
            # Linux says once that the peer is gone and had not read all; what it had sent itself is still to be read.
            self._is_reset = True
            size, ancillary, _, _ = self._socket.recvmsg_into((self._buffer,), *_RECEIVED)
        return size, ancillary

    def _deliver(self, message: Message, descriptors: list[int]) -> None:
        match message:
            case Item():
                self._deliver_item(message)
            case Release():
                for key in message.blocks:
                    self._returned(key)
            case SlabOpened():
                self._map(message, descriptors)
            case SlabClosed():
                self._mapped.pop(message.slab, None)
            case SlabMissing():
                self._told.discard(message.slab)
            case LaneOffer() | LaneAnswer() | LaneNote():
                self._deliver_to_lane(message, descriptors)
            case _:
                self._receiver.on_message(self, message, descriptors)

    def _map(self, opened: SlabOpened, descriptors: Sequence[int]) -> None:
        """Map a slab of the peer. Where no more descriptors are carried, or may be opened here, there is none."""
        with contextlib.suppress(OSError):
            for descriptor in descriptors:
                self._mapped[opened.slab] = mmap.mmap(descriptor, opened.size_bytes, prot=mmap.PROT_READ)
        close_all(descriptors)
        if opened.slab not in self._mapped:
            log.error("memory of %s cannot be mapped: are too many files open?", self.peer)
            self.send(SlabMissing(opened.slab))

    def _deliver_unmapped(self, item: Item, blocks: Sequence[Block]) -> None:
        """Nobody will have an item whose buffers lie in a slab that could not be mapped."""
        if item.device is not None:
            with contextlib.suppress(DeviceError, RuntimeError):
                self._fetch(item.device, (item.edge, item.request))  # what a communicator brings must be received
        self._release([(block.slab, block.slot, block.generation) for block in blocks])
        error = UnavailableError(f"memory of {self.peer} could not be mapped: are too many files open?")
        self._receiver.on_bad_item(self, item.edge, item.request, error.info())

    def _deliver_item(self, item: Item) -> None:
        blocks = item.loans if item.block is None else (item.block, *item.loans)
        if blocks and any(block.slab not in self._mapped for block in blocks):
            self._deliver_unmapped(item, blocks)
            return
        leased = [self._lease(block) for block in blocks] if blocks else ()
        try:
            value = self._rebuilt(item, leased)
        except (msgspec.ValidationError, TypeError, RecursionError) as error:
            failure: RequestError = ProtocolError(f"the value is not of the type of its port: {error}")
        except DeviceError as error:
            failure = ProtocolError(f"its tensors cannot be had: {error}")
        except (RuntimeError, MemoryError) as error:  # as torch says that its device is full
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            failure = UnavailableError(f"a value cannot be taken in here: {reason}")
        except Exception as error:  # noqa: BLE001 - the boundary to the types of the graph (`__post_init__`)
            failure = ProtocolError(f"the value is refused by its type: {type(error).__name__}: {error}")
        else:
            self._receiver.on_item(self, item.edge, item.request, item.seq, value)
            return
        self._receiver.on_bad_item(self, item.edge, item.request, failure.info())

    def _rebuilt(self, item: Item, leased: Sequence[Region]) -> object:
        """The value of an item whose blocks are `leased`."""
        # Before all else that may fail: what a communicator brings must be received.
        device = self._fetch(item.device, (item.edge, item.request)) if item.device is not None else None
        regions = leased if self._keeps_views else [_copied(region) for region in leased]
        body: msgspec.Raw | memoryview = item.body
        region: Region | None = None
        loans = regions
        if item.block is not None:
            region, loans = regions[0], regions[1:]
            if item.body_length:
                body = region.data[: item.body_length]
                region = region[_aligned(item.body_length) :]
        elif item.inline:
            region = np.frombuffer(item.inline, np.uint8)
        return decoder_for(self._types[item.edge]).decode(body, region, loans, device, self._home)

    def _lease(self, block: Block) -> Region:
        """A view of the peer's block. Views of it keep it alive; when the last has died the block returns."""
        base = np.frombuffer(self._mapped[block.slab], np.uint8, block.length, block.offset)
        self._deaths.watch(base, (block.slab, block.slot, block.generation))
        return base

    def _fetch(self, block: Block, origin: Origin) -> torch.Tensor:
        """The bytes of a value's tensors that stayed on their device."""
        if self._lane is None:
            raise DeviceError("this end of the link has no lane")
        key = (block.slab, block.slot, block.generation)
        try:
            region, owner = self._lane.fetch(block, origin)
        except (DeviceError, RuntimeError):
            self._release([key])  # nobody will have it
            raise
        if owner is None:
            self._lane.died([key])
            self.send(Release((key,)), more=True)
        else:
            self._deaths.watch(owner, key)
        return region

    def _deliver_to_lane(self, message: LaneOffer | LaneAnswer | LaneNote, descriptors: list[int]) -> None:
        match self._lane, message:
            case None, LaneOffer():
                close_all(descriptors)
                self.send(LaneAnswer("the other host has no lane"))
            case Lane() as lane, LaneOffer():
                lane.on_offer(message, descriptors)
            case Lane() as lane, LaneAnswer():
                lane.on_answer(message, self.peer, descriptors)
            case Lane() as lane, LaneNote():
                lane.on_note(message)

    def _release(self, dead: list[Key]) -> None:
        """Views of the peer's blocks have died. Those on the host go back whatever the lane can still do."""
        of_lane = [key for key in dead if key[0] == LANE_SLAB]
        self._tell_dead([key for key in dead if key[0] != LANE_SLAB] if of_lane else dead, more=bool(of_lane))
        if of_lane and self._lane is not None:
            self._lane.died(of_lane)
            self._tell_dead(of_lane)

    def _tell_dead(self, keys: Sequence[Key], more: bool = False) -> None:
        for start in range(0, len(keys), _RELEASES):
            self.send(Release(tuple(keys[start : start + _RELEASES])), more=more)

    def _returned(self, key: Key) -> None:
        """The peer has no view of a block any more (or one view less, where a block was lent twice)."""
        count = self._lent.pop(key, 0)
        if count > 1:
            self._lent[key] = count - 1
        if count:
            self._give_back(key)

    def _give_back_all(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._give_back((block.slab, block.slot, block.generation))

    def _give_back(self, key: Key) -> None:
        if key[0] == LANE_SLAB and self._lane is not None:
            self._lane.pool.give_back(*key)
        else:
            self._memory.pool.give_back(*key)

    # -- closing ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed:
            return
        self._writer.close()
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._memory.links.discard(self)
        self._mapped.clear()
        lent, self._lent = self._lent, {}
        if self._lane is not None:
            self._lane.reclaim([key for key in lent if key[0] == LANE_SLAB])
            self._lane.close()
        for key, count in lent.items():
            for _ in range(count if key[0] != LANE_SLAB else 0):
                self._memory.pool.give_back(*key)

    def _lost(self) -> None:
        if self._lane is not None:
            self.lose(self._lane.lost())
        self.close()
        self._receiver.on_closed(self)

    def lose(self, origins: Sequence[Origin]) -> None:
        """Values that were delivered have tensors that never come (`LanePort`)."""
        error = StageDiedError("the process that it came from died, or its lane broke, before its tensors were there")
        for edge, request in origins:
            self._receiver.on_bad_item(self, edge, request, error.info())

    def statistics(self) -> LinkStatistics:
        lane = self._lane.kind if self._lane is not None and self._lane.is_open else None
        return LinkStatistics(self._writer.sent, self._received, self._writer.backlog, sum(self._lent.values()), lane)


def _is_small(encoded: Encoded) -> bool:
    """True where a value rides in its message."""
    return encoded.size <= _INLINE_BYTES and len(encoded.body) <= _BODY_BYTES


def _block_size(encoded: Encoded) -> int:
    return encoded.size + (_aligned(len(encoded.body)) if len(encoded.body) > _BODY_BYTES else 0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _copied(region: Region) -> Region:
    """A read-only copy, 64-byte aligned: a copy to what numpy allocates is up to 12 times slower."""
    room = np.empty(region.nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    copy = room[start : start + region.nbytes]
    copy[:] = region
    room.flags.writeable = copy.flags.writeable = False
    return copy


def _joined(parts: Sequence[tuple[int, Region]], size: int) -> bytes:
    region = bytearray(size)
    for offset, flat in parts:
        region[offset : offset + flat.nbytes] = flat.data
    return bytes(region)
