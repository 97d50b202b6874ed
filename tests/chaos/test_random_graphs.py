"""Any graph in 2-3 processes whose stages raise, die, hang and sleep: each request ends, once, in time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import NamedTuple

import anyio
import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omniflow.config import RuntimeConfig
from omniflow.errors import DeadlineError, ProtocolError, RequestError, StageDiedError, StageError, UnavailableError
from omniflow.graph import GraphSpec, Restart
from omniflow.media import Options
from omniflow.planner import Plan, plan
from omniflow.runtime import Runtime

from ..running import CPU, settled, up_again
from ..test_every_request_ends import DEADLY, HARMFUL, HARMLESS, Value, accepted, graphs
from ..waiting import HANGS_S
from .conftest import SEED, rounds

AGAIN = Restart("one_for_one", max_restarts=1_000_000, within_s=0.001, backoff_s=0.001)
CONFIG = RuntimeConfig(stream_bound=3, hang_s=1.0, restart_wait_s=5, shm_bytes=2**20, start_timeout_s=30)
LATE: list[float] = []
"""Seconds from the deadline to the end of each request that ended after it."""


@pytest.fixture(scope="module", autouse=True)
def how_late() -> Iterator[None]:
    yield
    p50, p99, most = np.percentile(LATE or [0.0], [50, 99, 100]) * 1000
    print(f"\n{len(LATE)} requests ended after their deadline: p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {most:.0f} ms")


stages = st.sampled_from([f"s{index}" for index in range(7)])
scripts = st.dictionaries(stages, st.sampled_from(HARMLESS * 2 + HARMFUL + DEADLY), max_size=3)


class Asked(NamedTuple):
    script: dict[str, str]
    deadline_s: float


requests = st.builds(Asked, scripts, st.sampled_from([0.15, 0.3, 3.0]))


async def end_of(runtime: Runtime, asked: Asked) -> str:
    """How a request ended: 'all', or the name of its error. Raises where it ended late, or twice."""
    options = Options(voice=json.dumps(asked.script))
    began = time.perf_counter()
    end = "all"
    try:
        reply = await runtime.submit("ask", Value(), options=options, deadline_s=asked.deadline_s)
        async with reply:
            try:
                async for _output in reply:
                    pass
            except RequestError as error:
                with pytest.raises(type(error)):
                    await anext(reply)  # it has ended, and stays so
                raise
        with pytest.raises(StopAsyncIteration):
            await anext(reply)
    except RequestError as error:
        end = type(error).__name__
    late_s = time.perf_counter() - began - asked.deadline_s
    if late_s > 0:
        LATE.append(late_s)
    assert late_s < HANGS_S, f"{asked} ended {late_s:.2f} s after its deadline"
    return end


async def play(found: Plan, asked: list[Asked]) -> list[str]:
    ends: list[str] = [""] * len(asked)
    async with Runtime(found, CONFIG) as runtime:

        async def one(index: int) -> None:
            ends[index] = await end_of(runtime, asked[index])

        async with anyio.create_task_group() as tasks:
            for index in range(len(asked)):
                tasks.start_soon(one, index)
        await settled(runtime)
        await up_again(runtime)
        assert await end_of(runtime, Asked({}, 10.0)) == "all", "it is as good as new"
        await settled(runtime)
    return ends


def in_processes(spec: GraphSpec, isolated: list[bool]) -> Plan | None:
    """The graph in 2-3 processes; None where it is none that is accepted."""
    if accepted(spec) is None:
        return None
    last = spec.stages[-1].name
    apart = tuple(
        msgspec.structs.replace(stage, restart=AGAIN, isolate=isolate and stage.name != last or stage is spec.stages[0])
        for stage, isolate in zip(spec.stages, isolated, strict=False)
    )
    return plan(msgspec.structs.replace(spec, stages=apart), CPU, CONFIG)


@hypothesis.seed(SEED)
@settings(max_examples=rounds(12), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(graphs(), st.lists(requests, min_size=4, max_size=10), st.sets(st.integers(0, 6), max_size=1))
def test_each_request_ends_in_time(spec: GraphSpec, asked: list[Asked], isolated: set[int]) -> None:
    found = in_processes(spec, [index in isolated for index in range(7)])
    if found is None or not all(host.process for host in found.hosts):
        return
    ends = anyio.run(play, found, asked)
    deadly = any(do in DEADLY for each in asked for do in each.script.values())
    for each, end in zip(asked, ends, strict=True):
        harm = set(each.script.values())
        possible = {"all", DeadlineError.__name__}
        possible |= {StageDiedError.__name__, UnavailableError.__name__} if deadly else set()
        possible |= {StageError.__name__} if "raise" in harm else set()
        possible |= {ProtocolError.__name__} if harm & {"wrong type", "wrong item"} else set()
        assert end in possible, each
