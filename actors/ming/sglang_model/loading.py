"""A checkpoint's tensors into the parameters of SGLang's layers, which take a part of each where ranks share them."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from omniflow.errors import WeightsError

_PREFIX = "model."
"""Of the thinker's tensors, beside those of the towers."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_EXPERT_PARTS = {"gate": ("w13_weight", "w1"), "up": ("w13_weight", "w3"), "down": ("w2_weight", "w2")}
_HALVES = {".gate_proj.": 0, ".up_proj.": 1}
_RENAMED = {".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."}
"""Ling-V2's names, and those of Ming-flash-omni-2.0."""


def load_checkpoint(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy all of `weights` that are the thinker's. Raises WeightsError that names what is missing or too many."""
    parameters = dict(model.named_parameters())
    missing = Counter({name: _pieces(name, parameter) for name, parameter in parameters.items()})
    for name, tensor in weights:
        if name.startswith(_PREFIX):
            target = _load(parameters, name.removeprefix(_PREFIX), tensor)
            missing[target] -= 1
    wrong = sorted(name for name, count in missing.items() if count)
    if wrong:
        raise WeightsError(f"the checkpoint has not all of {wrong[0]}, and of {len(wrong) - 1} other tensors")


def _pieces(name: str, parameter: nn.Parameter) -> int:
    """How many tensors of a checkpoint one parameter is made of."""
    if name.endswith("w2_weight"):
        return len(parameter)
    if name.endswith("w13_weight"):
        return 2 * len(parameter)
    return 2 if ".gate_up_proj." in name else 1


def _load(parameters: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> str:
    """Copy one tensor; returns the name of its parameter."""
    expert = _EXPERT.fullmatch(name)
    if expert:
        part, shard = _EXPERT_PARTS[expert[3]]
        target = f"{expert[1]}.{part}"
        _known(parameters, target, name)(tensor, name, shard_id=shard, expert_id=int(expert[2]))
        return target
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    for old, half in _HALVES.items():
        if old in name:
            target = name.replace(old, ".gate_up_proj.")
            _known(parameters, target, name)(tensor, half)
            return target
    _known(parameters, name, name)(tensor)
    return name


def _known(parameters: dict[str, nn.Parameter], target: str, name: str) -> Callable[..., None]:
    """What loads the parameter `target`, for the checkpoint's `name`: SGLang's layers say it, for their rank's part."""
    if target not in parameters:
        raise WeightsError(f"the thinker has no place for the checkpoint's {name}")
    parameter = parameters[target]
    return functools.partial(getattr(parameter, "weight_loader", default_weight_loader), parameter)
