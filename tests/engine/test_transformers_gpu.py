"""The reference engine on a GPU: it is for CPUs, but takes the devices that stages name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omniflow.engine.transformers import load_engine
from tests.engine.tiny import ids_of, prompt, request, run, tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.mark.parametrize("device", ["gpu", "gpu:0"])
def test_a_gpu_by_the_names_that_stages_use(tmp_path: Path, device: str) -> None:
    tiny_llama().save_pretrained(tmp_path)
    asked = [request(str(number), prompt(5 + 9 * number, number), max_tokens=12) for number in range(3)]
    here, there = (run(load_engine(tmp_path, device=each), asked) for each in ("cpu", device))
    for each in asked:
        assert ids_of(there[each.id])[:6] == ids_of(here[each.id])[:6]
