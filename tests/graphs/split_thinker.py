"""A thinker on SGLang over two GPUs; where there is none, the same on a CPU, through the shim."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from actors.thinker import Thinker
from omniflow.graph import Graph
from omniflow.topology import one_for_one
from tests.engine import sglang_shim

sglang_shim.install_where_needed()


class HereThinker(Thinker):
    """As `Thinker`, on the device that there is."""

    @classmethod
    def lacks(cls, settings: Mapping[str, Any], device: str) -> str | None:
        return super().lacks(settings, "gpu" if torch.cuda.is_available() else "cpu")

    def _load(self) -> Path:
        if not torch.cuda.is_available():
            self._device = "cpu"
        return super()._load()


def build(folder: Path) -> Graph:
    graph = Graph("split_thinker")
    thinker = graph.stage(
        "thinker",
        HereThinker,
        device="gpu",
        tp=2,
        restart=one_for_one(backoff_s=0.01),
        model=str(folder),
        engine="sglang",
        dtype="float32",
        kv_tokens=4096,
    )
    graph.input(ask=thinker)
    graph.output(tokens=thinker["emit"], end=thinker["result"])
    return graph
