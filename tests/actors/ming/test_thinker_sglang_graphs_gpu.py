"""Ming's thinker in bfloat16: a text that is read by a CUDA graph gives what it gives launch by launch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omniflow.engine.base import EngineRequest, Sampling
from tests.actors.ming.test_thinker_sglang_gpu import SHAPE, first
from tests.actors.ming.thinker_folder import write_thinker
from tests.engine.prompt_graphs import read_by
from tests.engine.tiny import run

if TYPE_CHECKING:
    from omniflow.engine.sglang import SGLangEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.timeout(300),
]
LENGTHS = [3, 9, 33, 130, 200, 64, 700, 1024]
"""Longer and shorter than the one before, and as long as a graph."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SGLangEngine]:
    from actors.ming.thinker_sglang import load_sglang_thinker

    write_thinker(tmp_path, **SHAPE, max_position_embeddings=2048)
    settings: dict[str, Any] = {"kv_tokens": 4096, "max_running": 8, "chunked_prefill_size": 2048}
    engine = load_sglang_thinker(tmp_path, dtype="bfloat16", prompt_graphs=True, **settings)
    yield engine
    engine.close()


def asked(id: str, length: int) -> EngineRequest:
    ids = torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return EngineRequest(id=id, ids=ids, sampling=Sampling(max_tokens=2), hidden="all")  # so nothing of it is known


def test_a_graph_reads_a_text_as_launches_do(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = engine._scheduler.tp_worker.model_runner.prefill_cuda_graph_runner
    read = read_by(graphs, monkeypatch)
    ours = [first(run(engine, [asked("a", length)])["a"]) for length in LENGTHS]
    assert read == LENGTHS
    monkeypatch.setattr(graphs, "can_run_graph", lambda batch: False)
    theirs = [first(run(engine, [asked("a", length)])["a"]) for length in LENGTHS]
    assert read == LENGTHS
    # Padding may sum in another order, and experts that are nearly even then go either way for a few inputs.
    apart = torch.cat([(a - b).norm(dim=-1) / b.norm(dim=-1) for (_, a), (_, b) in zip(ours, theirs, strict=True)])
    assert apart.median() < 0.02, apart.quantile(torch.tensor([0.1, 0.5, 0.9]))
    assert sum(a == b for (a, _), (b, _) in zip(ours, theirs, strict=True)) >= len(LENGTHS) - 2
