"""Ming's thinker split over two ranks (heads, experts, vocabulary): on two GPUs, or on a CPU through the shim."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import multiprocess
import pytest
import torch

from actors.ming.thinker_model import load_thinker
from omniflow.engine.transformers import TransformersEngine
from tests.actors.ming import thinker_rank
from tests.actors.ming.test_thinker_sglang import APART, REQUESTS, assert_same, text
from tests.actors.ming.thinker_folder import write_thinker
from tests.engine.tiny import run

if TYPE_CHECKING:
    from omniflow.engine.base import EngineRequest
    from tests.actors.ming.thinker_rank import Told

NUM_GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu if NUM_GPUS else pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.skipif(NUM_GPUS == 1, reason="needs two GPUs, or none"),
    pytest.mark.timeout(300),
]

ROUNDS = [
    [msgspec.structs.replace(each, hidden="all") for each in REQUESTS],
    [text("first", 40, 91)],
    [text("longer", 60, 91)],  # whose first 40 are known by then
]


def told_by_two(folder: Path, settings: dict[str, Any], rounds: list[list[EngineRequest]]) -> list[Told]:
    """What two fresh processes tell once rank 0 has run `rounds`. Raises EOFError where one of them ends before."""
    context = multiprocess.get_context("spawn")
    between, tests = context.Pipe(), [context.Pipe() for _ in range(2)]
    ranks = [
        context.Process(target=thinker_rank.live, args=(rank, folder, end, test[1], settings, rounds))
        for rank, (end, test) in enumerate(zip(between, tests, strict=True))
    ]
    for rank in ranks:
        rank.start()
    for theirs in (*between, *(test[1] for test in tests)):
        theirs.close()
    told = [test[0].recv() for test in tests]
    for rank in ranks:
        rank.join(30)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return told


@pytest.mark.parametrize("prompt_graphs", [pytest.param(False, id="launches"), pytest.param(True, id="graphs")])
def test_two_ranks_answer_as_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt_graphs: bool
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")
    folder = write_thinker(tmp_path)
    settings: dict[str, Any] = {
        "device": "gpu" if NUM_GPUS else "cpu",
        "dtype": "float32",
        "kv_tokens": 1024,
        "max_running": 6,
        "chunked_prefill_size": 64,
        "prompt_graphs": prompt_graphs,
    }
    first, second = told_by_two(folder, settings, ROUNDS)
    assert first.captures == second.captures
    assert first.captures == ([True, False] if version("sglang") == "0.5.17" else [])
    assert first.read == second.read
    assert first.read[-2:] == ([40, 20] if prompt_graphs else [])
    reference = TransformersEngine(load_thinker(folder), media=True)
    for asked, found in zip(ROUNDS, first.outputs, strict=True):
        wanted = run(reference, asked)
        for each in asked:
            ours, known = found[each.id], wanted[each.id]
            assert_same(ours, known)
            if each.hidden is not None:
                assert ours[0].hidden is not None and known[0].hidden is not None
                assert (ours[0].hidden - known[0].hidden).abs().max() < APART
