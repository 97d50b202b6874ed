"""A checkpoint's tensors into the parameters of SGLang's layers, which take a part of each where ranks share them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from omniflow.errors import WeightsError

if TYPE_CHECKING:
    import torch
    from torch import nn

_PREFIX = "model."
"""Of the thinker's tensors, beside those of the towers."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_EXPERT_PARTS = {"gate": ("w13_weight", "w1"), "up": ("w13_weight", "w3"), "down": ("w2_weight", "w2")}
_HALVES = {".gate_proj.": 0, ".up_proj.": 1}
_RENAMED = {".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."}
"""Ling-V2's names, and those of Ming-flash-omni-2.0."""


class Place(NamedTuple):
    """Where a checkpoint's tensor belongs: a parameter, and what its loader is told beside the tensor."""

    parameter: str
    given: tuple[Any, ...] = ()
    named: dict[str, Any] = {}


def place_of(name: str) -> Place | None:
    """Of the tensor `name`; None where it is no thinker's."""
    if not name.startswith(_PREFIX):
        return None
    name = name.removeprefix(_PREFIX)
    expert = _EXPERT.fullmatch(name)
    if expert:
        part, shard = _EXPERT_PARTS[expert[3]]
        return Place(f"{expert[1]}.{part}", (name,), {"shard_id": shard, "expert_id": int(expert[2])})
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    for old, half in _HALVES.items():
        if old in name:
            return Place(name.replace(old, ".gate_up_proj."), (half,))
    return Place(name)


def pieces(parameter: str, num_experts: int) -> int:
    """How many tensors of a checkpoint one parameter is made of."""
    if parameter.endswith("w2_weight"):
        return num_experts
    if parameter.endswith("w13_weight"):
        return 2 * num_experts
    return 2 if ".gate_up_proj." in parameter else 1


def load_checkpoint(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], num_experts: int) -> None:
    """Copy all of `weights` that are the thinker's. Raises WeightsError that names what is missing or too many."""
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    parameters = dict(model.named_parameters())
    missing = Counter({name: pieces(name, num_experts) for name in parameters})
    for name, tensor in weights:
        place = place_of(name)
        if place is None:
            continue
        if place.parameter not in parameters:
            raise WeightsError(f"the thinker has no place for the checkpoint's {name}")
        parameter = parameters[place.parameter]
        # SGLang's layers say how a parameter is loaded: which part of it their rank has.
        load = getattr(parameter, "weight_loader", default_weight_loader)
        load(parameter, tensor, *place.given, **place.named)
        missing[place.parameter] -= 1
    wrong = sorted(name for name, count in missing.items() if count)
    if wrong:
        raise WeightsError(f"the checkpoint has not all of {wrong[0]}, and of {len(wrong) - 1} other tensors")
