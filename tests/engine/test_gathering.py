from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniflow.engine.base import EngineOutput
from omniflow.engine.gathering import Gathering, joined
from omniflow.errors import InvalidInputError
from omniflow.media import TokenLogprob


def test_joined_outputs_are_those_of_each_request_in_order() -> None:
    """What has frames stays by itself, and so does what came before an error: it is still told."""
    top = (TokenLogprob(7, -0.5),)
    frame, error = torch.zeros(1, 8), InvalidInputError("no")
    steps = [
        [EngineOutput("a", (1,), None, top), EngineOutput("b", (5,)), EngineOutput("c", (), None, (), frame)],
        [EngineOutput("a", (2,), None, top), EngineOutput("b", (), "abort", error=error)],
        [EngineOutput("a", (3, 4), "stop", 2 * top), EngineOutput("c", (), "length", (), frame)],
    ]
    found = joined(steps)
    assert [(each.id, each.ids, each.finish_reason) for each in found] == [
        ("a", (1, 2, 3, 4), "stop"),
        ("b", (5,), None),
        ("b", (), "abort"),
        ("c", (), None),
        ("c", (), "length"),
    ]
    assert (found[0].logprobs, found[2].error) == (4 * top, error)
    assert joined(steps[:1]) is steps[0]


def test_without_a_time_all_is_handed_over_as_it_comes() -> None:
    outputs = [EngineOutput("a", (1,))]
    assert Gathering(0.0).add(outputs) is outputs
    assert Gathering(0.0).add([]) == []


def test_what_waits_does_so_from_when_something_was_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    gathering = Gathering(10.0)

    def counts(*times: float) -> list[int]:
        """How many tokens are handed over after steps that end at `times`."""
        found = []
        for now in times:
            seconds[0] = now
            found.append(sum(len(each.ids) for each in gathering.add([EngineOutput("a", (0,))])))
        return found

    assert counts(100.0, 105.0, 109.9, 110.0, 119.9, 120.0) == [1, 0, 0, 3, 0, 2]
    assert counts(125.0) == [0]
    assert len(gathering.rest()[0].ids) == 1
    assert counts(134.9, 135.0) == [0, 2]


@given(st.lists(st.lists(st.sampled_from("abc"), unique=True), max_size=30), st.booleans())
def test_nothing_is_lost_and_first_and_last_ones_do_not_wait(steps: list[list[str]], asks: bool) -> None:
    """Each step gives some of three requests a token, and a last one ends them all, the rest told before or not."""
    gathering, given, told = Gathering(1e9), dict[str, list[int]](), dict[str, list[int]]()
    was_quiet = False
    for number, ids in enumerate(steps):
        is_first = any(id not in given for id in ids)
        for id in ids:
            given.setdefault(id, []).append(number)
        handed_over = gathering.add([EngineOutput(id, (number,)) for id in ids])
        assert bool(handed_over) == bool(ids and (is_first or was_quiet))
        was_quiet = not ids
        for output in handed_over:
            told.setdefault(output.id, []).extend(output.ids)
        assert not handed_over or told == given
    if asks:
        handed_over = gathering.rest() if gathering.holds else []
        assert not gathering.holds
        for output in handed_over:
            told.setdefault(output.id, []).extend(output.ids)
        assert told == given
    for output in gathering.add([EngineOutput(id, (), "stop") for id in "abc"]):
        told.setdefault(output.id, []).extend(output.ids)
    assert told == {id: given.get(id, []) for id in "abc"}
