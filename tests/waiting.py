"""How long tests wait for what must come, and an event loop whose clock does not wait for the machine's."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

import anyio

HANGS_S = 60.0
"""What has not come by then never will: two cores at a load of 10 have taken 20 s for what else takes 2."""


async def until(holds: Callable[[], Any]) -> None:
    """Let the event loop run until `holds()`, for what no event tells. Raises TimeoutError where it never does."""
    with anyio.fail_after(HANGS_S):
        while not holds():
            await anyio.sleep(0.001)


class _Skips(selectors.DefaultSelector):
    """Gives what is ready; where nothing is, the time until the next timer has passed at once."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return super().select()
        ready = super().select(0)
        if not ready:
            self.now_s += timeout
        return ready


class SkippingLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while anything runs, and jumps to the next timer where nothing does.

    So what takes 0.1 s by its timers takes exactly 0.1 s, however busy the machine is. Not for what waits for a thread,
    a process or the network while a timer runs: the clock does not wait for them.
    """

    def __init__(self) -> None:
        self._skips = _Skips()
        super().__init__(self._skips)

    def time(self) -> float:
        return self._skips.now_s


exact_time = ("asyncio", {"loop_factory": SkippingLoop})
"""For the fixture `anyio_backend`."""
