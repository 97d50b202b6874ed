"""Results that are on disk as soon as they are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu.report import Report, machine


def test_what_is_added_is_written_at_once_beside_other_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "found.json"
    report = Report(file, "rates", {"gpus": ["a"]})
    report.add({"tokens": 5}, "1b", "8")
    assert json.loads(file.read_text()) == {"machine": {"gpus": ["a"]}, "rates": {"1b": {"8": {"tokens": 5}}}}
    report.keep({"first": 2}, "1b", "8")
    report.add({"took": 3})
    Report(file, "kills", {"gpus": ["b"]}).keep({"one": {}})
    assert json.loads(file.read_text()) == {
        "machine": {"gpus": ["b"]},
        "rates": {"1b": {"8": {"tokens": 5, "first": 2}}, "took": 3},
        "kills": {"one": {}},
    }
    assert capsys.readouterr().out == '1b 8 {"tokens": 5}\n{"took": 3}\n'


def test_the_machine_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIFLOW_COMMIT", "abc")
    found = machine()
    assert found["commit"] == "abc" and found["cores"] > 0 and found["torch"]
