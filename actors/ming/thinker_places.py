"""Where the inputs of the thinker are in time, height and width: `EngineRequest.places`.

A text counts up on all three, an image stands at one time, and what follows goes on after the largest position so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch


class Grid(msgspec.Struct, frozen=True):
    """An image or a video of `frames` by `rows` by `columns` inputs, as they are after the vision tower's merging.

    A prompt that names each frame's time has a grid of 1 frame for each. Otherwise one frame is `frame_step` positions
    after the one before: seconds from frame to frame times the model's positions per second (2 of Ming's).
    """

    frames: int
    rows: int
    columns: int
    frame_step: float = 1.0

    @property
    def size(self) -> int:
        """How many inputs it is."""
        return self.frames * self.rows * self.columns


def places(parts: Sequence[int | Grid]) -> torch.Tensor:
    """int64 [3, n] for a prompt of `parts`: a number stands for as many inputs of text or audio."""
    start, pieces = 0, [torch.empty(3, 0, dtype=torch.long)]
    for part in parts:
        size = part.size if isinstance(part, Grid) else part
        if size == 0:
            continue
        piece = _grid(part) if isinstance(part, Grid) else torch.arange(part).expand(3, -1)
        pieces.append(piece + start)
        start += int(piece.max()) + 1
    return torch.cat(pieces, dim=1)


def _grid(grid: Grid) -> torch.Tensor:
    times = (torch.arange(grid.frames, dtype=torch.float64) * grid.frame_step).long()
    axes = torch.meshgrid(times, torch.arange(grid.rows), torch.arange(grid.columns), indexing="ij")
    return torch.stack(axes).flatten(1)
