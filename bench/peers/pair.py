"""Two pinned processes and a blocking channel between them: the same loops for each channel."""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

import msgspec
import numpy as np

from bench.workload import (
    NUM_IDLE,
    NUM_SENT,
    NUM_TRIPS,
    PAUSE_S,
    check,
    decode,
    encode,
    message,
    pin,
    sizes,
    tell,
    tell_payload,
    tell_times,
)


class Channel:
    """What a peer has to define: `prepare` runs before the fork, `parent` and `child` after it."""

    name = ""
    payloads = True
    messages = True

    def prepare(self) -> None: ...

    def parent(self) -> None: ...

    def child(self) -> None: ...

    def send(self, data: bytes) -> None:
        raise NotImplementedError

    def receive(self) -> bytes:
        raise NotImplementedError

    def send_array(self, array: np.ndarray) -> None:
        raise NotImplementedError

    def receive_array(self) -> np.ndarray:
        """Valid until `release`."""
        raise NotImplementedError

    def release(self) -> None: ...


def _serve(channel: Channel) -> None:
    channel.send(b"up")
    while True:
        command, count = msgspec.msgpack.decode(channel.receive())
        if command == "stop":
            return
        for _ in range(count):
            if command == "echo":
                channel.send(encode(decode(channel.receive())))
            elif command == "take":
                decode(channel.receive())
            else:
                taken = check(channel.receive_array())
                channel.release()
                if command == "array":
                    channel.send(msgspec.msgpack.encode(taken))
        if command in ("take", "stream"):
            channel.send(b"done")


def _ask(channel: Channel, command: str, count: int) -> None:
    channel.send(msgspec.msgpack.encode((command, count)))


def round_trips(channel: Channel, count: int, pause_s: float) -> list[float]:
    _ask(channel, "echo", count)
    times: list[float] = []
    for number in range(count):
        time.sleep(pause_s)
        one = message(number)
        began = time.monotonic_ns()
        channel.send(encode(one))
        decode(channel.receive())
        times.append(time.monotonic_ns() - began)
    return times


def one_way(channel: Channel, array: np.ndarray, count: int, pause_s: float) -> list[float]:
    _ask(channel, "array", count)
    times: list[float] = []
    for _ in range(count):
        time.sleep(pause_s)
        began = time.monotonic_ns()
        channel.send_array(array)
        times.append(msgspec.msgpack.decode(channel.receive()) - began)
    return times


def rate(channel: Channel, count: int) -> float:
    _ask(channel, "take", count)
    one = message()
    began = time.monotonic_ns()
    for number in range(count):
        one.seq = number
        channel.send(encode(one))
    channel.receive()
    return count / (time.monotonic_ns() - began) * 1e9


def streamed(channel: Channel, array: np.ndarray, count: int) -> float:
    """GB/s of payloads sent one after the other."""
    _ask(channel, "stream", count)
    began = time.monotonic_ns()
    for _ in range(count):
        channel.send_array(array)
    channel.receive()
    return count * array.nbytes / (time.monotonic_ns() - began)


def _measure(channel: Channel) -> None:
    if channel.messages:
        round_trips(channel, 200, 0)
        tell_times(channel.name, "round trip hot", round_trips(channel, NUM_TRIPS, 0))
        tell_times(channel.name, "round trip idle", round_trips(channel, NUM_IDLE, PAUSE_S))
        rate(channel, 2000)
        tell(channel.name, "rate", rate(channel, NUM_SENT))
    if channel.payloads:
        for name, array, count in sizes():
            tell_payload(channel.name, name, one_way(channel, array, count, 0))
            if count > 50:
                tell_payload(channel.name, f"{name} idle", one_way(channel, array, 60, PAUSE_S))
        streamed(channel, array, 2)
        tell(channel.name, "stream 64 MB", streamed(channel, array, count))


def run(channel: Channel) -> None:
    """Measure one channel, in this process and a forked one."""
    channel.prepare()
    pid = os.fork()
    if pid == 0:
        _child(channel)
    pin(0)
    channel.parent()
    assert bytes(channel.receive()) == b"up"
    gc.disable()
    _measure(channel)
    _ask(channel, "stop", 0)
    os.waitpid(pid, 0)


def _child(channel: Any) -> None:
    code = 1
    try:
        pin(1)
        channel.child()
        gc.disable()
        _serve(channel)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)
