"""What entered the graph, kept while a request may have to run again; bounded in bytes over all requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from omniflow.media import Options
from omniflow.transport.codec import encode


class Kept(NamedTuple):
    """What one request entered with: the caller's own objects, not copies."""

    items: Sequence[object]
    options: Options
    size_bytes: int


class KeptInputs:
    """Keeps inputs up to `limit_bytes`; what does not fit is not kept, and its request cannot run again."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def keep(self, items: Sequence[object], options: Options) -> Kept | None:
        """Keep what a request enters with, if there is room. None too where it could not enter at all."""
        try:
            size_bytes = sum(encoded.num_bytes for encoded in map(encode, items))
        except Exception:  # noqa: BLE001 - code of the caller's types: it is told where the request enters
            return None
        if self.held_bytes + size_bytes > self._limit_bytes:
            return None
        self.held_bytes += size_bytes
        return Kept(items, options, size_bytes)

    def drop(self, kept: Kept) -> None:
        """Forget what `keep` gave."""
        self.held_bytes -= kept.size_bytes
