from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from actors.ming.pixels import Shown
from actors.ming.vision_tower import VisionTower, load_vision_tower
from omniflow.errors import WeightsError
from tests.actors.ming.reference import apart
from tests.actors.ming.towers import CONFIG, HIDDEN, PIXELS, VISION, watched_attention, write_towers

GRIDS = [(1, 2, 2), (1, 4, 6), (1, 14, 14), (1, 10, 2), (3, 4, 8), (2, 6, 6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_towers(tmp_path_factory.mktemp("towers"))


@pytest.fixture(scope="module")
def tower(folder: Path) -> VisionTower:
    return load_vision_tower(folder)


def rows_of(tower: VisionTower, seen: Sequence[Shown]) -> list[torch.Tensor]:
    *layers, rows = tower.rows(seen)
    assert layers == [None] * 4 and rows is not None
    return [torch.from_numpy(each.copy()) for each in rows]


def patches(grid: tuple[int, int, int], seed: int = 0) -> Shown:
    frames, rows, columns = grid
    values = np.random.default_rng(seed).integers(0, 256, (frames * rows * columns, 96), dtype=np.uint8)
    return Shown(values, grid)


class Reference:
    """transformers' Qwen3-VL, whose weights have the same names, and torch's layers with the projector's."""

    def __init__(self, folder: Path) -> None:
        self._weights = load_file(folder / "model-00001-of-00002.safetensors")
        self._model = Qwen3VLVisionModel(Qwen3VLVisionConfig(**{**VISION, "model_type": "qwen3_vl_vision"}))
        state = {name.removeprefix("vision."): each for name, each in self._weights.items() if "vision." in name}
        self._model.load_state_dict(state)

    @torch.no_grad()
    def rows(self, seen: Sequence[Shown]) -> torch.Tensor:
        mean, std = (torch.tensor(PIXELS[name]).repeat_interleave(32) for name in ("image_mean", "image_std"))
        pixels = torch.cat([torch.from_numpy(each.values) for each in seen]).float() / 255
        merged = self._model((pixels - mean) / std, torch.tensor([each.grid for each in seen])).pooler_output
        x = F.linear(merged, self._weights["linear_proj.0.weight"], self._weights["linear_proj.0.bias"])
        x = F.linear(F.gelu(x), self._weights["linear_proj.2.weight"], self._weights["linear_proj.2.bias"])
        return F.normalize(x, dim=-1)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.mark.parametrize("grid", GRIDS)
def test_an_image_is_what_transformers_sees(
    tower: VisionTower, reference: Reference, grid: tuple[int, int, int]
) -> None:
    (rows,) = rows_of(tower, [patches(grid)])
    assert rows.shape == (grid[0] * grid[1] * grid[2] // 4, HIDDEN) and rows.dtype == torch.float32
    assert apart(rows, reference.rows([patches(grid)])) <= 1e-5
    assert torch.allclose(rows.norm(dim=-1), torch.ones(len(rows)), atol=1e-6)
    assert len(rows) == 1 or rows.std(dim=0).max() > 0.05, "each row says the same"


def test_several_images_and_clips_are_what_transformers_sees(tower: VisionTower, reference: Reference) -> None:
    seen = [patches(grid, seed) for seed, grid in enumerate(GRIDS)]
    assert apart(torch.cat(rows_of(tower, seen)), reference.rows(seen)) <= 1e-5


def test_an_image_has_the_same_rows_in_any_company(tower: VisionTower) -> None:
    seen = [patches(grid, seed) for seed, grid in enumerate([*GRIDS, GRIDS[2], GRIDS[2]])]
    for each, rows in zip(seen, rows_of(tower, seen), strict=True):
        assert apart(rows, rows_of(tower, [each])[0]) <= 1e-5


def test_frames_of_as_many_patches_attend_in_one_call(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sent them: on a GPU a call is a launch in each layer."""
    shapes = watched_attention(monkeypatch)
    rows_of(tower, [patches(grid) for grid in ((1, 4, 6), (1, 2, 2), (1, 6, 4), (3, 4, 6), (1, 2, 2))])
    assert sorted(shapes) == [(2, 4)] * 4 + [(5, 24)] * 4  # in each of the 4 layers


def test_a_clip_is_seen_frame_by_frame(tower: VisionTower) -> None:
    """A frame sees nothing of the others, so a clip's rows are those of its frames as images."""
    clip = patches((3, 4, 8))
    frames = [Shown(values, (1, 4, 8)) for values in np.split(clip.values, 3)]
    assert apart(rows_of(tower, [clip])[0], torch.cat(rows_of(tower, frames))) <= 1e-5


def test_places_are_seen(tower: VisionTower) -> None:
    """The same patch everywhere: without places and turns all rows would be one."""
    one = patches((1, 8, 8))
    (rows,) = rows_of(tower, [Shown(np.repeat(one.values[:1], 64, axis=0), one.grid)])
    assert apart(rows[0], rows[5]) > 0.01


def test_bright_and_dark_are_those_of_the_preprocessor(folder: Path, tmp_path: Path) -> None:
    write_towers(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    seen = [patches((1, 4, 4))]
    (rows,), (plain,) = rows_of(load_vision_tower(folder), seen), rows_of(load_vision_tower(tmp_path), seen)
    assert apart(rows, plain) > 0.01


def test_a_long_clip_is_embedded_in_pieces(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    (rows,) = rows_of(tower, [patches((2, 6, 6))])
    monkeypatch.setattr("actors.ming.vision_tower.PIECE", 7)
    assert apart(rows_of(tower, [patches((2, 6, 6))])[0], rows) <= 1e-5


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = write_towers(tmp_path) / "model-00001-of-00002.safetensors"
    weights = load_file(path)
    save_file({name: each for name, each in weights.items() if name != "vision.merger.norm.bias"}, path)
    with pytest.raises(WeightsError, match=r"the vision tower do not fit.*vision\.merger\.norm\.bias"):
        load_vision_tower(tmp_path)
    save_file(weights | {"vision.deepstack_merger_list.2.norm.bias": torch.ones(192)}, path)
    with pytest.raises(WeightsError, match=r"Unexpected key.*vision\.deepstack_merger_list\.2\.norm\.bias"):
        load_vision_tower(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen2_5_vit"}, "qwen2_5_vit"),
        ({"num_heads": 5}, "num_heads 5"),
        ({"num_position_embeddings": 50}, "50 is not a square"),
        ({"hidden_act": "relu"}, "relu"),
    ],
)
def test_other_towers_are_refused(tmp_path: Path, change: dict[str, object], named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vision_config": VISION | change}))
    with pytest.raises(WeightsError, match=f"has no vision tower of Ming's.*{named}"):
        load_vision_tower(tmp_path)


def test_broken_numbers_of_the_preprocessor_are_named(tmp_path: Path) -> None:
    (write_towers(tmp_path) / "preprocessor_config.json").write_text('{"min_pixels": "few"}')
    with pytest.raises(WeightsError, match=r"preprocessor_config\.json.*min_pixels"):
        load_vision_tower(tmp_path)
