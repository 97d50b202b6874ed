"""What both vision transformers of Ming have: patches embedded, and attention that turns with their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from actors.attention import attend_apart
from actors.ming.config import Vision

NORM_EPS = 1e-6
ROPE_THETA = 10000.0


def patch_order(rows: int, columns: int, merge: int) -> torch.Tensor:
    """Which patch of a frame comes when, counted row by row: those that are merged follow each other."""
    squares = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    return squares.transpose(1, 2).flatten()


def turns(grid: tuple[int, int, int], sizes: Vision, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [patches, 1, head_dim] by which queries and keys turn: half of them with the row, half with the
    column. The sign of the half-turned part is in the sines.
    """
    frames, rows, columns = grid
    order = patch_order(rows, columns, sizes.spatial_merge_size).to(device)
    dim = sizes.hidden_size // sizes.num_heads
    inverse = 1.0 / ROPE_THETA ** (torch.arange(0, dim // 2, 2, dtype=torch.float32) / (dim // 2))
    angles = torch.stack([order // columns, order % columns], dim=1)[:, :, None] * inverse.to(device)
    angles = angles.flatten(1)[:, None].repeat(frames, 1, 1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


class PatchEmbed(nn.Module):
    """Holds the weights by which pixels of a patch become its embedding."""

    def __init__(self, sizes: Vision, *, bias: bool = True) -> None:
        super().__init__()
        kernel = (sizes.temporal_patch_size, sizes.patch_size, sizes.patch_size)
        self.proj = nn.Conv3d(sizes.in_channels, sizes.hidden_size, kernel, kernel, bias=bias)


class Attention(nn.Module):
    """Patches [n, hidden] of one span attend to each other; `lengths` are those of the spans, one behind the other."""

    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self.qkv = nn.Linear(sizes.hidden_size, 3 * sizes.hidden_size)
        self.proj = nn.Linear(sizes.hidden_size, sizes.hidden_size)
        self._heads = sizes.num_heads

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        query, key, value = self.qkv(x).view(len(x), 3, self._heads, -1).unbind(1)
        query, key = (_turned(each, cos, sin) for each in (query, key))
        attended: torch.Tensor = self.proj(attend_apart(query, key, value, lengths).flatten(1))
        return attended


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned = x * cos + x.roll(x.shape[-1] // 2, -1) * sin  # in float32, as `cos` is
    return turned.to(x.dtype)


class Block(nn.Module):
    """A layer over patches [n, hidden]: attention and `mlp`, each behind a norm that `norm` makes."""

    def __init__(self, sizes: Vision, norm: Callable[[int, float], nn.Module], mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(sizes.hidden_size, NORM_EPS), norm(sizes.hidden_size, NORM_EPS)
        self.attn = Attention(sizes)
        self.mlp = mlp

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, lengths)
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y
