"""The AR engine against bare `transformers.generate`, on the real thinker: `python bench/engine.py [--cpu]`.

Everything is measured in one process with 1 thread, runs interleaved, and the best of several rounds is kept (the
machine may be shared; the best run is the least disturbed one; `--cpu` counts CPU seconds instead). Prints milliseconds
and tokens/s as JSON lines, and the two ratios that are promised: one request against bare generate (>= 0.9), four
together against one alone (>= 2).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.smollm2 import SMOLLM2_135M_INSTRUCT
from omniflow.engine.base import EngineRequest, Sampling
from omniflow.engine.transformers import TransformersEngine, load_engine

PROMPT_TOKENS = 40


Clock = Callable[[], float]


def run_engine(engine: TransformersEngine, num_requests: int, num_tokens: int, clock: Clock) -> tuple[float, float]:
    """Seconds to read all prompts, and decode tokens/s after it."""
    for number in range(num_requests):
        ids = [(7 * number + i) % 40000 + 100 for i in range(PROMPT_TOKENS)]
        engine.start(EngineRequest(id=str(number), ids=ids, sampling=Sampling(max_tokens=num_tokens + num_requests)))
    begin = clock()
    seen: set[str] = set()
    while len(seen) < num_requests:
        seen |= {output.id for output in engine.step()}
    prefilled = clock()
    count = 0
    for _ in range(num_tokens - 1):
        count += len(engine.step())
    decode_s = clock() - prefilled
    while engine.has_work():
        engine.step()
    return prefilled - begin, count / decode_s


def run_bare(model: PreTrainedModel, num_tokens: int, clock: Clock) -> tuple[float, float]:
    """Seconds of one forward over the prompt, and tokens/s of the rest of `generate`."""
    ids = torch.tensor([[i % 40000 + 100 for i in range(PROMPT_TOKENS)]])
    mask = torch.ones_like(ids)
    options = {"do_sample": False, "attention_mask": mask, "eos_token_id": None, "pad_token_id": 2}
    begin = clock()
    model.generate(ids, max_new_tokens=1, **options)
    prefilled = clock()
    model.generate(ids, max_new_tokens=num_tokens, **options)
    prefill_s = prefilled - begin
    return prefill_s, (num_tokens - 1) / (clock() - prefilled - prefill_s)


def measure(folder: Path, num_tokens: int, rounds: int, clock: Clock) -> dict[str, float]:
    engine = load_engine(folder)
    bare = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    best: dict[str, float] = {}
    for _ in range(rounds):
        runs = {"bare": run_bare(bare, num_tokens, clock)}
        runs |= {f"batch_{count}": run_engine(engine, count, num_tokens, clock) for count in (1, 2, 4, 8)}
        for name, (prefill_s, rate) in runs.items():
            best[f"{name}_prefill_ms"] = min(best.get(f"{name}_prefill_ms", 1e9), prefill_s * 1e3)
            best[f"{name}_tokens_per_s"] = max(best.get(f"{name}_tokens_per_s", 0.0), rate)
    alone = best["batch_1_tokens_per_s"]
    best["one_over_bare"] = alone / best["bare_tokens_per_s"]
    for count in (2, 4, 8):
        best[f"{count}_over_one"] = best[f"batch_{count}_tokens_per_s"] / alone
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=48, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds, not seconds")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    for name, value in measure(SMOLLM2_135M_INSTRUCT.fetch(), arguments.tokens, arguments.rounds, clock).items():
        print(json.dumps({"name": name, "value": round(value, 2)}))


if __name__ == "__main__":
    main()
