"""Ming's thinker at its real widths on SGLang: `python -m bench.gpu.ming_thinker --layers 4 8 --json FILE`.

Random bf16 weights with as many of its 32 layers as are named (the first is dense, as in the model); with `--ranks 2`
they are split over two GPUs, which hold them all. Steps that decode, under CUDA graphs, beside the time that the memory
needs for the bytes that such a step cannot do without; prompts with and without media, and steps after them; short
texts, with `--prompt-graphs on` as CUDA graphs; what it costs to be told hidden states.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import multiprocess
import torch

from actors.ming.config import AUDIO, IMAGE, Thinker
from actors.ming.prompt import Grid, places
from bench.gpu.engine import copy_bandwidth
from bench.gpu.report import Report, need
from bench.gpu.rounds import prompts
from omniflow.engine.base import EngineRequest, Sampling
from omniflow.engine.group import follow, lead
from omniflow.engine.ranks import ALONE, Ranks

CONFIG: dict[str, Any] = {
    "vocab_size": 157184,
    "hidden_size": 4096,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 1,
    "router_type": "MultiRouter",
    "rms_norm_eps": 1e-6,
    "rope_theta": 2.4e6,
    "rope_scaling": {"type": "video_rope"},
    "max_position_embeddings": 32768,
}
WHOLE = 32
"""Layers of the model."""
SHORT = (16, 64, 128, 250, 500, 1000)
"""Tokens of texts that are asked for one alone."""


def build(layers: int, arguments: argparse.Namespace, ranks: Ranks) -> Any:
    from actors.ming.thinker_sglang import load_sglang_thinker

    with tempfile.TemporaryDirectory() as folder:
        config = {"torch_dtype": "bfloat16", "llm_config": CONFIG | {"num_hidden_layers": layers}}
        Path(folder, "config.json").write_text(json.dumps(config))
        most = max(arguments.batches)
        limits: Any = {"max_running": most, "max_waiting": max(64, most), "kv_tokens": 65536}
        more: Any = {"load_format": "dummy", "disable_cuda_graph": arguments.eager, "chunked_prefill_size": 8192}
        graphs = arguments.prompt_graphs == "on"
        engine = load_sglang_thinker(Path(folder), ranks=ranks, prompt_graphs=graphs, **limits, **more)
    for name, weight in engine._scheduler.model.named_parameters():
        # SGLang's own random numbers are the same in each layer, and so small that all tokens go to the same experts.
        torch.manual_seed(zlib.crc32(name.encode()))  # what both ranks have must be equal
        weight.data.fill_(1.0) if "norm" in name else weight.data.normal_(std=0.02)
    return engine


def experts_read(engine: Any, batch: int) -> float:
    """Different experts that a layer chooses for `batch` inputs that are not alike: mean over the layers."""
    counts = []
    for layer in engine._scheduler.model.model.layers[1:]:
        x = torch.randn(batch, CONFIG["hidden_size"], device="cuda", dtype=torch.bfloat16)
        counts.append(layer.mlp.gate(x).topk_ids.unique().numel())
    return float(statistics.mean(counts))


def step_bytes(layers: int, experts: float, batch: int, positions: int) -> float:
    """The fewest bytes that a step reads: every weight that it uses once, and the keys and values."""
    shape = msgspec.convert(CONFIG | {"num_hidden_layers": layers}, Thinker)
    hidden, inner, dim = shape.hidden_size, shape.moe_intermediate_size, shape.dim
    attention = hidden * dim * 2 * (shape.num_attention_heads + shape.num_key_value_heads)
    routed = 3 * hidden * inner * (experts + shape.num_shared_experts) + 2 * hidden * shape.num_experts  # float32
    dense = 3 * hidden * shape.intermediate_size
    keys = 2 * shape.num_key_value_heads * dim * positions * batch
    return 2.0 * (layers * (attention + keys) + (layers - 1) * routed + dense + hidden * shape.vocab_size)


def decode_ms(engine: Any, batch: int, tokens: int, hidden: Any = None) -> float:
    """A step of `batch` requests that all decode."""
    for number, ids in enumerate(prompts(batch, 7)):
        sampling = Sampling(max_tokens=tokens)
        engine.start(EngineRequest(id=str(number), ids=ids, sampling=sampling, hidden=hidden))
    ends = []
    while engine.has_work():
        if len(engine.step()) == batch:
            ends.append(time.perf_counter())
    steps = [1e3 * (after - before) for before, after in zip(ends[4:], ends[5:], strict=False)]
    return statistics.mean(sorted(steps)[: max(1, len(steps) * 9 // 10)])


def alone_ms(engine: Any, length: int, *, media: bool = False, tokens: int = 1, rounds: int = 4) -> list[float]:
    """Of one request: the time to its first token, and of a step of its answer. Medians, the first round for nothing.

    `media`: 3,072 of its 4,096 inputs are of images, and 512 of audio.
    """
    times = []
    for number in range(rounds + 1):
        generator = torch.Generator().manual_seed(1000 * length + number)
        ids = torch.randint(10, 100_000, (length,), generator=generator).tolist()
        request = EngineRequest(id="p", ids=ids, sampling=Sampling(max_tokens=tokens))
        if media:
            request = with_media(request, generator)
        ends = [time.perf_counter()]
        engine.start(request)
        while engine.has_work():
            if engine.step():
                ends.append(time.perf_counter())
        times.append([ends[1] - ends[0], (ends[-1] - ends[1]) / max(tokens - 1, 1)])
    return [round(1e3 * statistics.median(of), 2) for of in zip(*times[1:], strict=True)]


def with_media(request: EngineRequest, generator: torch.Generator) -> EngineRequest:
    parts: list[int | Grid] = [128, Grid(1, 48, 32), 64, Grid(1, 48, 32), 64, 512, 256]
    kinds = torch.zeros(4096, dtype=torch.uint8)
    kinds[128:1664] = kinds[1728:3264] = IMAGE
    kinds[3328:3840] = AUDIO
    at = tuple(kinds.nonzero().flatten().tolist())
    rows = torch.randn(len(at), CONFIG["hidden_size"], generator=generator).to(torch.bfloat16)
    where = torch.from_numpy(places(parts))
    return msgspec.structs.replace(request, embeds=rows, positions=at, places=where, kinds=kinds)


def second_rank(layers: int, arguments: argparse.Namespace, connection: Any) -> None:
    ranks = Ranks(1, 2, [connection])
    follow(build(layers, arguments, ranks), ranks)


def measure(layers: int, arguments: argparse.Namespace, bandwidth: float, report: Report) -> None:
    ranks, begin = ALONE, time.perf_counter()
    if arguments.ranks == 2:
        ours, theirs = multiprocess.get_context("spawn").Pipe()
        multiprocess.get_context("spawn").Process(target=second_rank, args=(layers, arguments, theirs)).start()
        ranks = Ranks(0, 2, [ours])
    alone = build(layers, arguments, ranks)
    engine = lead(alone, ranks)
    start_s, gpu_gb = round(time.perf_counter() - begin, 1), round(torch.cuda.memory_reserved() / 1e9, 1)
    report.add({"start_s": start_s, "gpu_gb": gpu_gb}, str(layers))
    for batch in arguments.batches:
        decode_ms(engine, batch, 8)
        step, experts = decode_ms(engine, batch, arguments.tokens), experts_read(alone, batch)
        floor = 1e3 * step_bytes(layers, experts, batch, 128 + arguments.tokens // 2) / bandwidth / ranks.size
        entry = {"step_ms": step, "tokens_per_s": 1e3 * batch / step, "experts_a_layer": experts, "floor_ms": floor}
        entry["step_over_floor"] = step / floor
        report.add({name: round(value, 3) for name, value in entry.items()}, str(layers), str(batch))
    batch = max(arguments.batches)
    rounds = [decode_ms(engine, batch, arguments.tokens, hidden) for hidden in ("last", None, "last", None)]
    hidden_ms = {"told": round(min(rounds[::2]), 3), "not": round(min(rounds[1::2]), 3)}
    report.add({"hidden_ms": hidden_ms} | prompts_ms(engine), str(layers))
    engine.close()


def prompts_ms(engine: Any) -> dict[str, dict[str, float]]:
    """To the first token of long prompts and short ones, and a step of the answers to long ones."""
    long = {kinds: alone_ms(engine, 4096, media=kinds == "media", tokens=33) for kinds in ("text", "media")}
    return {
        "prefill_4096_ms": {kinds: first for kinds, (first, _) in long.items()},
        "step_after_4096_ms": {kinds: step for kinds, (_, step) in long.items()},
        "first_token_ms": {str(length): alone_ms(engine, length, rounds=10)[0] for length in SHORT},
    }


def whole(layers: list[int], results: dict[str, Any], batch: int) -> dict[str, float]:
    """A step of all 32 layers, if each further one takes what it took between the two sizes; not measured."""
    fewer, more = sorted(layers)
    a, b = results[str(fewer)][str(batch)], results[str(more)][str(batch)]
    step = b["step_ms"] + (WHOLE - more) * (b["step_ms"] - a["step_ms"]) / (more - fewer)
    return {"step_ms": round(step, 2), "tokens_per_s": round(1e3 * batch / step, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--prompt-graphs", choices=["on", "off"], default="off", help="texts of up to 1,024 tokens")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    need(arguments.ranks, sglang=True)
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    key = f"{arguments.ranks} GPU" + (", eager" if arguments.eager else "")
    key += ", graphs of prompts" if arguments.prompt_graphs == "on" else ""
    report = Report(arguments.json, key)
    report.add({"copy_tb_per_s": round(bandwidth / 1e12, 2)})
    for layers in arguments.layers:
        measure(layers, arguments, bandwidth, report)
    if len(arguments.layers) == 2:
        whole_of = {str(batch): whole(arguments.layers, report.found, batch) for batch in arguments.batches}
        report.add(whole_of, "estimated_whole")


if __name__ == "__main__":
    main()
