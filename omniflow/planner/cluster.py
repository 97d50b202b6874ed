"""Clusters as data: what the planner may place stages on."""

from __future__ import annotations

import re

import msgspec

from omniflow.errors import PlanError


class Gpu(msgspec.Struct, frozen=True):
    """One GPU: its model and how much of its memory stages may use."""

    model: str
    memory_bytes: int


class Cluster(msgspec.Struct, frozen=True):
    """One node. `single_process` keeps all stages in the process of the runtime (tests, notebooks): on the CPU."""

    name: str
    cpu_cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    single_process: bool = False
    unshared: str = ""
    """Why processes cannot hand each other device memory here; empty where they can."""


# Usable memory: what the driver leaves of the nominal size, less 4 % for contexts and fragmentation.
_GPUS = {
    "h200": Gpu("H200", 134 * 2**30),
    "h100": Gpu("H100", 76 * 2**30),
    "b200": Gpu("B200", 170 * 2**30),
    "a100": Gpu("A100", 76 * 2**30),
    "l40s": Gpu("L40S", 43 * 2**30),
    "rtx4090": Gpu("RTX 4090", 22 * 2**30),
}


def cluster_named(name: str, *, cpu_cores: int = 2, memory_bytes: int = 0) -> Cluster:
    """The cluster that a name like `cpu`, `1xh200` or `8xh100` stands for. Raises PlanError with the known names."""
    if name == "cpu":
        return Cluster("cpu", cpu_cores, memory_bytes)
    match = re.fullmatch(r"(\d+)x(\w+)", name.lower())
    if match is None or match[2] not in _GPUS or int(match[1]) < 1:
        raise PlanError(f"unknown cluster {name!r}; write cpu, or NxGPU with GPU one of {', '.join(_GPUS)} (8xh200)")
    count = int(match[1])
    return Cluster(name, 16 * count, memory_bytes, (_GPUS[match[2]],) * count)
