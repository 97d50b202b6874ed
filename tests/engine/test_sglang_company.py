"""The SGLang engine, its KV cache too small for all who run: each request gets what the reference gives it."""

from __future__ import annotations

import importlib.util
import time
from array import array
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from omniflow.engine.base import EngineRequest, Sampling
from omniflow.engine.places import PLAIN
from omniflow.engine.transformers import TransformersEngine
from tests.engine import sglang_shim
from tests.engine.company import aborted_after, any_requests, cut_as, in_company
from tests.engine.test_sglang import GPU, assert_same, decode, greedy
from tests.engine.tiny import HIDDEN, drain, ids_of, prompt, run, tiny_llama

if TYPE_CHECKING:
    from omniflow.engine.sglang import SGLangEngine

pytestmark = [
    pytest.mark.gpu if GPU else pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module", params=["overlapped"] if GPU else ["in turn", "overlapped"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    from omniflow.engine.sglang import load_engine

    folder = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(folder)
    engine = load_engine(
        folder,
        decode=decode,
        device="gpu" if GPU else "cpu",
        dtype="float32",
        kv_tokens=600,
        max_running=8,
        max_waiting=100,
        chunked_prefill_size=64,
        schedule_conservativeness=0.05,  # so that more are let in than there is room for
        disable_overlap_schedule=request.param == "in turn",
    )
    if request.param == "overlapped" and not GPU:
        sglang_shim.overlap(engine._scheduler)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference() -> TransformersEngine:
    return TransformersEngine(tiny_llama(), decode=decode)


@pytest.fixture
def taken_back(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests whose memory SGLang takes for others."""
    found: list[Any] = []
    kind = type(engine._scheduler.running_batch)
    take_back = kind.retract_decode

    def noting(batch: Any, *args: Any, **settings: Any) -> Any:
        result = take_back(batch, *args, **settings)
        found.extend(result[0])
        return result

    monkeypatch.setattr(kind, "retract_decode", noting)
    return found


def assert_nothing_is_left(engine: SGLangEngine) -> None:
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == stats.kv_tokens_used == 0
    assert not engine._scheduler.outbox.asides and not engine._ids


ROWS = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(5))
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2}


def many(**sampling: float) -> list[EngineRequest]:
    """More than the cache has room for."""
    return [greedy(f"k{number}", prompt(60 + number, number), max_tokens=120, **sampling) for number in range(10)]


@pytest.mark.parametrize(
    ("changes", "sampling"),
    [
        ({}, {}),
        pytest.param({}, PENALTIES, marks=pytest.mark.skipif(GPU, reason="logprobs tell no near ties of these")),
        ({"embeds": ROWS, "positions": tuple(range(30))}, {}),
        ({"hidden": "last"}, {}),
        ({"hidden": "all"}, {}),
    ],
    ids=["plain", "penalties", "embeddings", "last hidden", "all hidden"],
)
def test_whose_memory_is_taken_for_others_gets_the_same_answer(
    engine: SGLangEngine,
    reference: TransformersEngine,
    taken_back: list[Any],
    changes: dict[str, object],
    sampling: dict[str, float],
) -> None:
    asked = [msgspec.structs.replace(each, **changes) for each in many(**sampling)]
    ours = run(engine, asked)
    assert taken_back
    for each in asked:
        theirs = run(reference, [each])[each.id]
        assert_same(ours[each.id], theirs)
        for our, their in zip(ours[each.id], theirs, strict=False):
            assert our.ids != their.ids or abs(our.logprobs[0].logprob - their.logprobs[0].logprob) < 0.02 or sampling
        if each.hidden is not None and ids_of(ours[each.id]) == ids_of(theirs):
            mine, wanted = (torch.cat([output.hidden for output in given]) for given in (ours[each.id], theirs))
            assert (mine.cpu() - wanted).abs().max() < (1e-2 if GPU else 1e-3)
    assert_nothing_is_left(engine)


def test_stop_strings_are_seen_where_memory_was_taken(
    engine: SGLangEngine, reference: TransformersEngine, taken_back: list[Any]
) -> None:
    wholes = run(reference, many())
    asked = [msgspec.structs.replace(each, stop=(decode(ids_of(wholes[each.id])[100:103]),)) for each in many()]
    ours, theirs = run(engine, asked), run(reference, asked)
    assert taken_back
    for each in asked:
        assert theirs[each.id][-1].finish_reason == "stop"
        assert_same(ours[each.id], theirs[each.id])
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_come_and_go_get_what_they_get_alone(
    engine: SGLangEngine, reference: TransformersEngine, seed: int
) -> None:
    random = Random(seed)
    requests = any_requests(random, 64, penalized=not GPU)
    together = in_company(engine, requests, random)
    for each in requests:
        whole = run(reference, [each])[each.id]
        assert_same(together[each.id], cut_as(together[each.id], whole))
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("length", [9, 150])  # read at once, and in 3 chunks
def test_an_abort_at_any_step_ends_the_one_that_is_named(
    engine: SGLangEngine, reference: TransformersEngine, length: int
) -> None:
    whole = run(reference, [greedy("x", prompt(length), max_tokens=9)])["x"]
    for step in range(16):
        requests = [greedy(id, prompt(length), max_tokens=9) for id in ("ab", "a", "abc")]
        outputs = aborted_after(step, "a", engine, requests)
        for id in ("ab", "a", "abc"):
            assert id == "a" or outputs[id][-1].finish_reason == "length"
            assert_same(outputs[id], cut_as(outputs[id], whole))
        assert_nothing_is_left(engine)


def test_who_is_aborted_does_not_wait_to_be_read_again(
    engine: SGLangEngine, taken_back: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted before the step that takes its memory, it is gone after that step."""
    kind = type(engine._scheduler.running_batch)
    take_back = kind.retract_decode

    def after_aborts(batch: Any, *args: Any, **settings: Any) -> Any:
        for each in many():
            engine.abort(each.id)
        return take_back(batch, *args, **settings)

    monkeypatch.setattr(kind, "retract_decode", after_aborts)
    for each in many():
        engine.start(each)
    while not taken_back:
        engine.step()
    assert engine.stats().num_waiting == 0
    assert all(outputs[-1].finish_reason == "abort" for outputs in drain(engine).values())
    assert_nothing_is_left(engine)


def test_a_repetition_penalty_counts_the_tokens_of_the_prompt_and_no_embeddings(
    engine: SGLangEngine, reference: TransformersEngine
) -> None:
    ids = [*range(30), *prompt(30, 3)]
    for penalty in (1.05, 1.5, 0.8):
        asked = EngineRequest(
            id="r",
            ids=ids,
            embeds=ROWS,
            positions=tuple(range(30)),
            sampling=Sampling(max_tokens=8 if GPU else 60, repetition_penalty=penalty, top_logprobs=2),
        )
        ours, theirs = ids_of(run(engine, [asked])["r"]), ids_of(run(reference, [asked])["r"])
        assert ours == theirs


def test_tokens_that_may_wait_do_not_wait_for_the_first_ones_of_others(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are read whenever tokens would be due."""
    from omniflow.engine import sglang_outbox

    now = [1e9]
    monkeypatch.setattr(sglang_outbox, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(engine._scheduler.outbox, "gather_s", 4.0)
    engine.start(EngineRequest(id="long", ids=prompt(9), sampling=Sampling(max_tokens=100)))
    engine.step()
    told = 0
    for number in range(10):
        engine.start(EngineRequest(id=str(number), ids=prompt(9, number), sampling=Sampling(max_tokens=1)))
        for seconds in (5, 1):  # one step reads the prompt, the other goes on with the long one
            now[0] += seconds
            told += sum(len(output.ids) for output in engine.step() if output.id == "long")
    assert told >= 8
    engine.abort("long")
    drain(engine)
    assert_nothing_is_left(engine)


@pytest.fixture
def gathering(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that may wait do so for ever."""
    monkeypatch.setattr(engine._scheduler.outbox, "gather_s", 1e9)
    monkeypatch.setattr(engine._scheduler.outbox, "_gave", time.monotonic())


@pytest.mark.usefixtures("gathering")
@pytest.mark.parametrize("sampling", [{}, PENALTIES], ids=["plain", "penalties"])
def test_tokens_that_wait_are_told_before_a_prompt_is_waited_for(
    engine: SGLangEngine, sampling: dict[str, float]
) -> None:
    if not engine._scheduler.enable_overlap:
        pytest.skip("a step in turn can only tell what it has got after the prompt that it reads")

    def told(steps: int) -> int:
        return sum(len(output.ids) for _ in range(steps) for output in engine.step() if output.id == "long")

    engine.start(EngineRequest(id="long", ids=prompt(9), sampling=Sampling(max_tokens=100, **sampling)))
    assert told(12) == 1
    assert not engine.is_reading()
    engine.start(EngineRequest(id="read", ids=prompt(200, 90 + len(sampling)), sampling=Sampling(max_tokens=1)))
    (req,) = engine._scheduler.running_batch.reqs
    for _ in range(4):  # read in 4 chunks; meanwhile nobody else goes on
        assert told(1) in (len(req.output_ids) - 1, 0)
        assert engine.is_reading() and req.send_token_offset == len(req.output_ids)
    assert told(3) == 0
    assert not engine.is_reading() and req.send_token_offset < len(req.output_ids)
    engine.abort("long")
    drain(engine)
    assert_nothing_is_left(engine)


@pytest.mark.usefixtures("gathering")
def test_whose_memory_is_taken_has_been_told_all(engine: SGLangEngine, taken_back: list[Any]) -> None:
    for each in many():
        engine.start(each)
    while not taken_back:
        outputs = engine.step()
    for req in taken_back:
        assert req.send_token_offset == len(req.output_ids) > 1
        assert engine._ids[req.rid] in {output.id for output in outputs}
    for each in many():
        engine.abort(each.id)
    drain(engine)
    assert_nothing_is_left(engine)


@pytest.mark.parametrize(("count", "wait_s"), [(1, 4.0), (15, 4.0), (16, 8.0)])
def test_tokens_of_many_requests_wait_twice_as_long(count: int, wait_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from omniflow.engine import sglang_outbox

    now = [1e9]
    monkeypatch.setattr(sglang_outbox, "time", SimpleNamespace(monotonic=lambda: now[0]))
    outbox = sglang_outbox.Outbox()
    outbox.gather_s = 4.0
    running = {"finished": lambda: False, "finished_output": False, "finished_len": None, "return_logprob": False}
    reqs = [SimpleNamespace(rid=str(n), send_token_offset=0, output_ids=array("q"), **running) for n in range(count)]
    outbox.asides = {req.rid: sglang_outbox.Aside(PLAIN, None, may_wait=True) for req in reqs}

    def told_after(seconds: float) -> int:
        now[0] += seconds
        for req in reqs:
            req.output_ids.append(7)
        outbox.stream_output(reqs, False)
        told, outbox.progress = outbox.progress, []
        return sum(len(each.ids) for each in told)

    assert told_after(0.0) == count  # the first
    assert told_after(100.0) == count
    assert told_after(wait_s - 0.5) == 0
    assert told_after(0.5) == 2 * count
