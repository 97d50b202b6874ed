"""Results that are on disk as soon as they are known."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from bench.gpu import report as shared
from bench.gpu.report import Report, folder_of, machine, need, shared_memory
from omniflow.cli.machine import GpuFacts, GpuReport


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


@pytest.mark.parametrize(
    ("gpus", "visible", "installed", "said"),
    [
        (1, None, True, ""),
        (2, "0,1", True, ""),
        (2, "1", True, "script wants 2 GPUs, and sees 1: `omniflow doctor` says more\n"),
        (1, "", True, "script wants a GPU, and sees none: `omniflow doctor` says more\n"),
        (1, None, False, "script wants SGLang, which is not installed: `make gpu` makes an environment that has it\n"),
    ],
)
def test_what_a_script_wants(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: int,
    visible: str | None,
    installed: bool,
    said: str,
) -> None:
    here = tuple(GpuFacts(number, f"GPU-{number}", "H200", 2**37, "580", "9.0") for number in range(2))
    monkeypatch.setattr(shared, "find_gpus", lambda: GpuReport(here))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "sglang" and installed or None)
    monkeypatch.setattr(sys, "argv", ["/some/script.py"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if said:
        with pytest.raises(SystemExit) as ended:
            need(gpus, sglang=True)
        assert ended.value.code == 2
    else:
        need(gpus, sglang=True)
    assert capsys.readouterr().err == said


def test_the_folder_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder_of(str(tmp_path)) == str(tmp_path)
    with pytest.raises(SystemExit) as ended:
        folder_of(str(tmp_path / "gone"))
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "gone: there is no such folder" in line


def test_all_but_semaphores_of_joblib_is_left_in_shared_memory() -> None:
    before = shared_memory()
    names = [f"{kind}-{os.getpid()}-test" for kind in ("sem.loky", "sem.mp", "omniflow")]
    files = [Path("/dev/shm", name) for name in names]
    for file in files:
        file.touch()
    try:
        assert set(names) & (shared_memory() - before) == set(names[1:])  # others may leave theirs meanwhile
    finally:
        for file in files:
            file.unlink()
