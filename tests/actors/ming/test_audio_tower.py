from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from actors.ming.audio_tower import AudioTower, load_audio_tower, num_rows
from omniflow.errors import WeightsError
from tests.actors.ming.reference import apart
from tests.actors.ming.towers import HIDDEN, audio_config, random_tower, whisper_with, write_towers


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> AudioTower:
    return load_audio_tower(write_towers(tmp_path_factory.mktemp("towers")))


def rows_of(tower: AudioTower, mels: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    *layers, rows = tower.rows([mel.numpy() for mel in mels])
    assert layers == [None] * 3 and rows is not None
    return [torch.from_numpy(each.copy()) for each in rows]


def mel(frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(128, frames, generator=torch.Generator().manual_seed(seed))


def transformers_rows(tower: AudioTower, clip: torch.Tensor) -> torch.Tensor:
    """By the layers of transformers' Whisper, and torch's own with the projector's weights.

    Its `forward` takes clips of 30 s only; what it does is this.
    """
    weights = tower.state_dict()
    whisper = whisper_with(weights, msgspec.to_builtins(tower.sizes))
    x = F.gelu(whisper.conv2(F.gelu(whisper.conv1(clip[None])))).transpose(1, 2)
    x = x + whisper.embed_positions.weight[: x.shape[1]]
    for layer in whisper.layers:
        x = layer(x, None)
    x = whisper.layer_norm(x)
    names = ("linear_proj_audio.0", "linear_proj_audio.3")
    (conv, conv_bias), (linear, linear_bias) = ((weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in names)
    x = F.conv1d(x.transpose(1, 2), conv, conv_bias, stride=2, padding=1).transpose(1, 2)
    return F.normalize(F.linear(F.gelu(x), linear, linear_bias)[0], dim=-1)


@pytest.mark.parametrize("frames", [1, 2, 3, 7, 100, 331, 800])
def test_a_clip_is_what_transformers_hears(tower: AudioTower, frames: int) -> None:
    clip = mel(frames)
    (rows,) = rows_of(tower, [clip])
    assert apart(rows, transformers_rows(tower, clip)) <= 1e-5
    assert rows.shape == (num_rows(audio_config().audio_config, frames), HIDDEN) == ((frames + 3) // 4, HIDDEN)
    assert torch.allclose(rows.norm(dim=-1), torch.ones(len(rows)), atol=1e-6)
    if len(rows) > 1:
        assert rows.std(dim=0).max() > 0.05, "each row says the same"


def test_the_forward_of_transformers_is_those_layers(tower: AudioTower) -> None:
    clip = mel(800)
    whisper = whisper_with(tower.state_dict())
    x = F.gelu(whisper.conv2(F.gelu(whisper.conv1(clip[None])))).transpose(1, 2) + whisper.embed_positions.weight
    for layer in whisper.layers:
        x = layer(x, None)
    assert apart(whisper.layer_norm(x), whisper(clip[None]).last_hidden_state) <= 1e-6


def test_a_clip_has_the_same_rows_in_any_company(tower: AudioTower) -> None:
    clips = [mel(frames, seed) for seed, frames in enumerate((61, 200, 200, 7, 333))]
    together = rows_of(tower, clips)
    for clip, rows in zip(clips, together, strict=True):
        assert apart(rows, rows_of(tower, [clip])[0]) <= 1e-5
    assert apart(together[1], together[2]) > 0.1


def test_rows_are_normalised_where_the_config_says_so_only(tower: AudioTower) -> None:
    plain = random_tower(AudioTower(audio_config(norm_query_embeds=False)))
    assert isinstance(plain, AudioTower)
    (rows,) = rows_of(plain, [mel(50)])
    assert (rows.norm(dim=-1) - 1).abs().min() > 0.01
    assert apart(F.normalize(rows, dim=-1), rows_of(tower, [mel(50)])[0]) <= 1e-5


def test_positions_are_whispers_where_the_checkpoint_has_none(tower: AudioTower, tmp_path: Path) -> None:
    from transformers.models.whisper.modeling_whisper import sinusoids

    write_towers(tmp_path)
    weights = load_file(tmp_path / "model-00002-of-00002.safetensors")
    del weights["audio.positional_embedding"]
    save_file(weights, tmp_path / "model-00002-of-00002.safetensors")
    assert torch.equal(load_audio_tower(tmp_path).audio.positional_embedding, sinusoids(400, 32))
    assert torch.equal(tower.audio.positional_embedding, sinusoids(400, 32))


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    write_towers(tmp_path)
    path = tmp_path / "model-00002-of-00002.safetensors"
    weights = load_file(path)
    whole = dict(weights)
    del weights["audio.blocks.1.attn.query.bias"]
    save_file(weights, path)
    with pytest.raises(WeightsError, match=r"the audio tower do not fit.*audio\.blocks\.1\.attn\.query\.bias"):
        load_audio_tower(tmp_path)
    save_file(whole | {"audio.blocks.3.attn.query.bias": torch.ones(32)}, path)
    with pytest.raises(WeightsError, match=r"Unexpected key.*audio\.blocks\.3\.attn\.query\.bias"):
        load_audio_tower(tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(WeightsError, match=r"\.safetensors is broken, or not whole"):
        load_audio_tower(tmp_path)
    (tmp_path / "config.json").write_text('{"llm_config": {"hidden_size": 8}}')
    with pytest.raises(WeightsError, match="has no audio tower of Ming's.*audio_config"):
        load_audio_tower(tmp_path)
