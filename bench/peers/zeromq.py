"""pyzmq: PUSH and PULL over ipc, and three producers into one consumer."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import numpy as np
import zmq

from bench.peers.pair import Channel, run
from bench.workload import NUM_SENT, decode, encode, message, pin, tell


class ZeroMQ(Channel):
    name = "pyzmq"

    def prepare(self) -> None:
        self.folder = tempfile.mkdtemp()

    def _sockets(self) -> None:
        context = zmq.Context()
        self.out: Any = context.socket(zmq.PUSH)
        self.into: Any = context.socket(zmq.PULL)
        self.out.setsockopt(zmq.LINGER, 0)

    def parent(self) -> None:
        self._sockets()
        self.out.bind(f"ipc://{self.folder}/a")
        self.into.bind(f"ipc://{self.folder}/b")

    def child(self) -> None:
        self._sockets()
        self.into.connect(f"ipc://{self.folder}/a")
        self.out.connect(f"ipc://{self.folder}/b")

    def send(self, data: bytes) -> None:
        self.out.send(data)

    def receive(self) -> bytes:
        found: bytes = self.into.recv()
        return found

    def send_array(self, array: np.ndarray) -> None:
        self.out.send(array, copy=False)

    def receive_array(self) -> np.ndarray:
        return np.frombuffer(self.into.recv(copy=False).buffer, np.uint8)


def produce(path: str, go: int, number: int) -> None:
    pin(1)
    socket = zmq.Context().socket(zmq.PUSH)
    socket.connect(path)
    os.read(go, 1)
    one = message()
    one.step = number
    for seq in range(NUM_SENT // 2):
        one.seq = seq
        socket.send(encode(one))
    socket.close()
    zmq.Context.instance().term()
    time.sleep(0.5)
    os._exit(0)


def fan_in() -> None:
    path = f"ipc://{tempfile.mkdtemp()}/fan"
    go, start = os.pipe()
    pids = []
    for number in range(3):
        pid = os.fork()
        if pid == 0:
            produce(path, go, number)
        pids.append(pid)
    pin(0)
    socket = zmq.Context().socket(zmq.PULL)
    socket.bind(path)
    time.sleep(0.5)
    counts = [0, 0, 0]
    began = time.monotonic()
    os.write(start, b"xxx")
    while max(counts) < NUM_SENT // 2:
        counts[decode(socket.recv()).step] += 1
    tell("pyzmq", "fan-in", sum(counts) / (time.monotonic() - began))
    tell("pyzmq", "fan-in least share", min(counts) / (sum(counts) / 3))
    while sum(counts) < 3 * (NUM_SENT // 2):
        counts[decode(socket.recv()).step] += 1
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    run(ZeroMQ())
    fan_in()
    os._exit(0)
