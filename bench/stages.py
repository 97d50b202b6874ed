"""Two stages in two processes: bounds, order, types, deadlines, cancellation and supervision included."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from bench.graphs import Ask, Ping, Pong, Receiver, Shipper, Step, one_way, row, running, there_and_back
from bench.loops import ASYNCIO, loaned, loops
from bench.workload import (
    NUM_IDLE,
    NUM_SENT,
    NUM_TRIPS,
    PAUSE_S,
    PAYLOADS,
    REPEATS,
    message,
    tell,
    tell_payload,
    tell_times,
)
from omniflow.runtime import Runtime

SHM_BYTES = 2**29


async def ask(runtime: Runtime, *args: Any) -> Any:
    return (await (await runtime.submit("ask", Ask(*args))).collect())["times"]


def cpu_s(pid: int) -> float:
    """Seconds that a process has run."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def messages(name: str, **config: Any) -> None:
    async with running(there_and_back(Ping, Pong, "back"), processes=True, **config) as runtime:
        await ask(runtime, 200)
        tell_times(name, "round trip hot", await ask(runtime, NUM_TRIPS))
        tell_times(name, "round trip idle", await ask(runtime, NUM_IDLE, PAUSE_S))
        await ask(runtime, 200)
        await asyncio.sleep(0.001)
        pids = [stage.pid for stage in runtime.status().stages if stage.pid] + [os.getpid()]
        before, began = [cpu_s(pid) for pid in pids], time.monotonic()
        await asyncio.sleep(2)
        passed = time.monotonic() - began
        tell(name, "idle CPU", max(cpu_s(pid) - was for pid, was in zip(pids, before, strict=True)) / passed * 100)
    async with running(one_way(256), processes=True, **config) as runtime:
        for count in (2000, NUM_SENT * 2):
            got = await (await runtime.submit("ask", Ask(count))).collect()
        tell(name, "rate", count / (got["ended"] - got["began"]) * 1e9)


async def payloads(name: str, **config: Any) -> None:
    graph = there_and_back(Shipper, Receiver, "received")
    async with running(graph, processes=True, shm_bytes=SHM_BYTES, **config) as runtime:
        for size, num_bytes in PAYLOADS.items():
            for in_place in (False, True):
                count = (max(40, REPEATS[size]) if in_place else REPEATS[size]) + 1
                system = loaned(name) if in_place else name
                tell_payload(system, size, await ask(runtime, count, 0.0, num_bytes, in_place))
                if count > 50:
                    tell_payload(system, f"{size} idle", await ask(runtime, 60, PAUSE_S, num_bytes, in_place))


async def start(name: str, **config: Any) -> None:
    """Eight stages, each in a process of its own: from nothing until the first request is answered."""
    for metric in ("start of 8", "start of 8, again"):
        began = time.monotonic()
        async with running(row(8, Step, isolate=True), processes=True, **config) as runtime:
            await (await runtime.submit("note", message())).collect()
            tell(name, metric, (time.monotonic() - began) * 1e6)


async def measure(name: str, *, first: bool, **config: Any) -> None:
    if first:  # later the fork server is up already
        await start(name, **config)
    await messages(name, **config)
    await payloads(name, **config)


def main() -> None:
    for number, (suffix, factory) in enumerate(loops().items()):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(measure(f"omniflow{suffix}", first=number == 0, uvloop=suffix != ASYNCIO))


if __name__ == "__main__":
    main()
