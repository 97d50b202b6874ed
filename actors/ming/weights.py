"""Weights by the names that Ming's checkpoints use: found in any number of files, renamed, and loaded to the last one.

Two layouts exist. In Ming-omni-tts all parts are in one folder (`model.model.`, `flowloss.cfm.model.`,
`linear_proj_audio.`, `audio.`). The talker's folder of Ming-flash-omni has `model.`, `cfm.model.` and `aggregator.`,
and its AudioVAE a folder of its own (`actors.ming.config.Folders`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

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


def read_folder(folder: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, torch.Tensor]:
    """The tensors of the safetensors files in `folder` whose names begin with one of `prefixes`, as they are stored.

    Raises WeightsError.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WeightsError(f"{folder} has no *.safetensors")
    try:
        return {name: tensor for path in paths for name, tensor in _read_file(path, prefixes)}
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{folder} has a broken file of weights: {error}") from error


def _read_file(path: Path, prefixes: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, "pt") as file:
        for name in file.keys():
            if name.startswith(prefixes):
                yield name, file.get_tensor(name)


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
            found[name.replace(f".{names[0]}.", f".{fused}.")] = torch.cat(
                [each for each in pieces if each is not None]
            )
    return found


def load(module: nn.Module, weights: Mapping[str, torch.Tensor], what: str) -> None:
    """Copy `weights` into `module`, every one of both. Raises WeightsError that names what is missing or too many."""
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise WeightsError(f"the weights of {what} do not fit: {' '.join(str(error).split())}") from error
