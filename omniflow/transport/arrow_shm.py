"""Arrow shared memory: values between processes of one node, one copy in, none out.

Messages travel over a Unix seqpacket socket (order, boundaries, descriptors and end-of-file in one object). A value's
buffers lie in a block of the sender's slabs; the receiver gets read-only views, and when the last of them dies the
block returns. What is small rides in the message itself.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import weakref
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from omniflow.errors import ProtocolError
from omniflow.messages import Block, Item, Message, Release, SlabClosed, SlabOpened
from omniflow.transport.base import Link, LinkStatistics, Receiver
from omniflow.transport.codec import ALIGNMENT, Encoded, Region, decoder_for, encode
from omniflow.transport.slabs import SlabPool

# A copy into the datagram and out of it again beats a block and its release below about 8 KB.
_INLINE_BYTES = 8 * 1024
_BODY_BYTES = 32 * 1024
_DATAGRAM_BYTES = 128 * 1024
_LARGEST_INLINE_BYTES = 96 * 1024
_RELEASES = 1024
"""Blocks that one message gives back; it must fit into a datagram."""
_DRAIN = 64
"""Datagrams delivered before other work of the event loop gets a turn."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection between hosts, for `ArrowShmLink`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class SharedMemory:
    """The slabs of this process, and the links that must hear of changes. One for each host."""

    def __init__(self, limit_bytes: int) -> None:
        self.links: set[ArrowShmLink] = set()
        self.pool = SlabPool(limit_bytes, self._tell_dropped)

    def _tell_dropped(self, slab: int) -> None:
        for link in self.links:
            link.forget_slab(slab)

    def close(self) -> None:
        """Give all memory back; links must be closed before."""
        self.pool.close()


class ArrowShmLink(Link):
    """One end of a link between two processes. `types` gives the type of the values of each edge.

    With `keeps_views=False` arriving values are copied out of the peer's memory at once: for a receiver whose callers
    may hold on to what they get for as long as they like.
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
    ) -> None:
        self.peer = peer
        self._receiver = receiver
        self._socket = connection
        self._memory = memory
        self._types = types
        self._keeps_views = keeps_views
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(_DATAGRAM_BYTES)
        self._view = memoryview(self._buffer)
        self._backlog: deque[tuple[bytes, Sequence[int]]] = deque()
        self._room: asyncio.Event = asyncio.Event()
        self._closed = False
        self._sent = 0
        self._received = 0
        self._told: set[int] = set()
        self._lent: set[tuple[int, int, int]] = set()
        self._mapped: dict[int, mmap.mmap] = {}
        self._dead: deque[tuple[int, int, int]] = deque()
        self._flushing = False
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self.poll)
        memory.links.add(self)

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        data = _encoder.encode(message)
        if len(data) > _DATAGRAM_BYTES:
            raise ProtocolError(f"a {type(message).__name__} message of {len(data)} bytes is too large")
        self._write(data, descriptors)

    def send_item(self, edge: int, request: int, seq: int, value: object) -> Awaitable[None] | None:
        encoded = encode(value)
        if not self._backlog:
            item = self._item(edge, request, seq, encoded, None)
            if item is not None:
                self.send(item)
                return None
        return self._send_later(edge, request, seq, encoded)

    async def flushed(self) -> None:
        while self._backlog and not self._closed:
            self._room.clear()
            await self._room.wait()

    async def _send_later(self, edge: int, request: int, seq: int, encoded: Encoded) -> None:
        await self.flushed()
        item = self._item(edge, request, seq, encoded, None)
        if item is None and not self._closed:
            block = await self._memory.pool.take(_block_size(encoded))
            if self._closed:
                self._memory.pool.give_back(block.slab, block.slot, block.generation)
            else:
                item = self._item(edge, request, seq, encoded, block)
        if item is not None:
            self.send(item)

    def _item(self, edge: int, request: int, seq: int, encoded: Encoded, block: Block | None) -> Item | None:
        """The message for a value, its buffers in place; None where all shared memory is in use."""
        body, parts, size = encoded
        small = size <= _INLINE_BYTES and len(body) <= _BODY_BYTES
        if block is None and not small and not self._closed:
            block = self._memory.pool.try_take(_block_size(encoded))
        if block is None:
            # Where a receiver holds all memory, what fits into a message goes on at the price of two more copies.
            fits = small or size + len(body) <= _LARGEST_INLINE_BYTES
            return Item(edge, request, seq, body, _joined(parts, size), None) if fits else None
        slab = self._memory.pool.slab(block.slab)
        body_length = len(body) if len(body) > _BODY_BYTES else 0
        start = block.offset
        if body_length:
            slab.bytes[start : start + body_length] = np.frombuffer(body, np.uint8)
            start += _aligned(body_length)
            body = b""
        for offset, flat in parts:
            slab.bytes[start + offset : start + offset + flat.nbytes] = flat
        if block.slab not in self._told:
            self._told.add(block.slab)
            self.send(SlabOpened(block.slab, slab.size_bytes), (os.dup(slab.descriptor),))
        self._lent.add((block.slab, block.slot, block.generation))
        return Item(edge, request, seq, body, b"", block, body_length)

    def forget_slab(self, slab: int) -> None:
        """Tell the peer that a slab is gone; none of its blocks is lent any more."""
        if slab in self._told:
            self._told.remove(slab)
            self.send(SlabClosed(slab))

    def _write(self, data: bytes, descriptors: Sequence[int]) -> None:
        """Send now, or keep in order until the peer has room. Owns `descriptors`."""
        if self._closed:
            _close_all(descriptors)
            return
        if self._backlog or not self._sent_now(data, descriptors):
            if not self._backlog:
                self._loop.add_writer(self._socket.fileno(), self._write_backlog)
            self._backlog.append((data, descriptors))

    def _sent_now(self, data: bytes, descriptors: Sequence[int]) -> bool:
        try:
            if descriptors:
                socket.send_fds(self._socket, [data], list(descriptors))
            else:
                self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return False
        except (BrokenPipeError, ConnectionResetError):
            # The end of file that follows tells the receiver, in order with what the peer sent before it died.
            _close_all(descriptors)
            return True
        _close_all(descriptors)
        self._sent += 1
        return True

    def _write_backlog(self) -> None:
        while self._backlog:
            data, descriptors = self._backlog[0]
            if not self._sent_now(data, descriptors):
                return
            self._backlog.popleft()
        self._loop.remove_writer(self._socket.fileno())
        self._room.set()

    # -- receiving -------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        for _ in range(_DRAIN):
            if self._closed:
                return
            try:
                size, ancillary, _flags, _address = self._socket.recvmsg_into(
                    [self._buffer], socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:
                size, ancillary = 0, []
            if size == 0:
                self._lost()
                return
            self._received += 1
            self._deliver(_decoder.decode(self._view[:size]), _descriptors(ancillary))

    def _deliver(self, message: Message, descriptors: list[int]) -> None:
        match message:
            case Item():
                self._deliver_item(message)
            case Release():
                for key in message.blocks:
                    self._lent.discard(key)
                    self._memory.pool.give_back(*key)
            case SlabOpened():
                self._mapped[message.slab] = mmap.mmap(descriptors[0], message.size_bytes, prot=mmap.PROT_READ)
                _close_all(descriptors)
            case SlabClosed():
                self._mapped.pop(message.slab, None)
            case _:
                self._receiver.on_message(self, message, descriptors)

    def _deliver_item(self, item: Item) -> None:
        body: bytes | memoryview = item.body
        region: Region | None = None
        if item.block is not None:
            region = self._lease(item.block)
            if item.body_length:
                body = region.data[: item.body_length]
                region = region[_aligned(item.body_length) :]
        elif item.inline:
            region = np.frombuffer(item.inline, np.uint8)
        try:
            value = decoder_for(self._types[item.edge]).decode(body, region)
        except (msgspec.ValidationError, TypeError) as error:
            failure = ProtocolError(f"the value is not of the type of its port: {error}")
            self._receiver.on_bad_item(self, item.edge, item.request, failure.info())
            return
        self._receiver.on_item(self, item.edge, item.request, item.seq, value)

    def _lease(self, block: Block) -> Region:
        """A view of the peer's block. Views of it keep it alive; when the last has died the block returns."""
        base = np.frombuffer(self._mapped[block.slab], np.uint8, block.length, block.offset)
        lease = weakref.finalize(base, self._view_died, (block.slab, block.slot, block.generation))
        lease.atexit = False
        if self._keeps_views:
            return base
        copy = base.copy()
        copy.flags.writeable = False
        return copy

    def _view_died(self, key: tuple[int, int, int]) -> None:
        """Runs in whichever thread dropped the last view."""
        self._dead.append(key)
        if not self._flushing and not self._loop.is_closed():
            self._flushing = True
            self._loop.call_soon_threadsafe(self._release_dead)

    def _release_dead(self) -> None:
        self._flushing = False
        while self._dead:
            keys = [self._dead.popleft() for _ in range(min(len(self._dead), _RELEASES))]
            if not self._closed:
                self.send(Release(tuple(keys)))

    # -- closing ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._memory.links.discard(self)
        for _, descriptors in self._backlog:
            _close_all(descriptors)
        self._backlog.clear()
        self._room.set()
        self._mapped.clear()
        lent, self._lent = self._lent, set()
        for key in lent:
            self._memory.pool.give_back(*key)

    def _lost(self) -> None:
        self.close()
        self._receiver.on_closed(self)

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(self._sent, self._received, len(self._backlog), len(self._lent))


def _block_size(encoded: Encoded) -> int:
    return encoded.size + (_aligned(len(encoded.body)) if len(encoded.body) > _BODY_BYTES else 0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _joined(parts: list[tuple[int, Region]], size: int) -> bytes:
    if not parts:
        return b""
    region = bytearray(size)
    for offset, flat in parts:
        region[offset : offset + flat.nbytes] = flat.data
    return bytes(region)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found += memoryview(data[: len(data) - len(data) % 4]).cast("i").tolist()
    return found


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
