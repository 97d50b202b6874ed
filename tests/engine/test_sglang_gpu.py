"""What SGLang does on GPUs alone: draws by seed, and CUDA graphs that give what eager steps give."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from omniflow.engine.base import EngineRequest
from omniflow.engine.transformers import TransformersEngine
from tests.engine.prompt_graphs import read_by
from tests.engine.test_sglang_frames import ask, frame_model, frames_of
from tests.engine.test_sglang_frames import run as run_frames
from tests.engine.tiny import ids_of, prompt, request, run, tiny_llama

if TYPE_CHECKING:
    from omniflow.engine.sglang import SGLangEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def deterministic(tmp_path: Path) -> Iterator[SGLangEngine]:
    from omniflow.engine.sglang import load_engine

    tiny_llama().save_pretrained(tmp_path)
    engine = load_engine(tmp_path, dtype="bfloat16", kv_tokens=4096, max_running=8, deterministic=True)
    yield engine
    engine.close()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[SGLangEngine]:
    from omniflow.engine.sglang import load_engine

    tiny_llama().save_pretrained(tmp_path)
    engine = load_engine(tmp_path, dtype="float32", kv_tokens=4096, max_running=8)
    yield engine
    engine.close()


def test_short_prompts_are_read_as_cuda_graphs(plain: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_by(plain._scheduler.tp_worker.model_runner.prefill_cuda_graph_runner, monkeypatch)
    reference = TransformersEngine(tiny_llama())
    lengths = [3, 9, 33, 130, 200, 64]  # longer and shorter than the one before, and as long as a graph
    for length in lengths:
        asked = [msgspec.structs.replace(request(str(length), prompt(length, length), max_tokens=2), hidden="all")]
        ours, theirs = (run(each, asked)[str(length)] for each in (plain, reference))
        assert ids_of(ours) == ids_of(theirs)
        mine, wanted = (
            torch.cat([output.hidden for output in each if output.hidden is not None]) for each in (ours, theirs)
        )
        assert mine.shape == wanted.shape
        assert (mine.cpu() - wanted).abs().max() < 1e-2
    assert read == lengths
    together = [request(f"together {length}", prompt(length, 1000 + length), max_tokens=2) for length in lengths]
    found, wanted_of_all = (run(each, together) for each in (plain, reference))
    assert {id: ids_of(each) for id, each in found.items()} == {id: ids_of(each) for id, each in wanted_of_all.items()}
    assert len(read) > len(lengths)


def drawn(id: str, seed: int, length: int = 20, **filters: float) -> EngineRequest:
    return request(id, prompt(length, 3), max_tokens=24, temperature=1.0, seed=seed, **(filters or {"top_p": 0.95}))


@pytest.mark.parametrize("filters", [{"top_p": 0.95}, {"top_p": 1.0}, {"top_k": 20}], ids=str)
def test_a_seed_draws_the_same_tokens_alone_and_in_company(
    deterministic: SGLangEngine, filters: dict[str, float]
) -> None:
    alone = ids_of(run(deterministic, [drawn("a", 7, **filters)])["a"])
    others = [request(str(number), prompt(5 + 9 * number, number), max_tokens=30) for number in range(6)]
    others.append(request("nucleus", prompt(9, 1), max_tokens=30, temperature=1.0, top_p=0.9))
    company = run(deterministic, [*others[:3], drawn("a", 7, **filters), drawn("b", 8, **filters), *others[3:]])
    assert ids_of(company["a"]) == alone
    assert ids_of(company["b"]) != alone
    like = run(deterministic, [drawn("b", 8, **filters), drawn("a", 7, **filters)])
    assert ids_of(like["a"]) == alone


def test_requests_without_a_seed_are_drawn_apart(deterministic: SGLangEngine) -> None:
    asked = [request(id, prompt(20, 3), max_tokens=24, temperature=1.0) for id in "abc"]
    assert len({tuple(ids_of(outputs)) for outputs in run(deterministic, asked).values()}) == 3


def test_a_seed_draws_the_same_tokens_after_an_abort(deterministic: SGLangEngine) -> None:
    alone = ids_of(run(deterministic, [drawn("a", 7)])["a"])
    deterministic.start(drawn("a", 7))
    for _ in range(5):
        deterministic.step()
    deterministic.abort("a")
    again = run(deterministic, [drawn("b", 8), msgspec.structs.replace(drawn("a", 7), id="again")])
    assert ids_of(again["again"]) == alone


def test_codes_of_a_seed_are_the_same_alone_and_in_company_where_asked_for() -> None:
    from omniflow.engine.sglang_frames import load_frame_engine

    engine = load_frame_engine(
        frame_model("depth"), dtype="bfloat16", max_running=4, kv_tokens=1000, max_steps=128, deterministic=True
    )
    try:
        alone = run_frames(engine, [ask("a", seed=3)])["a"]
        company = run_frames(engine, [ask("x", seed=1, length=30), ask("a", seed=3), ask("y", seed=2)], every=2)["a"]
    finally:
        engine.close()
    assert torch.equal(frames_of(company), frames_of(alone))
    assert company[-1].finish_reason == alone[-1].finish_reason


@pytest.mark.parametrize("kind", ["token", "parallel", "depth"])
def test_a_captured_step_gives_the_codes_of_an_eager_one(kind: str) -> None:
    from omniflow.engine.sglang_frames import load_frame_engine

    requests = [ask(str(number), seed=number, length=3 + 4 * number) for number in range(6)]
    given = []
    for eager in (False, True):
        engine = load_frame_engine(
            copy.deepcopy(frame_model(kind)),
            max_running=4,
            kv_tokens=1000,
            max_steps=128,
            disable_cuda_graph=eager,
        )
        try:
            given.append(run_frames(engine, requests))
        finally:
            engine.close()
    for each in requests:
        captured, eager_outputs = (frames_of(outputs[each.id]) for outputs in given)
        # A captured batch is padded to a size of its own, so sums may differ in their last bit: a few steps are equal.
        count = min(8, len(eager_outputs))
        assert torch.equal(captured[:count], eager_outputs[:count])
