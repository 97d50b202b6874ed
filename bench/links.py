"""`ArrowShmLink` between two processes: what every value between hosts goes through, without the stages."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from bench.loops import loaned, loops
from bench.workload import (
    KB,
    NUM_IDLE,
    NUM_SENT,
    NUM_TRIPS,
    PAUSE_S,
    Message,
    check,
    message,
    percentile,
    pin,
    sizes,
    tell,
    tell_payload,
    tell_times,
)
from omniflow.errors import ErrorInfo
from omniflow.messages import Message as Control
from omniflow.transport.arrow_shm import ArrowShmLink, SharedMemory, socket_pair
from omniflow.transport.base import Link

ECHO, TAKE, ARRAY, STREAM, REPLY = 1, 2, 3, 4, 5
TYPES: dict[int, Any] = {ECHO: Message, TAKE: Message, ARRAY: np.ndarray, STREAM: np.ndarray, REPLY: int}
LAST = 2**31
"""Sequence number of the last item of a row that is answered as a whole."""
HOT_S = 200e-6


class End:
    """A receiver; `replies` are the values that arrive on edges that answer."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.counts: dict[str, int] = {}
        self._reply: asyncio.Future[Any] | None = None

    def reply(self) -> asyncio.Future[Any]:
        self._reply = asyncio.get_running_loop().create_future()
        return self._reply

    def on_item(self, link: Link, edge: int, request: int, seq: int, value: Any) -> None:
        if edge == REPLY or self._reply is not None and edge == ECHO:
            assert self._reply is not None
            self._reply.set_result(value)
        elif edge == ECHO:
            link.send_item(ECHO, request, seq, value)
        elif edge == ARRAY:
            link.send_item(REPLY, request, seq, check(value))
        else:
            if edge == STREAM:
                check(value)
            self.counts[link.peer] = self.counts.get(link.peer, 0) + 1
            if seq == LAST:
                link.send_item(REPLY, request, seq, 1)

    def on_bad_item(self, link: Link, edge: int, request: int, error: ErrorInfo) -> None:
        raise AssertionError(error)

    def on_message(self, link: Link, message: Control, descriptors: Sequence[int]) -> None:
        raise AssertionError(message)

    def on_closed(self, link: Link) -> None:
        self.closed.set()


async def serve(connection: socket.socket, hot_s: float) -> None:
    """The process at the other end."""
    end, memory = End(), SharedMemory(2**28, hot_s)
    ArrowShmLink("sender", end, connection, memory, TYPES)
    await end.closed.wait()
    memory.close()


class Sender:
    def __init__(self, connection: socket.socket, hot_s: float) -> None:
        self.end, self.memory = End(), SharedMemory(2**28, hot_s)
        self.link = ArrowShmLink("receiver", self.end, connection, self.memory, TYPES)

    async def ask(self, edge: int, value: Any, seq: int = 0) -> Any:
        reply = self.end.reply()
        await self.put(edge, value, seq)
        return await reply

    async def put(self, edge: int, value: Any, seq: int = 0) -> None:
        pending = self.link.send_item(edge, 1, seq, value)
        if pending is not None:
            await pending

    async def round_trips(self, count: int, pause_s: float) -> list[float]:
        times: list[float] = []
        for number in range(count):
            if pause_s:
                await asyncio.sleep(pause_s)
            one = message(number)
            began = time.monotonic_ns()
            await self.ask(ECHO, one)
            times.append(time.monotonic_ns() - began)
        return times

    async def one_way(self, array: np.ndarray, count: int, pause_s: float, loaned: bool) -> list[float]:
        times: list[float] = []
        for _ in range(count):
            if pause_s:
                await asyncio.sleep(pause_s)
            if loaned:
                memory = self.link.allocate(array.nbytes)
                assert memory is not None
                array = memory
                array[0], array[-1] = 0, 255
            began = time.monotonic_ns()
            times.append(await self.ask(ARRAY, array) - began)
        return times

    async def rate(self, edge: int, value: Any, count: int) -> float:
        """Items a second."""
        began = time.monotonic_ns()
        for number in range(count - 1):
            await self.put(edge, value, number)
        await self.ask(edge, value, LAST)
        return count / (time.monotonic_ns() - began) * 1e9


async def small(connection: socket.socket, hot_s: float, name: str) -> None:
    sender = Sender(connection, hot_s)
    hot = "hot" if hot_s else "hot, window off"
    await sender.round_trips(200, 0)
    tell_times(name, f"round trip {hot}", await sender.round_trips(NUM_TRIPS, 0))
    tell_times(name, f"round trip {hot.replace('hot', 'idle')}", await sender.round_trips(NUM_IDLE, PAUSE_S))
    await sender.rate(TAKE, message(), 2000)
    tell(name, "rate", await sender.rate(TAKE, message(), NUM_SENT))
    sender.link.close()


async def large(connection: socket.socket, hot_s: float, name: str) -> None:
    sender = Sender(connection, hot_s)
    for size, array, count in sizes():
        for in_place in (False, True):
            system = loaned(name) if in_place else name
            tell_payload(system, size, await sender.one_way(array, count, 0, in_place))
            if count > 50:
                tell_payload(system, f"{size} idle", await sender.one_way(array, 60, PAUSE_S, in_place))
    await sender.rate(STREAM, array, count)
    tell(name, "stream 64 MB", await sender.rate(STREAM, array, count) * array.nbytes / 1e9)
    sender.link.close()


def pair(work: Callable[..., Coroutine[Any, Any, None]], name: str, hot_s: float, factory: Any) -> None:
    """Run `work` against a process that serves."""
    ours, theirs = socket_pair()
    pid = os.fork()
    with asyncio.Runner(loop_factory=factory) as runner:
        gc.disable()
        if pid == 0:
            ours.close()
            pin(1)
            runner.run(serve(theirs, hot_s))
            os._exit(0)
        theirs.close()
        pin(0)
        runner.run(work(ours, hot_s, name))
    os.waitpid(pid, 0)


async def produce(connection: socket.socket, go: int, count: int) -> None:
    sender = Sender(connection, 0.0)
    await asyncio.to_thread(os.read, go, 1)
    await sender.rate(TAKE, message(), count)
    sender.link.close()


async def consume(connections: list[socket.socket], start: int, count: int, name: str) -> None:
    end, memory = End(), SharedMemory(2**24)
    for number, connection in enumerate(connections):
        ArrowShmLink(f"producer {number}", end, connection, memory, TYPES)
    await asyncio.sleep(0.3)
    began = time.monotonic()
    os.write(start, b"xxx")
    while max(end.counts.values(), default=0) < count:
        await asyncio.sleep(0)
    total = sum(end.counts.values())
    tell(name, "fan-in", total / (time.monotonic() - began))
    tell(name, "fan-in least share", min(end.counts.values()) / (total / 3))
    while sum(end.counts.values()) < 3 * count:
        await asyncio.sleep(0)
    memory.close()


def fan_in(name: str, factory: Any) -> None:
    """Three processes on core 1 send to one on core 0."""
    go, start = os.pipe()
    pairs = [socket_pair() for _ in range(3)]
    pids = []
    for _, theirs in pairs:
        pid = os.fork()
        if pid == 0:
            for mine, _ in pairs:
                mine.close()
            pin(1)
            gc.disable()
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(produce(theirs, go, NUM_SENT // 2))
            os._exit(0)
        pids.append(pid)
        theirs.close()
    pin(0)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(consume([ours for ours, _ in pairs], start, NUM_SENT // 2, name))
    for pid in pids:
        os.waitpid(pid, 0)


async def own_cost(name: str) -> None:
    """CPU time of both sides for a payload of 64 KB, with no process to wake up: send, deliver, view, release.

    It takes four turns of the loop until the value has arrived and its release has, too. What four turns cost by
    themselves is taken off.
    """
    ours, theirs = socket_pair()
    sender, end, memory = Sender(ours, 0.0), End(), SharedMemory(2**24)
    other = ArrowShmLink("sender", end, theirs, memory, TYPES)
    copied = np.zeros(64 * KB, np.uint8)
    copied[-1] = 255
    turns = []
    for _ in range(1500):
        began = time.thread_time_ns()
        for _ in range(4):
            await asyncio.sleep(0)
        turns.append(time.thread_time_ns() - began)
    for in_place in (False, True):
        times: list[float] = []
        for _ in range(1500):
            array = sender.link.allocate(64 * KB) if in_place else copied
            array[0], array[-1] = 0, 255
            began = time.thread_time_ns()
            sender.link.send_item(STREAM, 1, 0, array)
            for _ in range(4):
                await asyncio.sleep(0)
            times.append(time.thread_time_ns() - began)
        assert sender.link.statistics().blocks_held == 0
        cost = percentile(times, 0.5) - percentile(turns, 0.5)
        tell(loaned(name) if in_place else name, "own CPU", cost / 1e3)
    other.close()
    sender.link.close()


def main() -> None:
    for suffix, factory in loops().items():
        name = f"omniflow link{suffix}"
        for hot_s in (0.0, HOT_S):
            pair(small, name, hot_s, factory)
        pair(large, name, HOT_S, factory)
        fan_in(name, factory)
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(own_cost(name))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
