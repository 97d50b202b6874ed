"""torch.multiprocessing: a queue of tensors, fresh ones and ones that are in shared memory already."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

from bench.peers.pair import Channel, run


class FreshTensor(Channel):
    """The storage of each tensor is moved to shared memory when it is sent."""

    name = "torch queue"
    messages = False

    def prepare(self) -> None:
        torch.set_num_threads(1)
        torch.multiprocessing.set_sharing_strategy("file_descriptor")
        self.ends = multiprocessing.get_context("fork").Pipe()
        self.tensors: Any = torch.multiprocessing.get_context("fork").SimpleQueue()

    def parent(self) -> None:
        self.connection = self.ends[0]

    def child(self) -> None:
        self.connection = self.ends[1]

    def send(self, data: bytes) -> None:
        self.connection.send_bytes(data)

    def receive(self) -> bytes:
        return self.connection.recv_bytes()

    def send_array(self, array: np.ndarray) -> None:
        self.tensors.put(torch.from_numpy(array).clone())

    def receive_array(self) -> np.ndarray:
        self.tensor = self.tensors.get()
        found: np.ndarray = self.tensor.numpy()
        return found

    def release(self) -> None:
        del self.tensor


class SharedTensor(FreshTensor):
    """The same tensor again and again, in shared memory from the beginning: only its handle travels."""

    name = "torch queue, shared tensor"

    def prepare(self) -> None:
        super().prepare()
        self.shared: dict[int, torch.Tensor] = {}

    def send_array(self, array: np.ndarray) -> None:
        if array.nbytes not in self.shared:
            tensor = torch.empty(array.nbytes, dtype=torch.uint8).share_memory_()
            tensor.numpy()[:] = array
            self.shared[array.nbytes] = tensor
        self.tensors.put(self.shared[array.nbytes])


if __name__ == "__main__":
    for kind in (FreshTensor, SharedTensor):
        pid = os.fork()
        if pid == 0:
            run(kind())
            os._exit(0)
        os.waitpid(pid, 0)
