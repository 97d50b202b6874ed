"""Two engines and a codec on one GPU, each held to a budget: `python -m bench.gpu.budgets --json FILE`.

Each is a process of its own, in several orders of start and at once. Said are the budgets, what each holds in each
order, and whether it gets more than its budget. Fails where one gets more, where what it holds is more than 2 % from
its budget, or where that differs by more than 2 % between orders.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.gpu.engine import LLAMAS, VOCAB_SIZE, llama_folder
from bench.gpu.report import Report, need
from omniflow.devices import Gpus, cap_memory
from omniflow.engine.base import EngineRequest, Sampling

SIZE = "1b"
ORDERS = ("abc", "cba", "bca", "at once")
ANSWER_S = 90
MOST_APART = 0.02
BEYOND = 2**25
ENGINE_WORKSPACE = 350_000_000
"""CUDA graphs of steps and of prompts, and a prompt of 490 tokens: 302 and 341 MB were seen."""
CODEC_WEIGHTS = 361_122_762
"""Of `codec`, each of 4 bytes."""


class Budget(NamedTuple):
    """What torch may take in a process, in bytes; the process's context on the GPU, 0.6 GB, is beside it."""

    weights: int
    kv: int
    workspace: int
    """Of an engine: `ENGINE_WORKSPACE`. Of a codec: its streams (0.80)."""

    @property
    def cap(self) -> int:
        return sum(self)


def engine_budget(kv_tokens: int) -> Budget:
    """By the shape of the model: 16 bits a weight and a value; its embedding is its last matrix, too."""
    shape = LLAMAS[SIZE]
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    kv_size = 8 * hidden // heads
    layer = hidden * (2 * hidden + 2 * kv_size + 3 * shape["intermediate_size"] + 2)
    weights = VOCAB_SIZE * hidden + layers * layer + hidden
    return Budget(2 * weights, 2 * 2 * layers * kv_size * kv_tokens, ENGINE_WORKSPACE)


KV_TOKENS = {"a": 100_000, "b": 40_000}
"""Of the engines; `c` is the codec."""
BUDGETS = {name: engine_budget(tokens) for name, tokens in KV_TOKENS.items()}
BUDGETS["c"] = Budget(4 * CODEC_WEIGHTS, 0, 820_000_000)


class Holder:
    """A process that has started, and builds what it is to hold when it is told to."""

    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=hold, args=(theirs, name), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, word: str) -> None:
        if self._process.is_alive():
            self._pipe.send(word)

    def answer(self) -> dict[str, Any]:
        """What it says; how it died where it did."""
        try:
            if self._pipe.poll(ANSWER_S):
                found: dict[str, Any] = self._pipe.recv()
                return found
        except EOFError:
            self._process.join(5)
            return {"failed": f"died with exit code {self._process.exitcode}"}
        return {"failed": f"no answer within {ANSWER_S} s"}

    def ask(self, word: str) -> dict[str, Any]:
        self.tell(word)
        return self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def hold(pipe: Any, name: str) -> None:
    """In the process: import, wait, build and say what is held; wait, and try to take more."""
    torch.zeros(1, device="cuda")
    if name in KV_TOKENS:
        import omniflow.engine.sglang  # noqa: F401 - imported before the start is counted
    cap = BUDGETS[name].cap
    cap_memory(Gpus(numbers=(0,), cap_bytes=cap), ())
    pipe.send({})
    pipe.recv()
    if name in KV_TOKENS:
        held: Any = engine_of(KV_TOKENS[name])
    else:
        held = (decoder := codec().cuda()), streams_of(decoder)
    pipe.send({"bytes": torch.cuda.memory_reserved(), "most_bytes": torch.cuda.max_memory_reserved()})
    pipe.recv()
    torch.cuda.empty_cache()  # torch gives that back by itself before it refuses
    try:
        torch.empty(cap - torch.cuda.memory_reserved() + BEYOND, dtype=torch.uint8, device="cuda")
        pipe.send({"more": "was given"})
    except torch.cuda.OutOfMemoryError:
        pipe.send({"more": "is refused"})
    pipe.recv()
    del held


def engine_of(kv_tokens: int) -> Any:
    from omniflow.engine.sglang import load_engine

    with tempfile.TemporaryDirectory() as folder:
        limits: Any = {"max_running": 8, "kv_tokens": kv_tokens}
        engine = load_engine(llama_folder(SIZE, folder), **limits, dtype="bfloat16", load_format="dummy")
    engine.start(EngineRequest(id="one", ids=list(range(10, 500)), sampling=Sampling(max_tokens=64)))
    while engine.has_work():
        engine.step()
    return engine


def codec() -> Any:
    """An AudioVAE of the size of Ming's, with random weights."""
    from actors.ming.audio_vae import AudioVaeDecoder
    from actors.ming.config import AudioVae, Qwen2, VaeDecoder

    backbone = Qwen2(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    return AudioVaeDecoder(AudioVae(dec_kwargs=VaeDecoder(backbone, 64, 882), patch_size=4, sample_rate=44100)).eval()


def streams_of(decoder: Any) -> list[Any]:
    """16 streams of 10 s that have stepped together."""
    with torch.inference_mode():
        streams = [decoder.init() for _ in range(16)]
        latents = [np.zeros((25, 64), np.float32)] * 16
        for step in range(5):
            decoder.step_together(streams, latents, [step == 4] * 16)
    return streams


def one_order(order: str, holders: dict[str, Holder], report: Report) -> None:
    """Let all build, one after the other or at once; then let each try to take more while all hold what they have."""
    if order == "at once":
        for holder in holders.values():
            holder.tell("build")
        found = {name: holder.answer() for name, holder in holders.items()}
    else:
        found = {name: holders[name].ask("build") for name in order}
    for name, row in found.items():
        if "failed" not in row:
            row |= holders[name].ask("take more")
            row["of_budget"] = round(row["bytes"] / BUDGETS[name].cap, 3)
    report.add(found, order)


def verdict(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Of one holder, over all orders."""
    rows = [found[order][name] for order in ORDERS]
    if any("failed" in row for row in rows):
        return {"held": False, "failed": [row["failed"] for row in rows if "failed" in row]}
    held = [row["bytes"] for row in rows]
    apart, beyond = max(held) / min(held) - 1, sorted({str(row["more"]) for row in rows})
    of_budget = [each / BUDGETS[name].cap for each in (min(held), max(held))]
    is_held = apart <= MOST_APART and of_budget[0] >= 1 - MOST_APART and beyond == ["is refused"]
    return {"held": is_held, "spread": apart, "of_budget": of_budget, "beyond": beyond}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    need(sglang=True)
    report = Report(arguments.json, "budgets")
    report.add({name: budget._asdict() | {"cap": budget.cap} for name, budget in BUDGETS.items()}, "budgets")
    every = {order: {name: Holder(name) for name in BUDGETS} for order in ORDERS}  # all import at once
    for order, holders in every.items():
        ready = {name: holder.answer() for name, holder in holders.items()}
        if any(ready.values()):
            report.add(ready, order)
        else:
            one_order(order, holders, report)
        for holder in holders.values():
            holder.end()
    verdicts = {name: verdict(name, report.found) for name in BUDGETS}
    report.add(verdicts, "verdict")
    return 0 if all(each["held"] for each in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
