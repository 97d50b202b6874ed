"""A tiny random checkpoint of Ming's towers, in the hub's layout, and transformers' modules with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from actors.ming.audio_tower import AudioTower
from actors.ming.config import AudioConfig, Pixels, VisionConfig
from actors.ming.vision_tower import VisionTower, unused_weights

HIDDEN = 48
AUDIO: dict[str, Any] = {
    "whisper_encoder_config": {"n_mels": 128, "n_ctx": 400, "n_state": 32, "n_head": 4, "n_layer": 3},
    "ds_kernel_size": 3,
    "ds_stride": 2,
    "norm_query_embeds": True,
}
VISION: dict[str, Any] = {
    "model_type": "qwen3_moe_vit",
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 40,
    "num_position_embeddings": 49,
    "deepstack_visual_indexes": [1, 2],
}
CONFIG: dict[str, Any] = {
    "llm_config": {"hidden_size": HIDDEN},
    "mlp_depth": 2,
    "audio_config": AUDIO,
    "vision_config": VISION,
}
PIXELS: dict[str, Any] = {
    "min_pixels": 8 * 8 * 4,
    "max_pixels": 8 * 8 * 80,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.3, 0.2, 0.25],
}


def audio_config(**changes: object) -> AudioConfig:
    return msgspec.convert({**CONFIG, "audio_config": {**AUDIO, **changes}}, AudioConfig)


NORMS = tuple(f"{name}.weight" for name in ("attn_ln", "mlp_ln", "ln_post", "norm1", "norm2", "norm"))


def vision_config() -> VisionConfig:
    return msgspec.convert(CONFIG, VisionConfig)


def random_tower(tower: nn.Module, seed: int = 0) -> nn.Module:
    """`tower` with weights that are neither near 0 nor near 1, so that every one of them is heard."""
    generator = torch.Generator().manual_seed(seed)
    for name, each in tower.named_parameters():
        spread = 0.2 if each.dim() == 1 else 1.0 if "pos_embed" in name else 2.0 / each[0].numel() ** 0.5
        each.data = spread * torch.randn(each.shape, generator=generator) + (1.0 if name.endswith(NORMS) else 0.0)
    return tower.requires_grad_(False).eval()


def watched_attention(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Filled with how many spans of how many patches each call of attention has."""
    shapes: list[tuple[int, int]] = []
    attend = F.scaled_dot_product_attention

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        shapes.append((query.shape[0], query.shape[2]))
        return attend(query, key, value)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return shapes


def write_towers(folder: Path, seed: int = 0) -> Path:
    """config.json and the weights of the towers, beside one that belongs to the thinker."""
    config, random = vision_config(), torch.Generator().manual_seed(seed)
    unused = {
        name: torch.randn(shape, generator=random) for name, shape in unused_weights(config.vision_config).items()
    }
    thinker = {"model.model.norm.weight": torch.ones(HIDDEN)}
    vision = random_tower(VisionTower(config, Pixels()), seed).state_dict()
    save_file(vision | unused | thinker, folder / "model-00001-of-00002.safetensors")
    audio = random_tower(AudioTower(audio_config()), seed).state_dict()
    save_file(audio, folder / "model-00002-of-00002.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return folder


RENAMED = {
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out",
    "self_attn_layer_norm": "attn_ln",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "final_layer_norm": "mlp_ln",
    "layer_norm": "ln_post",
    "layers.": "blocks.",
    "embed_positions.weight": "positional_embedding",
}


def whisper_with(weights: dict[str, torch.Tensor], sizes: dict[str, int] | None = None) -> WhisperEncoder:
    """transformers' encoder with the weights that a checkpoint calls `audio.*`, by default of the sizes in `AUDIO`."""
    sizes = sizes or AUDIO["whisper_encoder_config"]
    encoder = WhisperEncoder(
        WhisperConfig(
            d_model=sizes["n_state"],
            encoder_layers=sizes["n_layer"],
            encoder_attention_heads=sizes["n_head"],
            encoder_ffn_dim=4 * sizes["n_state"],
            num_mel_bins=sizes["n_mels"],
            max_source_positions=sizes["n_ctx"],
        )
    )
    state = {}
    for name in encoder.state_dict():
        ours = name
        for theirs, renamed in RENAMED.items():
            ours = ours.replace(theirs, renamed)
        state[name] = weights[f"audio.{ours}"]
    encoder.load_state_dict(state)
    encoder.eval()  # type: ignore[no-untyped-call]
    encoder.requires_grad_(False)
    return encoder
