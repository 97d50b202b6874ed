"""Two engines that hand each other tensors: make -> fold, on the GPU where there is one."""

from __future__ import annotations

import os
from typing import ClassVar

import msgspec
import torch

from omniflow.actor import Actor
from omniflow.graph import Graph
from omniflow.topology import Budget, one_for_one


class Wanted(msgspec.Struct, frozen=True):
    """How many numbers `make` is to give, and for how many clock cycles its GPU is to be busy before; where it `spoils`
    all, a kernel that fails follows.
    """

    size: int
    cycles: int = 0
    spoils: bool = False


class Batch(msgspec.Struct, frozen=True):
    """Tensors on the device and on the CPU."""

    numbers: torch.Tensor
    halves: torch.Tensor
    on_host: torch.Tensor
    pid: int


class Folded(msgspec.Struct, frozen=True):
    """What `fold` found: the sums of what it got, on what devices that was, and what both processes see."""

    sums: tuple[float, float, float]
    devices: tuple[str, str, str]
    pids: tuple[int, int]
    visible: str
    free_bytes: int
    """Of the GPU, before anything is computed; and what torch has taken of it in this process."""
    taken_bytes: int


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Make(Actor):
    owns_process = True
    preload: ClassVar[tuple[str, ...]] = ("torch",)

    async def run(self, wanted: Wanted) -> Batch:
        if wanted.cycles:
            torch.cuda._sleep(wanted.cycles)
        if wanted.spoils:
            torch._assert_async(torch.zeros((), device=device()))
        numbers = torch.arange(wanted.size, device=device(), dtype=torch.float32)
        return Batch(numbers, numbers.to(torch.bfloat16)[:100], torch.arange(10), os.getpid())


class Fold(Actor):
    owns_process = True
    preload: ClassVar[tuple[str, ...]] = ("torch",)

    async def run(self, batch: Batch) -> Folded:
        return await self.offload(fold, batch)


def fold(batch: Batch) -> Folded:
    on_gpu = torch.cuda.is_available()
    free, taken = (torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()) if on_gpu else (0, 0)
    tensors = (batch.numbers, batch.halves, batch.on_host)
    sums = [float(each.double().sum()) for each in tensors]
    if on_gpu:
        torch.cuda.empty_cache()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return Folded(
        (sums[0], sums[1], sums[2]),
        (batch.numbers.device.type, batch.halves.device.type, batch.on_host.device.type),
        (batch.pid, os.getpid()),
        visible,
        free,
        taken,
    )


def build(*, devices: tuple[str, str] = ("gpu", "gpu"), weights: str = "0") -> Graph:
    graph = Graph("tensors")
    again = one_for_one(max_restarts=20, backoff_s=0.01)
    budget = Budget(weights=weights)
    make = graph.stage("make", Make, device=devices[0], restart=again, memory=budget)
    fold = graph.stage("fold", Fold, device=devices[1], restart=again, memory=budget)
    graph.result(make, fold)
    graph.input(ask=make)
    graph.output(answer=fold)
    return graph
