"""Small towers with heads as wide as those of Ming-flash-omni: a GPU hears and sees what a CPU does, 16 bits nearly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file

from actors.attention import attend_apart
from actors.encoding import placed
from actors.ming.audio_tower import AudioTower
from actors.ming.config import AudioConfig, Pixels, VisionConfig
from actors.ming.hearing import MingAudioEncoder
from actors.ming.pixels import Shown
from actors.ming.seeing import MingImageEncoder
from actors.ming.vision_tower import VisionTower
from omniflow.media import Images, Waveforms
from tests.actors.ming.towers import random_tower
from tests.actors.test_pictures import encoded, scene

CONFIG: dict[str, Any] = {
    "llm_config": {"hidden_size": 256},
    "mlp_depth": 2,
    "audio_config": {"whisper_encoder_config": {"n_state": 256, "n_head": 4, "n_layer": 4, "n_ctx": 200}},
    "vision_config": {
        "depth": 4,
        "hidden_size": 288,
        "intermediate_size": 720,
        "num_heads": 4,
        "out_hidden_size": 320,
        "num_position_embeddings": 576,
        "deepstack_visual_indexes": [],
    },
}
"""Heads of 64 and of 72."""
WINDOWED = {"model_type": "qwen2_5_vit", "hidden_act": "silu", "window_size": 64, "fullatt_block_indexes": [1, 3]}
EXACT, NEAR = 1e-4, 0.1
"""How far rows, of length 1, may be from those of a CPU in float32: in float32, and in bfloat16 (0.035 on the CPU)."""
ON = [
    pytest.param("cpu", marks=pytest.mark.timeout(60)),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")],
    ),
]
Rows = Callable[[Sequence[Any]], list[np.ndarray]]


@pytest.fixture(autouse=True)
def cudnn() -> Iterator[None]:
    """What `placed` turned off is on again afterwards."""
    was = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    yield
    torch.backends.cuda.enable_cudnn_sdp(was)


def rows_of(tower: AudioTower | VisionTower, media: Sequence[Any]) -> list[np.ndarray]:
    *_, rows = tower.rows(media)
    assert rows is not None
    return rows


def audio_tower() -> AudioTower:
    tower = random_tower(AudioTower(msgspec.convert(CONFIG, AudioConfig)))
    assert isinstance(tower, AudioTower)
    return tower


def vision_tower() -> VisionTower:
    tower = random_tower(VisionTower(msgspec.convert(CONFIG, VisionConfig), Pixels()))
    assert isinstance(tower, VisionTower)
    return tower


def windowed_tower() -> VisionTower:
    config = CONFIG | {"vision_config": CONFIG["vision_config"] | WINDOWED}
    tower = random_tower(VisionTower(msgspec.convert(config, VisionConfig), Pixels()))
    assert isinstance(tower, VisionTower)
    return tower


def mels() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal((128, frames)).astype(np.float32) for frames in (60, 7, 30, 60)]


def images() -> list[Shown]:
    random = np.random.default_rng(0)
    grids = [(1, 4, 6), (1, 8, 4), (1, 4, 6), (2, 2, 4)]
    return [
        Shown(random.integers(0, 256, (count * rows * columns, 1536), dtype=np.uint8), (count, rows, columns))
        for count, rows, columns in grids
    ]


TOWERS = [
    pytest.param(audio_tower, mels, id="audio"),
    pytest.param(vision_tower, images, id="vision"),
    pytest.param(windowed_tower, images, id="windows"),
]


def furthest(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    return max(float(np.linalg.norm(a - b, axis=-1).max()) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(("build", "media"), TOWERS)
def test_rows_are_those_of_a_cpu_in_float32_and_near_them_in_bfloat16(
    build: Callable[[], Any], media: Callable[[], list[Any]], device: str
) -> None:
    tower, seen = build(), media()
    want = rows_of(tower, seen)
    if device != "cpu":
        assert furthest(rows_of(placed(tower, device, "float32"), seen), want) <= EXACT
    placed(tower, device, "bfloat16")
    got = rows_of(tower, seen)
    assert 1e-4 < furthest(got, want) <= NEAR
    assert furthest(got[:1], rows_of(tower, seen[:1])) <= NEAR


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dim", [64, 72])
def test_flash_attention_takes_heads_of_both_sizes(dim: int) -> None:
    """As slices of one matrix, as the vision tower cuts them; no other kernel is allowed here, so none can stand in."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    qkv = torch.randn(3 * 100 + 64, 3, 16, dim, device="cuda", dtype=torch.bfloat16)
    lengths = [100, 100, 100, 64]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        got = attend_apart(qkv[:, 0], qkv[:, 1], qkv[:, 2], lengths)
    with sdpa_kernel(SDPBackend.MATH):
        exact = qkv.float()
        want = attend_apart(exact[:, 0], exact[:, 1], exact[:, 2], lengths)
    assert F.mse_loss(got.float(), want).sqrt() < 0.01 * want.std()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dim", [64, 72])
def test_float32_attends_without_a_square_of_scores(dim: int) -> None:
    """Those of a clip of 300 s would be 18 GB."""
    x = torch.randn(4000, 16, dim, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend_apart(x, x, x, [4000])
    assert torch.cuda.max_memory_allocated() - before < 4 * 4000 * 4000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(audio_tower().state_dict() | vision_tower().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.gpu
@pytest.mark.anyio
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
async def test_the_actors_hear_and_see_on_a_gpu_as_on_a_cpu(folder: Path) -> None:
    heard = Waveforms([np.sin(np.arange(16_000 * seconds) / 20).astype(np.float32) for seconds in (1, 2)], (0, 1))
    seen = Images([encoded(scene(96, 128)), encoded(Image.new("RGB", (64, 64), "red"))], (0, 1))
    rows: dict[str, list[np.ndarray]] = {}
    for device in ("cpu", "gpu"):
        ears, eyes = (each(model=str(folder), device=device) for each in (MingAudioEncoder, MingImageEncoder))
        await ears.setup()
        await eyes.setup()
        (of_sound,), (of_sight,) = await ears.run([heard]), await eyes.run([seen])
        assert of_sound.rows is not None
        rows[device] = [of_sound.rows, of_sight.rows]
    assert furthest(rows["gpu"], rows["cpu"]) <= NEAR
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
