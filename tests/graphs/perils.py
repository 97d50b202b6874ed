"""Stages that are somewhere where death is awkward: in a slow setup, in a batch, full of memory, with a full reader."""

from __future__ import annotations

import time

import anyio
import msgspec
import numpy as np

from omniflow.actor import Actor, Emit, Stream, batched
from omniflow.graph import Graph, Restart

AGAIN = Restart("one_for_one", max_restarts=1_000_000, within_s=0.001, backoff_s=0.001)


class Task(msgspec.Struct, frozen=True):
    """`num` blocks of `size` bytes; the reader takes `reads` of them, then holds on to them for `holds_s`."""

    num: int = 1
    size: int = 0
    reads: int = 1_000_000
    holds_s: float = 0.0


class Load(msgspec.Struct, frozen=True):
    number: int
    data: np.ndarray


class Start(Actor):
    """Takes `setup_s` to start."""

    heavy = True

    def __init__(self, *, setup_s: float = 0.0) -> None:
        self.setup_s = setup_s

    async def setup(self) -> None:
        await anyio.sleep(self.setup_s)

    async def run(self, task: Task, out: Emit[Load]) -> int:
        for number in range(task.num):
            await out.send(Load(number, np.full(task.size, number % 256, np.uint8)))
        return task.num


class Hold(Actor):
    """Keeps what it reads, and with it the sender's memory."""

    heavy = True

    async def run(self, loads: Stream[Load], task: Task, out: Emit[int]) -> int:
        kept = []
        for _ in range(task.reads):
            load = await anext(loads, None)
            if load is None:
                return sum(each.data.nbytes for each in kept)
            assert np.all(load.data == load.number % 256)
            kept.append(load)
            await out.send(load.number)
        await anyio.sleep(task.holds_s)
        return sum(each.data.nbytes for each in kept)


class Batch(Actor):
    """Batches of numbers; each takes as many seconds as its largest number says."""

    heavy = True

    @batched(max_size=4)
    def run(self, seconds: list[float]) -> list[float]:
        time.sleep(max(seconds))
        return seconds


def build(*, bound: int = 4, restart: Restart = AGAIN, setup_s: float = 0.0) -> Graph:
    graph = Graph("perils")
    start = graph.stage("start", Start, restart=restart, setup_s=setup_s)
    hold = graph.stage("hold", Hold, restart=restart)
    ask = graph.stage("ask", Ask, near="start")
    graph.result(ask, start["task"])
    graph.stream(start, hold["loads"], bound=bound)
    graph.result(ask, hold["task"])
    batch = graph.stage("batch", Batch, restart=restart)
    graph.input(task=ask, seconds=batch)
    graph.output(numbers=hold["out"], held=hold["result"], batched=batch)
    return graph


class Ask(Actor):
    async def run(self, task: Task) -> Task:
        return task


graph = build()
