"""The tiny talker's own weights on SGLang: the codes of the reference engine, with its own way of drawing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from actors.tiny_talker.model import load_model
from omniflow.engine.base import EngineRequest, Sampling
from omniflow.engine.frames import FrameEngine
from tests.engine.test_sglang_frames import assert_same, run

if TYPE_CHECKING:
    from omniflow.engine.sglang_frames import SGLangFrameEngine

GPU = torch.cuda.is_available()
FOLDER = Path(__file__).parents[2] / "packages/omniflow-tiny-talker/omniflow_tiny_talker"

pytestmark = [
    pytest.mark.gpu if GPU else pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[SGLangFrameEngine]:
    from omniflow.engine.sglang_frames import load_frame_engine

    engine = load_frame_engine(load_model(FOLDER), device="gpu" if GPU else "cpu", max_running=4, kv_tokens=2048)
    yield engine
    engine.close()


def asked(number: int, temperature: float) -> EngineRequest:
    sampling = Sampling(temperature=temperature, top_k=50, top_p=0.95, seed=number, max_tokens=24)
    ids = [
        1,
        *(10 + (7 * number + 3 * at) % 120 for at in range(8 + 5 * number)),
        160 + 1025,
    ]  # any phonemes, then begin
    return EngineRequest(id=str(number), ids=ids, sampling=sampling)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_says_what_it_says_on_the_reference_engine(engine: SGLangFrameEngine, temperature: float) -> None:
    requests = [asked(number, temperature) for number in range(5)]
    theirs = run(FrameEngine(load_model(FOLDER), max_running=4), requests)
    ours = run(engine, requests)
    for each in requests:
        assert_same(ours[each.id], theirs[each.id])
