"""What was said in earlier turns, by the audio id that the client got for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec


class _Kept(msgspec.Struct, frozen=True):
    audio_id: str
    transcript: str
    expires_at: int


class Transcripts:
    """Keeps transcripts for `lifetime_s` seconds each, but no more than `max_chars` characters: the oldest go first.

    Each counts `OVERHEAD_CHARS` more than its text, so that empty ones are bounded, too. The default is room for
    100 000 answers of a minute.
    """

    OVERHEAD_CHARS = 500

    def __init__(self, max_chars: int = 2**26, lifetime_s: int = 3600, clock: Callable[[], float] = time.time) -> None:
        self._max_chars = max_chars
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._by_age: deque[_Kept] = deque()
        self._by_id: dict[str, _Kept] = {}
        self._num_chars = 0

    def keep(self, audio_id: str, transcript: str) -> int:
        """Remember what `audio_id` said. Returns when it will be forgotten, in Unix seconds."""
        now = self._clock()
        kept = _Kept(audio_id, transcript, int(now) + self._lifetime_s)
        self._by_age.append(kept)
        self._by_id[audio_id] = kept
        self._num_chars += self._size(kept)
        while self._by_age and (self._num_chars > self._max_chars or self._by_age[0].expires_at <= now):
            self._forget_oldest()
        return kept.expires_at

    def find(self, audio_id: str) -> str | None:
        """What `audio_id` said; None where it is unknown or forgotten."""
        kept = self._by_id.get(audio_id)
        return kept.transcript if kept is not None and kept.expires_at > self._clock() else None

    def _forget_oldest(self) -> None:
        oldest = self._by_age.popleft()
        self._num_chars -= self._size(oldest)
        if self._by_id[oldest.audio_id] is oldest:
            del self._by_id[oldest.audio_id]

    def _size(self, kept: _Kept) -> int:
        return len(kept.transcript) + self.OVERHEAD_CHARS
