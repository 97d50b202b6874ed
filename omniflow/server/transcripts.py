"""What was said in earlier turns, by the audio id that the client got for it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec


class _Kept(msgspec.Struct, frozen=True):
    transcript: str
    expires_at: int


class Transcripts:
    """Keeps the last `max_items` transcripts, each for `lifetime_s` seconds; the oldest goes first."""

    def __init__(self, max_items: int = 4096, lifetime_s: int = 3600, clock: Callable[[], float] = time.time) -> None:
        self._max_items = max_items
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def keep(self, audio_id: str, transcript: str) -> int:
        """Remember what `audio_id` said. Returns when it will be forgotten, in Unix seconds."""
        expires_at = int(self._clock()) + self._lifetime_s
        self._kept[audio_id] = _Kept(transcript, expires_at)
        while len(self._kept) > self._max_items:
            self._kept.popitem(last=False)
        return expires_at

    def find(self, audio_id: str) -> str | None:
        """What `audio_id` said; None where it is unknown or forgotten."""
        kept = self._kept.get(audio_id)
        if kept is None or kept.expires_at <= self._clock():
            return None
        self._kept.move_to_end(audio_id)
        return kept.transcript
