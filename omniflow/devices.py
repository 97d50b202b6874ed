"""The GPUs of one host process: which it sees, what it may take of them, and the lanes of its links."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence

import msgspec

from omniflow.planner.plan import PlannedEdge, PlannedHost
from omniflow.topology import Stage
from omniflow.transport.cuda_driver import map_memory, take_memory
from omniflow.transport.cuda_ipc import CudaIpcLane, DevicePool
from omniflow.transport.lane import Lane
from omniflow.transport.nccl import NcclLane

LANES = ("cuda_ipc", "nccl")
"""Transports of edges whose tensors go by a lane."""


class Gpus(msgspec.Struct, frozen=True):
    """What a host may use: GPUs by their numbers on this machine, bytes of each, and bytes of its pool for values.

    `cap_bytes` 0: its stages name no budget, so nothing holds them.
    """

    numbers: tuple[int, ...] = ()
    cap_bytes: int = 0
    pool_bytes: int = 0

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What the host's process finds in its environment: its GPUs alone, which count from 0 there.

        `environ` is the runtime's, whose CUDA_VISIBLE_DEVICES the numbers count in.
        """
        if not self.numbers:
            return {}
        seen = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        names = [seen[number] if number < len(seen) else str(number) for number in self.numbers]
        # The order of nvidia-smi, by which the cluster was described; CUDA's own is the fastest first.
        return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpus_of(host: PlannedHost) -> Gpus:
    """What a host of a plan may use."""
    numbers = tuple(int(device.removeprefix("gpu:")) for device in host.devices if device != "cpu")
    return Gpus(numbers, host.device_bytes, host.pool_bytes)


def cap_memory(gpus: Gpus, stages: Sequence[Stage]) -> None:
    """Let torch take no more of the host's GPUs than its budget; a stage that wants more fails, and no other.

    Where no stage uses torch (loaded already, or among its `preload`) there is nothing to hold.
    """
    if not gpus.cap_bytes or not gpus.numbers:
        return
    if "torch" not in sys.modules and all("torch" not in stage.actor.preload for stage in stages):
        return
    import torch

    for index in range(torch.cuda.device_count()):
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gpus.cap_bytes / total), index)


class Lanes:
    """Makes the lanes of a host's links. They share one pool of device memory."""

    def __init__(self, name: str, gpus: Gpus, edges: Sequence[PlannedEdge]) -> None:
        self._name = name
        self._edges = [edge for edge in edges if edge.transport in LANES]
        self._pool = DevicePool(gpus.pool_bytes, take_memory)

    def to(self, peer: str) -> Lane | None:
        """The lane of the link to `peer`; None where no edge between the two needs one."""
        between = [edge for edge in self._edges if {edge.source_host, edge.target_host} == {self._name, peer}]
        if not between:
            return None
        sends = any(edge.source_host == self._name for edge in between)
        receives = any(edge.target_host == self._name for edge in between)
        if between[0].transport == "nccl":
            return NcclLane("nccl", self._pool.limit_bytes, sends=sends, receives=receives)
        return CudaIpcLane(self._pool, functools.partial(map_memory, index=0), sends=sends, receives=receives)

    def close(self) -> None:
        """Give the pool back."""
        self._pool.close()
