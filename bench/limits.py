"""What the machine itself allows: copies of memory, wake-ups of a blocked process, one awaited call."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import socket
import time

import numpy as np

from bench.workload import (
    MB,
    NUM_IDLE,
    NUM_TRIPS,
    PAUSE_S,
    decode,
    encode,
    message,
    percentile,
    pin,
    sizes,
    tell,
    tell_times,
)


def copies() -> None:
    """Into memory that is 64-byte aligned and was touched before, as blocks of shared memory are."""
    descriptor = os.memfd_create("bench", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 64 * MB)
    target = np.frombuffer(mmap.mmap(descriptor, 64 * MB), np.uint8)
    target[:] = 0
    for name, array, count in sizes():
        times: list[float] = []
        for _ in range(count):
            began = time.monotonic_ns()
            target[: array.nbytes] = array
            times.append(time.monotonic_ns() - began)
        tell_times("limit", f"copy {name}", times)
    tell("limit", "stream 64 MB", 64 * MB / percentile(times, 0.5))


def round_trips() -> None:
    """A seqpacket socket between two processes that block in it: no event loop, no bounds, no runtime."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        pin(1)
        ours.close()
        while data := theirs.recv(4096):
            theirs.send(encode(decode(data)))
        os._exit(0)
    theirs.close()
    pin(0)
    gc.disable()
    for metric, count, pause_s in (("hot", NUM_TRIPS, 0.0), ("idle", NUM_IDLE, PAUSE_S)):
        times: list[float] = []
        for number in range(count):
            time.sleep(pause_s)
            one = message(number)
            began = time.monotonic_ns()
            ours.send(encode(one))
            decode(ours.recv(4096))
            times.append(time.monotonic_ns() - began)
        tell_times("limit", f"round trip {metric}", times)
    ours.close()
    os.waitpid(pid, 0)


def spinning() -> None:
    """One message each way through shared memory that both sides look at all the time: no system call at all."""
    memory = mmap.mmap(-1, 8192)
    view, words = memoryview(memory), memoryview(memory).cast("Q")

    def put(at: int, data: bytes, number: int) -> None:
        view[at * 8 + 16 : at * 8 + 16 + len(data)] = data
        words[at + 1] = len(data)
        words[at] = number

    def get(at: int, number: int) -> bytes:
        while words[at] != number:
            pass
        return bytes(view[at * 8 + 16 : at * 8 + 16 + words[at + 1]])

    pid = os.fork()
    if pid == 0:
        pin(1)
        for number in range(1, NUM_TRIPS + 1):
            put(512, encode(decode(get(0, number))), number)
        os._exit(0)
    times: list[float] = []
    for number in range(1, NUM_TRIPS + 1):
        one = message(number)
        began = time.monotonic_ns()
        put(0, encode(one), number)
        decode(get(512, number))
        times.append(time.monotonic_ns() - began)
    tell_times("limit", "round trip spinning", times)
    os.waitpid(pid, 0)


async def awaited_call() -> None:
    async def call(value: object) -> object:
        return value

    one, times = message(), []
    for _ in range(300):
        began = time.monotonic_ns()
        for _ in range(100):
            await call(one)
        times.append((time.monotonic_ns() - began) / 100)
    tell_times("limit", "fused hop", times)


if __name__ == "__main__":
    copies()
    round_trips()
    spinning()
    asyncio.run(awaited_call())
