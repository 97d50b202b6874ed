"""How messages leave by a socket: one or more of them in a datagram, a msgpack list.

The first message of a turn of the event loop leaves at once; what follows in the same turn leaves together at its end,
and what waits for a slow peer leaves in datagrams as large as may be: a system call and a wake-up cost more than ten
messages.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from omniflow.transport.descriptors import close_all
from omniflow.transport.hot_window import HotWindow

DATAGRAM_BYTES = 128 * 1024
"""The largest message."""
MOST_MESSAGES = 256
"""Of one datagram."""
ONE = b"\x91"
"""The head of a msgpack list of one."""
_MOST_BYTES = DATAGRAM_BYTES - 2
"""Of several messages in a datagram: the head of their list has 3 bytes."""
_FULL_BYTES = 64 * 1024
"""Messages that wait are sent once they fill so much of a datagram."""
_LATE_S = 100e-6
"""In a turn that lasts, what it holds back leaves with the first message that comes so long after the last datagram."""

_NO_MEMORY = errno.ENOBUFS, errno.ENOMEM
"""What the kernel says where it has no memory for a datagram: there is no room for it now."""
_MEMORY_S = 0.001
"""How long such a one waits: its socket is writable all the while, so that would wake the loop at every turn."""


class Datagram(NamedTuple):
    """A msgpack list of messages; `descriptors` travel with a single one."""

    data: bytes
    num_messages: int
    descriptors: Sequence[int]


class DatagramWriter:
    """Sends encoded messages by `connection`, in order. A peer that is gone takes all, and nobody reads them."""

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop, hot_window: HotWindow) -> None:
        self._socket = connection
        self._loop = loop
        self._hot_window = hot_window
        self.sent = 0
        """Messages that have left this process."""
        self.is_refused = False
        """The peer is gone, as a message to it has shown."""
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._turn_ends = False
        self._stuck: deque[Datagram] = deque()
        self.stuck_bytes = 0
        """What waits for the peer to have room."""
        self._last_sent = 0.0
        self._lacks_memory = False
        """The kernel had no memory for the datagram that is stuck."""
        self._room: asyncio.Event = asyncio.Event()
        self._closed = False

    @property
    def backlog(self) -> int:
        """Messages that have not left yet."""
        return len(self._held) + sum(datagram.num_messages for datagram in self._stuck)

    def write(self, data: bytes, descriptors: Sequence[int] = (), more: bool = False) -> None:
        """Send a message now, or at the end of the loop's turn, or once the peer has room. Owns `descriptors`.

        `more`: another one follows at once, so the two may travel together.
        """
        if self._closed:
            close_all(descriptors)
            return
        if not self._turn_ends:
            self._turn_ends = True
            self._loop.call_soon(self._end_turn)
            held = more or bool(self._held or self._stuck)
        else:
            held = more or bool(self._stuck) or time.monotonic() - self._last_sent < _LATE_S
        if descriptors:
            self._send_held()
            self._send(Datagram(ONE + data, 1, descriptors))
        elif held or self._held:
            self._hold(data, held)
        else:
            self._send(Datagram(ONE + data, 1, ()))
        self._hot_window.touch()

    def push(self) -> bool:
        """Send what is held back; False where the peer has no room for all."""
        if not self._stuck:
            self._send_held()
        return not self._stuck and not self._held

    async def flushed(self) -> None:
        """Returns once all has left this process."""
        while not self._closed and not self.push():
            self._room.clear()
            await self._room.wait()

    def close(self) -> None:
        """Send what the peer has room for, and drop the rest. The socket is the caller's."""
        self.push()
        self._closed = True
        self._loop.remove_writer(self._socket.fileno())
        for datagram in self._stuck:
            close_all(datagram.descriptors)
        self._stuck.clear()
        self._held.clear()
        self._room.set()

    def _hold(self, data: bytes, held: bool) -> None:
        """Put a message behind those that wait; together they leave now, unless they are `held` and few."""
        if self._held_bytes + len(data) > _MOST_BYTES:
            self._send_held()
        self._held.append(data)
        self._held_bytes += len(data)
        if not held or self._held_bytes >= _FULL_BYTES or len(self._held) == MOST_MESSAGES:
            self._send_held()

    def _end_turn(self) -> None:
        self._turn_ends = False
        self.push()

    def _send_held(self) -> None:
        """Make what was held back one datagram."""
        if self._held:
            held, self._held, self._held_bytes = self._held, [], 0
            data = b"".join((b"\xdc", len(held).to_bytes(2, "big"), *held)) if len(held) > 1 else ONE + held[0]
            self._send(Datagram(data, len(held), ()))

    def _send(self, datagram: Datagram) -> None:
        """Send now, or once the peer has room."""
        self._last_sent = time.monotonic()
        if self._stuck or not self._sent_now(datagram):
            if not self._stuck:
                self._await_room()
            self._stuck.append(datagram)
            self.stuck_bytes += len(datagram.data)

    def _await_room(self) -> None:
        if self._lacks_memory:
            self._lacks_memory = False
            self._loop.remove_writer(self._socket.fileno())
            self._loop.call_later(_MEMORY_S, self._send_stuck)
        else:
            self._loop.add_writer(self._socket.fileno(), self._send_stuck)

    def _send_stuck(self) -> None:
        """The peer may have room."""
        if self._closed:
            return
        while self._stuck:
            if not self._sent_now(self._stuck[0]):
                self._await_room()
                return
            self.stuck_bytes -= len(self._stuck.popleft().data)
        self._loop.remove_writer(self._socket.fileno())
        self.push()
        self._room.set()

    def _sent_now(self, datagram: Datagram) -> bool:
        """False where the peer has no room now."""
        data, num_messages, descriptors = datagram
        try:
            if descriptors:
                self._send_with(data, descriptors)
            else:
                self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return False
        except (BrokenPipeError, ConnectionResetError):
            # The end of file that follows tells the receiver, in order with what the peer sent before it died.
            self.is_refused = True
        except OSError as error:
            if error.errno not in _NO_MEMORY:
                raise
            self._lacks_memory = True
            return False
        close_all(descriptors)
        self.sent += num_messages
        return True

    def _send_with(self, data: bytes, descriptors: Sequence[int]) -> None:
        """Where the kernel carries no more descriptors (ETOOMANYREFS), the message goes without them: its receiver must
        do without those that it may not open itself, too.
        """
        try:
            socket.send_fds(self._socket, [data], list(descriptors))
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self._socket.send(data)
