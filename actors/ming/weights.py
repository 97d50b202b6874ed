"""Weights by the names that Ming's checkpoints use, as our modules name them.

Two layouts exist. In Ming-omni-tts all parts are in one folder (`model.model.`, `flowloss.cfm.model.`,
`linear_proj_audio.`, `audio.`). The talker's folder of Ming-flash-omni has `model.`, `cfm.model.` and `aggregator.`,
and its AudioVAE a folder of its own (`actors.ming.config.Folders`). Its thinker is under an outer `model.`, beside the
towers (`vision.`, `audio.`, `linear_proj.`, `linear_proj_audio.`), whose modules are called as the checkpoint calls
them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from omniflow.errors import WeightsError

FLOW = ("flowloss.cfm.model.", "cfm.model.")
AGGREGATOR = ("linear_proj_audio.", "aggregator.")
BACKBONE = ("model.model.", "model.")
AUDIO_VAE = ("audio.", "")

_FUSED = (
    (("to_q", "to_k", "to_v"), "to_qkv"),
    (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    (("gate_proj", "up_proj"), "gate_up_proj"),
)
_COMPUTED = ("rotary_emb.inv_freq", "rotary_embed.inv_freq", "istft.window")
"""Buffers that the sizes tell."""
_RENAMED = {
    ".mlp.gate.weight": ".mlp.gate.scores.weight",
    ".mlp.image_gate.weight": ".mlp.image_gate.scores.weight",
    ".mlp.audio_gate.weight": ".mlp.audio_gate.scores.weight",
    # Ming-flash-omni-2.0 calls them so; in Ling-V2, the same decoder, they are `query_layernorm` and `key_layernorm`.
    ".attention.q_norm.weight": ".attention.query_layernorm.weight",
    ".attention.k_norm.weight": ".attention.key_layernorm.weight",
}
"""Ends of names in checkpoints, and what they are in `ThinkerModel`."""


def part(weights: Mapping[str, torch.Tensor], prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The weights whose names begin with the first of `prefixes` that any has, without it and as our modules name them.

    Queries, keys and values are one matrix there, and so are gate and up: a step of one request takes fewer calls.
    """
    prefix = next((each for each in prefixes if any(name.startswith(each) for name in weights)), prefixes[0])
    found = {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix) and not name.endswith(_COMPUTED)
    }
    for names, fused in _FUSED:
        for name in [name for name in found if f".{names[0]}." in name]:
            pieces = [found.pop(name.replace(f".{names[0]}.", f".{each}."), None) for each in names]
            if any(piece is None for piece in pieces):
                raise WeightsError(f"beside {prefix}{name} one of {', '.join(names)} is missing")
            whole = [each for each in pieces if each is not None]
            if len({each.shape[1:] for each in whole}) > 1:
                shapes = ", ".join(str(list(each.shape)) for each in whole)
                raise WeightsError(f"{prefix}{name} and what belongs to it are of the shapes {shapes}")
            found[name.replace(f".{names[0]}.", f".{fused}.")] = torch.cat(whole)
    return found


def thinker_part(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a `ThinkerModel`, out of those of all parts."""
    return {_renamed(name): tensor for name, tensor in part(weights, ("model.",)).items()}


def _renamed(name: str) -> str:
    end = next((end for end in _RENAMED if name.endswith(end)), None)
    return name if end is None else name.removesuffix(end) + _RENAMED[end]
