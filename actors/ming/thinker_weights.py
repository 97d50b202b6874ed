"""The thinker's weights out of a whole checkpoint of Ming-flash-omni.

There they are under an outer `model.`, beside the towers' (`vision.`, `audio.`, `linear_proj.`, `linear_proj_audio.`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from actors.ming.thinker_config import Thinker
from actors.ming.thinker_model import ThinkerModel
from actors.ming.weights import load, part, read_folder
from omniflow.engine.linear import pack_linears

_RENAMED = {
    ".mlp.gate.weight": ".mlp.gate.scores.weight",
    ".mlp.image_gate.weight": ".mlp.image_gate.scores.weight",
    ".mlp.audio_gate.weight": ".mlp.audio_gate.scores.weight",
    # Ming-flash-omni-2.0 calls them so; in Ling-V2, the same decoder, they are `query_layernorm` and `key_layernorm`.
    ".attention.q_norm.weight": ".attention.query_layernorm.weight",
    ".attention.k_norm.weight": ".attention.key_layernorm.weight",
}
"""Ends of names in checkpoints, and what they are in `ThinkerModel`."""


def thinker_part(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a `ThinkerModel`, out of those of all parts."""
    return {_renamed(name): tensor for name, tensor in part(weights, ("model.",)).items()}


def _renamed(name: str) -> str:
    end = next((end for end in _RENAMED if name.endswith(end)), None)
    return name if end is None else name.removesuffix(end) + _RENAMED[end]


def load_thinker(folder: Path, device: str = "cpu") -> ThinkerModel:
    """The thinker in `folder`, in float32; on the CPU its matrices are packed. Raises WeightsError."""
    model = ThinkerModel(Thinker.load(folder))
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
    load(model, thinker_part(read_folder(folder)), "the thinker")
    model.to(device)
    pack_linears(model)
    return model
