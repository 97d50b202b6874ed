"""A step of a talker-shaped mixture of experts with a depth head: `python -m bench.gpu.talker_step --json FILE`.

With CUDA graphs and eager, beside what the memory would allow. Weights are random, bf16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench.gpu.engine import copy_bandwidth
from bench.gpu.report import Report, need
from omniflow.engine.base import EngineRequest, Sampling

BATCHES = (1, 8, 16)
TALKER: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
}


def depth_head() -> Any:
    from omniflow.engine.decoder import DecoderShape
    from omniflow.engine.heads import DepthHead

    shape = DecoderShape(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=5,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32,
        rope_theta=1e6,
    )
    return DepthHead(shape, num_codes=16, vocab_size=2048, first_vocab_size=3072, stop_ids=[2150], banned_ids=[2150])


def talker_bytes(batch: int, positions: int) -> float:
    """The fewest bytes that a step reads: every weight that it uses once a use, and the keys and values."""
    hidden, layers, experts = TALKER["hidden_size"], TALKER["num_hidden_layers"], TALKER["num_experts"]
    heads, kv_heads, dim = TALKER["num_attention_heads"], TALKER["num_key_value_heads"], TALKER["head_dim"]
    used = experts * (1 - (1 - TALKER["num_experts_per_tok"] / experts) ** batch)  # of each layer, if chosen evenly
    attention = hidden * dim * (2 * heads + 2 * kv_heads)
    backbone = layers * (attention + hidden * experts + used * 3 * hidden * TALKER["moe_intermediate_size"])
    keys = layers * 2 * kv_heads * dim * positions * batch
    depth_layer = hidden * dim * (2 * 16 + 2 * 8) + 3 * hidden * 3072
    # 15 passes of the 5 layers (60 MB of cache hold a third of them), a matrix of 2048 a pass, one of 3072 before.
    head = 15 * (5 * depth_layer + 2048 * hidden) + 3072 * hidden
    return 2.0 * float(backbone + keys + head)


def measure(tokens: int, report: Report) -> None:
    from omniflow.engine.sglang_frames import build_frame_engine

    bandwidth = copy_bandwidth()
    report.add({"copy_tb_per_s": round(bandwidth / 1e12, 2)})
    torch.manual_seed(0)
    head = depth_head()
    for mode in ("graphs", "eager"):
        engine = build_frame_engine(
            TALKER,
            head,
            dtype="bfloat16",
            max_running=16,
            kv_tokens=32768,
            max_steps=1024,
            disable_cuda_graph=mode == "eager",
        )
        for batch in BATCHES:
            steps = tokens if mode == "graphs" else 24
            ms = 1e3 * frame_steps(engine, batch, steps)
            row = {f"{mode}_ms": round(ms, 3)}
            if mode == "graphs":
                floor = 1e3 * talker_bytes(batch, 64 + steps // 2) / bandwidth
                row |= {"floor_ms": round(floor, 3), "graphs_over_floor": round(ms / floor, 2)}
            else:
                row |= {"eager_over_graphs": round(ms / report.found[str(batch)]["graphs_ms"], 2)}
            report.add(row, str(batch))
        engine.close()
        del engine


def frame_steps(engine: Any, batch: int, steps: int) -> float:
    """Seconds of a step of `batch` requests, all of them making frames: median."""
    for number in range(batch):
        sampling = Sampling(temperature=0.9, top_k=50, seed=number, max_tokens=steps)
        engine.start(EngineRequest(id=str(number), ids=list(range(64)), sampling=sampling))
    times = []
    while engine.has_work():
        begin = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == batch and all(output.frames is not None for output in outputs):
            times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    need(sglang=True)
    measure(arguments.tokens, Report(arguments.json, "talker"))


if __name__ == "__main__":
    main()
