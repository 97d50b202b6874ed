"""What `bench.gpu.tp` runs: a thinker with random weights on SGLang, split over GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models

from actors.thinker import Thinker
from bench.gpu.engine import llama_folder
from omniflow.graph import Budget, Graph
from omniflow.topology import one_for_one

PROMPT_TOKENS = 128
MAX_RUNNING = 32
KV_TOKENS = 32768


class RandomThinker(Thinker):
    """As `Thinker`, with weights that SGLang makes up where the folder has none."""

    def _load(self) -> Path:
        folder = super()._load()
        if not any(folder.glob("*.safetensors")):
            self._sglang["load_format"] = "dummy"
        return folder


def thinker(folder: Path, tp: int, dtype: str) -> Graph:
    shape = json.loads((folder / "config.json").read_text())
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    layer = shape["hidden_size"] * (shape["hidden_size"] * 2 * (1 + kv_heads / heads) + 3 * shape["intermediate_size"])
    weights = shape["num_hidden_layers"] * layer + 2 * shape["vocab_size"] * shape["hidden_size"]
    size = 4 if dtype == "float32" else 2
    graph = Graph("tp")
    stage = graph.stage(
        "thinker",
        RandomThinker,
        device="gpu",
        tp=tp,
        memory=Budget(
            weights=int(size * weights),
            workspace="10 GiB",
            kv_tokens=KV_TOKENS,
            kv_bytes_per_token=2 * size * shape["num_hidden_layers"] * kv_heads * shape["hidden_size"] // heads,
            heads=heads,
            kv_heads=kv_heads,
        ),
        restart=one_for_one(backoff_s=0.01),
        model=str(folder),
        engine="sglang",
        dtype=dtype,
        kv_tokens=KV_TOKENS,
        max_running=MAX_RUNNING,
    )
    graph.input(ask=stage)
    graph.output(tokens=stage["emit"])
    return graph


def dummy_folder(size: str, folder: Path) -> Path:
    """A Llama of 1b or 8b without weights: its shape, and a tokenizer that nothing here asks."""
    llama_folder(size, str(folder))
    return _with_tokenizer(folder)


def small_folder(folder: Path) -> Path:
    """A Llama of 35 M random weights in float32, the same for every number of GPUs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        initializer_range=0.08,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return _with_tokenizer(folder)


def _with_tokenizer(folder: Path) -> Path:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


def prompts(count: int, round: int, vocab: int) -> list[list[int]]:
    """Prompts that no other round has: the prefix cache finds nothing."""
    generator = torch.Generator().manual_seed(1000 * round + count)
    return torch.randint(10, vocab, (count, PROMPT_TOKENS), generator=generator).tolist()
