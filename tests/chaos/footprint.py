"""What processes hold, seen from outside: children, descriptors, threads, memory, names in /dev/shm."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import anyio

from omniflow.runtime import Runtime

from ..conftest import hosts_below, shared_memory
from ..graphs.paths import HOSTS, Held, num_descriptors
from ..running import settled
from ..waiting import HANGS_S


class Footprint(NamedTuple):
    """Of this process and what is below it."""

    hosts: int
    shm: set[str]
    descriptors: int
    """Without those of pooled memory, which stay for the next value; how much that may be is `runtime.shm_bytes`."""
    threads: int

    @classmethod
    def now(cls) -> Footprint:
        return cls(
            len(hosts_below(os.getpid())),
            shared_memory(),
            num_descriptors(),
            len(os.listdir("/proc/self/task")),
        )


async def ask(runtime: Runtime, entry: str, value: object, **how: Any) -> Any:
    """What the only output of `entry` gives."""
    (found,) = (await (await runtime.submit(entry, value, **how)).collect()).values()
    return found


async def quiet(runtime: Runtime, within_s: float = HANGS_S) -> dict[str, Held]:
    """Wait until neither the runtime nor any host of the graph `paths` holds anything of a request; what they are."""
    await settled(runtime, within_s)
    until = time.monotonic() + within_s
    while True:
        found: dict[str, Held] = {name: await ask(runtime, f"look_{name}", 0) for name in HOSTS}
        if all(not any(held.of_requests) and not held.tasks for held in found.values()):
            return found
        assert time.monotonic() < until, f"hosts still hold something of a request: {found}"
        await anyio.sleep(0.01)
