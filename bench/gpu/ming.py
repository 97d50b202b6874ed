"""Ming's talker and vocoder on one GPU: `python -m bench.gpu.ming PART FOLDER --json FILE`, with random weights.

write   the checkpoint that the other parts read
check   the tiny checkpoint on the GPU against the CPU, and one seed alone against one among others, at full size
steps   what a step of the talker takes, by the number of streams, beside its floor; with --profile also where
vae     what a step of the vocoder takes, and how far 16 bits are from 32
serve   text to speech through planner and host processes: first audio and requests per second by clients
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch

from actors.checkpoint import read_tensors
from actors.ming.audio_slots import AudioSlots
from actors.ming.audio_vae import load_audio_vae
from actors.ming.config import AudioVae, Talker
from actors.ming.talker import TalkerModel, load_talker
from bench.gpu.ming_graph import TEXTS, speech, write_talker
from bench.gpu.report import Report, need
from omniflow import Runtime, plan
from omniflow.cli.machine import this_machine
from omniflow.config import RuntimeConfig
from omniflow.engine import fused, slot_cache
from omniflow.engine.base import EngineOutput, EngineRequest, Sampling
from omniflow.engine.flow import FlowKnobs
from omniflow.engine.flow_engine import FlowEngine
from omniflow.engine.flow_slots import SlotStream, SlottedFlow
from omniflow.media import Options, TextDelta

STREAMS = (1, 2, 4, 8, 16, 32)
STEP_S = 0.32
DEVICE = "cuda"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def gpu_facts() -> dict[str, float]:
    """What a step is held against: a large matrix product and a large copy, on random numbers."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    product_s = timed(lambda: torch.mm(left, right, out=out), 10)
    copy_s = timed(lambda: target.copy_(source), 10)
    return {"tflops": 2 * 8192**3 / product_s / 1e12, "tb_per_s": 2 * 4 * 2**30 / copy_s / 1e12}


def timed(call: Callable[[], object], count: int) -> float:
    """Seconds of a call, by the GPU's clock; the median."""
    for _ in range(3):
        call()
    taken = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def plain_kernels(plain: bool) -> None:
    """Whether torch's kernels run instead of ours, in what is made from now on."""
    fused.HAS_TRITON = slot_cache.HAS_TRITON = not plain


def talker_of(folder: Path, dtype: str) -> TalkerModel:
    return load_talker(Talker.load(folder), read_tensors(folder), DEVICE, DTYPES[dtype])


class Steps:
    """A talker whose streams step for ever."""

    def __init__(self, model: TalkerModel, slots: int) -> None:
        began = time.perf_counter()
        self.runner = SlottedFlow(model, slots=slots, positions=512)
        torch.cuda.synchronize()
        self.start_s = time.perf_counter() - began
        self.streams: list[SlotStream] = []
        self.prompt = torch.randn(48, model.shape.hidden_size, device=DEVICE, dtype=model.embedding.weight.dtype) * 0.3

    def fill(self, count: int) -> float:
        """As many streams; returns the seconds of the step in which they join."""
        for stream in self.streams:
            self.runner.end(stream)
        self.streams = [self.runner.init() for _ in range(count)]
        began = time.perf_counter()
        self.step([self.prompt] * count).latents.cpu()
        return time.perf_counter() - began

    def step(self, inputs: list[torch.Tensor], noise: torch.Tensor | None = None) -> Any:
        count = len(self.streams)
        noise = torch.randn(count, *self.runner.head.noise_shape) if noise is None else noise
        knobs = FlowKnobs(torch.full((count,), 2.0), torch.zeros(count))
        return self.runner.step(self.streams, inputs, noise, knobs)

    def company(self, count: int) -> list[float]:
        """How far the latents of a stream's steps are from what they are alone, among `count`."""
        noises = torch.randn(4, count, *self.runner.head.noise_shape)
        found = []
        for number in (1, count):
            for stream in self.streams:
                self.runner.end(stream)
            self.streams = [self.runner.init() for _ in range(number)]
            found.append([self.step([self.prompt] * number, each[:number]).latents[0].cpu() for each in noises])
        return [apart(many.numpy(), alone.numpy()) for alone, many in zip(*found, strict=True)]


def floor_of(model: TalkerModel, streams: int, facts: dict[str, float]) -> dict[str, float]:
    """The fewest operations and bytes of a step: each matrix once over its inputs, each weight read once a pass."""
    flow, reader = (sum(each.numel() for each in part.parameters()) for part in (model.head.net, model.head.feedback))
    backbone = sum(each.numel() for each in model.decoder.parameters())
    steps, patch, _ = model.head.noise_shape
    rows = 1 + model.head.net.history + patch
    attention = 2 * 2 * rows * rows * 1024 * 28 * 2 * streams * steps
    flops = 2 * streams * (backbone + (1 + patch) * reader + 2 * steps * rows * flow) + attention
    size = model.embedding.weight.element_size()
    moved = size * (backbone + reader + steps * flow)
    return {
        "tflop": flops / 1e12,
        "gb": moved / 1e9,
        "floor_ms": 1e3 * max(flops / facts["tflops"] / 1e12, moved / facts["tb_per_s"] / 1e12),
    }


def measure_steps(folder: Path, arguments: argparse.Namespace, report: Report) -> None:
    facts = gpu_facts()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    model = talker_of(folder, arguments.dtype)
    loaded_s = time.perf_counter() - began
    steps = Steps(model, max(STREAMS))
    report.add({"facts": facts, "dtype": arguments.dtype, "plain": arguments.plain})
    gpu_gb = torch.cuda.max_memory_allocated() / 1e9
    report.add({"load_s": loaded_s, "capture_s": steps.start_s, "gpu_gb": gpu_gb})
    for count in STREAMS:
        steps.fill(count)
        join_ms = 1e3 * statistics.median(steps.fill(count) for _ in range(3))
        inputs = [steps.prompt[:1]] * count
        gpu_ms = 1e3 * timed(lambda inputs=inputs: steps.step(inputs), arguments.rounds)
        taken = []
        for _ in range(arguments.rounds):
            began = time.perf_counter()
            steps.step(inputs).latents.cpu()
            taken.append(time.perf_counter() - began)
        wall_ms = 1e3 * statistics.median(taken)
        floor = floor_of(model, count, facts)
        row = {"join_ms": join_ms, "gpu_ms": gpu_ms, "wall_ms": wall_ms, **floor}
        row["audio_s_per_s"] = count * STEP_S / (wall_ms / 1e3)
        row["alone_apart"] = max(steps.company(count))
        report.add(rounded(row), "streams", str(count))
        if arguments.profile and count in (1, 16):
            profile(lambda inputs=inputs: steps.step(inputs).latents.cpu())


def rounded(row: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in row.items()}


def profile(call: Callable[[], object]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CUDA]) as seen:
        call()
    print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=72), flush=True)


def latents_of(engine: FlowEngine[Any], seeds: list[int], steps: int) -> dict[int, np.ndarray]:
    for seed in seeds:
        sampling = Sampling(seed=seed, max_tokens=steps)
        engine.start(EngineRequest(id=str(seed), ids=list(range(1, 40 + seed)), sampling=sampling))
    outputs: list[EngineOutput] = []
    while engine.has_work():
        outputs += engine.step()
    return {
        seed: np.concatenate(
            [each.frames.numpy() for each in outputs if each.id == str(seed) and each.frames is not None]
        )
        for seed in seeds
    }


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """Relative, over all."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def measure_check(folder: Path, arguments: argparse.Namespace, report: Report) -> None:
    tiny = Path("tests/actors/ming/fixtures/tiny_ming")

    def engine_on(model: TalkerModel, slots: int) -> FlowEngine[Any]:
        runner = SlottedFlow(model, slots=slots, positions=512)
        return FlowEngine(runner, guidance=2.0, sigma=0.25, max_running=slots, kv_tokens=512 * slots)

    tiny_weights = {name: each for name, each in read_tensors(tiny).items() if not name.startswith("stop_head")}
    tiny_weights |= {"stop_head.weight": torch.zeros(2, 32), "stop_head.bias": torch.tensor([30.0, 0.0])}
    config = Talker.load(tiny)
    plain = load_talker(config, tiny_weights)
    want = latents_of(FlowEngine(plain, guidance=2.0, sigma=0.25, max_running=4), [1, 2, 3], 4)
    for name, dtype in DTYPES.items():
        got = latents_of(engine_on(load_talker(config, tiny_weights, DEVICE, dtype), 4), [1, 2, 3], 4)
        rows = [[apart(got[seed][4 * n : 4 * n + 4], want[seed][4 * n : 4 * n + 4]) for n in range(4)] for seed in want]
        report.add({f"tiny, {name}, against the CPU's float32": rows})
    plain_kernels(True)
    engine = engine_on(talker_of(folder, "float32"), 16)
    exact = latents_of(engine, [3], 6)[3]
    del engine
    plain_kernels(False)
    for name in ("float32", "bfloat16"):
        engine = engine_on(talker_of(folder, name), 16)
        alone = {seed: latents_of(engine, [seed], 6)[seed] for seed in (1, 7)}
        again = latents_of(engine, [7], 6)[7]
        many = latents_of(engine, list(range(1, 14)), 6)
        report.add({f"full, {name}, alone twice": float(np.abs(again - alone[7]).max())})
        rows = [
            [apart(many[seed][4 * n : 4 * n + 4], own[4 * n : 4 * n + 4]) for n in range(6)]
            for seed, own in alone.items()
        ]
        report.add({f"full, {name}, alone and among 13": rows})
        from_exact = [apart(many[3][4 * n : 4 * n + 4], exact[4 * n : 4 * n + 4]) for n in range(6)]
        report.add({f"full, {name}, against torch's kernels in float32": from_exact})
        del engine
        torch.cuda.empty_cache()


def measure_vae(folder: Path, arguments: argparse.Namespace, report: Report) -> None:
    config, weights = AudioVae.load(folder / "vae"), read_tensors(folder / "vae")
    latents = np.random.default_rng(0).standard_normal((80, 64), np.float32)
    plain = load_audio_vae(config, weights, DEVICE)
    want = plain.step(plain.init(), latents, True)
    for name, precision in (("float32", "highest"), ("float32", "high"), ("bfloat16", "highest")):
        torch.set_float32_matmul_precision(precision)
        began = time.perf_counter()
        slots = AudioSlots(load_audio_vae(config, weights, DEVICE), slots=32, positions=2000, dtype=DTYPES[name])
        key = name if precision == "highest" else "tf32"
        row: dict[str, Any] = {"start_s": time.perf_counter() - began}
        state = slots.init()
        sounds = [slots.step(state, latents[at : at + 4], at == 76) for at in range(0, 80, 4)]
        slots.end(state)
        row["first_samples"] = len(sounds[0])
        row["apart"] = apart(np.concatenate(sounds), want)
        row["level"] = float(np.std(want))
        for count in STREAMS:
            states, taken = [slots.init() for _ in range(count)], []
            for at in range(arguments.rounds):
                began = time.perf_counter()
                slots.step_together(states, [latents[:4]] * count, [False] * count)
                taken.append(time.perf_counter() - began)
                if at == 2:
                    row[f"{count} early ms"] = 1e3 * taken[-1]
            row[f"{count} ms"] = 1e3 * statistics.median(taken)
            for each in states:
                slots.end(each)
        report.add(rounded(row), key)
        del slots
        torch.cuda.empty_cache()


async def one_request(runtime: Runtime, number: int, rows: list[dict[str, float]]) -> None:
    began, first, samples, rate = time.perf_counter(), 0.0, 0, 44100
    gap_s, ready_s = 0.0, 0.0
    text = TEXTS[number % len(TEXTS)]
    options = Options(seed=number)
    async with await runtime.submit("speech", [TextDelta(text)], outputs={"audio"}, options=options) as reply:
        async for output in reply:
            now = time.perf_counter() - began
            first = first or now
            # A player that began with the first sound has played all by `ready_s`.
            ready_s = ready_s or now
            gap_s += max(0.0, now - ready_s)
            samples += len(output.value.samples)
            ready_s = max(ready_s, now) + len(output.value.samples) / rate
    rows.append({"first": first, "whole": time.perf_counter() - began, "audio": samples / rate, "underrun": gap_s})


async def load(runtime: Runtime, clients: int, requests: int) -> dict[str, float]:
    """Each client asks again as soon as it has its answer."""
    rows: list[dict[str, float]] = []
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            await one_request(runtime, number, rows)

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(clients):
            tasks.start_soon(client)
    seconds = time.perf_counter() - began

    def at(name: str, share: float) -> float:
        ordered = sorted(row[name] for row in rows)
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    return {
        "clients": clients,
        "requests": len(rows),
        "requests_per_s": len(rows) / seconds,
        "audio_s": statistics.fmean(row["audio"] for row in rows),
        "audio_s_per_s": sum(row["audio"] for row in rows) / seconds,
        "first_p50_s": at("first", 0.5),
        "first_p99_s": at("first", 0.99),
        "whole_p50_s": at("whole", 0.5),
        "whole_p99_s": at("whole", 0.99),
        "worst_underrun_s": at("underrun", 1.0),
    }


async def measure_serve(folder: Path, arguments: argparse.Namespace, report: Report) -> None:
    graph = speech(
        folder,
        max_running=arguments.max_running,
        together=arguments.together,
        talker=arguments.dtype,
        vocoder=arguments.vocoder_dtype,
    )
    config = RuntimeConfig(start_timeout_s=300.0, step_s=120.0)
    began = time.perf_counter()
    async with Runtime(plan(graph.spec(), this_machine(), config), config) as runtime:
        report.add({"start_s": time.perf_counter() - began, "together": arguments.together})
        await load(runtime, 4, 8)  # whatever is done on first use
        for clients in arguments.clients:
            row = await load(runtime, clients, max(8, arguments.turns * clients))
            report.add(rounded(row), f"{clients} clients")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["write", "check", "steps", "vae", "serve"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--vocoder-dtype", default="auto", choices=["auto", *DTYPES])
    parser.add_argument("--plain", action="store_true", help="torch's kernels instead of ours")
    parser.add_argument("--together", action="store_true", help="talker and vocoder in one process")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--turns", type=int, default=4, help="requests of each client")
    parser.add_argument("--max-running", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    need()
    plain_kernels(arguments.plain)
    if arguments.part == "write":
        write_talker(arguments.folder)
        return
    report = Report(arguments.json, arguments.part)
    if arguments.part == "serve":
        anyio.run(measure_serve, arguments.folder, arguments, report)
    else:
        parts = {"check": measure_check, "steps": measure_steps, "vae": measure_vae}
        parts[arguments.part](arguments.folder, arguments, report)


if __name__ == "__main__":
    main()
