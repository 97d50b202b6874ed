"""What a graph costs: rows of stages that do nothing, in one process and in a process for each stage.

    python -m bench.overhead [--json FILE]

Prints one JSON object a line. Wall times are medians of single requests; costs with many in flight are the time of all
of them by their number, the best of three rounds, because others who use the machine can only add to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import anyio

from bench.graphs import Step, Work, row, running
from bench.workload import message, percentile
from omniflow.runtime import Runtime

NUM_STAGES = 7
NUM_REQUESTS = 1000
IN_FLIGHT = (1, 16, 256, 2048)
PLENTY = {"max_in_flight": 100_000, "max_queued": 100_000}


async def request(runtime: Runtime) -> None:
    await (await runtime.submit("note", message())).collect()


async def single(runtime: Runtime) -> tuple[float, float]:
    """Microseconds of requests one after the other: the median, and what 99 of 100 stay below."""
    times: list[float] = []
    for number in range(NUM_REQUESTS + 100):
        began = time.monotonic_ns()
        await request(runtime)
        if number >= 100:
            times.append(time.monotonic_ns() - began)
    return percentile(times, 0.5) / 1e3, percentile(times, 0.99) / 1e3


async def together(runtime: Runtime, in_flight: int, count: int) -> float:
    """Microseconds for each of `count` requests, `in_flight` of them at a time."""

    async def some() -> None:
        for _ in range(count // in_flight):
            await request(runtime)

    began = time.monotonic_ns()
    async with anyio.create_task_group() as tasks:
        for _ in range(in_flight):
            tasks.start_soon(some)
    return (time.monotonic_ns() - began) / (count // in_flight * in_flight) / 1e3


def cpu_us(runtime: Runtime) -> float:
    """CPU time of this process and all hosts so far."""
    pids = {os.getpid(), *(stage.pid for stage in runtime.status().stages if stage.pid)}
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e3


async def row_of(name: str, processes: bool) -> dict[str, Any]:
    graph = row(NUM_STAGES, Step, isolate=processes)
    async with running(graph, processes=processes, **PLENTY) as runtime:
        median, p99 = await single(runtime)
        found: dict[str, Any] = {"name": name, "median_us": median, "p99_us": p99, "each_us": {}, "cpu_us": {}}
        for in_flight in IN_FLIGHT:
            count = max(4 * in_flight, NUM_REQUESTS)
            rounds = []
            for _ in range(3):
                before = cpu_us(runtime)
                wall = await together(runtime, in_flight, count)
                rounds.append((wall, (cpu_us(runtime) - before) / count))
            found["each_us"][in_flight] = min(wall for wall, _ in rounds)
            found["cpu_us"][in_flight] = min(cpu for _, cpu in rounds)
    return found


async def scaling(busy_us: int, count: int) -> dict[str, Any]:
    """Requests a second of two stages that compute: both in one process, and each in its own on a core of its own."""
    found: dict[str, Any] = {"name": "scaling", "busy_us": busy_us}
    for name, processes in (("one_process", False), ("two_processes", True)):
        best = 0.0
        async with running(row(2, Work, isolate=processes, busy_us=busy_us), processes=processes, **PLENTY) as runtime:
            await together(runtime, 8, 80)
            for _ in range(3):
                best = max(best, 1e6 / await together(runtime, 8, count))
        found[name] = best
    found["ratio"] = found["two_processes"] / found["one_process"]
    return found


async def measure() -> list[dict[str, Any]]:
    found = [await row_of("fused", False), await row_of("processes", True), await scaling(2000, 400)]
    for each in found:
        print(json.dumps(each), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = asyncio.run(measure())
    if arguments.json:
        arguments.json.parent.mkdir(exist_ok=True)
        arguments.json.write_text(json.dumps({"load": os.getloadavg(), "rows": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
