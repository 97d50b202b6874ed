"""How the towers of a checkpoint of Ming-flash-omni get their weights.

A tower's modules are called as the checkpoint calls them, so `tower.state_dict()` is what a checkpoint holds of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, TypeVar

import torch
from torch import nn

from actors.ming.weights import misfit

TowerT = TypeVar("TowerT", bound=nn.Module)


def dtype_for(wanted: Literal["auto", "float32", "bfloat16"], device: str) -> torch.dtype:
    """What a tower computes in: "auto" is bfloat16 on a GPU, as Ming's authors run it, and float32 on a CPU."""
    if wanted == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return torch.float32 if wanted == "float32" else torch.bfloat16


def placed(tower: TowerT, device: str, wanted: Literal["auto", "float32", "bfloat16"]) -> TowerT:
    """`tower` on `device`, in what it computes in there.

    On a GPU this process from then on attends without cuDNN, which torch prefers on Hopper: it builds a plan for each
    new length of a clip or size of an image, and keeps them all. Heads of 64 and of 72 are FlashAttention's too.
    """
    if device != "cpu":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return tower.to(device, dtype_for(wanted, device))


def load_tower(
    build: Callable[[], TowerT], weights: dict[str, torch.Tensor], unused: Collection[str], what: str
) -> TowerT:
    """The module that `build` makes, with `weights`, every one of both but those `unused`, as they are stored.

    Raises WeightsError that names what is missing or too many.
    """
    with torch.device("meta"):  # a random start of 0.6 billion weights takes 10 s
        tower = build()
    try:
        tower.load_state_dict({name: each for name, each in weights.items() if name not in unused}, assign=True)
    except RuntimeError as error:
        raise misfit(what, error) from error
    return tower.requires_grad_(False).eval()
