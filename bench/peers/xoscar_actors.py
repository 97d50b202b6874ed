"""xoscar: calls between actors of pool processes, and within one. The caller runs on core 0, the others on core 1."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

# The processes of the pool import this package, too.
os.environ["PYTHONPATH"] = f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"

import xoscar

from bench import workload
from bench.workload import (
    NUM_IDLE,
    PAUSE_S,
    decode,
    encode,
    message,
    pin,
    sizes,
    tell,
    tell_payload,
    tell_times,
)


class Echo(xoscar.Actor):
    def __init__(self, core: int = 1) -> None:
        self.core = core

    async def __post_create__(self) -> None:
        workload.pin(self.core)

    def echo(self, data: bytes) -> bytes:
        return workload.encode(workload.decode(data))

    def take(self, data: bytes) -> None:
        workload.decode(data)

    def array(self, array: np.ndarray) -> int:
        return workload.check(array)


async def round_trips(echo: Any, count: int, pause_s: float) -> list[float]:
    times: list[float] = []
    for number in range(count):
        await asyncio.sleep(pause_s)
        one = message(number)
        began = time.monotonic_ns()
        decode(await echo.echo(encode(one)))
        times.append(time.monotonic_ns() - began)
    return times


async def one_way(echo: Any, array: np.ndarray, count: int, pause_s: float) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        await asyncio.sleep(pause_s)
        began = time.monotonic_ns()
        times.append(await echo.array(array) - began)
    return times


async def in_one_process(pool: Any) -> None:
    local = await xoscar.create_actor(Echo, 0, address=pool.external_address, uid="local")
    data, times = encode(message()), []
    for _ in range(2000):
        began = time.monotonic_ns()
        await local.take(data)
        times.append(time.monotonic_ns() - began)
    tell_times("xoscar", "hop in a process", times)


async def main() -> None:
    began = time.monotonic()
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=8)
    actors = [
        await xoscar.create_actor(Echo, address=address, uid=f"echo{number}")
        for number, address in enumerate(pool.sub_processes)
    ]
    tell("xoscar", "start of 8", (time.monotonic() - began) * 1e6)
    pin(0)
    gc.disable()
    echo = actors[0]
    await round_trips(echo, 100, 0)
    tell_times("xoscar", "round trip hot", await round_trips(echo, 600, 0))
    tell_times("xoscar", "round trip idle", await round_trips(echo, NUM_IDLE, PAUSE_S))
    data = encode(message())
    start = time.monotonic_ns()
    for _ in range(30):
        await asyncio.gather(*[echo.take(data) for _ in range(64)])
    tell("xoscar", "rate", 30 * 64 / (time.monotonic_ns() - start) * 1e9)
    await in_one_process(pool)
    for name, array, count in sizes():
        count = max(4, count // 5)
        tell_payload("xoscar", name, await one_way(echo, array, count, 0))
        if count > 15:
            tell_payload("xoscar", f"{name} idle", await one_way(echo, array, 40, PAUSE_S))
    await pool.stop()


if __name__ == "__main__":
    asyncio.run(main())
