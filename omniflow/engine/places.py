"""Where the inputs of one request are, and of which kind: those of its prompt as it says, those of its answer after."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from omniflow.engine.base import EngineRequest


class Places:
    """`places` int64 [3, n] and `kinds` uint8 [n] of a prompt as in `EngineRequest`, of any number of inputs."""

    def __init__(self, places: torch.Tensor | None, kinds: torch.Tensor | None) -> None:
        self._places = torch.empty(3, 0, dtype=torch.long) if places is None else places
        self._kinds = torch.empty(0, dtype=torch.uint8) if kinds is None else kinds
        self.shift = int(self._places[0].max()) + 1 - self._places.shape[1] if self._places.numel() else 0
        """How far the places of an answer are from its positions: they go on after the last time, as base.py says."""
        length = self._places.shape[1]
        self.plain = not self._kinds.any() and bool((self._places == torch.arange(length)).all())
        """True where all is of the kind 0 and at its own position: a text needs no more than its tokens."""

    def places(self, start: int, end: int) -> torch.Tensor:
        """Positions in time, height and width of the inputs [start, end): int64 [3, end - start]."""
        length = self._places.shape[1]
        later = torch.arange(max(start, length), max(end, length)) + self.shift
        return torch.cat([self._places[:, start:end], later.expand(3, -1)], dim=1)

    def kinds(self, start: int, end: int) -> torch.Tensor:
        """Which of the model's kinds each of the inputs [start, end) is: uint8 [end - start]."""
        known = self._kinds[start:end]
        return F.pad(known, (0, end - start - len(known)))


PLAIN = Places(None, None)
"""Of a text: each token at its own position."""


def places_of(request: EngineRequest) -> Places:
    """Those of a prompt. What tells nothing is `PLAIN`, as nearly all are: to look at its tensors takes 15 µs."""
    if request.places is None and request.kinds is None:
        return PLAIN
    return Places(request.places, request.kinds)
