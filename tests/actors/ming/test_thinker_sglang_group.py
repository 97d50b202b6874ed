"""Ming's thinker split over two ranks (heads, experts, vocabulary): on two GPUs, or on a CPU through the shim."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import multiprocess
import pytest
import torch

from actors.ming.thinker_model import load_thinker
from omniflow.engine.group import lead
from omniflow.engine.ranks import Ranks
from omniflow.engine.transformers import TransformersEngine
from tests.actors.ming import second_rank
from tests.actors.ming.test_thinker_sglang import APART, REQUESTS, assert_same
from tests.actors.ming.thinker_folder import write_thinker
from tests.engine.tiny import run

NUM_GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu if NUM_GPUS else pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.skipif(NUM_GPUS == 1, reason="needs two GPUs, or none"),
    pytest.mark.timeout(300),
]


def test_two_ranks_answer_as_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.ming.thinker_sglang import load_sglang_thinker

    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")
    folder = write_thinker(tmp_path)
    settings: dict[str, Any] = {
        "device": "gpu" if NUM_GPUS else "cpu",
        "dtype": "float32",
        "kv_tokens": 1024,
        "max_running": 6,
        "chunked_prefill_size": 64,
    }
    context = multiprocess.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=second_rank.live, args=(folder, theirs, settings))
    other.start()
    theirs.close()
    ranks = Ranks(0, 2, [ours])
    engine = lead(load_sglang_thinker(folder, ranks=ranks, **settings), ranks)
    asked = [msgspec.structs.replace(each, hidden="all") for each in REQUESTS]
    reference = run(TransformersEngine(load_thinker(folder), media=True), asked)
    found = run(engine, asked)
    engine.close()
    other.join(30)
    assert other.exitcode == 0
    for each in asked:
        assert_same(found[each.id], reference[each.id])
        mine, wanted = found[each.id][0].hidden, reference[each.id][0].hidden
        assert mine is not None and wanted is not None
        assert (mine.cpu() - wanted).abs().max() < APART
