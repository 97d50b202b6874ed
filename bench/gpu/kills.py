"""kill -9 of an SGLang host under load: `python -m bench.gpu.kills [--model FOLDER] [--json FILE]`.

A thinker on SGLang in a host of its own, and requests that stream. Its process is killed while all of them are being
answered, and while they are being read; then the runtime itself is. Said are: how each request ended and how long after
the kill, when the GPU had its memory back, when the stage answered again, and what is left behind. `--device cpu` is
the same with the reference engine, which has no memory of a GPU to give back.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import anyio

from actors.detokenize import Detokenize
from actors.thinker import Thinker
from bench.gpu.report import ROOT, Report, folder_of, need, shared_memory
from omniflow import Graph, Runtime, one_for_one, plan
from omniflow.cli.machine import this_machine
from omniflow.config import RuntimeConfig
from omniflow.errors import OmniflowError, RequestError
from omniflow.media import Options, TokenPrompt

MARK = "OMNIFLOW_BENCH_KILLS"
"""In the environment of every process of a run, by which what is left of it is found."""
KILL_ME = "now kill me"
MB = 1e6


def _handle(gpu: int) -> Any:
    """A GPU of those that this process may see, as NVML knows it."""
    import pynvml

    visible = [int(each) for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByIndex(visible[gpu] if visible else gpu)


def memory_used(gpu: int = 0) -> float:
    """MB in use on a GPU, by all processes."""
    import pynvml

    return float(pynvml.nvmlDeviceGetMemoryInfo(_handle(gpu)).used / MB)


def held_by_processes(gpu: int = 0) -> dict[int, float]:
    """MB of a GPU that each process holds, by its id."""
    import pynvml

    found = pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(gpu))
    return {each.pid: (each.usedGpuMemory or 0) / MB for each in found}


class MemoryBack:
    """Watches, in a thread, when the GPU has all that some processes hold of it; others may use it meanwhile."""

    def __init__(self, pids: Collection[int]) -> None:
        held = held_by_processes()
        self._pids = {pid for pid in pids if pid in held}
        self._held_mb = sum(held[pid] for pid in self._pids)
        self._used_mb = memory_used()
        self._began = time.perf_counter()
        self._after_ms: float | None = None
        self._fell_mb = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while time.perf_counter() - self._began < 10 and self._after_ms is None:
            if not self._pids & held_by_processes().keys():
                self._after_ms = 1e3 * (time.perf_counter() - self._began)
            time.sleep(0.002)
        time.sleep(0.05)
        self._fell_mb = self._used_mb - memory_used()

    def found(self) -> dict[str, float | None]:
        """Once it is known. `memory_fell_mb` is of the whole GPU, which others may use."""
        self._thread.join()
        after = None if self._after_ms is None else round(self._after_ms, 1)
        held, fell = round(self._held_mb), round(self._fell_mb)
        return {"held_mb": held, "memory_back_after_ms": after, "memory_fell_mb": fell, "processes": len(self._pids)}


def thinker_graph(model: str, device: str) -> Graph:
    graph = Graph("kills")
    thinker = graph.stage(
        "thinker",
        Thinker,
        model=model,
        device=device,
        engine="transformers" if device == "cpu" else "sglang",
        dtype="auto" if device == "cpu" else "bfloat16",
        max_running=16,
        kv_tokens=65536,
        restart=one_for_one(max_restarts=5, within_s=300),
    )
    detokenize = graph.stage("detokenize", Detokenize, near="thinker", model=model)
    graph.stream(thinker, detokenize, bound=64)
    graph.input(chat=thinker)
    graph.output(text=detokenize["text"], usage=thinker["result"])
    return graph


class Load:
    """`count` requests at once, and what became of them."""

    def __init__(self, runtime: Runtime, count: int, prompt_tokens: int, tokens: int) -> None:
        self._runtime = runtime
        self._count = count
        self._prompt_tokens = prompt_tokens
        self._tokens = tokens
        self.submitted = 0
        self.answering = 0
        self.ends: list[tuple[str, float]] = []
        """How each ended, and when."""

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(self._count):
                tasks.start_soon(self._one, number)

    async def _one(self, number: int) -> None:
        ids = [10 + (37 * number + 11 * at) % 40_000 for at in range(self._prompt_tokens)]
        options = Options(temperature=1.0, max_tokens=self._tokens)
        seen = False
        try:
            async with await self._runtime.submit("chat", TokenPrompt(ids), options=options) as reply:
                self.submitted += 1
                async for _ in reply:
                    if not seen:
                        seen = True
                        self.answering += 1
            ended = "answered"
        except OmniflowError as error:
            more = f" ({error.status}, retriable: {error.retriable})" if isinstance(error, RequestError) else ""
            ended = f"{type(error).__name__}{more}"
        self.ends.append((ended, time.perf_counter()))

    def found(self, killed: float) -> dict[str, Any]:
        times = [1e3 * (at - killed) for _, at in self.ends]
        ends = [end for end, _ in self.ends]
        return {
            "requests": {end: ends.count(end) for end in set(ends)},
            "first_error_ms": round(min(times), 2),
            "last_error_ms": round(max(times), 2),
        }


def pid_of(runtime: Runtime) -> int | None:
    return next(status.pid for status in runtime.status().stages if status.name == "thinker")


async def kill_under(runtime: Runtime, load: Load, is_time: Callable[[], bool], on_gpu: bool) -> dict[str, Any]:
    """Kill the thinker's process once `is_time`, and wait until it answers again."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load.run)
        with anyio.fail_after(60):
            while not is_time():
                await anyio.sleep(0.001)
        pid = pid_of(runtime)
        assert pid is not None
        watch = MemoryBack([pid]) if on_gpu else None
        killed = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(5):
            while pid_of(runtime) == pid:
                await runtime._wait_change()
        seen = time.perf_counter() - killed
    found = load.found(killed)
    memory = await anyio.to_thread.run_sync(watch.found) if watch is not None else {}
    with anyio.fail_after(80):
        while not runtime._up.issuperset(host.name for host in runtime.plan.hosts):
            await runtime._wait_change()
        back = time.perf_counter() - killed
        again = Load(runtime, 1, 20, 8)
        await again.run()
    return {
        "death_seen_ms": round(1e3 * seen, 2),
        **found,
        **memory,
        "ready_again_s": round(back, 2),
        "then": again.ends[0][0],
        "then_after_s": round(again.ends[0][1] - killed, 2),
    }


async def kills(model: str, device: str) -> None:
    """All kills of the thinker; then say so, and let the requests run until this process is killed."""
    config = RuntimeConfig(start_timeout_s=120.0, step_s=60.0)
    found: dict[str, Any] = {"model": model, "device": device}
    on_gpu = device != "cpu"
    began = time.perf_counter()
    async with Runtime(plan(thinker_graph(model, device).spec(), this_machine(), config), config) as runtime:
        found["start_s"] = round(time.perf_counter() - began, 2)
        warm = Load(runtime, 16, 64, 16)
        await warm.run()
        found["warm"] = sorted({end for end, _ in warm.ends})
        load = Load(runtime, 16, 64, 2000)
        found["while 16 are answered"] = await kill_under(runtime, load, lambda: load.answering == 16, on_gpu)
        print(json.dumps(found), flush=True)
        prompts = Load(runtime, 16, 1500, 500)
        found["while 16 prompts are read"] = await kill_under(runtime, prompts, lambda: prompts.submitted > 8, on_gpu)
        print(json.dumps(found), flush=True)
        last = Load(runtime, 16, 64, 2000)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(last.run)
            while last.answering < 16:
                await anyio.sleep(0.001)
            print(KILL_ME, flush=True)


def is_of(pid: int, mark: str) -> bool:
    """True for a living process of this run."""
    folder = Path("/proc", str(pid))
    try:
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and mark.encode() in (folder / "environ").read_bytes()
    except OSError:
        return False


def left(mark: str) -> list[int]:
    """The living processes of this run."""
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if pid != os.getpid() and is_of(pid, mark)]


def until_asked(process: subprocess.Popen[str], report: Report) -> bool:
    """Keep what the runtime's process finds, until it asks to be killed; False where it ends by itself."""
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.strip() == KILL_ME:
            return True
        if line.startswith('{"model"'):
            report.keep(json.loads(line))
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="folder of a small checkpoint, or its name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="gpu", choices=["gpu", "cpu"])
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "gpu"
    if on_gpu:
        need(sglang=True)
    if arguments.child:
        anyio.run(kills, arguments.model, arguments.device)
        return
    shm, mark = shared_memory(), uuid.uuid4().hex
    command = [sys.executable, "-m", "bench.gpu.kills", "--child", "--model", folder_of(arguments.model)]
    command += ["--device", arguments.device]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, text=True)
    report = Report(arguments.json, "kills")
    if not until_asked(process, report):
        report.add({"failed": f"it ended by itself, with exit code {process.wait()}"}, "the runtime itself")
        sys.exit(1)
    watch = MemoryBack([pid for pid in held_by_processes() if is_of(pid, mark)]) if on_gpu else None
    killed = time.perf_counter()
    process.kill()
    process.wait()
    while left(mark) and time.perf_counter() - killed < 10:
        time.sleep(0.002)
    gone = 1e3 * (time.perf_counter() - killed)
    memory = watch.found() if watch is not None else {}
    report.add({"all_processes_gone_ms": round(gone, 1), "left": left(mark), **memory}, "the runtime itself")
    report.add({"left_in_dev_shm": sorted(shared_memory() - shm)})


if __name__ == "__main__":
    main()
