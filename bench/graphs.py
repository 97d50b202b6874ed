"""Graphs of stages that do nothing, so that what is left is the runtime."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import numpy as np

from bench.workload import Message, check, message, pin
from omniflow.actor import Actor, Context, Emit, Stream
from omniflow.config import RuntimeConfig
from omniflow.graph import Graph
from omniflow.planner import Cluster, cluster_named, plan
from omniflow.runtime import Runtime


class Ask(msgspec.Struct, frozen=True):
    """`count` messages, `pause_s` apart; payloads of `size` bytes, written in place where `loaned`."""

    count: int
    pause_s: float = 0.0
    size: int = 0
    loaned: bool = False


class Parcel(msgspec.Struct, frozen=True):
    data: np.ndarray


class Pinned(Actor):
    """Stays on one core, where that is asked for, and is never interrupted by the garbage collector."""

    def __init__(self, *, core: int = -1) -> None:
        self.core = core

    async def setup(self) -> None:
        if self.core >= 0:
            gc.disable()
            pin(self.core)


class Ping(Pinned):
    """Sends a message and waits for its return, again and again; gives the times of the round trips in ns."""

    async def run(self, ask: Ask, back: Stream[Message], emit: Emit[Message]) -> list[float]:
        times: list[float] = []
        for number in range(ask.count):
            if ask.pause_s:
                await anyio.sleep(ask.pause_s)
            one = message(number)
            began = time.monotonic_ns()
            await emit.send(one)
            await anext(back)
            times.append(time.monotonic_ns() - began)
        return times


class Pong(Pinned):
    async def run(self, messages: Stream[Message], emit: Emit[Message]) -> None:
        async for one in messages:
            await emit.send(one)


class Shipper(Pinned):
    """Sends payloads; gives the times until the receiver had each, in ns."""

    async def run(self, ask: Ask, received: Stream[int], emit: Emit[Parcel], ctx: Context) -> list[float]:
        own = (np.arange(ask.size, dtype=np.uint64) & 255).astype(np.uint8)
        times: list[float] = []
        for _ in range(ask.count):
            if ask.pause_s:
                await anyio.sleep(ask.pause_s)
            if ask.loaned:
                own = ctx.allocate(ask.size, np.uint8)
                own[0], own[-1] = 0, 255
            began = time.monotonic_ns()
            await emit.send(Parcel(own))
            times.append(await anext(received) - began)
        return times


class Receiver(Pinned):
    async def run(self, parcels: Stream[Parcel], emit: Emit[int]) -> None:
        async for parcel in parcels:
            await emit.send(check(parcel.data))
            del parcel


class Source(Pinned):
    """Sends as fast as it may; gives the time of its start."""

    async def run(self, ask: Ask, emit: Emit[Message]) -> int:
        one = message()
        began = time.monotonic_ns()
        for _ in range(ask.count):
            await emit.send(one)
        return began


class Sink(Pinned):
    """Gives the time at which it had all."""

    async def run(self, messages: Stream[Message]) -> int:
        async for _ in messages:
            pass
        return time.monotonic_ns()


class Step(Pinned):
    async def run(self, note: Message) -> Message:
        return note


class Work(Pinned):
    """Computes for `busy_us` in the event loop of its host."""

    def __init__(self, *, busy_us: int = 0, core: int = -1) -> None:
        super().__init__(core=core)
        self.busy_us = busy_us

    async def run(self, note: Message) -> Message:
        until = time.thread_time_ns() + self.busy_us * 1000
        while time.thread_time_ns() < until:
            pass
        return note


def there_and_back(one: type[Actor], other: type[Actor], port: str) -> Graph:
    """A pair of stages in a loop, the first on core 0, the second on core 1."""
    graph = Graph("pair")
    first = graph.stage("first", one, core=0, isolate=True)
    second = graph.stage("second", other, core=1, isolate=True)
    graph.stream(first["emit"], second)
    graph.stream(second, first[port], loop=10**9)
    graph.input(ask=first["ask"])
    graph.output(times=first["result"])
    return graph


def one_way(bound: int) -> Graph:
    graph = Graph("one_way")
    source = graph.stage("source", Source, core=0, isolate=True)
    sink = graph.stage("sink", Sink, core=1, isolate=True)
    graph.stream(source["emit"], sink, bound=bound)
    graph.input(ask=source)
    graph.output(began=source["result"], ended=sink)
    return graph


def row(num_stages: int, actor: type[Actor] = Step, *, isolate: bool = False, **settings: Any) -> Graph:
    graph = Graph("row")
    stages = [graph.stage(f"s{number}", actor, isolate=isolate, **settings) for number in range(num_stages)]
    for source, target in zip(stages, stages[1:], strict=False):
        graph.result(source, target)
    graph.input(note=stages[0])
    graph.output(note=stages[-1])
    return graph


@asynccontextmanager
async def running(graph: Graph, *, processes: bool, **config: Any) -> AsyncIterator[Runtime]:
    """A runtime of `graph`: in processes as the planner says, or all in this one."""
    settings = RuntimeConfig(**{"deadline_s": 600.0, **config})
    cores = len(os.sched_getaffinity(0))
    cluster = cluster_named("cpu", cpu_cores=cores) if processes else Cluster("here", cores, 0, single_process=True)
    async with Runtime(plan(graph.spec(), cluster, settings), settings) as runtime:
        yield runtime
