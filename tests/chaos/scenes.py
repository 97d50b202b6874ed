"""What tests and the benchmark of chaos play: aborted streams, cancels, and a program that is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from omniflow.config import RuntimeConfig
from omniflow.errors import DeadlineError
from omniflow.graph import Graph
from omniflow.planner import plan
from omniflow.runtime import Runtime

from ..graphs.paths import SIDES, Ask, rss_bytes
from ..running import CPU, settled
from ..waiting import HANGS_S
from .footprint import quiet
from .rounds import Watched


@asynccontextmanager
async def watched(graph: Graph, **config: Any) -> AsyncIterator[Watched]:
    """A runtime that notes deaths, and must hold nothing in the end."""
    settings = RuntimeConfig(**{"deadline_s": 200.0, "start_timeout_s": 100.0, "shm_bytes": 2**24, **config})
    async with Watched(plan(graph.spec(), CPU, settings), settings) as runtime:
        yield runtime
        await settled(runtime)


# -- aborted streams ---------------------------------------------------------------------------------------------------


async def growth(runtime: Runtime, dice: random.Random, num: int) -> dict[str, float]:
    """How much the memory of each process has grown, as a part of it, after `num` aborted streams of 200 KB pieces."""
    await _aborted(runtime, dice, 400)
    before = await _memory(runtime)
    await _aborted(runtime, dice, num)
    after = await _memory(runtime)
    return {name: round(after[name] / before[name] - 1, 4) for name in after}


async def _memory(runtime: Runtime) -> dict[str, int]:
    found = {name: held.rss_bytes for name, held in (await quiet(runtime)).items()}
    return {"main": rss_bytes(os.getpid()), **found}


async def _aborted(runtime: Runtime, dice: random.Random, num: int) -> None:
    async def some(side: str) -> None:
        for _ in range(num // 8):
            await _abort(runtime, side, dice)

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(some, SIDES[number % 2])


async def _abort(runtime: Runtime, side: str, dice: random.Random) -> None:
    """Take some pieces of a stream that has more, then leave in one of the ways there are."""
    reply = await runtime.submit(side, Ask(num=1000, size=50_000, pause_s=0))
    for _ in range(dice.randint(0, 4)):
        await anext(reply)
    match dice.choice(["cancel", "leave", "be cancelled"]):
        case "cancel":
            await reply.cancel()
        case "leave":
            async with reply:
                pass
        case "be cancelled":
            with anyio.move_on_after(0.001):
                await reply.collect()


# -- cancels -----------------------------------------------------------------------------------------------------------


async def cancels(runtime: Runtime, dice: random.Random, num: int) -> list[float]:
    """Cancel `num` requests that never end, 0-5 ms after their submission; seconds until nothing of them was left."""
    found = []
    for number in range(num):
        ask = Ask(num=10**9, size=dice.choice([10, 5000, 50_000]), pause_s=0)
        reply = await runtime.submit(SIDES[number % 2], ask, request_id="again")
        await anyio.sleep(dice.random() * 0.005)
        began = time.perf_counter()
        await reply.cancel()
        if number % 7 == 0:  # the others are followed by the next one at once
            await settled(runtime)
            found.append(time.perf_counter() - began)
    await settled(runtime)
    return found


# -- deadlines ---------------------------------------------------------------------------------------------------------


async def late(runtime: Runtime, num: int) -> list[float]:
    """Ask for `num` requests that never end, one after the other; seconds from its deadline to the error of each."""
    found = []
    for number in range(num):
        began = time.perf_counter()
        reply = await runtime.submit(SIDES[number % 2], Ask(num=10**9, size=10), deadline_s=0.05)
        with pytest.raises(DeadlineError):
            await reply.collect()
        found.append(time.perf_counter() - began - 0.05)
    return found


# -- a program that is killed ------------------------------------------------------------------------------------------


def marked(mark: str) -> dict[int, str]:
    """Living processes that were started with `mark` in their environment, wherever they hang in the tree."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")[:100]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@contextmanager
def program(then: str = "", module: str = "program") -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Leader of a group of its own, and the mark of all that comes from it."""
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-m", f"tests.chaos.{module}", then],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
        env={**os.environ, "CHAOS_MARK": mark},
        cwd=Path(__file__).parents[2],
    ) as process:
        yield process, f"CHAOS_MARK={mark}"


def up(process: subprocess.Popen[bytes]) -> None:
    """Wait until the program says that it is."""
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"


def kill(process: subprocess.Popen[bytes], whole_group: bool) -> None:
    if whole_group:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def gone_after(mark: str) -> float:
    """Seconds until no process with `mark` is left. Kills what never ends, and raises."""
    began = time.perf_counter()
    while (left := marked(mark)) and time.perf_counter() < began + HANGS_S:
        time.sleep(0.002)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes live {HANGS_S} s after their main process: {left}"
    return time.perf_counter() - began


def kill_main(whole_group: bool, dice: random.Random) -> float:
    """kill -9 of a program under load: seconds until nothing of it is left."""
    with program() as (process, mark):
        up(process)
        time.sleep(dice.random() * 0.1)
        kill(process, whole_group)
        return gone_after(mark)
