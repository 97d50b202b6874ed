"""The SGLang engine on one GPU: `python -m bench.gpu.engine PART --json FILE`, with the SGLang that is installed.

    llama    EngineLoop and SGLangEngine, as an actor drives them, against SGLang's own scheduler loop in one process
    steps    where the time of a step goes on the actor's way: SGLang, our engine around it, our loop, and the readers
    sglang   sgl.Engine, which streams through processes of its own: the same model, prompts and settings
    talker   a talker-shaped mixture of experts with a depth head: CUDA graphs, eager, and what its memory would allow
    budgets  two engines and a codec on one GPU, started in several orders and at once: what each holds

Weights are random, bf16, but those of `--sizes smollm2` (with `--smollm2 FOLDER`). Every figure is the median of
`--rounds`; the loops that are compared are interleaved.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.thinker import GATHER_S
from omniflow.devices import Gpus, cap_memory
from omniflow.engine.base import EngineRequest, Sampling
from omniflow.engine.loop import Command, EngineLoop

LLAMAS = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
PROMPT_TOKENS = 128


def model_settings(size: str, folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """SGLang's settings for the model and where its weights come from."""
    if size == "smollm2":
        return {"model_path": str(arguments.smollm2), "dtype": "bfloat16"}
    return {"model_path": str(llama_folder(size, folder)), "load_format": "dummy", "dtype": "bfloat16"}


def llama_folder(size: str, folder: str) -> Path:
    shape = LLAMAS[size]
    config = shape | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "num_key_value_heads": 8,
        "head_dim": shape["hidden_size"] // shape["num_attention_heads"],
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": size == "1b",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    Path(folder, "config.json").write_text(json.dumps(config))
    return Path(folder)


def prompts(count: int, round: int) -> list[list[int]]:
    """Prompts that no other round has: the prefix cache finds nothing."""
    generator = torch.Generator().manual_seed(1000 * round + count)
    return torch.randint(10, 49_000, (count, PROMPT_TOKENS), generator=generator).tolist()


def summary(first_s: list[float], total_s: float, count: int, tokens: int) -> dict[str, float]:
    return {
        "tokens_per_s": count * tokens / total_s,
        "ttft_ms": 1e3 * statistics.median(first_s),
        "ttft_last_ms": 1e3 * max(first_s),
    }


def bare_round(scheduler: Any, asked: list[list[int]], tokens: int) -> dict[str, float]:
    """SGLang's loop: its scheduler, its streamer, messages into a list."""
    from omniflow.engine.sglang_requests import Way, submit

    way = Way(tokens)
    first: dict[str, float] = {}
    begin = time.perf_counter()
    for number, ids in enumerate(asked):
        submit(scheduler, f"{number:016x}", ids, way)
    while not scheduler.is_fully_idle():
        scheduler.step()
        now = time.perf_counter() - begin
        for message in scheduler.messages:
            for rid in message.rids:
                first.setdefault(rid, now)
        scheduler.messages.clear()
    return summary(list(first.values()), time.perf_counter() - begin, len(asked), tokens)


async def actor_round(loop: Any, asked: list[list[int]], tokens: int) -> dict[str, float]:
    """As `actors/thinker.py` does it: a task a request, each reading its own outputs."""
    first: list[float] = []
    begin = time.perf_counter()

    async def read(number: int, ids: list[int]) -> None:
        request = EngineRequest(id=str(number), ids=ids, sampling=Sampling(max_tokens=tokens))
        count = 0
        async with loop.generate(request) as outputs:
            async for output in outputs:
                if not count:
                    first.append(time.perf_counter() - begin)
                count += len(output.ids)
        assert count == tokens

    async with asyncio.TaskGroup() as group:
        for number, ids in enumerate(asked):
            group.create_task(read(number, ids))
    return summary(first, time.perf_counter() - begin, len(asked), tokens)


def with_sglangs_streamer(scheduler: Any) -> Any:
    """SGLang's own streamer for `scheduler`, beside ours; its messages go to `scheduler.messages`."""
    from sglang.srt.managers.scheduler import Scheduler

    class Messages(list[Any]):
        def send_output(self, output: object, recv_obj: object = None) -> None:
            self.append(output)

    scheduler.messages = Messages()
    ours = scheduler.output_streamer
    kept = scheduler.ipc_channels.send_to_detokenizer
    scheduler.ipc_channels.send_to_detokenizer = scheduler.messages
    Scheduler.init_output_streamer(scheduler)
    theirs, scheduler.output_streamer = scheduler.output_streamer, ours
    scheduler.ipc_channels.send_to_detokenizer = kept
    return theirs


class Rounds:
    """Rounds of both kinds in the thread of one EngineLoop, on one scheduler, in turns."""

    def __init__(self, loop: EngineLoop, engine: Any) -> None:
        self._loop = loop
        self._scheduler = engine._scheduler
        self._ours = self._scheduler.output_streamer
        self._theirs = with_sglangs_streamer(self._scheduler)
        self._number = 0

    def _prompts(self, count: int) -> list[list[int]]:
        self._number += 1
        return prompts(count, self._number)

    async def bare(self, batch: int, tokens: int) -> dict[str, float]:
        asked, done = self._prompts(batch), asyncio.get_running_loop().create_future()

        def run(_: object) -> None:
            self._ours.stream_output = self._theirs.stream_output
            found = bare_round(self._scheduler, asked, tokens)
            del self._ours.stream_output
            done.get_loop().call_soon_threadsafe(done.set_result, found)

        self._loop._send(Command("", run))
        found: dict[str, float] = await done
        return found

    async def actor(self, batch: int, tokens: int) -> dict[str, float]:
        return await actor_round(self._loop, self._prompts(batch), tokens)


async def compare(rounds: Rounds, batches: list[int], tokens: int, count: int) -> dict[str, Any]:
    alone = [(await rounds.bare(1, 4), await rounds.actor(1, 4)) for _ in range(5 * count + 2)][2:]
    firsts = {
        name: statistics.median(pair[at]["ttft_ms"] for pair in alone) for at, name in enumerate(("bare", "actor"))
    }
    results: dict[str, Any] = {"ttft_alone_ms": firsts | {"added": firsts["actor"] - firsts["bare"]}}
    print(json.dumps(results), flush=True)
    for batch in batches:
        pairs = [(await rounds.bare(batch, tokens), await rounds.actor(batch, tokens)) for _ in range(count + 1)][1:]
        medians = {"bare": median_of([bare for bare, _ in pairs]), "actor": median_of([actor for _, actor in pairs])}
        medians["ratio"] = {"tokens_per_s": medians["actor"]["tokens_per_s"] / medians["bare"]["tokens_per_s"]}
        results[str(batch)] = medians
        print(batch, json.dumps(medians), flush=True)
    return results


def median_of(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


def llama(arguments: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            results[size] = asyncio.run(llama_rounds(model_settings(size, folder, arguments), arguments))
    return results


async def llama_rounds(model: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    from omniflow.engine.sglang import load_engine

    engines = []

    def build() -> Any:
        engines.append(
            load_engine(
                Path(model["model_path"]),
                max_running=max(arguments.batches),
                kv_tokens=arguments.kv_tokens,
                gather_s=GATHER_S,
                **{name: value for name, value in model.items() if name != "model_path"},
            )
        )
        return engines[0]

    loop = EngineLoop(build, gather_s=GATHER_S)
    begin = time.perf_counter()
    await loop.setup()
    print(f"built in {time.perf_counter() - begin:.1f} s, imports included", flush=True)
    results = await compare(Rounds(loop, engines.pop()), arguments.batches, arguments.tokens, arguments.rounds)
    await loop.close()
    return results


class Watched:
    """Times what the engine's thread does; all in seconds, one entry a step."""

    def __init__(self, loop: EngineLoop, engine: Any) -> None:
        self.spent: dict[str, list[float]] = {"sglang": [], "launch": [], "results": [], "engine": [], "loop": []}
        self._last = 0.0
        scheduler = engine._scheduler
        for owner, method, name in (
            (scheduler, "run_batch", "launch"),
            (scheduler, "process_batch_result", "results"),
            (scheduler, "step", "sglang"),
            (engine, "step", "engine"),
        ):
            setattr(owner, method, self._timed(owner, method, name))
        step = loop._step

        def between(engine: Any) -> None:
            began = time.perf_counter()
            if self._last:
                self.spent["loop"].append(began - self._last)  # handing over, commands, and waiting for Python's lock
            step(engine)
            self._last = time.perf_counter()

        loop._step = between  # type: ignore[method-assign]

    def _timed(self, owner: Any, method: str, name: str) -> Any:
        call = owner.__getattribute__(method)

        def timed(*arguments: Any, **settings: Any) -> Any:
            began = time.perf_counter()
            found = call(*arguments, **settings)
            self.spent[name].append(time.perf_counter() - began)
            return found

        return timed

    def take(self) -> dict[str, float]:
        """Microseconds a step, medians, of what was seen since the last call; `engine` without SGLang's part."""
        middle = {name: 1e6 * statistics.median(each[len(each) // 4 :] or [0.0]) for name, each in self.spent.items()}
        middle["engine"] -= middle["sglang"]
        for each in self.spent.values():
            each.clear()
        return {name: round(value, 1) for name, value in middle.items()}


async def steps_of(model: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    from omniflow.engine.sglang import load_engine

    engines: list[Any] = []

    def build() -> Any:
        settings = {name: value for name, value in model.items() if name != "model_path"}
        limits: Any = {"max_running": max(arguments.batches), "kv_tokens": arguments.kv_tokens, "gather_s": GATHER_S}
        engines.append(load_engine(Path(model["model_path"]), **limits, **settings))
        return engines[0]

    loop = EngineLoop(build, gather_s=GATHER_S)
    await loop.setup()
    watched = Watched(loop, engines.pop())
    results: dict[str, Any] = {}
    for batch in arguments.batches:
        await actor_round(loop, prompts(batch, 0), 32)
        watched.take()
        found = await actor_round(loop, prompts(batch, 1), arguments.tokens)
        results[str(batch)] = watched.take() | {"step": round(1e6 * batch / found["tokens_per_s"], 1)}
        print(batch, json.dumps(results[str(batch)]), flush=True)
    await loop.close()
    return results


def steps(arguments: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            results[size] = asyncio.run(steps_of(model_settings(size, folder, arguments), arguments))
    return results


def sglang(arguments: argparse.Namespace) -> dict[str, Any]:
    import sglang as sgl

    results: dict[str, Any] = {}
    for size in arguments.sizes:
        from omniflow.engine.sglang_settings import graph_sizes

        with tempfile.TemporaryDirectory() as folder:
            engine = sgl.Engine(
                **model_settings(size, folder, arguments),
                attention_backend="triton",
                sampling_backend="pytorch",
                grammar_backend="none",
                skip_tokenizer_init=True,
                max_total_tokens=arguments.kv_tokens,
                max_running_requests=max(arguments.batches),
                mem_fraction_static=0.95,
                cuda_graph_bs_decode=graph_sizes(max(arguments.batches)),
                disable_prefill_cuda_graph=True,
                log_level="error",
            )
            results[size] = {}
            for batch in arguments.batches:
                rows = [
                    engine.loop.run_until_complete(sglang_round(engine, prompts(batch, 50 + number), arguments.tokens))
                    for number in range(arguments.rounds + 1)
                ]
                results[size][str(batch)] = median_of(rows[1:])
                print(size, batch, json.dumps(results[size][str(batch)]), flush=True)
            engine.shutdown()
    return results


async def sglang_round(engine: Any, asked: list[list[int]], tokens: int) -> dict[str, float]:
    first: list[float] = []
    begin = time.perf_counter()

    async def read(ids: list[int]) -> None:
        seen = False
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        async for _ in await engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True):
            if not seen:
                first.append(time.perf_counter() - begin)
            seen = True

    async with asyncio.TaskGroup() as group:
        for ids in asked:
            group.create_task(read(ids))
    return summary(first, time.perf_counter() - begin, len(asked), tokens)


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


def talker(arguments: argparse.Namespace) -> dict[str, Any]:
    from omniflow.engine.sglang_frames import build_frame_engine

    bandwidth = copy_bandwidth()
    results: dict[str, Any] = {"copy_tb_per_s": round(bandwidth / 1e12, 2)}
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
        for batch in (1, 8, 16):
            steps = arguments.tokens if mode == "graphs" else 24
            step_s = frame_steps(engine, batch, steps)
            floor = talker_bytes(batch, 64 + steps // 2) / bandwidth
            entry = results.setdefault(str(batch), {"floor_ms": round(1e3 * floor, 3)})
            entry[f"{mode}_ms"] = round(1e3 * step_s, 3)
            print(mode, batch, json.dumps(entry), flush=True)
        engine.close()
        del engine
    for batch in (1, 8, 16):
        entry = results[str(batch)]
        entry["eager_over_graphs"] = round(entry["eager_ms"] / entry["graphs_ms"], 2)
        entry["graphs_over_floor"] = round(entry["graphs_ms"] / entry["floor_ms"], 2)
    return results


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


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * source.numel() / min(times)


BUDGETS = {"a": 6_400_000_000, "b": 4_500_000_000, "c": 2_500_000_000}
"""What torch may take in each process: an engine with 100,000 KV tokens, one with 40,000, a codec with 16 streams."""


def budgets(arguments: argparse.Namespace) -> dict[str, Any]:
    """Two engines and a codec, each in a new process: started one after the other in several orders, and at once."""
    orders = ["abc", "cba", "bca", "at once"]
    every = {order: {name: started(name) for name in BUDGETS} for order in orders}
    results: dict[str, Any] = {"budgets": BUDGETS}
    for order, pipes in every.items():
        for pipe in pipes.values():
            assert pipe.recv() == "ready"
        found: dict[str, Any] = {}
        for name in BUDGETS if order == "at once" else order:
            pipes[name].send("build")
            if order != "at once":
                found[name] = pipes[name].recv()
        results[order] = found or {name: pipe.recv() for name, pipe in pipes.items()}
        print(order, json.dumps(results[order]), flush=True)
        for name in BUDGETS:
            pipes[name].send("take more")
            results[order][name]["more"] = pipes[name].recv()
            pipes[name].send("end")
        for pipe in pipes.values():
            pipe.recv()
    for name, budget in BUDGETS.items():
        held = [results[order][name]["bytes"] for order in orders]
        more = {results[order][name]["more"] for order in orders}
        results[f"of {name}"] = {"spread": max(held) / min(held) - 1, "most_of_budget": max(held) / budget}
        results[f"of {name}"]["beyond the budget"] = sorted(more)
        print(name, json.dumps(results[f"of {name}"]), flush=True)
    return results


def started(name: str) -> Connection:
    here, there = multiprocessing.get_context("spawn").Pipe()
    multiprocessing.get_context("spawn").Process(target=holder, args=(there, name), daemon=True).start()
    return here


def holder(pipe: Connection, name: str) -> None:
    """A process that builds what it is to hold when it is told to, says how much that is, and tries to take more."""
    torch.zeros(1, device="cuda")
    if name != "c":
        import omniflow.engine.sglang  # noqa: F401 - imported before the start is counted
    cap_memory(Gpus(numbers=(0,), cap_bytes=BUDGETS[name]), ())
    pipe.send("ready")
    pipe.recv()
    held: Any = codec() if name == "c" else engine_of({"a": 100_000, "b": 40_000}[name])
    pipe.send({"bytes": torch.cuda.memory_reserved()})
    pipe.recv()
    try:
        torch.empty(BUDGETS[name] - torch.cuda.memory_reserved() + 2**25, dtype=torch.uint8, device="cuda")
        pipe.send("was given")
    except torch.cuda.OutOfMemoryError:
        pipe.send("is refused")
    pipe.recv()
    del held
    pipe.send("closed")


def engine_of(kv_tokens: int) -> Any:
    from omniflow.engine.sglang import load_engine

    with tempfile.TemporaryDirectory() as folder:
        limits: Any = {"max_running": 8, "kv_tokens": kv_tokens}
        engine = load_engine(llama_folder("1b", folder), **limits, dtype="bfloat16", load_format="dummy")
    engine.start(EngineRequest(id="one", ids=list(range(10, 500)), sampling=Sampling(max_tokens=64)))
    while engine.has_work():
        engine.step()
    return engine


def codec() -> Any:
    """An AudioVAE of the size of Ming's, random weights, and 16 streams of 10 s that step together."""
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
    decoder = AudioVaeDecoder(AudioVae(44100, VaeDecoder(backbone, 64, 882), patch_size=4)).cuda().eval()
    with torch.inference_mode():
        streams = [decoder.init() for _ in range(16)]
        latents = [np.zeros((25, 64), np.float32)] * 16
        for step in range(5):
            decoder.step_together(streams, latents, [step == 4] * 16)
    return decoder, streams


def machine() -> dict[str, Any]:
    import sglang as sgl

    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        "sglang": sgl.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "attention_backend": "triton",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["llama", "steps", "sglang", "talker", "budgets"])
    parser.add_argument("--json", type=Path, help="results are added to those that are in this file")
    parser.add_argument("--sizes", nargs="+", default=["1b", "8b"], choices=[*LLAMAS, "smollm2"])
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2's weights")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=65536)
    arguments = parser.parse_args()
    part = {"llama": llama, "steps": steps, "sglang": sglang, "talker": talker, "budgets": budgets}[arguments.part]
    results = part(arguments)
    if arguments.json is not None:
        found = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        found |= {"machine": machine(), arguments.part: found.get(arguments.part, {}) | results}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
