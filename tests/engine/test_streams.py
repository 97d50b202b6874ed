"""By which stream tensors of other stages are read. What stands in for torch's streams writes down what is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omniflow.engine.streams import in_order


class Stream:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self._calls = name, calls

    def wait_stream(self, other: Stream) -> None:
        self._calls.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    own, default = Stream("own", found), Stream("default", found)

    @contextlib.contextmanager
    def stream(current: Stream) -> Iterator[None]:
        found.append(f"by {current.name}")
        yield
        found.append("by own again")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: own)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: default)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return found


def test_what_lies_on_a_gpu_is_read_by_the_default_stream(calls: list[str]) -> None:
    """Which waits for a peer that has yet to fill it, and tells the peer when it is through."""
    there: Any = SimpleNamespace(is_cuda=True)
    with in_order(None, torch.zeros(1), there):
        calls.append("read")
    assert calls == ["by default", "read", "by own again", "own waits for default"]


def test_of_what_lies_in_the_hosts_memory_no_stream_is_asked(calls: list[str]) -> None:
    with in_order(torch.zeros(1), None):
        calls.append("read")
    assert calls == ["read"]
