"""The event loops that are measured: what `omniflow run` takes (uvloop, where it is installed), and asyncio's own."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable

Factory = Callable[[], asyncio.AbstractEventLoop]
ASYNCIO = " (asyncio)"
"""Added to the name of what was measured on asyncio's own loop."""


def loops() -> dict[str, Factory]:
    """Each loop by what it adds to a name."""
    found: dict[str, Factory] = {ASYNCIO: asyncio.new_event_loop}
    if importlib.util.find_spec("uvloop") is None:
        return found
    import uvloop

    return {"": uvloop.new_event_loop} | found


def loaned(name: str) -> str:
    """What a system is called where stages write in place: `omniflow (asyncio)` is `omniflow, loaned (asyncio)`."""
    system, bracket, loop = name.partition(" (")
    return f"{system}, loaned{bracket}{loop}"
