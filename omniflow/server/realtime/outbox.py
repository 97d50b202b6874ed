"""What is to be sent on one socket, in order, and bounded: who makes more of it waits until there is room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import anyio
import msgspec

from omniflow.server.realtime.server_events import ServerEvent

_ROOM_BYTES = 256 * 1024
"""Beyond which responses wait: 4 s of 24 kHz PCM in base64, some of it always ready when the socket is."""
_ACKNOWLEDGED_BYTES = 1024 * 1024
"""Beyond which the client is not read any more. More than the above: one that sends much before it reads is no knot."""


class Outbox:
    """A queue of encoded events, with one reader."""

    def __init__(self) -> None:
        self._messages: deque[str] = deque()
        self._num_bytes = 0
        self._filled = anyio.Event()
        self._emptied = anyio.Event()

    @property
    def empty(self) -> bool:
        """True while nothing waits."""
        return not self._messages

    def put(self, events: Iterable[ServerEvent]) -> None:
        """Append; the values of events are as of now."""
        for event in events:
            message = msgspec.json.encode(event).decode()
            self._messages.append(message)
            self._num_bytes += len(message)
        if self._messages:
            self.wake()

    def wake(self) -> None:
        """Let the reader look, whether there is something or not."""
        self._filled.set()

    def take(self) -> str:
        """The oldest message; its room is free."""
        message = self._messages.popleft()
        self._num_bytes -= len(message)
        self._emptied.set()
        return message

    async def filled(self) -> None:
        """Returns after the next `put` or `wake`, or at once where one came since the last time."""
        await self._filled.wait()
        self._filled = anyio.Event()

    async def room_for_responses(self) -> None:
        """Returns once there is room for more of a response."""
        await self._below(_ROOM_BYTES)

    async def room_for_replies(self) -> None:
        """Returns once there is room for what the client's next message brings."""
        await self._below(_ACKNOWLEDGED_BYTES)

    async def _below(self, limit: int) -> None:
        while self._num_bytes > limit:
            if self._emptied.is_set():  # else others wait for the same event
                self._emptied = anyio.Event()
            await self._emptied.wait()
