"""The GPUs of one host process: which it sees, what it may take of them, and the lanes of its links."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import anyio
import msgspec

from omniflow.planner.plan import LANES, PlannedEdge, PlannedHost
from omniflow.topology import Stage
from omniflow.transport.cuda_driver import map_memory, take_memory
from omniflow.transport.cuda_ipc import CudaIpcLane
from omniflow.transport.device_pool import DevicePool
from omniflow.transport.lane import Lane, LanePort
from omniflow.transport.nccl import NcclLane

_PEER_S = 30.0
"""To start, a process on a GPU takes 3-10 s until it can make a lane; one that is being killed never does."""
NCCL_CHUNK = {"NCCL_P2P_NVL_CHUNKSIZE": "131072"}
"""NCCL sends a value in chunks of 512 KB over 16 channels, so of 16 MB little of the way in overlaps with the way out:
196 GB/s in a stream between two H200, and 274 in chunks of 128 KB (NCCL 2.28.9). Both ends want the same, and a process
reads it once: every host has it from its start.
"""


class Gpus(msgspec.Struct, frozen=True):
    """What a host may use: GPUs by their numbers on this machine, bytes of each, and bytes of a pool for values.

    `cap_bytes` 0: its stages name no budget, so nothing holds them. A host of several `ranks` is as many processes,
    which see all of its GPUs and use one each.
    """

    numbers: tuple[int, ...] = ()
    cap_bytes: int = 0
    lane_bytes: int = 0
    ranks: int = 1

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What the host's process finds in its environment: its GPUs alone, which count from 0 there.

        `environ` is the runtime's, whose CUDA_VISIBLE_DEVICES the numbers count in.
        """
        if not self.numbers:
            return {}
        seen = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        names = [seen[number] if number < len(seen) else str(number) for number in self.numbers]
        # The order of nvidia-smi, by which the cluster was described; CUDA's own is the fastest first.
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return gpus | {name: environ.get(name, value) for name, value in NCCL_CHUNK.items()}


def gpus_of(host: PlannedHost) -> Gpus:
    """What a host of a plan may use."""
    numbers = tuple(int(device.removeprefix("gpu:")) for device in host.devices if device != "cpu")
    return Gpus(numbers, host.device_bytes, host.lane_bytes, host.ranks)


def cap_memory(gpus: Gpus, stages: Sequence[Stage], rank: int = 0) -> None:
    """Let torch take no more of the host's GPUs than its budget; a stage that wants more fails, and no other.

    Where no stage uses torch (loaded already, or among its `preload`) there is nothing to hold.
    """
    if not gpus.cap_bytes or not gpus.numbers:
        return
    if "torch" not in sys.modules and all("torch" not in stage.actor.preload for stage in stages):
        return
    import torch

    count = torch.cuda.device_count()
    if gpus.ranks > 1 and count:
        torch.cuda.set_device(rank)  # looking at another GPU would take half a gigabyte of it
    for index in range(count) if gpus.ranks == 1 else range(rank, min(rank + 1, count)):
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gpus.cap_bytes / total), index)


def uses_gpu() -> bool:
    """Whether this process has used a GPU by torch so far."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


class Lanes:
    """Makes the lanes of a host's links. Those to hosts on the same GPU share one pool of device memory."""

    def __init__(self, name: str, gpus: Gpus, edges: Sequence[PlannedEdge]) -> None:
        self._between: dict[str, list[PlannedEdge]] = {}
        for edge in edges if gpus.numbers else ():
            if edge.transport in LANES:
                peer = edge.target_host if edge.source_host == name else edge.source_host
                self._between.setdefault(peer, []).append(edge)
        self._pool = DevicePool(gpus.lane_bytes, take_memory)
        self._limit_bytes = gpus.lane_bytes
        self._lanes: dict[str, Lane] = {}
        self._made = anyio.Event()
        self._may_open = anyio.Event()

    def to(self, peer: str) -> Lane | None:
        """The lane of a new link to `peer`; None where no edge between the two needs one."""
        between = self._between.get(peer)
        if between is None:
            return None
        sends = any(edge.target_host == peer for edge in between)
        receives = any(edge.source_host == peer for edge in between)
        lane: Lane
        if between[0].transport == "nccl":
            lane = NcclLane("nccl", self._limit_bytes, sends=sends, receives=receives)
        else:
            lane = CudaIpcLane(self._pool, map_memory, sends=sends, receives=receives, far=between[0].far)
        self._lanes[peer] = lane
        self._made.set()
        self._made = anyio.Event()
        return lane

    async def serve(self, lane: Lane, link: LanePort) -> None:
        """Serve the lane of a link from when `settled` is asked for, which is when the host's actors are set up: CUDA
        graphs that they capture allow no other work of the process on the GPU meanwhile.
        """
        await self._may_open.wait()
        await lane.serve(link)

    async def settled(self) -> None:
        """Returns once it is known how tensors go to and from each peer: a host is not ready before, because until
        then they would go through the host. Peers that do not come up are not waited for any longer than they may take.
        """
        self._may_open.set()
        with anyio.move_on_after(_PEER_S):
            while len(self._lanes) < len(self._between):
                await self._made.wait()
            for peer in self._between:
                await self._lanes[peer].settled()

    def close(self) -> None:
        """Give the pool back."""
        self._pool.close()
