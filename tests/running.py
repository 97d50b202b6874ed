"""Runtimes for tests, and what must be true of them once nothing runs any more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from omniflow.config import RuntimeConfig
from omniflow.graph import Graph
from omniflow.planner import Cluster, cluster_named, plan
from omniflow.runtime import Runtime
from tests.waiting import HANGS_S

INLINE = Cluster("inline", 2, 0, single_process=True)
CPU = cluster_named("cpu")


def unstarted(graph: Graph, cluster: Cluster = INLINE, **config: Any) -> Runtime:
    """Its deadline is far behind what a test waits for: it ends no request that should have ended before."""
    settings = RuntimeConfig(**{"deadline_s": 200.0, "start_timeout_s": 100.0, "shm_bytes": 2**24, **config})
    return Runtime(plan(graph.spec(), cluster, settings), settings)


@asynccontextmanager
async def running(graph: Graph, cluster: Cluster = INLINE, **config: Any) -> AsyncIterator[Runtime]:
    """A runtime that must hold nothing any more when the test is through with it."""
    async with unstarted(graph, cluster, **config) as runtime:
        yield runtime
        await settled(runtime)


async def settled(runtime: Runtime, within_s: float = HANGS_S) -> None:
    """Wait until the runtime and its inline hosts hold nothing of any request."""
    with anyio.fail_after(within_s):
        while runtime._requests:
            await runtime._wait_change()
        while runtime._memory.pool.blocks_in_use:
            await anyio.sleep(0.001)
    assert runtime._admission.num_taken == runtime._admission.num_queued == 0
    assert [host.num_open for host, _ in runtime._inline.values()] == [0] * len(runtime._inline)
    assert runtime.status().in_flight == 0


async def up_again(runtime: Runtime, within_s: float = HANGS_S) -> None:
    """Wait until every host is ready."""
    with anyio.fail_after(within_s):
        while len(runtime._up) < len(runtime.plan.hosts):
            await runtime._wait_change()


def pid_of(runtime: Runtime, stage: str) -> int:
    """The process that runs `stage`."""
    found = next(status.pid for status in runtime.status().stages if status.name == stage)
    assert found is not None
    return found
