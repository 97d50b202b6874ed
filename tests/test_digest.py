"""Digests: the same for the same content however it is cut, and a difference is found where it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniflow import digest
from omniflow.digest import EdgeDigest, EdgeRecord, State, first_difference, pack, unpack
from omniflow.media import AudioChunk, Generated, Latents, Segment, TextDelta, Tokens

ROOT = Path(__file__).parents[1]


def record(hint: Any, items: Sequence[object], state: State = "ended") -> EdgeRecord:
    found = EdgeDigest(hint)
    for item in items:
        found.add(item)
    return EdgeRecord(
        edge="a.x -> b.y",
        state=state,
        unit=found.form.unit,
        block=found.form.block,
        size=found.size,
        digests=found.digests(),
        opaque=found.opaque,
    )


def texts(text: str) -> list[Any]:
    return [TextDelta(text)]


def cut(whole: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[a:b] for a, b in zip(edges, edges[1:], strict=False)]


# -- where a whole is cut does not matter ------------------------------------------------------------------------------

FORMS: dict[str, tuple[type, Callable[[str], object]]] = {
    "text": (TextDelta, TextDelta),
    "tokens": (Tokens, lambda part: Tokens(tuple(map(ord, part)))),
    "audio": (AudioChunk, lambda part: AudioChunk(np.repeat(np.array([*map(ord, part)], np.float32), 300), 24000)),
    "stereo": (AudioChunk, lambda part: AudioChunk(np.repeat(np.array([*map(ord, part)], np.float32), 2), 24000, 2)),
    "frames": (Latents, lambda part: Latents(np.array([[ord(c), 1, 2] for c in part], np.float32), 0, False)),
}


@pytest.mark.parametrize("form", FORMS)
@given(
    whole=st.text(st.characters(codec="utf-8"), min_size=1, max_size=80),
    a=st.lists(st.integers(0, 80), max_size=6),
    b=st.lists(st.integers(0, 80), max_size=6),
)
def test_any_cut_of_a_whole_has_the_same_digests(form: str, whole: str, a: list[int], b: list[int]) -> None:
    hint, make = FORMS[form]
    if form == "frames":  # a part without frames has no shape to compare
        parts = [[part for part in cut(whole, places) if part] for places in (a, b)]
    else:
        parts = [cut(whole, a), cut(whole, b)]
    one, other = (record(hint, [make(part) for part in each]) for each in parts)
    assert one == other
    assert first_difference(one, other) is None


@given(whole=st.text("abc", min_size=1, max_size=100), at=st.integers(0, 99), places=st.lists(st.integers(0, 99)))
def test_a_changed_character_is_found_in_its_block(whole: str, at: int, places: list[int]) -> None:
    at %= len(whole)
    changed = whole[:at] + "X" + whole[at + 1 :]
    found = first_difference(record(TextDelta, texts(whole)), record(TextDelta, map(TextDelta, cut(changed, places))))
    assert found == at // 16 * 16


@pytest.mark.parametrize(
    ("hint", "one", "other", "at"),
    [
        (TextDelta, texts("a" * 40), texts("a" * 39), 32),
        (TextDelta, texts("a" * 32), texts("a" * 33), 32),
        (TextDelta, texts(""), texts("a"), 0),
        (Tokens, [Tokens((1, 2, 3))], [Tokens((1, 2, 4))], 2),
        (Tokens, [Tokens((1, 2, 3))], [Tokens((1, 2, 3, 4))], 3),
        (AudioChunk, [AudioChunk(np.zeros(9, np.float32), 24000)], [AudioChunk(np.zeros(9, np.float32), 16000)], 0),
        (AudioChunk, [AudioChunk(np.zeros(8, np.float32), 8, 1)], [AudioChunk(np.zeros(8, np.float32), 8, 2)], 0),
        (Segment, [Segment("a", 0), Segment("b", 1)], [Segment("a", 0), Segment("c", 1)], 1),
        (Segment, [Segment("a", 0)], [Segment("a", 0), Segment("c", 1)], 1),
        (Generated, [Generated("stop", 1, 2)], [Generated("length", 1, 2)], 0),
    ],
)
def test_what_differs_and_where(hint: Any, one: list[Any], other: list[Any], at: int) -> None:
    assert first_difference(record(hint, one), record(hint, other)) == at
    assert first_difference(record(hint, other), record(hint, one)) == at
    assert first_difference(record(hint, one), record(hint, one)) is None


def frames(count: int, segment: int = 0, last: bool = False) -> Latents:
    return Latents(np.ones((count, 4), np.float32), segment, last)


def test_where_a_segment_of_frames_ends_is_part_of_what_it_says() -> None:
    whole = record(Latents, [frames(20), frames(12, last=True), frames(5, 1, True)])
    assert record(Latents, [frames(32), frames(0, last=True), frames(3, 1), frames(2, 1, True)]) == whole
    for other in (
        [frames(31, last=True), frames(1), frames(5, 1, True)],
        [frames(32), frames(5, 1, True)],
        [frames(32, last=True), frames(5, 2, True)],
        [frames(32, last=True), frames(5, 1)],
    ):
        assert first_difference(record(Latents, other), whole) is not None


# -- any other value ---------------------------------------------------------------------------------------------------


class Sack(msgspec.Struct, frozen=True):
    names: set[str] = set()
    counts: dict[str, int] = {}
    array: np.ndarray | None = None
    tensor: torch.Tensor | None = None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Sack(counts={"a": 1, "b": 2}), Sack(counts={"b": 2, "a": 1}), True),
        (Sack(counts={"a": 1, "b": 2}), Sack(counts={"b": 1, "a": 2}), False),
        (Sack(array=np.arange(6.0)), Sack(array=np.arange(12.0)[::2] / 2), True),
        (Sack(array=np.arange(6.0)), Sack(array=np.arange(6.0).reshape(2, 3)), False),
        (Sack(array=np.arange(6.0)), Sack(array=np.arange(6.0, dtype=np.float32)), False),
        (Sack(tensor=torch.ones(3)), Sack(tensor=torch.ones(3)), True),
        (Sack(tensor=torch.ones(3)), Sack(tensor=torch.tensor([1.0, 1.0, 2.0])), False),
        (Sack(tensor=torch.ones(3)), Sack(array=np.ones(3, np.float32)), False),
    ],
)
def test_values_are_compared_by_what_they_say(one: Sack, other: Sack, same: bool) -> None:
    assert (first_difference(record(Sack, [one]), record(Sack, [other])) is None) == same


def test_a_set_has_the_same_digest_in_every_process() -> None:
    """Python gives strings another hash, and so sets another order, in each process."""
    program = (
        "from omniflow.digest import EdgeDigest\n"
        "found = EdgeDigest(object)\n"
        "found.add({'north', 'south', 'east', 'west'})\n"
        "print(found.digests().hex(), found.opaque)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("hint", "bad", "why"),
    [
        (Sack, object(), "a value of type object cannot travel between processes"),
        (TextDelta, Segment(None, 0), "'NoneType' object has no attribute 'encode'"),  # type: ignore[arg-type]
        (Tokens, Tokens(("x",)), "invalid literal for int"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_digested_is_said_and_fails_nothing(hint: Any, bad: object, why: str) -> None:
    found = record(hint, [bad, bad])
    assert why in found.opaque
    assert found.size == 0


def test_packed_values_come_back() -> None:
    value = Sack({"a"}, {"b": 1}, np.arange(4), torch.ones(2))
    found = unpack(Sack, pack(value))
    assert (found.names, found.counts, found.array.tolist()) == ({"a"}, {"b": 1}, [0, 1, 2, 3])
    assert torch.equal(found.tensor, torch.ones(2))
    with pytest.raises(msgspec.ValidationError):
        unpack(Segment, pack(TextDelta("x")))


# -- edges that did not come to their end ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [
        (("abcdef", "cut"), ("abcdefgh", "ended"), None),
        (("a" * 20, "cut"), ("a" * 40, "ended"), None),
        (("a" * 20, "cut"), ("b" * 40, "ended"), 0),
        (("a" * 20, "cut"), ("a" * 18, "ended"), 18),
        (("a" * 20, "cut"), ("a" * 30, "cut"), None),
        (("a" * 20, "cut"), ("b" * 30, "cut"), 0),
        (("", "cut"), ("a" * 30, "ended"), None),
        (("", "cut"), ("", "skipped"), None),
        (("", "ended"), ("", "skipped"), 0),
        (("a", "cut"), ("", "skipped"), 0),
        (("", "skipped"), ("", "skipped"), None),
    ],
)
def test_what_was_cut_is_compared_as_far_as_it_goes(
    one: tuple[str, State], other: tuple[str, State], at: int | None
) -> None:
    a, b = (record(TextDelta, texts(text), state) for text, state in (one, other))
    assert first_difference(a, b) == first_difference(b, a) == at


def test_the_digests_of_an_endless_edge_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_MOST_DIGESTS", 4)
    ids = tuple(range(100))
    long = record(Tokens, [Tokens(ids)])
    assert (long.size, len(long.digests)) == (100, 4 * 8)
    assert record(Tokens, [Tokens((number,)) for number in ids]) == long
    assert first_difference(long, record(Tokens, [Tokens((0, 9, *ids[2:]))])) == 1
    assert first_difference(long, record(Tokens, [Tokens((*ids[:50], 7, *ids[51:]))])) == 3
    assert first_difference(long, record(Tokens, [Tokens(ids[:60])], "cut")) is None
