"""What bench/gpu/first.py says of what it has seen."""

from __future__ import annotations

from typing import Any

import pytest

from bench.gpu.first import QUESTIONS, verdict, words
from bench.gpu.report import Report

SAME = [str(number) for number in range(len(QUESTIONS))]
OTHER = [*SAME[:-1], "x"]


@pytest.mark.parametrize(
    ("changed", "failed", "equal"),
    [
        ({}, [], {"thinker, float32": 8, "thinker": 8}),
        ({"thinker": {"answers": OTHER}}, [], {"thinker, float32": 8, "thinker": 7}),
        ({"thinker, float32": {"answers": OTHER}}, ["thinker, float32"], {"thinker, float32": 7, "thinker": 8}),
        ({"thinker": {"words_heard": 0.4}}, ["thinker"], {"thinker, float32": 8, "thinker": 8}),
        ({"thinker": {"failed": "hearing: no"}}, ["thinker"], {"thinker, float32": 8, "thinker": 8}),
    ],
)
def test_only_float32_has_to_say_what_the_cpu_says_and_all_have_to_speak(
    changed: dict[str, Any], failed: list[str], equal: dict[str, int]
) -> None:
    report, names = Report(None, "first"), ["cpu", "thinker, float32", "thinker"]
    for name in names:
        report.keep({"answers": SAME, "words_heard": 1.0} | changed.get(name, {}), name)
    assert verdict(report, names) == bool(failed)
    assert report.found["verdict"] == {"equal_to_cpu": equal, "of": 8, "failed": failed}


def test_one_that_did_not_start_has_failed_and_is_compared_with_nothing() -> None:
    report = Report(None, "first")
    report.keep({"failed": "the server did not start"}, "cpu")
    report.keep({"answers": SAME, "words_heard": 1.0}, "thinker")
    assert verdict(report, ["cpu", "thinker"]) == 1
    assert report.found["verdict"] == {"equal_to_cpu": {}, "of": 8, "failed": ["cpu"]}


def test_words_have_no_signs() -> None:
    assert words("She opened; the OLD door.") == ["she", "opened", "the", "old", "door"]
