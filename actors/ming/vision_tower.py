"""Ming's vision tower: Qwen3-VL's vision transformer, and the projector into the thinker.

The names of modules are those of weights in a checkpoint: `vision.*` and `linear_proj.*`. By inclusionAI, MIT.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from actors.attention import attend_apart
from actors.checkpoint import built, read_tensors
from actors.encoding import on_host
from actors.ming.config import Pixels, Vision, VisionConfig
from actors.ming.pixels import Shown

VISION_PREFIXES = ("vision.", "linear_proj.")
NORM_EPS = 1e-6
ROPE_THETA = 10000.0
PIECE = 8192
"""Patches whose pixels are floats at a time: 50 MB, and not the 600 MB of a long clip."""


class VisionTower(nn.Module):
    """Patches of images and clips to inputs of the thinker, one for each square of `spatial_merge_size` patches."""

    def __init__(self, config: VisionConfig, pixels: Pixels) -> None:
        super().__init__()
        self.sizes, hidden = config.vision_config, config.llm_config.hidden_size
        self.vision = _Encoder(self.sizes)
        layers: list[nn.Module] = [nn.Linear(self.sizes.out_hidden_size, hidden)]
        for _ in range(1, config.mlp_depth):
            layers += [nn.GELU(), nn.Linear(hidden, hidden)]
        self.linear_proj = nn.Sequential(*layers)
        self._pixels = pixels

    @torch.inference_mode()
    def rows(self, seen: Sequence[Shown]) -> Iterator[list[np.ndarray] | None]:
        """Gives None after each layer, and in the end the rows float32 [num_rows, hidden] of each, all of length 1.

        An image or a clip has the same rows in any company.
        """
        # Frames of as many patches, whoever sent them, attend in one call.
        order = sorted(range(len(seen)), key=lambda at: seen[at].grid[1] * seen[at].grid[2])
        for passed in self._pass([seen[at] for at in order]):
            if passed is None:
                yield None
            else:
                found = dict(zip(order, passed, strict=True))
                yield [found[at] for at in range(len(seen))]

    def _pass(self, seen: Sequence[Shown]) -> Iterator[list[np.ndarray] | None]:
        x = torch.cat([self._inputs(each) for each in seen])
        turns = [_turns(each.grid, self.sizes, x.device) for each in seen]
        cos, sin = (torch.cat(each) for each in zip(*turns, strict=True))
        lengths = [rows * columns for frames, rows, columns in (each.grid for each in seen) for _ in range(frames)]
        for block in self.vision.blocks:
            x = block(x, cos, sin, lengths)
            yield None
        rows = F.normalize(self.linear_proj(self.vision.merger(x)).float(), dim=-1)
        square = self.sizes.spatial_merge_size**2
        counts = [len(each.values) // square for each in seen]
        yield [on_host(each) for each in torch.split(rows, counts)]

    def _inputs(self, seen: Shown) -> torch.Tensor:
        """The patches embedded, and where each is in its frame: [patches, hidden]."""
        proj = self.vision.patch_embed.proj
        mean, std = (
            torch.tensor(each, device=proj.weight.device)[:, None]
            for each in (self._pixels.image_mean, self._pixels.image_std)
        )
        embedded = []
        for start in range(0, len(seen.values), PIECE):
            piece = torch.from_numpy(seen.values[start : start + PIECE])
            colours = piece.to(proj.weight.device).view(len(piece), len(mean), -1)
            shown = ((colours.float() / 255 - mean) / std).to(proj.weight.dtype)
            embedded.append(F.linear(shown.flatten(1), proj.weight.flatten(1), proj.bias))
        return torch.cat(embedded) + _places(self.vision.pos_embed.weight, seen.grid, self.sizes.spatial_merge_size)


def patch_order(rows: int, columns: int, merge: int) -> torch.Tensor:
    """Which patch of a frame comes when, counted row by row: those that are merged follow each other."""
    squares = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    return squares.transpose(1, 2).flatten()


def _places(table: torch.Tensor, grid: tuple[int, int, int], merge: int) -> torch.Tensor:
    """The learned places, those of a square, stretched to each frame of `grid`."""
    frames, rows, columns = grid
    side = int(len(table) ** 0.5)
    square = table.float().T.reshape(1, -1, side, side)
    stretched = F.interpolate(square, (rows, columns), mode="bilinear", align_corners=True)[0].flatten(1).T
    return stretched[patch_order(rows, columns, merge).to(table.device)].repeat(frames, 1).to(table.dtype)


def _turns(grid: tuple[int, int, int], sizes: Vision, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
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


class _PatchEmbed(nn.Module):
    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        kernel = (sizes.temporal_patch_size, sizes.patch_size, sizes.patch_size)
        self.proj = nn.Conv3d(sizes.in_channels, sizes.hidden_size, kernel, kernel)


class _Attention(nn.Module):
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


class _Mlp(nn.Module):
    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(sizes.hidden_size, sizes.intermediate_size)
        self.linear_fc2 = nn.Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
        return y


class _Block(nn.Module):
    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.hidden_size, NORM_EPS)
        self.norm2 = nn.LayerNorm(sizes.hidden_size, NORM_EPS)
        self.attn = _Attention(sizes)
        self.mlp = _Mlp(sizes)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, lengths)
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


class _Merger(nn.Module):
    """Squares of patches become one: [patches, hidden] -> [patches / merge ** 2, out_hidden]."""

    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self._merged = sizes.hidden_size * sizes.spatial_merge_size**2
        self.norm = nn.LayerNorm(sizes.hidden_size, NORM_EPS)
        self.linear_fc1 = nn.Linear(self._merged, self._merged)
        self.linear_fc2 = nn.Linear(self._merged, sizes.out_hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear_fc2(F.gelu(self.linear_fc1(self.norm(x).view(-1, self._merged))))
        return y


class _Encoder(nn.Module):
    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self.patch_embed = _PatchEmbed(sizes)
        self.pos_embed = nn.Embedding(sizes.num_position_embeddings, sizes.hidden_size)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.depth))
        self.merger = _Merger(sizes)


def unused_weights(sizes: Vision) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that a checkpoint has beside those of a `VisionTower`.

    They merge the outputs of earlier layers (DeepStack), which Ming's thinker does not read.
    """
    merged = sizes.hidden_size * sizes.spatial_merge_size**2
    shapes: dict[str, tuple[int, ...]] = {
        "norm.weight": (merged,),
        "norm.bias": (merged,),
        "linear_fc1.weight": (merged, merged),
        "linear_fc1.bias": (merged,),
        "linear_fc2.weight": (sizes.out_hidden_size, merged),
        "linear_fc2.bias": (sizes.out_hidden_size,),
    }
    return {
        f"vision.deepstack_merger_list.{number}.{name}": shape
        for number in range(len(sizes.deepstack_visual_indexes))
        for name, shape in shapes.items()
    }


def load_vision_tower(folder: Path) -> VisionTower:
    """The tower of the checkpoint in `folder`, as it is stored, on the CPU. Raises WeightsError."""
    config, pixels = VisionConfig.load(folder), Pixels.load(folder)
    weights, unused = read_tensors(folder, VISION_PREFIXES), unused_weights(config.vision_config)
    used = {name: each for name, each in weights.items() if name not in unused}
    return built(lambda: VisionTower(config, pixels), used, "the vision tower")
