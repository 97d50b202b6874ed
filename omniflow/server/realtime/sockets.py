"""The sessions that are open: how many, and their end when the server drains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio


class Sockets:
    """Knows every open session; one for a server."""

    def __init__(self) -> None:
        self._leave: set[Callable[[], None]] = set()
        self._changed = anyio.Event()
        self.draining = False

    @property
    def num_open(self) -> int:
        """Sessions that are open."""
        return len(self._leave)

    @contextmanager
    def opened(self, leave: Callable[[], None]) -> Iterator[None]:
        """Counts a session while the block runs; `leave` is called when it is to end by itself."""
        self._leave.add(leave)
        try:
            yield
        finally:
            self._leave.discard(leave)
            self._changed.set()
            self._changed = anyio.Event()

    async def drain(self, within_s: float) -> None:
        """Take no more sessions, and let the open ones end what they say; returns then, or after `within_s`."""
        self.draining = True
        for leave in list(self._leave):
            leave()
        with anyio.move_on_after(within_s):
            while self._leave:
                await self._changed.wait()
