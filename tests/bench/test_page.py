"""docs/gpu_transports.md says what the files say: the newest of each part, all rounds of the ratios, every run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import page

MACHINE = {"date": "2026-01-02", "gpus": ["H200"], "torch": "2", "nccl": "2", "driver": "5", "commit": "abc"}


def edge(stream_gb_s: float, ready_us: float = 90.0) -> dict[str, Any]:
    return {size: {page.READY: ready_us, page.HALF: 50.0, page.STREAM: stream_gb_s} for size in page.SIZES}


def run_of(*rounds: dict[str, Any]) -> page.Run:
    return page.Run(MACHINE, "abc", "", "there", rounds)


def test_the_page_is_fresh() -> None:
    assert page.PAGE.read_text() == page.page(json.loads(page.RUNS.read_text())), "run `python -m bench.gpu.page`"


def test_files_with_the_same_parts_are_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    for name, parts in (("1", {"a": 1, "b": 2}), ("2", {"a": 3}), ("kills", {"kill": 4})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": MACHINE, "parts": parts}))
    run = page.read({"files": ["1.json", "2.json", "kills.json"]})
    assert run.rounds == ({"a": 1, "b": 2}, {"a": 3, "kill": 4})
    assert run.title() == "2026-01-02, commit abc"


def test_the_newest_that_worked_is_taken_and_its_rounds_have_a_median() -> None:
    old, new = run_of({"x": edge(1), "y": edge(1)}), run_of({"x": {"failed": "why"}, "y": edge(2)}, {"y": edge(4)})
    assert page.newest([old, new], "x").run is old
    assert page.newest([old, new], "y").over(page.LARGE[0], page.STREAM) == 3


def test_edges_are_held_against_bare_nccl_round_by_round() -> None:
    """On uvloop where it was run; a round that has no bare NCCL, or no stream, says nothing."""
    slow, fast = edge(80, ready_us=151.0), edge(95)
    full = {page.BARE: edge(100), page.IPC: fast, page.NCCL: slow, f"{page.NCCL} (uvloop)": fast}
    runs = [
        run_of({page.IPC: fast, page.NCCL: fast}),
        run_of({page.BARE: edge(100), page.IPC: fast, page.NCCL: slow}),
        run_of(full, full | {f"{page.NCCL} (uvloop)": slow}),
    ]
    rounds = list(page.rounds_beside(runs))
    assert [round(each.ratio(page.NCCL, page.LARGE[0]), 2) for each in rounds] == [0.80, 0.95, 0.80]
    assert [each.number for each in rounds] == ["", ", round 1", ", round 2"]
    assert rounds[0].more_us(page.NCCL) == [101.0] * 3
    assert page.verdict(rounds, [False, True, False]) == "**met in 1 of 3 rounds**, in 1 of the newest 2"
    assert page.verdict(rounds, [True, True, True]) == "met"


def test_a_leak_would_show() -> None:
    """Memory that is not back after each death is told from the least to the most."""
    death = {"seen_ms": 1.26, "our_gpu_idle_after_ms": 2.0, "aborted_after_s": 0.98}
    part = {"first": death | {"memory_not_back_mb": 442.5}, "second": death | {"memory_not_back_mb": 885.0}}
    row = page.deaths("kill -9 of the reader, nccl", page.Found(run_of(), (part,)))
    assert row == [
        "reader, nccl",
        "1.3 ms",
        "2.0 ms",
        "1.0 s",
        "442 to 885 MB",
        "2, of [2026-01-02, commit abc](there)",
    ]
