"""Ranks that make the same calls in the same order: here each is a whole engine, so that what it holds can be seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import multiprocess
import pytest
import torch

from omniflow.engine import group as group_module
from omniflow.engine.base import Engine, EngineOutput, EngineRequest, Sampling
from omniflow.engine.group import Feed, Leader, calls_of, drawn_after, follow, lead, messages_of
from omniflow.engine.ranks import ALONE, Ranks
from omniflow.engine.transformers import TransformersEngine
from omniflow.errors import ActorBrokenError, ContextLengthError, ProtocolError
from tests.engine.tiny import CONTEXT, HIDDEN, drain, ids_of, prompt, request, run, tiny_llama
from tests.waiting import HANGS_S


class Heard:
    """A real engine that remembers the requests it was given."""

    def __init__(self) -> None:
        self.engine = TransformersEngine(tiny_llama(), kv_tokens=600)
        self.requests: dict[str, EngineRequest] = {}
        self.outputs: list[EngineOutput] = []
        self.closed = False
        self.feed, self.abort = self.engine.feed, self.engine.abort

    def start(self, request: EngineRequest) -> None:
        self.requests[request.id] = request
        self.engine.start(request)

    def step(self) -> list[EngineOutput]:
        outputs = self.engine.step()
        self.outputs += outputs
        return outputs

    def close(self) -> None:
        self.closed = True
        self.engine.close()


@contextmanager
def group(size: int = 2) -> Iterator[tuple[Engine, list[Heard], list[BaseException | None]]]:
    """Rank 0 and the engines of the others, each in a thread, with what they ended by."""
    pairs = [multiprocess.Pipe() for _ in range(1, size)]
    others = [Heard() for _ in pairs]
    ends: list[BaseException | None] = [None] * len(others)

    def live(index: int) -> None:
        try:
            follow(others[index], Ranks(index + 1, size, [pairs[index][1]]))  # type: ignore[arg-type]
        except ActorBrokenError as error:
            ends[index] = error
            pairs[index][1].close()

    threads = [threading.Thread(target=live, args=(index,)) for index in range(len(others))]
    for thread in threads:
        thread.start()
    leader = lead(TransformersEngine(tiny_llama(), kv_tokens=600), Ranks(0, size, [ours for ours, _ in pairs]))
    yield leader, others, ends
    for ours, _ in pairs:
        ours.close()
    for thread in threads:
        thread.join(HANGS_S)
        assert not thread.is_alive()


def test_every_rank_makes_the_same_calls() -> None:
    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    asked = [
        request("a", prompt(9), max_tokens=6),
        EngineRequest(
            id="b",
            ids=prompt(12),
            sampling=Sampling(max_tokens=4, temperature=0.7, seed=5, logit_bias=((3, 1.5),), top_logprobs=2),
            embeds=rows.to(torch.float64).to(torch.float32),
            positions=(2, 5, 11),
        ),
    ]
    with group(3) as (leader, others, ends):
        found = run(leader, asked)
        leader.start(EngineRequest(id="open", ids=[], open=True, sampling=Sampling(max_tokens=5)))
        leader.feed("open", rows[:1], done=False)
        leader.feed("open", rows[1:], done=True)
        leader.start(request("gone", prompt(5), max_tokens=50))
        begun = leader.step()
        leader.abort("gone")
        for id, outputs in drain(leader).items():
            found[id] = [output for output in begun if output.id == id] + outputs
        leader.close()
    alone = TransformersEngine(tiny_llama(), kv_tokens=600)
    assert {id: ids_of(outputs) for id, outputs in run(alone, asked).items()} == {id: ids_of(found[id]) for id in "ab"}
    assert found["gone"][-1].finish_reason == "abort"
    for other in others:
        assert other.closed
        for id, outputs in found.items():
            assert ids_of([output for output in other.outputs if output.id == id]) == ids_of(outputs)
        heard = other.requests["b"]
        assert heard.embeds is not None and torch.equal(heard.embeds, rows)
        assert (heard.sampling, heard.positions, heard.ids) == (asked[1].sampling, asked[1].positions, asked[1].ids)
    assert ends == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 4), (1,), (0, 7)])
def test_tensors_arrive_as_they_were(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = (torch.rand(shape) * 100).to(dtype)
    turned = sent.T if len(shape) > 1 else sent
    messages = iter(messages_of([Feed("a", turned, False), Feed("b", sent[:1], True)]))
    first, second = calls_of(lambda: bytes(next(messages)))
    assert isinstance(first, Feed) and isinstance(second, Feed)
    assert (first.rows.dtype, second.rows.dtype) == (dtype, dtype)
    assert torch.equal(first.rows, turned) and torch.equal(second.rows, sent[:1])
    assert list(messages) == []


def test_a_row_of_one_element_arrives_whatever_its_stride() -> None:
    """Torch calls it contiguous, and its bytes cannot be seen."""
    sent = torch.arange(12.0).reshape(3, 4)[1:2, 2]
    messages = iter(messages_of([Feed("a", sent, False)]))
    (got,) = calls_of(lambda: bytes(next(messages)))
    assert isinstance(got, Feed) and torch.equal(got.rows, sent)


def test_what_is_refused_is_made_nowhere() -> None:
    with group() as (leader, others, _):
        with pytest.raises(ContextLengthError):
            leader.start(request("long", prompt(CONTEXT + 1)))
        with pytest.raises(ProtocolError):
            leader.start(EngineRequest(id="w", ids=[1], embeds=torch.zeros(1, 3), positions=(0,), sampling=Sampling()))
        found = run(leader, [request("next", prompt(5))])
        leader.close()
    assert list(others[0].requests) == ["next"]
    assert ids_of(others[0].outputs) == ids_of(found["next"])


def test_a_rank_that_draws_other_tokens_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would come to wait for each other: one has ended a request that the other has not."""
    with group() as (leader, others, ends):
        leader.start(request("a", prompt(9), max_tokens=6))
        leader.step()
        others[0].step = lambda: [EngineOutput("a", (1,), None)]  # type: ignore[method-assign]
        monkeypatch.setattr(group_module, "_KILLED_S", 0.0)
        with pytest.raises(OSError):
            for _ in range(100_000):
                leader.step()
    assert "rank 1 has drawn other tokens than rank 0" in str(ends[0])


def test_alone_nothing_is_between() -> None:
    engine = TransformersEngine(tiny_llama())
    assert lead(engine, ALONE) is engine
    assert isinstance(lead(engine, Ranks(0, 2)), Leader)


def test_a_leader_has_to_do_what_its_engine_has() -> None:
    leader = lead(TransformersEngine(tiny_llama(), kv_tokens=600), Ranks(0, 2))
    found = [(leader.has_work(), leader.is_reading())]
    leader.start(request("a", prompt(9), max_tokens=2))
    for _ in range(2):
        found.append((leader.has_work(), leader.is_reading()))
        leader.step()
    found.append((leader.has_work(), leader.is_reading()))
    assert found == [(False, False), (True, True), (True, False), (False, False)]


def test_what_was_drawn_counts_all_that_ranks_must_agree_on() -> None:
    outputs = [EngineOutput("a", (1, 2), None), EngineOutput("b", (3,), "stop")]
    seen = {drawn_after(0, outputs)}
    for other in (EngineOutput("a", (1,), None), EngineOutput("a", (1, 2), "length"), EngineOutput("c", (1, 2), None)):
        seen.add(drawn_after(0, [other, outputs[1]]))
    assert len(seen) == 4
    assert drawn_after(drawn_after(0, outputs[:1]), outputs[1:]) == drawn_after(0, outputs)
