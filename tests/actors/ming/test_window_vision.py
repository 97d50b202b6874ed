"""The preview's eyes see what transformers' Qwen2.5-VL sees, whose weights have the same names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from actors.ming.config import Pixels, Vision, VisionConfig
from actors.ming.pixels import Shown
from actors.ming.seeing import MingImageEncoder
from actors.ming.tensors import vision_shapes
from actors.ming.vision_tower import VisionTower, load_vision_tower
from actors.ming.window_vision import windows
from omniflow.errors import WeightsError
from omniflow.media import Images
from tests.actors.ming import towers
from tests.actors.ming.reference import apart
from tests.actors.ming.test_vision_tower import patches, rows_of
from tests.actors.ming.towers import HIDDEN, PIXELS, random_tower, watched_attention
from tests.actors.test_pictures import encoded

VISION: dict[str, Any] = {
    **towers.VISION,
    "model_type": "qwen2_5_vit",
    "window_size": 32,
    "fullatt_block_indexes": [1, 3],
    "hidden_act": "silu",
}
CONFIG: dict[str, Any] = {"llm_config": {"hidden_size": HIDDEN}, "mlp_depth": 2, "vision_config": VISION}
GRIDS = [(1, 2, 2), (1, 8, 8), (1, 14, 14), (1, 10, 2), (3, 4, 18), (2, 6, 6)]
"""A window is 4 x 4 cells of 2 x 2 patches."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("preview")
    tower = random_tower(VisionTower(msgspec.convert(CONFIG, VisionConfig), Pixels()))
    save_file(tower.state_dict(), found / "model.safetensors")
    (found / "config.json").write_text(json.dumps(CONFIG))
    (found / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return found


@pytest.fixture(scope="module")
def tower(folder: Path) -> VisionTower:
    return load_vision_tower(folder)


@torch.no_grad()
def reference_rows(folder: Path, seen: Sequence[Shown]) -> torch.Tensor:
    weights = load_file(folder / "model.safetensors")
    config = Qwen2_5_VLVisionConfig(**{**VISION, "model_type": "qwen2_5_vl", "attn_implementation": "sdpa"})
    model = Qwen2_5_VisionTransformerPretrainedModel(config)
    model.load_state_dict({name.removeprefix("vision."): each for name, each in weights.items() if "vision." in name})
    mean, std = (torch.tensor(PIXELS[name]).repeat_interleave(32) for name in ("image_mean", "image_std"))
    pixels = torch.cat([torch.from_numpy(each.values) for each in seen]).float() / 255
    merged = model((pixels - mean) / std, torch.tensor([each.grid for each in seen])).pooler_output
    x = F.linear(merged, weights["linear_proj.0.weight"], weights["linear_proj.0.bias"])
    x = F.linear(F.gelu(x), weights["linear_proj.2.weight"], weights["linear_proj.2.bias"])
    return F.normalize(x, dim=-1)


@pytest.mark.parametrize("grid", GRIDS)
def test_an_image_is_what_transformers_sees(tower: VisionTower, folder: Path, grid: tuple[int, int, int]) -> None:
    (rows,) = rows_of(tower, [patches(grid)])
    assert rows.shape == (np.prod(grid) // 4, HIDDEN) and rows.dtype == torch.float32
    assert apart(rows, reference_rows(folder, [patches(grid)])) <= 1e-5
    assert len(rows) == 1 or rows.std(dim=0).max() > 0.05, "each row says the same"


def test_several_images_and_clips_are_what_transformers_sees(tower: VisionTower, folder: Path) -> None:
    seen = [patches(grid, seed) for seed, grid in enumerate(GRIDS)]
    for each, rows in zip(seen, rows_of(tower, seen), strict=True):
        assert apart(rows, reference_rows(folder, [each])) <= 1e-5


def test_an_image_has_the_same_rows_in_any_company(tower: VisionTower) -> None:
    seen = [patches(grid, seed) for seed, grid in enumerate([*GRIDS, GRIDS[2], GRIDS[2]])]
    for each, rows in zip(seen, rows_of(tower, seen), strict=True):
        assert apart(rows, rows_of(tower, [each])[0]) <= 1e-5


def test_windows_of_one_size_attend_in_one_call(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sent them: 14 x 14 patches are a window of 8 x 8, two of 8 x 6 or 6 x 8, and one of 6 x 6."""
    shapes = watched_attention(monkeypatch)
    rows_of(tower, [patches((1, 14, 14)), patches((1, 8, 8)), patches((1, 14, 14), 1)])
    assert sorted(set(shapes)) == [(1, 64), (2, 36), (2, 196), (3, 64), (4, 48)]
    assert shapes.count((3, 64)) == shapes.count((1, 64)) == 2  # layers with windows, and without


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_each_cell_is_in_one_window_of_its_frame(grids: list[tuple[int, int, int]]) -> None:
    sizes = msgspec.convert(VISION, Vision)
    found = windows([(count, 2 * rows, 2 * columns) for count, rows, columns in grids], sizes)
    assert sorted(found.order.tolist()) == list(range(len(found.order)))
    assert sum(found.lengths) == 4 * len(found.order) and found.lengths == sorted(found.lengths)
    windows_of_cells = [
        (number, frame, row // 4, column // 4)
        for number, (count, rows, columns) in enumerate(grids)
        for frame in range(count)
        for row in range(rows)
        for column in range(columns)
    ]
    parts = torch.split(found.order, [length // 4 for length in found.lengths])
    assert all(len({windows_of_cells[cell] for cell in part}) == 1 for part in parts)
    assert len(parts) == len(set(windows_of_cells))


@pytest.mark.anyio
async def test_the_actor_sees_with_it(folder: Path) -> None:
    actor = MingImageEncoder(model=str(folder))
    await actor.setup()
    red, blue = (encoded(Image.new("RGB", (64, 48), colour)) for colour in ("red", "blue"))
    (features,) = await actor.run([Images([red, blue], (0, 1))])
    assert features.grids == ((1, 6, 8), (1, 6, 8)) and features.rows.shape == (96, HIDDEN)
    assert apart(torch.from_numpy(features.rows[:48]), torch.from_numpy(features.rows[48:])) > 0.01


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, "qwen2_5_vit with hidden_act gelu_pytorch_tanh"),
        ({"model_type": "qwen3_moe_vit"}, "qwen3_moe_vit with hidden_act silu"),
        ({"window_size": 7}, "window_size 7 is less than the 8 pixels"),
    ],
)
def test_what_no_ming_sees_with_is_refused(folder: Path, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vision_config": VISION | change}))
    with pytest.raises(WeightsError, match=says):
        load_vision_tower(tmp_path)


def test_the_names_are_those_of_the_authors_module(tower: VisionTower) -> None:
    """Which are transformers', as the reference loads them; at the preview's sizes a tower has 1.4 GB of weights."""
    shapes = {name: tuple(each.shape) for name, each in tower.state_dict().items() if name.startswith("vision.")}
    assert shapes == {f"vision.{name}": shape for name, shape in vision_shapes(VISION | {"in_channels": 3}).items()}
    real = VISION | {"depth": 32, "hidden_size": 1280, "intermediate_size": 3456, "num_heads": 16, "patch_size": 14}
    sizes = vision_shapes(real | {"in_channels": 3, "out_hidden_size": 8192}).values()
    assert 1.3e9 < 2 * sum(int(np.prod(shape)) for shape in sizes) < 1.5e9
