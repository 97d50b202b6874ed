"""The SGLang engine on one GPU: `python -m bench.gpu.engine PART --json FILE`, with the SGLang that is installed.

    llama    EngineLoop and SGLangEngine, as an actor drives them, in turns with SGLang's own scheduler loop in the same
             process, and with `sgl.Engine`, in processes of its own on the same GPU: one model, prompts and settings
    steps    where the time of a step goes on the actor's way: SGLang, our engine around it, our loop, and the readers

Weights are random, bf16, but those of `--sizes smollm2` (with `--smollm2 FOLDER`). Every figure is the median of
`--rounds`; ratios, and what is added to a first token, are of rounds that were next to each other, as quartiles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import operator
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import torch

from actors.stage import GATHER_S
from bench.gpu.report import Report, folder_of, need
from bench.gpu.rounds import Turns, medians, prompts, quartiles, summary
from bench.gpu.sgl_engine import SglEngine
from omniflow.config import RuntimeConfig
from omniflow.engine.base import EngineRequest, Sampling
from omniflow.engine.loop import EngineLoop
from omniflow.process import runs_on_uvloop, spare_the_collector

LLAMAS = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
VOCAB_SIZE = 128256
FEW_TOKENS = 4
FIRSTS = 5
"""Rounds of few tokens to each of many, for first tokens: launching their batch takes 10 to 35 ms of Python, and that
varies by ten times what the actor's way adds.
"""


def model_settings(size: str, folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """SGLang's settings for the model and where its weights come from."""
    if size == "smollm2":
        return {"model_path": folder_of(arguments.smollm2), "dtype": "bfloat16"}
    return {"model_path": str(llama_folder(size, folder)), "load_format": "dummy", "dtype": "bfloat16"}


def llama_folder(size: str, folder: str) -> Path:
    shape = LLAMAS[size]
    config = shape | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
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


def bare_round(scheduler: Any, asked: list[list[int]], tokens: int) -> dict[str, float]:
    """SGLang's loop: its scheduler, its streamer, messages into a list."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    from omniflow.engine.sglang_outbox import Aside

    first: dict[str, float] = {}
    begin = time.perf_counter()
    for number, ids in enumerate(asked):
        request = EngineRequest(id="", ids=ids, sampling=Sampling())
        way = SamplingParams(max_new_tokens=tokens, temperature=0.0)
        scheduler.submit(f"{number:016x}", request, way, Aside())
    while scheduler.has_work():
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
    """Rounds of both kinds in the thread of one EngineLoop, on one scheduler."""

    def __init__(self, loop: EngineLoop, engine: Any) -> None:
        self._loop = loop
        self._scheduler = engine._scheduler
        self._ours = self._scheduler.output_streamer
        self._theirs = with_sglangs_streamer(self._scheduler)

    async def bare(self, batch: int, tokens: int, number: int) -> dict[str, float]:
        asked, done = prompts(batch, number), asyncio.get_running_loop().create_future()

        def run(_: object) -> None:
            self._ours.stream_output = self._theirs.stream_output
            found = bare_round(self._scheduler, asked, tokens)
            del self._ours.stream_output
            done.get_loop().call_soon_threadsafe(done.set_result, found)

        self._loop.tell("", run)
        found: dict[str, float] = await done
        return found

    async def actor(self, batch: int, tokens: int, number: int) -> dict[str, float]:
        return await actor_round(self._loop, prompts(batch, number), tokens)


async def compare(turns: Turns, size: str, arguments: argparse.Namespace, report: Report) -> None:
    alone = await turns.take(1, FEW_TOKENS, FIRSTS * arguments.rounds)
    report.add({"ttft_alone_ms": {name: medians(rows)["ttft_ms"] for name, rows in alone.items()}}, size)
    for batch in arguments.batches:
        firsts = await turns.take(batch, FEW_TOKENS, FIRSTS * arguments.rounds, only=("bare", "actor"))
        rounds = await turns.take(batch, arguments.tokens, arguments.rounds)
        ours, others = rounds["actor"], {name: rows for name, rows in rounds.items() if name != "actor"}
        ratios = {name: quartiles(ours, rows, "tokens_per_s") for name, rows in others.items()}
        found = {name: medians(rows) for name, rows in rounds.items()}
        report.add(found | {"actor over": ratios, "added_ttft_ms": added_ms(firsts)}, size, str(batch))


def added_ms(rounds: dict[str, list[dict[str, float]]]) -> list[float]:
    """What the actor's way adds to the bare loop's first token, in rounds next to each other: quartiles."""
    return quartiles(rounds["actor"], rounds["bare"], "ttft_ms", operator.sub)


async def loop_of(model: dict[str, Any], arguments: argparse.Namespace) -> tuple[EngineLoop, Any]:
    """A loop that has started, as an actor has it, and its engine."""
    from omniflow.engine.sglang import load_engine

    engines: list[Any] = []
    settings = {name: value for name, value in model.items() if name != "model_path"}

    def build() -> Any:
        most = max(arguments.batches)
        limits: Any = {"max_running": most, "max_waiting": most, "kv_tokens": arguments.kv_tokens, "gather_s": GATHER_S}
        engines.append(load_engine(Path(model["model_path"]), **limits, **settings))
        return engines[0]

    loop = EngineLoop(build, gather_s=GATHER_S)
    begin = time.perf_counter()
    await loop.setup()
    print(f"built in {time.perf_counter() - begin:.1f} s, imports included", flush=True)
    return loop, engines.pop()


async def llama(size: str, model: dict[str, Any], arguments: argparse.Namespace, report: Report) -> None:
    theirs = SglEngine(model, kv_tokens=arguments.kv_tokens, max_running=max(arguments.batches))
    loop, engine = await loop_of(model, arguments)
    await theirs.answer()
    rounds = Rounds(loop, engine)
    # The actor's in the middle: it is next to both.
    turns = Turns({"bare": rounds.bare, "actor": rounds.actor, "sgl.Engine": theirs.round})
    await compare(turns, size, arguments, report)
    await loop.close()
    theirs.close()


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


async def steps(size: str, model: dict[str, Any], arguments: argparse.Namespace, report: Report) -> None:
    loop, engine = await loop_of(model, arguments)
    watched = Watched(loop, engine)
    for batch in arguments.batches:
        await actor_round(loop, prompts(batch, 0), 32)
        watched.take()
        found = await actor_round(loop, prompts(batch, 1), arguments.tokens)
        report.add(watched.take() | {"step": round(1e6 * batch / found["tokens_per_s"], 1)}, size, str(batch))
    await loop.close()


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["llama", "steps"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["1b", "8b"], choices=[*LLAMAS, "smollm2"])
    parser.add_argument("--smollm2", default="smollm2-135m-instruct", help="folder of SmolLM2's weights, or its name")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-tokens", type=int, default=65536)
    arguments = parser.parse_args()
    need(sglang=True)
    spare_the_collector()  # as hosts do it
    report = Report(arguments.json, arguments.part)
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            model = model_settings(size, folder, arguments)
            part = {"llama": llama, "steps": steps}[arguments.part]
            # As hosts do it, and SGLang's own processes: a wake-up of asyncio's own loop takes twice as long.
            uvloop = {"use_uvloop": runs_on_uvloop(RuntimeConfig())}
            anyio.run(part, size, model, arguments, report, backend_options=uvloop)


if __name__ == "__main__":
    main()
