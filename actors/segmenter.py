"""Cuts running text into pieces that can be spoken one after the other, the first as early as it makes sense."""

from __future__ import annotations

import math
from typing import Annotated

import anyio
from msgspec import Meta

from actors.roles import SegmenterRole
from omniflow.actor import Context, Count, Emit, Stream
from omniflow.media import Segment, TextDelta

LETTERS_PER_S = 14.0
"""How fast a voice speaks, in Latin letters (4.7 Chinese characters)."""


class Segmenter(SegmenterRole):
    """Sizes are in Latin letters; an ideograph counts as 3, since it takes as long to say.

    The first segment ends with a sentence of a quarter of `first_size`, a clause of half of it, or the word that
    reaches it (about 5 words); later ones with sentences of at least `first_size` or clauses of three times as much,
    so that speech sounds natural. None is larger than `max_size`.

    Where text comes slowly, a segment ends with the words that are here: the first `first_wait_s` after its first text,
    later ones `lead_s` (what the talker needs) before the speech so far is over, so that the player does not run dry.
    When that is goes by `letters_per_s`, how fast the voice speaks: too few, and the player runs dry.
    """

    timed = True

    def __init__(
        self,
        *,
        first_size: Count = 24,
        max_size: Count = 200,
        first_wait_s: float = 0.35,
        lead_s: float = 0.5,
        letters_per_s: Annotated[float, Meta(gt=0)] = LETTERS_PER_S,
    ) -> None:
        self._first_size = first_size
        self._max_size = max_size
        self._first_wait_s = first_wait_s
        self._lead_s = lead_s
        self._letters_per_s = letters_per_s

    async def setup(self) -> None:
        # Imports `regex`, so not at the top: a graph is checked and explained without it.
        from actors import cutting

        self._find_cut = cutting.find_cut
        self._size_of = cutting.size_of

    async def run(self, text: Stream[TextDelta], emit: Emit[Segment], ctx: Context) -> None:
        letters_per_s = self._letters_per_s * max(0.1, ctx.options.speed)  # the talker refuses what is out of range
        pace = _Pace(self._first_wait_s, self._lead_s, letters_per_s)
        buffer, index, late, ended = "", 0, False, False
        while not ended:
            # `Stream` loses nothing when a receive is cancelled: an item is taken out after the last wait.
            with anyio.CancelScope(deadline=math.inf if late else pace.due_s) as limit:
                delta = await anext(text, None)
                ended = delta is None
                if delta is not None and delta.text:
                    buffer += delta.text
                    pace.text_came()
            late = late or limit.cancelled_caught
            while buffer and (cut := self._cut(buffer, index, late, ended)) is not None:
                await emit.send(Segment(buffer[:cut], index))
                pace.spoke(self._size_of(buffer[:cut], figure=1))  # at least
                buffer, index, late = buffer[cut:], index + 1, False

    def _cut(self, buffer: str, index: int, late: bool, ended: bool) -> int | None:
        cut = self._find_cut(buffer, limits(index, self._first_size), self._max_size, late)
        return len(buffer) if cut is None and ended else cut


def limits(index: int, first_size: int) -> tuple[int, int, int, int]:
    """From which size on segment `index` may end with a character, a word, a clause, a sentence."""
    if index == 0:
        return 3 * first_size // 2, first_size, first_size // 2, first_size // 4
    return 9 * first_size, 6 * first_size, 3 * first_size, first_size


class _Pace:
    """When the next segment is due: early for the first, before the speech so far is over for others."""

    def __init__(self, first_wait_s: float, lead_s: float, letters_per_s: float) -> None:
        self._first_wait_s = first_wait_s
        self._lead_s = lead_s
        self._letters_per_s = letters_per_s
        self._spoken_until_s: float | None = None
        self.due_s = math.inf

    def text_came(self) -> None:
        if self._spoken_until_s is None and self.due_s == math.inf:
            self.due_s = anyio.current_time() + self._first_wait_s

    def spoke(self, size: int) -> None:
        now = anyio.current_time()
        began = now + self._lead_s if self._spoken_until_s is None else max(now, self._spoken_until_s)
        self._spoken_until_s = began + size / self._letters_per_s
        self.due_s = self._spoken_until_s - self._lead_s
