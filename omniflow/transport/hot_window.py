"""A short time after traffic in which the event loop does not sleep, because more traffic is likely.

A sleeping process needs 40-60 us to wake up; one that still looks answers in 5-10. The window is kept open by one
callback that schedules itself, so the selector never waits, and everything else in the loop runs as always. It adapts:
each message that comes within it doubles it, a window in which none came halves it, and when that has happened often
it stays shut, but for a try now and then. Without traffic nothing runs.
"""

from __future__ import annotations

import asyncio
import time

_SHORTEST_S = 20e-6
_TRY_EVERY = 16
"""Messages after which a window that did not pay is tried again."""


class HotWindow:
    """One for each process, for all of its links; at most `longest_s` long, and none where that is 0."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self.length_s = longest_s
        """How long the next window stays open without traffic."""
        self._until = 0.0
        self.is_open = False
        self._paid = False
        self._closed_for = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keep `loop` from sleeping, from now on."""
        if self._longest_s > 0:
            self._loop = loop

    def hit(self) -> None:
        """Something came: if the window was open for it, it pays."""
        if self.is_open:
            self._paid = True
            if self.length_s < self._longest_s:
                self.length_s = min(2 * self.length_s, self._longest_s)
        self.touch()

    def touch(self) -> None:
        """There is traffic: look for more."""
        if self._loop is None:
            return
        if self.is_open:
            self._until = time.monotonic() + self.length_s
        elif self._closed_for > 0:
            self._closed_for -= 1
        else:
            self.is_open = True
            self._paid = False
            self._until = time.monotonic() + self.length_s
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        assert self._loop is not None
        if time.monotonic() < self._until:
            self._loop.call_soon(self._look)
            return
        self.is_open = False
        if self._paid:
            return
        self.length_s /= 2
        if self.length_s < _SHORTEST_S:
            self.length_s = min(2 * _SHORTEST_S, self._longest_s)
            self._closed_for = _TRY_EVERY
