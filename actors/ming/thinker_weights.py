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

_GATES = (".gate.weight", ".image_gate.weight", ".audio_gate.weight")


def thinker_part(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a `ThinkerModel`, out of those of all parts."""
    return {
        name.removesuffix("weight") + "scores.weight" if name.endswith(_GATES) else name: tensor
        for name, tensor in part(weights, ("model.",)).items()
    }


def load_thinker(folder: Path) -> ThinkerModel:
    """The thinker in `folder`, float32 on the CPU, its matrices packed. Raises WeightsError."""
    model = ThinkerModel(Thinker.load(folder))
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
    load(model, thinker_part(read_folder(folder)), "the thinker")
    pack_linears(model)
    return model
