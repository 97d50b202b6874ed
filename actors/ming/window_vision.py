"""The vision transformer of Ming-flash-omni-preview, which is Qwen2.5-VL's: most layers see windows of a frame only.

The names of modules are those of weights in a checkpoint, below `vision.`. Patches have no learned places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from actors.ming.config import Vision
from actors.ming.vision_layers import NORM_EPS, Block, PatchEmbed, turns


class Windows(NamedTuple):
    """Which patches attend to each other: those of a window, which are near in a frame.

    `order` [cells] has the cells (squares of patches that become one row) window by window, windows of one size behind
    each other, so that they attend in one call. `lengths` are the patches of each window.
    """

    order: torch.Tensor
    lengths: list[int]


class WindowedEncoder(nn.Module):
    """Embedded patches to rows [cells, out_hidden_size]."""

    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(sizes, bias=False)
        self.blocks = nn.ModuleList(Block(sizes, nn.RMSNorm, _Mlp(sizes)) for _ in range(sizes.depth))
        self.merger = _Merger(sizes)
        self._sizes = sizes

    def passed(self, x: torch.Tensor, grids: Sequence[tuple[int, int, int]]) -> Iterator[torch.Tensor | None]:
        """Gives None after each layer, and in the end the rows, in the order of the patches x [patches, hidden]."""
        sizes, square = self._sizes, self._sizes.spatial_merge_size**2
        near = windows(grids, sizes)
        to_windows = near.order.to(x.device)
        to_frames = to_windows.argsort()
        cos, sin = (torch.cat(each) for each in zip(*(turns(grid, sizes, x.device) for grid in grids), strict=True))
        near_turns = [_in_order(each, to_windows, square) for each in (cos, sin)]
        frames = [rows * columns for count, rows, columns in grids for _ in range(count)]
        x = _in_order(x, to_windows, square)
        for number, block in enumerate(self.blocks):
            if number in sizes.fullatt_block_indexes:
                whole = block(_in_order(x, to_frames, square), cos, sin, frames)
                x = _in_order(whole, to_windows, square)
            else:
                x = block(x, *near_turns, near.lengths)
            yield None
        yield self.merger(x)[to_frames]


def windows(grids: Sequence[tuple[int, int, int]], sizes: Vision) -> Windows:
    """Of frames, one behind the other, their cells row by row; those at the right and lower end may be smaller."""
    merge = sizes.spatial_merge_size
    side = sizes.window_size // sizes.cell
    found: list[torch.Tensor] = []
    first = 0
    for count, high, wide in grids:
        rows, columns = high // merge, wide // merge
        for _ in range(count):
            cells = torch.arange(first, first + rows * columns).view(rows, columns)
            found += [part.flatten() for strip in torch.split(cells, side) for part in torch.split(strip, side, 1)]
            first += rows * columns
    found.sort(key=len)
    return Windows(torch.cat(found), [len(each) * merge**2 for each in found])


def _in_order(x: torch.Tensor, order: torch.Tensor, square: int) -> torch.Tensor:
    """The patches [patches, ...] of cells in another order of these."""
    return x.view(-1, square, *x.shape[1:])[order].flatten(0, 1)


class _Mlp(nn.Module):
    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class _Merger(nn.Module):
    """Squares of patches become one: [patches, hidden] -> [patches / merge ** 2, out_hidden]."""

    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        merged = sizes.hidden_size * sizes.spatial_merge_size**2
        self._merged = merged
        self.ln_q = nn.RMSNorm(sizes.hidden_size, NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, sizes.out_hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(self.ln_q(x).view(-1, self._merged))
        return y
