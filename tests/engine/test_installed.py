"""What is missing is told by what lies in the environment, without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from omniflow.engine.installed import lacks_cuda, lacks_sglang


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose packages a test writes."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr("sys.modules", {})
    return tmp_path


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (None, "torch is not installed"),
        ("cuda: Optional[str] = None\n", "torch is built without CUDA"),
        ("cuda: Optional[str] = '13.0'\n", None),
    ],
)
def test_a_torch_that_cannot_use_gpus(site: Path, version: str | None, why: str | None) -> None:
    if version is not None:
        (site / "torch").mkdir()
        (site / "torch/__init__.py").write_text("raise AssertionError('it was imported')")
        (site / "torch/version.py").write_text(version)
    assert lacks_cuda("cpu") is None
    told = lacks_cuda("gpu:1")
    assert told == (why and f"device='gpu:1' needs torch for GPUs, and {why} here; install torch from PyPI, in a new "
                    "environment")  # fmt: skip


def test_sglang(site: Path) -> None:
    assert "pip install 'omniflow[sglang]'" in str(lacks_sglang())
    (site / "sglang.py").write_text("raise AssertionError('it was imported')")
    assert lacks_sglang() is None
