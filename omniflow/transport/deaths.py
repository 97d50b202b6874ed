"""Tells the event loop, in batches, which owners of memory have died: the last view of one may die in any thread."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable

Key = tuple[int, int, int]
"""What a death is reported as: (slab, slot, generation)."""


class _Watch(weakref.ref[object]):
    """A weak reference that knows what it stands for; `weakref.finalize` costs 1.4 us an array, this 0.7."""

    __slots__ = ("key",)

    key: Key


class Deaths:
    """Watches owners of memory; `report` is called in `loop`, once for all that have died since its last turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[list[Key]], None]) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._report = report
        self._watches: dict[int, _Watch] = {}
        self._dead: list[Key] = []
        self._reporting = False

    def watch(self, owner: object, key: Key) -> None:
        """Report `key` once `owner`, which its views hold (a numpy array, mostly), and all of them have died."""
        watch = _Watch(owner, self._died)
        watch.key = key
        self._watches[id(watch)] = watch

    def _died(self, watch: weakref.ref[object]) -> None:
        assert isinstance(watch, _Watch)
        del self._watches[id(watch)]
        self._dead.append(watch.key)
        if not self._reporting and not self._loop.is_closed():
            self._reporting = True
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._tell)
            else:
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._reporting = False
        dead = self._dead.copy()
        del self._dead[: len(dead)]
        self._report(dead)
