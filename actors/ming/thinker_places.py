"""Where the inputs of the thinker are in time, height and width: `EngineRequest.places`.

A text counts up on all three. Each frame of an image or a clip stands at one time, its middle on the diagonal that the
text goes along, so that its upper and left half lies before that time; what follows goes on after the last time.

So Ming's own code has it (Apache-2.0, github.com/inclusionAI/Ming, modeling_bailing_moe_v2.py: a rope of the type
video_rope), and SGLang's for its checkpoints. The same prompt with its frames' corners on the diagonal, as Qwen2-VL has
them, is another to the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

FRAME_STEP = 2
"""Positions from one frame of a clip to the next, whatever time is between them. Two frames of a film are one here."""


class Grid(msgspec.Struct, frozen=True):
    """An image or a clip of `frames` by `rows` by `columns` inputs, as they are after the vision tower's merging."""

    frames: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """How many inputs it is."""
        return self.frames * self.rows * self.columns


def places(parts: Sequence[int | Grid]) -> np.ndarray:
    """int64 [3, n] for a prompt of `parts`: a number stands for as many inputs of text or audio."""
    start, pieces = 0, [np.empty((3, 0), np.int64)]
    for part in parts:
        if isinstance(part, Grid):
            piece, length = _grid(part), (part.frames - 1) * FRAME_STEP + 1
        else:
            piece, length = np.broadcast_to(np.arange(part), (3, part)), part
        pieces.append(piece + start)
        start += length
    return np.concatenate(pieces, axis=1)


def _grid(grid: Grid) -> np.ndarray:
    time, row, column = np.indices((grid.frames, grid.rows, grid.columns)).reshape(3, -1)
    time *= FRAME_STEP
    return np.stack([time, time + row - (grid.rows - 1) // 2, time + column - (grid.columns - 1) // 2])
