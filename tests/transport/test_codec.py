"""Values to bytes and back, where the contract suite of transports does not look."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from omniflow.digest import pack, unpack
from omniflow.transport import codec

from ..waiting import HANGS_S


def test_event_loops_in_two_threads_decode_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes its tensors from its own value, though both are of one type."""
    torch = pytest.importorskip("torch")
    both, tensor = threading.Barrier(2), codec._tensor

    def in_step(*arguments: Any) -> Any:
        both.wait(HANGS_S)
        return tensor(*arguments)

    monkeypatch.setattr(codec, "_tensor", in_step)
    packed = [pack([torch.full((9,), number)] * 3) for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        got = list(threads.map(lambda each: unpack(list[torch.Tensor], each), packed))
    assert [[int(one.sum()) for one in value] for value in got] == [[0, 0, 0], [9, 9, 9]]


def test_a_decoder_is_made_once() -> None:
    assert codec.decoder_for(np.ndarray) is codec.decoder_for(np.ndarray)
