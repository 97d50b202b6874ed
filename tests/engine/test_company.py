"""Whatever else an engine is asked at the same time, each request gets what it gets alone."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniflow.engine.base import Engine, EngineOutput
from omniflow.engine.linear import pack_linears
from omniflow.engine.transformers import TransformersEngine
from tests.engine.company import aborted_after, any_requests, cut_as, in_company
from tests.engine.tiny import prompt, request, run, tiny_llama


def decode(ids: list[int]) -> str:
    return "".join(chr(32 + id) for id in ids)


def engine_of(**limits: int) -> TransformersEngine:
    model = tiny_llama()
    pack_linears(model)  # a row gets the same bits in any company: no near tie can fall otherwise
    return TransformersEngine(model, decode=decode, **limits)


def told(outputs: list[EngineOutput]) -> list[tuple[object, ...]]:
    """What of them must be equal: all but logprobs, whose last bits other batches may change."""
    return [(output.ids, output.finish_reason) for output in outputs]


@settings(max_examples=4, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([1, 3, 8]))
def test_requests_that_come_and_go_get_what_they_get_alone(random: Random, max_running: int) -> None:
    engine, alone = engine_of(max_running=max_running, kv_tokens=400), engine_of(kv_tokens=400)
    requests = any_requests(random, 12, seeds=True)
    together = in_company(engine, requests, random)
    for each in requests:
        whole = run(alone, [each])[each.id]
        assert told(together[each.id]) == told(cut_as(together[each.id], whole))
    assert engine.stats() == alone.stats()


@pytest.mark.parametrize("length", [9, 150])  # read at once, and in 3 chunks
def test_an_abort_at_any_step_ends_the_one_that_is_named(length: int) -> None:
    engine: Engine = engine_of()
    whole = told(run(engine, [request("x", prompt(length), max_tokens=5)])["x"])
    for step in range(len(whole) + 5):
        requests = [request(id, prompt(length), max_tokens=5) for id in ("ab", "a", "abc")]
        outputs = aborted_after(step, "a", engine, requests)
        assert told(outputs["ab"]) == told(outputs["abc"]) == whole
        assert told(outputs["a"]) in (whole, [*whole[: len(outputs["a"]) - 1], ((), "abort")])
        assert engine.stats().kv_tokens_used == 0


def test_a_seed_gives_the_same_tokens_after_an_abort() -> None:
    engine = engine_of()
    asked = request("s", prompt(20), temperature=1.0, seed=7, max_tokens=12)
    whole = told(run(engine, [asked])["s"])
    engine.start(asked)
    for _ in range(4):
        engine.step()
    engine.abort("s")
    others = [request(str(number), prompt(9, number), temperature=1.0, seed=number) for number in range(3)]
    assert told(run(engine, [*others, msgspec.structs.replace(asked, id="t")])["t"]) == whole
