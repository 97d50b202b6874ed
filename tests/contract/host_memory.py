"""Host memory in the place of a GPU's: what CUDA IPC does with blocks and words is the same, and runs anywhere.

A "stream" here is through with what it was given as soon as it was given it, unless `held` makes it wait. Where the
other end is another process (`apart`), it really waits for a word, for 10 s at most.
"""

from __future__ import annotations

import mmap
import os
import time

import numpy as np
import torch

from omniflow.transport.codec import bytes_of
from omniflow.transport.descriptors import duplicates
from omniflow.transport.device_pool import NUM_SLOTS, DeviceMemory, reached


class HostMemory(DeviceMemory):
    device = ""

    def __init__(self, memory: int, words: int, size: int, *, apart: bool = False) -> None:
        self.size_bytes = size
        self._descriptors = memory, words
        self._apart = apart
        self._map = mmap.mmap(memory, size)
        self.words = memoryview(mmap.mmap(words, NUM_SLOTS * 8)).cast("I", (NUM_SLOTS, 2))
        self.held: list[tuple[int, int, int]] | None = None
        """Words that the stream has yet to write, where it is busy."""
        self.waits: list[tuple[int, int, int]] = []
        """What the stream had to wait for."""

    def descriptors(self) -> tuple[int, ...]:
        return duplicates(self._descriptors)

    def copy_in(self, offset: int, tensor: torch.Tensor, num_bytes: int) -> None:
        self.view(offset, num_bytes)[0].copy_(bytes_of(tensor))

    def view(self, offset: int, length: int) -> tuple[torch.Tensor, object]:
        owner = np.frombuffer(self._map, np.uint8, length, offset)
        return torch.from_numpy(owner), owner

    def write(self, slot: int, word: int, value: int) -> None:
        if self.held is not None:
            self.held.append((slot, word, value))
        else:
            self.words[slot, word] = value

    def wait(self, slot: int, word: int, value: int) -> None:
        self.waits.append((slot, word, value))
        until = time.monotonic() + 10
        while self._apart and not reached(self.words[slot, word], value) and time.monotonic() < until:
            time.sleep(0)

    def waits_for_ever(self) -> bool:
        """True where the stream waits for a word that nobody has written yet."""
        return any(not reached(self.words[slot, word], value) for slot, word, value in self.waits)

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def take(size: int) -> HostMemory:
    memory, words = os.memfd_create("test-device"), os.memfd_create("test-words")
    os.ftruncate(memory, size)
    os.ftruncate(words, NUM_SLOTS * 8)
    return HostMemory(memory, words, size)


def attach(memory: int, words: int, size: int, device: str) -> HostMemory:
    return HostMemory(os.dup(memory), os.dup(words), size)


def attach_apart(memory: int, words: int, size: int, device: str) -> HostMemory:
    """In another process."""
    return HostMemory(os.dup(memory), os.dup(words), size, apart=True)
