"""Ray: calls of an actor, its object store, and compiled graphs over shared-memory channels.

Ray places its own daemons; the driver is pinned to core 0, the actor to core 1.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# The actors' processes import this package, too.
os.environ["PYTHONPATH"] = f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
os.environ |= {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

import ray
from ray.dag import InputNode

from bench import workload
from bench.workload import (
    MB,
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


@ray.remote(num_cpus=0)
class Echo:
    def __init__(self) -> None:
        workload.pin(1)

    def up(self) -> int:
        return os.getpid()

    def echo(self, data: bytes) -> bytes:
        return workload.encode(workload.decode(data))

    def take(self, data: bytes) -> None:
        workload.decode(data)

    def array(self, array: np.ndarray) -> int:
        return workload.check(array)


def round_trips(call: Callable[[bytes], Any], count: int, pause_s: float) -> list[float]:
    times: list[float] = []
    for number in range(count):
        time.sleep(pause_s)
        one = message(number)
        began = time.monotonic_ns()
        decode(call(encode(one)))
        times.append(time.monotonic_ns() - began)
    return times


def one_way(call: Callable[[np.ndarray], int], array: np.ndarray, count: int, pause_s: float) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        time.sleep(pause_s)
        began = time.monotonic_ns()
        times.append(call(array) - began)
    return times


def payloads(system: str, make: Callable[[int], tuple[Callable[[np.ndarray], int], Callable[[], None]]]) -> None:
    for name, array, count in sizes():
        call, close = make(array.nbytes)
        count = max(5, count // 4)
        tell_payload(system, name, one_way(call, array, count, 0))
        if count > 15:
            tell_payload(system, f"{name} idle", one_way(call, array, 40, PAUSE_S))
        close()


def actor(began: float) -> None:
    actors = [Echo.remote() for _ in range(8)]
    ray.get([one.up.remote() for one in actors])
    tell("ray actor", "start of 8", (time.monotonic() - began) * 1e6)
    for one in actors[1:]:
        ray.kill(one)
    echo = actors[0]

    def call(data: bytes) -> bytes:
        found: bytes = ray.get(echo.echo.remote(data))
        return found

    round_trips(call, 100, 0)
    tell_times("ray actor", "round trip hot", round_trips(call, 400, 0))
    tell_times("ray actor", "round trip idle", round_trips(call, NUM_IDLE, PAUSE_S))
    data = encode(message())
    began = time.monotonic_ns()
    ray.get([echo.take.remote(data) for _ in range(2000)])
    tell("ray actor", "rate", 2000 / (time.monotonic_ns() - began) * 1e9)
    payloads("ray actor", lambda size: (lambda array: ray.get(echo.array.remote(ray.put(array))), lambda: None))
    ray.kill(echo)


def compiled() -> None:
    echo = Echo.remote()
    ray.get(echo.up.remote())
    with InputNode() as entry:
        bound = echo.echo.bind(entry)
    graph = bound.experimental_compile(_buffer_size_bytes=MB)

    def call(data: bytes) -> bytes:
        found: bytes = ray.get(graph.execute(data))
        return found

    round_trips(call, 100, 0)
    tell_times("ray compiled graph", "round trip hot", round_trips(call, 1000, 0))
    tell_times("ray compiled graph", "round trip idle", round_trips(call, NUM_IDLE, PAUSE_S))
    data, running, count = encode(message()), [], 2000
    began = time.monotonic_ns()
    for _ in range(count):
        running.append(graph.execute(data))
        if len(running) >= 8:
            ray.get(running.pop(0))
    ray.get(running)
    tell("ray compiled graph", "rate", count / (time.monotonic_ns() - began) * 1e9)
    graph.teardown()
    ray.kill(echo)
    payloads("ray compiled graph", compiled_of)


def compiled_of(size: int) -> tuple[Callable[[np.ndarray], int], Callable[[], None]]:
    echo = Echo.remote()
    with InputNode() as entry:
        bound = echo.array.bind(entry)
    graph = bound.experimental_compile(_buffer_size_bytes=size + MB)

    def close() -> None:
        graph.teardown()
        ray.kill(echo)

    return lambda array: ray.get(graph.execute(array)), close


def main() -> None:
    began = time.monotonic()
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=1 << 30,
    )
    pin(0)
    gc.disable()
    actor(began)
    compiled()
    ray.shutdown()


if __name__ == "__main__":
    main()
