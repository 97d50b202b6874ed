"""The budgets of two engines and a codec are what their models take, and it is told where one was not held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bench.gpu.budgets import BUDGETS, CODEC_WEIGHTS, KV_TOKENS, ORDERS, SIZE, codec, verdict
from bench.gpu.engine import llama_folder


def test_weights_and_keys_are_those_of_the_models(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = json.loads((llama_folder(SIZE, str(tmp_path)) / "config.json").read_text())
    with torch.device("meta"):
        model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**shape))  # type: ignore[no-untyped-call]
        sounds = codec()
    weights = 2 * sum(each.numel() for each in model.parameters())
    cache = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    for name, tokens in KV_TOKENS.items():
        budget = BUDGETS[name]
        assert (budget.weights, budget.kv) == (weights, cache * tokens)
        assert budget.cap == weights + cache * tokens + budget.workspace
    assert CODEC_WEIGHTS == sum(each.numel() for each in sounds.parameters())


def test_a_budget_is_held_where_it_is_used_all_orders_are_alike_and_nobody_gets_more() -> None:
    cap = BUDGETS["a"].cap

    def found(share: float = 0.99, **of_last: Any) -> dict[str, Any]:
        row = {"bytes": int(cap * share), "more": "is refused"}
        return {order: {"a": row | (of_last if order == ORDERS[-1] else {})} for order in ORDERS}

    assert verdict("a", found())["held"]
    assert verdict("a", found(bytes=int(cap * 0.999)))["held"]
    assert not verdict("a", found(bytes=int(cap * 0.97)))["held"]
    assert not verdict("a", found(share=0.9))["held"]
    assert not verdict("a", found(bytes=int(cap * 1.03)))["held"]
    assert not verdict("a", found(more="was given"))["held"]
    assert verdict("a", found(failed="died"))["failed"] == ["died"]
