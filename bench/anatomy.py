"""Where the time of a hop goes: what its parts cost by themselves, in CPU time of this machine.

The parts that no Python code can avoid (system calls, the copy, encoding) are measured alone; what a whole hop takes
beyond them is Python: of asyncio's loop, and of the link.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import socket
import sys
import time
from collections.abc import Callable

import numpy as np

from bench.links import TAKE, End
from bench.workload import KB, decode, encode, message, percentile, pin, tell
from omniflow.transport.arrow_shm import ArrowShmLink, SharedMemory, socket_pair

SYSTEM = "anatomy"
NUM_TIMES = 3000
DATAGRAM = 230
"""Bytes of a small message with its envelope."""


def cost(once: Callable[[], object], count: int = NUM_TIMES) -> float:
    """CPU time of one call in microseconds: the median of batches of 20, less what an empty call takes."""

    def batches(call: Callable[[], object]) -> float:
        times = []
        for _ in range(count // 20):
            began = time.thread_time_ns()
            for _ in range(20):
                call()
            times.append((time.thread_time_ns() - began) / 20)
        return percentile(times, 0.5)

    return (batches(once) - batches(lambda: None)) / 1e3


def system_calls() -> None:
    """A datagram sent and received, and the question what is ready: each hop asks twice, before it sleeps and after."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    data, room = bytes(DATAGRAM), bytearray(2**17)

    def there() -> None:
        ours.send(data)
        theirs.recvmsg_into((room,), 256, socket.MSG_CMSG_CLOEXEC)

    tell(SYSTEM, "send and receive", cost(there))
    with selectors.DefaultSelector() as selector:
        selector.register(theirs, selectors.EVENT_READ)
        ours.send(data)
        tell(SYSTEM, "epoll", cost(lambda: selector.select(0)))
    ours.close()
    theirs.close()


def python_parts() -> None:
    one = message()
    data = encode(one)
    tell(SYSTEM, "encode and decode", cost(lambda: decode(encode(one))))
    assert len(data) < DATAGRAM
    source, target = np.zeros(64 * KB + 64, np.uint8), np.zeros(64 * KB + 64, np.uint8)
    start = -target.ctypes.data % 64
    flat, room = source[: 64 * KB], target[start : start + 64 * KB]

    def copy() -> None:
        room[:] = flat

    tell(SYSTEM, "copy 64 KB", cost(copy))


async def a_turn() -> None:
    """What a turn of asyncio's loop costs in which one callback runs, with a socket to look after."""
    ours, theirs = socket_pair()
    theirs.setblocking(False)
    asyncio.get_running_loop().add_reader(theirs.fileno(), lambda: None)
    times = []
    for _ in range(NUM_TIMES // 10):
        began = time.thread_time_ns()
        for _ in range(10):
            await asyncio.sleep(0)
        times.append((time.thread_time_ns() - began) / 10)
    tell(SYSTEM, "turn of the loop", percentile(times, 0.5) / 1e3)
    asyncio.get_running_loop().remove_reader(theirs.fileno())
    ours.close()
    theirs.close()


async def whole() -> None:
    """The same hop as a whole: a small message from link to link in one process, nobody asleep."""
    ours, theirs = socket_pair()
    end, memory = End(), SharedMemory(2**20)
    sender = ArrowShmLink("receiver", End(), ours, memory, {TAKE: type(message())})
    receiver = ArrowShmLink("sender", end, theirs, memory, {TAKE: type(message())})
    one, times = message(), []
    for number in range(NUM_TIMES):
        began = time.thread_time_ns()
        sender.send_item(TAKE, 1, number, one)
        sender.push()
        receiver.poll()
        times.append(time.thread_time_ns() - began)
    assert end.counts == {"sender": NUM_TIMES}
    tell(SYSTEM, "link, without a loop", percentile(times, 0.5) / 1e3)
    sender.close()
    receiver.close()


def main() -> None:
    pin(0)
    gc.disable()
    system_calls()
    python_parts()
    asyncio.run(a_turn())
    asyncio.run(whole())
    sys.stdout.flush()


if __name__ == "__main__":
    main()
