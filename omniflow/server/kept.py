"""Values that take long to make: made once for all who ask meanwhile, and kept while there is room for them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

import anyio

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class KeptValues(Generic[K, V]):
    """At most `max_entries` values of at most `max_bytes` (by `size_of`) in all; who was asked for last stays longest.

    A value that is too large to be kept is given to those who wait for it, and made anew for the next.
    """

    def __init__(self, size_of: Callable[[V], int], *, max_entries: int, max_bytes: int) -> None:
        self._size_of = size_of
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._values: OrderedDict[K, V] = OrderedDict()
        self._making: dict[K, _Making[V]] = {}
        self.num_bytes = 0
        """Of all that are kept."""

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    async def get(self, key: K, make: Callable[[], Awaitable[V]], *, within_s: float = math.inf) -> V | None:
        """The value of `key`; `make` is called where there is none, and nobody makes it already. None where somebody
        does, and it has not come `within_s`.

        Raises what `make` does. If it fails or is cancelled, that ends the call it belongs to and no other: of those
        who wait, one makes the value with its own `make`.
        """
        ends_s = anyio.current_time() + within_s
        while key not in self._values:
            making = self._making.get(key)
            if making is None:
                return await self._make(key, make)
            with anyio.CancelScope(deadline=ends_s):
                await making.over.wait()
            if not making.over.is_set():
                return None
            if making.made is not None:
                return making.made[0]
        self._values.move_to_end(key)
        return self._values[key]

    async def _make(self, key: K, make: Callable[[], Awaitable[V]]) -> V:
        making = self._making[key] = _Making[V]()
        try:
            value = await make()
            making.made = (value,)
        finally:
            del self._making[key]
            making.over.set()
        self._keep(key, value)
        return value

    def _keep(self, key: K, value: V) -> None:
        size = self._size_of(value)
        if size > self._max_bytes:
            return
        self._values[key] = value
        self.num_bytes += size
        while len(self._values) > self._max_entries or self.num_bytes > self._max_bytes:
            _, oldest = self._values.popitem(last=False)
            self.num_bytes -= self._size_of(oldest)


class _Making(Generic[V]):
    """One call of `make` that others wait for."""

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.made: tuple[V] | None = None
