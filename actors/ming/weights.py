"""Weights by the names that Ming's checkpoints use: found in any number of files, renamed, and loaded to the last one.

Two layouts exist. In Ming-omni-tts all parts are in one folder (`model.model.`, `flowloss.cfm.model.`,
`linear_proj_audio.`, `audio.`). The talker's folder of Ming-flash-omni has `model.`, `cfm.model.` and `aggregator.`,
and its AudioVAE a folder of its own (`actors.ming.config.Folders`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import msgspec
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

    Raises WeightsError where a file is broken, or one is missing that an index of the others names.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WeightsError(f"{folder} has no *.safetensors")
    missing = sorted(_indexed(folder / "model.safetensors.index.json") - {path.name for path in paths})
    if missing:
        others = f" and {len(missing) - 1} others" if missing[1:] else ""
        raise WeightsError(f"{folder} lacks {missing[0]}{others}, which its index names; fetch the checkpoint again")
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            found |= _read_file(path, prefixes)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} is broken, or not whole ({error}); fetch it again") from error
    return found


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _indexed(path: Path) -> set[str]:
    """The files that the index at `path` names; none where there is no index."""
    try:
        return set(msgspec.json.decode(path.read_bytes(), type=_Index).weight_map.values())
    except FileNotFoundError:
        return set()
    except (OSError, msgspec.DecodeError) as error:
        raise WeightsError(f"{path} is no index of weights: {error}") from error


def _read_file(path: Path, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefixes)}


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


def load(module: nn.Module, weights: Mapping[str, torch.Tensor], what: str) -> None:
    """Copy `weights` into `module`, every one of both. Raises WeightsError that names what is missing or too many."""
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise misfit(what, error) from error


def misfit(what: str, error: RuntimeError) -> WeightsError:
    """Of what torch says of weights that do not fit, the begin: a large model has thousands of names."""
    return WeightsError(f"the weights of {what} do not fit: {textwrap.shorten(str(error), 600, placeholder=' ...')}")
