"""Contenders take turns in both orders, and are compared round by round; `sgl.Engine` answers from its own process."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest

from bench.gpu.rounds import WARM_TOKENS, Round, Turns, prompts, quartiles
from bench.gpu.sgl_engine import SglEngine

SGLANG = """\
import asyncio

class Engine:
    def __init__(self, **settings):
        print("a word of its own", settings["model_path"])
        self.loop = asyncio.new_event_loop()

    async def async_generate(self, input_ids, sampling_params, stream):
        assert stream and len(input_ids) == 128 and sampling_params["temperature"] == 0
        async def outputs():
            for _ in range(sampling_params["max_new_tokens"]):
                yield {}
        return outputs()

    def shutdown(self):
        pass
"""


@pytest.mark.anyio
async def test_each_order_comes_as_often_after_a_warm_up_and_the_first_rounds_do_not_count() -> None:
    asked: list[tuple[str, int]] = []
    numbers: set[int] = set()

    def of(name: str) -> Round:
        async def contender(batch: int, tokens: int, number: int) -> dict[str, float]:
            asked.append((name, tokens))
            numbers.add(number)
            return {"tokens_per_s": float(number)}

        return contender

    found = await Turns({"a": of("a"), "b": of("b")}).take(8, 32, 2)
    order = ["a", "b", "b", "a", "a", "b"]
    assert asked == [(name, tokens) for name in order for tokens in (WARM_TOKENS, 32)]
    assert len(numbers) == len(asked)
    assert [row["tokens_per_s"] for row in found["a"]] == [8.0, 10.0]
    assert [row["tokens_per_s"] for row in found["b"]] == [6.0, 12.0]


def test_ratios_are_those_of_rounds_next_to_each_other() -> None:
    slow_machine = [1.0, 2.0, 1.0, 2.0, 1.0]
    ours = [{"tokens_per_s": 98.0 * speed} for speed in slow_machine]
    theirs = [{"tokens_per_s": 100.0 * speed} for speed in slow_machine]
    assert quartiles(ours, theirs, "tokens_per_s") == [0.98, 0.98, 0.98]
    assert quartiles(ours, theirs, "tokens_per_s", operator.sub) == [-4.0, -2.0, -2.0]


def test_no_two_rounds_have_a_prompt_in_common() -> None:
    assert prompts(2, 1) != prompts(2, 2) and prompts(2, 1) == prompts(2, 1)


@pytest.mark.anyio
async def test_sgl_engine_answers_rounds_and_its_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang.py").write_text(SGLANG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = SglEngine({"model_path": "llama"}, kv_tokens=1024, max_running=4)
    assert await engine.answer() == {}
    found = await engine.round(4, 16, 1)
    assert found["tokens_per_s"] > 0 and found["ttft_ms"] <= found["ttft_last_ms"]
    engine.close()
    with pytest.raises(RuntimeError, match="exit code 0"):
        await engine.answer()
