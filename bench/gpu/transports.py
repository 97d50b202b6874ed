"""How tensors go from process to process on GPUs: omniflow's lanes beside torch's ways (`peers.py`), in one run.

    python -m bench.gpu.transports [one|two|kills] [--only PART ...] [--json FILE]

    one    on one GPU
    two    between two
    kills  kill -9 of either end, between two

One value is on its way at a time. A hop ends when the receiver has the tensor and its GPU is through with all that was
given to it before ("ready"); it ends earlier when the receiver may give its GPU work on it ("held"). The processes read
one clock. Parts that need two GPUs are left out where there is one. NCCL reads its settings once, so each part that has
some of its own runs in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
import torch.distributed as distributed

from bench.gpu.peers import (
    SIZES,
    STREAMED,
    bare_nccl,
    calls,
    events,
    peer_copy,
    repeats_of,
    spread,
    torch_queue,
)
from bench.gpu.report import ROOT, Report, machine, need, shared_memory
from omniflow.devices import NCCL_CHUNK, Gpus
from omniflow.errors import ErrorInfo
from omniflow.messages import Message
from omniflow.transport.arrow_shm import ArrowShmLink, SharedMemory, socket_pair
from omniflow.transport.base import Link
from omniflow.transport.codec import Encoder, decoder_for
from omniflow.transport.cuda_driver import map_memory, take_memory
from omniflow.transport.cuda_ipc import CudaIpcLane
from omniflow.transport.device_pool import DevicePool
from omniflow.transport.lane import Lane
from omniflow.transport.nccl import ABORTS, NcclLane

POOL = 2**28
SHM = 2**30
TYPES: dict[int, Any] = {
    1: torch.Tensor, 2: tuple[float, float, float], 3: torch.Tensor, 4: torch.Tensor, 5: str, 6: torch.Tensor
}  # fmt: skip
MEASURE, TIMES, ECHO, KEEP, WORD, STREAM = 1, 2, 3, 4, 5, 6
"""Edges: answered with times; those times; sent back; kept; a word, answered with times; only the last is answered."""
NCCL_SETTINGS = {
    "NCCL's own chunks": {"NCCL_P2P_NVL_CHUNKSIZE": "524288"},
    "chunks of 64 KB": {"NCCL_P2P_NVL_CHUNKSIZE": "65536"},
    "64 channels": {"NCCL_P2P_NVL_CHUNKSIZE": "524288", "NCCL_MIN_P2P_NCHANNELS": "64"},
    "64 channels, chunks of 128 KB": {"NCCL_MIN_P2P_NCHANNELS": "64"},
}
"""Beside what a host has, `devices.NCCL_CHUNK`."""
UVLOOP = {"use_uvloop": True}
PART_S = 60


def lane_of(kind: str) -> Lane | None:
    if kind.startswith("cuda_ipc"):
        far = kind.endswith("far")
        return CudaIpcLane(DevicePool(POOL, take_memory), map_memory, sends=True, receives=True, far=far)
    return NcclLane("nccl", POOL, sends=True, receives=True) if kind == "nccl" else None


class End:
    """One end of a link, and what it does with what comes."""

    def __init__(self, kind: str, descriptor: int, *, window_s: float = 200e-6) -> None:
        self.memory = SharedMemory(SHM, window_s)
        self.lane = lane_of(kind)
        self.link = ArrowShmLink(
            "peer", self, socket.socket(fileno=descriptor), self.memory, TYPES, lane=self.lane, home="cuda"
        )
        self.closed = anyio.Event()
        self.closed_at = 0.0
        self.kept: list[Any] = []
        self.got: Any = None
        self._news = anyio.Event()

    def on_item(self, link: Link, edge: int, request: int, seq: int, value: Any) -> None:
        if edge == WORD:
            held = time.perf_counter()
            link.send_item(TIMES, request, seq, (held, held, 0.0))
        elif edge == STREAM:
            if seq == STREAMED - 1:
                torch.cuda.synchronize()
                link.send_item(TIMES, request, seq, (0.0, time.perf_counter(), 0.0))
        elif edge == MEASURE:
            held = time.perf_counter()
            torch.cuda.synchronize()
            ready = time.perf_counter()
            check = float(value.view(-1)[-1]) if seq == 0 else 0.0
            del value
            link.send_item(TIMES, request, seq, (held, ready, check))
        elif edge == ECHO and request == 1:
            link.send_item(ECHO, 2, seq, value)
        elif edge == KEEP:
            self.kept.append(value)
            self._tell(value)
        else:
            self._tell(value)

    def _tell(self, value: Any) -> None:
        self.got = value
        self._news.set()
        self._news = anyio.Event()

    async def answer(self) -> Any:
        await self._news.wait()
        value, self.got = self.got, None
        return value

    def on_bad_item(self, link: Link, edge: int, request: int, error: ErrorInfo) -> None:
        self._tell(error)

    def on_message(self, link: Link, message: Message, descriptors: Sequence[int]) -> None:
        raise AssertionError(message)

    def on_closed(self, link: Link) -> None:
        self.closed_at = time.perf_counter()
        self.closed.set()

    async def opened(self) -> None:
        with anyio.fail_after(90):
            while self.lane is not None and not self.lane.is_open:
                if self.lane.problem is not None:
                    raise RuntimeError(self.lane.problem)
                await anyio.sleep(0.001)


@contextlib.contextmanager
def child(name: str, kind: str, device: int) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """A process that sees one of our GPUs and has the other end of a socket."""
    ours, theirs = socket_pair()
    command = [sys.executable, "-m", "bench.gpu.transports", "--child", name, kind, str(theirs.fileno())]
    uvloop = type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    gpu = Gpus((device,)).environment(os.environ)
    environment = {**os.environ, **gpu, "BENCH_UVLOOP": "1" if uvloop else ""}
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
    theirs.close()
    try:
        yield ours, process
    finally:
        ours.close()
        process.kill()
        process.wait()


async def with_peer(
    kind: str, device: int, use: Callable[[End, subprocess.Popen[bytes]], Any], name: str = "echo"
) -> Any:
    """Open a link with a process and use it, for `PART_S` at most: what never comes must not hold the other parts."""
    with child(name, kind, device) as (ours, process), anyio.fail_after(PART_S):
        async with anyio.create_task_group() as tasks:
            end = End(kind, ours.detach())
            if end.lane is not None:
                tasks.start_soon(end.lane.serve, end.link)
            await end.opened()
            found = await use(end, process)
            end.link.close()
            if isinstance(end.lane, CudaIpcLane):
                end.lane.pool.close()
            tasks.cancel_scope.cancel()
    return found


async def run_child(name: str, kind: str, descriptor: int) -> None:
    gc.freeze()
    gc.set_threshold(50_000)  # as in hosts
    end = End(kind, descriptor)
    async with anyio.create_task_group() as tasks:
        if end.lane is not None:
            tasks.start_soon(end.lane.serve, end.link)
        if name == "flood":
            await end.opened()
            tasks.start_soon(flood, end)
        await end.closed.wait()
        os._exit(0)


async def flood(end: End) -> None:
    """Send without end; before each, the GPU is busy for a while."""
    tensor = torch.ones(2**20, device="cuda")
    for number in range(10**9):
        torch.cuda._sleep(200_000_000 if number >= 3 else 0)
        pending = end.link.send_item(KEEP, 1, number, tensor)
        if pending is not None:
            await pending
        await anyio.sleep(0.01)


# -- parts -------------------------------------------------------------------------------------------------------------


async def hops(kind: str, device: int) -> dict[str, Any]:
    """One-way times by size, and half of the way there and back."""

    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]

    async def use(end: End, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        taken = round((free - torch.cuda.mem_get_info()[0]) / 1e6, 1)
        rows: dict[str, Any] = {"message": spread("held", [await word(end) for _ in range(300)])}
        rows["memory_of_our_gpu_mb"] = taken
        for size in SIZES:
            tensor = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            held, ready, echo = [], [], []
            for number in range(repeats_of(size) if kind != "host" else 30):
                began = time.perf_counter()
                end.link.send_item(MEASURE, 1, number, tensor)
                times = await end.answer()
                held.append(times[0] - began)
                ready.append(times[1] - began)
                if number == 0 and times[2] != float(tensor[-1]):
                    raise AssertionError("what arrived is not what was sent")
            for number in range(repeats_of(size) // 3 if kind != "host" else 15):
                began = time.perf_counter()
                end.link.send_item(ECHO, 1, number, tensor)
                back = await end.answer()
                torch.cuda.synchronize()
                echo.append((time.perf_counter() - began) / 2)
                del back
            rows[str(size)] = {**spread("held", held), **spread("ready", ready), **spread("half_round_trip", echo)}
            if size >= 2**24 and kind != "host":
                found = [await streamed(end, tensor) for _ in range(5)]
                rows[str(size)]["stream_gb_s"] = round(sorted(found)[2], 1)
        return rows

    return await with_peer(kind, device, use)


async def streamed(end: End, tensor: torch.Tensor) -> float:
    """GB/s of values one behind the other, until the last is ready."""
    began = time.perf_counter()
    for number in range(STREAMED):
        pending = end.link.send_item(STREAM, 1, number, tensor)
        if pending is not None:
            await pending
    ended = (await end.answer())[1]
    return float(STREAMED * tensor.nbytes / (ended - began) / 1e9)


async def word(end: End) -> float:
    """A message that carries a word: what a hop costs without any tensor."""
    began = time.perf_counter()
    end.link.send_item(WORD, 1, 0, "word")
    return float((await end.answer())[0] - began)


async def killed_reader(kind: str, device: int) -> dict[str, Any]:
    """kill -9 of a process that holds tensors of ours, while more are on their way; then the next one."""

    async def use(end: End, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        tensor = torch.ones(2**22, device="cuda")
        for number in range(200):
            pending = end.link.send_item(KEEP, 1, number, tensor)
            if pending is not None:
                break
        await anyio.sleep(0.2)
        held = end.lane.pool.blocks_in_use if isinstance(end.lane, CudaIpcLane) else None
        process.send_signal(signal.SIGKILL)
        began = time.perf_counter()
        with anyio.fail_after(10):
            await end.closed.wait()
            await pending if pending is not None else None
        seen = end.closed_at - began
        torch.cuda.synchronize()
        still = time.perf_counter() - began
        return {
            "blocks_held_at_kill": held,
            "sends_before_waiting": number,
            "seen_ms": round(seen * 1e3, 2),
            "our_gpu_idle_after_ms": round(still * 1e3, 2),
            "blocks_held_after": end.link.statistics().blocks_held,
        }

    return await one_by_one(kind, device, use, "echo")


async def killed_writer(kind: str, device: int) -> dict[str, Any]:
    """kill -9 of a process whose tensors we hold, and whose GPU has not yet written what we wait for."""

    async def use(end: End, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        with anyio.fail_after(20):
            while len(end.kept) < 6:
                await end.answer()
        waiting = not torch.cuda.current_stream().query()
        process.send_signal(signal.SIGKILL)
        began = time.perf_counter()
        with anyio.fail_after(10):
            await end.closed.wait()
        seen = end.closed_at - began
        await anyio.to_thread.run_sync(torch.cuda.synchronize)
        idle = time.perf_counter() - began
        total = float(end.kept[0].sum())
        end.kept.clear()
        return {
            "our_stream_waited_at_kill": waiting,
            "seen_ms": round(seen * 1e3, 2),
            "our_gpu_idle_after_ms": round(idle * 1e3, 2),
            "old_tensor_still_whole": total == 2**20,
        }

    return await one_by_one(kind, device, use, "flood")


async def one_by_one(kind: str, device: int, use: Callable[..., Any], name: str) -> dict[str, Any]:
    """Three peers, each killed; and what of our GPU's memory is gone after each, once nothing of it is under way."""
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    found: dict[str, Any] = {}
    for which in ("first", "second", "third"):
        row = found[which] = await with_peer(kind, device, use, name)
        began = time.perf_counter()
        for thread in threading.enumerate():
            if thread.name == ABORTS:
                await anyio.to_thread.run_sync(thread.join, 20)
        row["aborted_after_s"] = round(time.perf_counter() - began, 2)
        await anyio.sleep(0.5)
        torch.cuda.empty_cache()
        row["memory_not_back_mb"] = round((free - torch.cuda.mem_get_info()[0]) / 1e6, 1)
    return found


def steps() -> dict[str, Any]:
    """What each step of sending and receiving takes of the processor, in microseconds."""
    memory = take_memory(2**22)
    tensor = torch.ones(2**16, dtype=torch.uint8, device="cuda")
    encoder = Encoder(device_type="cuda")
    body = encoder.encode(tensor).body
    region = memory.view(0, 2**16)[0]
    decoder = decoder_for(torch.Tensor)
    named: dict[str, Callable[[], Any]] = {
        "encode": lambda: encoder.encode(tensor),
        "copy in": lambda: memory.copy_in(0, tensor, 2**16),
        "copy out": lambda: memory.copy_out(0, 2**16),
        "write a word": lambda: memory.write(0, 0, 1),
        "wait for a word": lambda: memory.wait(0, 0, 1),
        "make a view": lambda: memory.view(0, 2**16),
        "decode": lambda: decoder.decode(body, None, (), region, None),
        **torch_steps(tensor),
    }
    found = {}
    for name, step in named.items():
        for number in range(400):
            if number == 100:
                torch.cuda.synchronize()
                began = time.perf_counter()
            step()
        found[name] = round((time.perf_counter() - began) / 300 * 1e6, 2)
        torch.cuda.synchronize()
    return found


def torch_steps(tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What the NCCL lane asks of torch for each value."""
    default, stream, event = torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Event()

    def wait() -> None:
        event.record(default)
        stream.wait_event(event)

    def beside() -> None:
        with torch.cuda.stream(stream):
            pass

    def there_and_back() -> None:
        torch.cuda.set_stream(stream)
        torch.cuda.set_stream(default)

    def read_elsewhere() -> None:
        torch.empty(2**16, dtype=torch.uint8, device="cuda").record_stream(stream)

    return {
        "is the stream idle": default.query,
        "record and wait": wait,
        "record a new event": default.record_event,
        "with torch.cuda.stream": beside,
        "set_stream twice": there_and_back,
        "empty": lambda: torch.empty(2**16, dtype=torch.uint8, device="cuda"),
        "empty, read in another stream": read_elsewhere,
        "data_ptr": tensor.data_ptr,
    }


async def spawned() -> dict[str, Any]:
    """Two GPU hosts of a runtime: their start, one request, and the way back after kill -9."""
    from omniflow.runtime import Runtime
    from tests.graphs.tensors import Wanted
    from tests.running import pid_of, unstarted, up_again
    from tests.test_gpu_hosts import MACHINE, tensors

    began = time.perf_counter()
    devices = ("gpu:0", "gpu:1" if torch.cuda.device_count() > 1 else "gpu:0")
    runtime: Runtime = unstarted(tensors.build(devices=devices), MACHINE, start_timeout_s=60)
    async with runtime:
        started = time.perf_counter() - began

        async def ask() -> float:
            asked = time.perf_counter()
            await (await runtime.submit("ask", Wanted(1000))).collect()
            return time.perf_counter() - asked

        first = await ask()
        await anyio.sleep(5)
        warm = sorted([await ask() for _ in range(200)])[100]
        os.kill(pid_of(runtime, "fold"), signal.SIGKILL)
        killed = time.perf_counter()
        while len(runtime._up) == len(runtime.plan.hosts):
            await runtime._wait_change()
        seen = time.perf_counter() - killed
        await up_again(runtime, 60)
        back = time.perf_counter() - killed
        again = await ask()
    return {
        "both_hosts_ready_s": round(started, 2), "first_request_ms": round(first * 1e3, 1),
        "warm_request_p50_us": round(warm * 1e6), "death_seen_ms": round(seen * 1e3, 2),
        "ready_again_s": round(back, 2), "first_request_after_ms": round(again * 1e3, 1),
    }  # fmt: skip


def parts_of_one() -> dict[str, Callable[[], Any]]:
    return {
        "events": lambda: in_a_process("events", {}),
        "cuda_ipc, one GPU": lambda: anyio.run(hops, "cuda_ipc", 0),
        "cuda_ipc, one GPU (uvloop)": lambda: anyio.run(hops, "cuda_ipc", 0, backend_options=UVLOOP),
        "steps of a hop": steps,
        "host bounce, one GPU": lambda: anyio.run(hops, "host", 0),
        "torch.multiprocessing, one GPU": torch_queue,
        "kill -9 of the reader, cuda_ipc": lambda: anyio.run(killed_reader, "cuda_ipc", 0),
        "kill -9 of the writer, cuda_ipc": lambda: anyio.run(killed_writer, "cuda_ipc", 0),
        "hosts": lambda: anyio.run(spawned),
    }


def parts_of_two() -> dict[str, Callable[[], Any]]:
    return {
        "bare torch.distributed": bare_nccl,
        "peer copy in one process": peer_copy,
        "cuda_ipc between GPUs (uvloop)": lambda: anyio.run(hops, "cuda_ipc, far", 1, backend_options=UVLOOP),
        "cuda_ipc between GPUs": lambda: anyio.run(hops, "cuda_ipc, far", 1),
        "nccl between GPUs": lambda: in_a_process("nccl", {}),
        "nccl between GPUs (uvloop)": lambda: in_a_process("nccl, uvloop", {}),
        "NCCL's calls": lambda: calls(False),
        "NCCL's calls, registered": lambda: calls(True),
        "host bounce between GPUs": lambda: anyio.run(hops, "host", 1),
        **{f"nccl between GPUs, {name}": with_settings(settings) for name, settings in NCCL_SETTINGS.items()},
    }


def parts_of_kills() -> dict[str, Callable[[], Any]]:
    return {
        f"kill -9 of the {end}, {name}": partial(anyio.run, killed, kind, 1)
        for name, kind in (("cuda_ipc between GPUs", "cuda_ipc, far"), ("nccl", "nccl"))
        for end, killed in (("reader", killed_reader), ("writer", killed_writer))
    }


def parts(group: str | None) -> dict[str, Callable[[], Any]]:
    """What can be measured here, by name."""
    found = {"one": parts_of_one()}
    if torch.cuda.device_count() > 1:
        found |= {"two": parts_of_two(), "kills": parts_of_kills()}
    groups = found.values() if group is None else [found.get(group, {})]
    return {name: part for each in groups for name, part in each.items()}


def with_settings(settings: dict[str, str]) -> Callable[[], Any]:
    return lambda: in_a_process("nccl, uvloop", settings)


ALONE: dict[str, Callable[[], Any]] = {
    "events": events,
    "nccl": lambda: anyio.run(hops, "nccl", 1),
    "nccl, uvloop": lambda: anyio.run(hops, "nccl", 1, backend_options=UVLOOP),
}


def in_a_process(part: str, settings: dict[str, str]) -> Any:
    """Run a part that has settings of its own, or may leave this process with a GPU that waits for ever."""
    command = [sys.executable, "-m", "bench.gpu.transports", "--alone", part]
    environment = {**os.environ, **settings}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    if ran.returncode:
        raise RuntimeError(ran.stderr[-2000:])
    return json.loads(ran.stdout.splitlines()[-1])


def measured(measure: Callable[[], Any]) -> dict[str, Any]:
    """What a part finds; how it failed, where it did."""
    try:
        rows: dict[str, Any] = measure()
    except BaseException as error:  # noqa: BLE001 - a part that fails must not lose the others
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    return rows


def versions() -> dict[str, Any]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if distributed.is_nccl_available() else None
    return {"cuda": torch.version.cuda, "nccl": nccl}


def measure_all(arguments: argparse.Namespace) -> int:
    """The exit code: 1 where a part failed."""
    shm = shared_memory()
    report = Report(arguments.json, "parts", machine() | versions())
    for name, measure in parts(arguments.group).items():
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        began = time.perf_counter()
        rows = measured(measure)
        left = shared_memory() - shm
        if left:
            rows["left_in_dev_shm"] = sorted(left)
        shm |= left
        print(f"{name} ({time.perf_counter() - began:.1f} s)")
        report.keep(rows, name)
        for key, value in rows.items():
            print(f"  {key}: {value}", flush=True)
    return int(any("failed" in rows for rows in report.found.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", nargs="?", choices=["one", "two", "kills"], help="what to measure; all without")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of what to measure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3)
    parser.add_argument("--alone", choices=ALONE)
    arguments = parser.parse_args()
    for name, value in NCCL_CHUNK.items():
        os.environ.setdefault(name, value)
    if arguments.child:
        options = {"use_uvloop": bool(os.environ["BENCH_UVLOOP"])}
        anyio.run(run_child, *arguments.child[:2], int(arguments.child[2]), backend_options=options)
    elif arguments.alone:
        print(json.dumps(ALONE[arguments.alone]()), flush=True)
        os._exit(0)
    else:
        need(1 if arguments.group in ("one", None) else 2)
        sys.exit(measure_all(arguments))


if __name__ == "__main__":
    main()
