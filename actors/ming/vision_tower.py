"""Ming's vision tower: Qwen3-VL's vision transformer, or the preview's, and the projector into the thinker.

The names of modules are those of weights in a checkpoint: `vision.*` and `linear_proj.*`. By inclusionAI, MIT.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from actors.checkpoint import built, read_tensors
from actors.encoding import on_host
from actors.ming.config import Pixels, Vision, VisionConfig
from actors.ming.pixels import Shown
from actors.ming.vision_layers import NORM_EPS, Block, PatchEmbed, patch_order, turns
from actors.ming.window_vision import WindowedEncoder

VISION_PREFIXES = ("vision.", "linear_proj.")
PIECE = 8192
"""Patches whose pixels are floats at a time: 50 MB, and not the 600 MB of a long clip."""


class VisionTower(nn.Module):
    """Patches of images and clips to inputs of the thinker, one for each square of `spatial_merge_size` patches."""

    def __init__(self, config: VisionConfig, pixels: Pixels) -> None:
        super().__init__()
        self.sizes, hidden = config.vision_config, config.llm_config.hidden_size
        self.vision = WindowedEncoder(self.sizes) if self.sizes.is_windowed else _Encoder(self.sizes)
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
        counts = [len(each.values) // self.sizes.spatial_merge_size**2 for each in seen]
        for merged in self.vision.passed(x, [each.grid for each in seen]):
            if merged is None:
                yield None
            else:
                rows = F.normalize(self.linear_proj(merged).float(), dim=-1)
                yield [on_host(each) for each in torch.split(rows, counts)]

    def _inputs(self, seen: Shown) -> torch.Tensor:
        """The patches embedded: [patches, hidden]."""
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
        return torch.cat(embedded)


def _places(table: torch.Tensor, grid: tuple[int, int, int], merge: int) -> torch.Tensor:
    """The learned places, those of a square, stretched to each frame of `grid`."""
    frames, rows, columns = grid
    side = int(len(table) ** 0.5)
    square = table.float().T.reshape(1, -1, side, side)
    stretched = F.interpolate(square, (rows, columns), mode="bilinear", align_corners=True)[0].flatten(1).T
    return stretched[patch_order(rows, columns, merge).to(table.device)].repeat(frames, 1).to(table.dtype)


class _Mlp(nn.Module):
    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(sizes.hidden_size, sizes.intermediate_size)
        self.linear_fc2 = nn.Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
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
        self.patch_embed = PatchEmbed(sizes)
        self.pos_embed = nn.Embedding(sizes.num_position_embeddings, sizes.hidden_size)
        self.blocks = nn.ModuleList(Block(sizes, nn.LayerNorm, _Mlp(sizes)) for _ in range(sizes.depth))
        self.merger = _Merger(sizes)
        self._sizes = sizes

    def passed(self, x: torch.Tensor, grids: Sequence[tuple[int, int, int]]) -> Iterator[torch.Tensor | None]:
        """Gives None after each layer, and in the end the rows [cells, out_hidden_size] of x [patches, hidden]."""
        sizes, table = self._sizes, self.pos_embed.weight
        x = x + torch.cat([_places(table, grid, sizes.spatial_merge_size) for grid in grids])
        cos, sin = (torch.cat(each) for each in zip(*(turns(grid, sizes, x.device) for grid in grids), strict=True))
        lengths = [rows * columns for frames, rows, columns in grids for _ in range(frames)]
        for block in self.blocks:
            x = block(x, cos, sin, lengths)
            yield None
        yield self.merger(x)


def unused_weights(sizes: Vision) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that a checkpoint has beside those of a `VisionTower`.

    They merge the outputs of earlier layers (DeepStack), which Ming's thinker does not read. The preview has none.
    """
    if sizes.is_windowed:
        return {}
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
