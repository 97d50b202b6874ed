"""Hops inside one process: omniflow's real ones beside asyncio.Queue and AnyIO's memory streams.

Rates are in CPU time, which others who use the machine do not change.
"""

from __future__ import annotations

import asyncio
import gc
import time

import anyio

from bench.graphs import Ask, Ping, Pong, Sink, Source, row, running
from bench.loops import loops
from bench.workload import Message, message, pin, tell, tell_times
from omniflow.graph import Graph

NUM_HOPS, NUM_ITEMS = 8000, 60_000


def ping_pong() -> Graph:
    graph = Graph("pair")
    ping, pong = graph.stage("ping", Ping), graph.stage("pong", Pong)
    graph.stream(ping["emit"], pong)
    graph.stream(pong, ping["back"], loop=10**9)
    graph.input(ask=ping["ask"])
    graph.output(times=ping["result"])
    return graph


def source_sink(bound: int) -> Graph:
    graph = Graph("one_way")
    source, sink = graph.stage("source", Source), graph.stage("sink", Sink)
    graph.stream(source["emit"], sink, bound=bound)
    graph.input(ask=source)
    graph.output(began=source["result"], ended=sink)
    return graph


async def mailbox(name: str) -> None:
    """`emit.send` of one stage until `async for` of the other has the item: credits, order, types and cancellation."""
    async with running(ping_pong(), processes=False) as runtime:
        for count in (500, NUM_HOPS):
            times = (await (await runtime.submit("ask", Ask(count))).collect())["times"]
    tell_times(name, "hop in a process", [each / 2 for each in times])
    async with running(source_sink(256), processes=False) as runtime:
        for count in (2000, NUM_ITEMS):
            began = time.thread_time()
            await (await runtime.submit("ask", Ask(count))).collect()
    tell(name, "rate in a process", count / (time.thread_time() - began))


async def fused(name: str) -> None:
    """What one more stage costs in a row of stages that run in one host: the difference of rows of 41 and of 1."""
    costs = []
    for num_stages in (1, 41):
        async with running(row(num_stages), processes=False) as runtime:
            times = []
            for _ in range(500):
                one = message()
                began = time.monotonic_ns()
                got = await (await runtime.submit("note", one)).collect()
                times.append(time.monotonic_ns() - began)
                assert got["note"] is one
        costs.append(sorted(times)[len(times) // 2])
    tell(name, "fused hop", (costs[1] - costs[0]) / 40 / 1e3)


async def queue(name: str) -> None:
    there: asyncio.Queue[Message | None] = asyncio.Queue(16)
    back: asyncio.Queue[Message] = asyncio.Queue(16)

    async def answer() -> None:
        while (one := await there.get()) is not None:
            await back.put(one)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer())
        one, times = message(), []
        for _ in range(NUM_HOPS):
            began = time.monotonic_ns()
            await there.put(one)
            await back.get()
            times.append((time.monotonic_ns() - began) / 2)
        await there.put(None)
    tell_times(name, "hop in a process", times)
    there = asyncio.Queue(256)

    async def take() -> None:
        while await there.get() is not None:
            pass

    async with asyncio.TaskGroup() as tasks:
        taking = tasks.create_task(take())
        start = time.thread_time()
        for _ in range(NUM_ITEMS):
            await there.put(one)
        await there.put(None)
        await taking
        tell(name, "rate in a process", NUM_ITEMS / (time.thread_time() - start))


async def memory_stream(name: str) -> None:
    to_other, at_other = anyio.create_memory_object_stream[Message](16)
    to_us, at_us = anyio.create_memory_object_stream[Message](16)

    async def answer() -> None:
        async for one in at_other:
            await to_us.send(one)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer)
        one, times = message(), []
        for _ in range(NUM_HOPS // 4):
            began = time.monotonic_ns()
            await to_other.send(one)
            await at_us.receive()
            times.append((time.monotonic_ns() - began) / 2)
        to_other.close()
    tell_times(name, "hop in a process", times)
    send, receive = anyio.create_memory_object_stream[Message](256)

    async def take() -> None:
        async for _ in receive:
            pass

    start = time.thread_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        for _ in range(NUM_ITEMS // 4):
            await send.send(one)
        send.close()
    tell(name, "rate in a process", NUM_ITEMS // 4 / (time.thread_time() - start))
    for each in (at_other, at_us, to_us, receive):
        each.close()


async def measure(suffix: str) -> None:
    for what, name in ((mailbox, "omniflow"), (queue, "asyncio.Queue"), (memory_stream, "AnyIO stream")):
        await what(f"{name}{suffix}")
    await fused(f"omniflow{suffix}")


def main() -> None:
    pin(0)
    gc.disable()
    for suffix, factory in loops().items():
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(measure(suffix))


if __name__ == "__main__":
    main()
