"""A Plan is data: which host runs which stages on which devices, and how every edge travels, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from omniflow.mailbox import Policy
from omniflow.planner.cluster import Cluster
from omniflow.topology import CLIENT, GraphSpec, Restart, Route, Stage, reachable_outputs, route, type_name

Transport = Literal["local_object", "arrow_shm", "cuda_ipc", "nccl"]
LANES: tuple[Transport, ...] = ("cuda_ipc", "nccl")
"""Transports of edges whose tensors go by a lane, and stay on GPUs."""
FRONT = "front"
"""The host that the runtime itself is: where requests enter and leave."""


class PlannedHost(msgspec.Struct, frozen=True):
    """One OS process (`process`), or the runtime's own one. `reason` says why its stages are together.

    A host whose stage is split over GPUs has `ranks` processes, one a GPU: the first runs its stages, the others
    follow, and all of them start, die and are restarted as one.
    """

    name: str
    stages: tuple[str, ...]
    devices: tuple[str, ...]
    budget_bytes: int
    process: bool
    start_method: Literal["forkserver", "spawn", "inline"]
    restart: Restart
    reason: str
    device_bytes: int = 0
    """What its stages may take of each of its GPUs; 0 where one of them does not say."""
    pool_bytes: int = 0
    """Memory of its first GPU, beside that, for values on their way: a pool for those that it sends, unless they go
    to other GPUs by cuda_ipc, and one for each host of another GPU that sends to it by cuda_ipc. And what NCCL takes
    for each direction to or from another host.
    """
    lane_bytes: int = 0
    """The size of one such pool; what it sends to a host of another GPU lies in one of that host's."""
    ranks: int = 1


class PlannedEdge(msgspec.Struct, frozen=True):
    """One edge with its number on the wire. `bound` is its credits (a value edge carries one value)."""

    id: int
    kind: Literal["result", "stream", "fan-in"]
    source: str
    source_port: str
    target: str
    target_port: str
    type: Any
    bound: int
    loop: int | None
    source_host: str
    target_host: str
    transport: Transport
    reason: str
    policy: Policy = "block"
    far: bool = False
    """Its hosts are on different GPUs."""

    def __str__(self) -> str:
        return f"{self.source}.{self.source_port} -> {self.target}.{self.target_port}"


class Plan(msgspec.Struct, frozen=True):
    """The whole plan. `graph` is the frozen graph that it places."""

    graph: GraphSpec
    cluster: Cluster
    hosts: tuple[PlannedHost, ...]
    edges: tuple[PlannedEdge, ...]

    @property
    def name(self) -> str:
        """The name of the graph."""
        return self.graph.name

    @property
    def inputs(self) -> dict[str, PlannedEdge]:
        """Entry edges by the name of the input."""
        return {edge.source_port: edge for edge in self.edges if edge.source == CLIENT}

    @property
    def outputs(self) -> dict[str, PlannedEdge]:
        """Exit edges by the name of the output."""
        return {edge.target_port: edge for edge in self.edges if edge.target == CLIENT}

    @property
    def gpu_bytes(self) -> tuple[int, ...]:
        """What is planned for each GPU of the cluster: its stages' budgets, and the pools of their hosts."""
        return tuple(
            sum(share for _, share in shares_of(self.graph, self.hosts, i)) for i in range(len(self.cluster.gpus))
        )

    def host_of(self, stage: str) -> str:
        """The name of the host that runs `stage`."""
        return next(host.name for host in self.hosts if stage in host.stages)

    def outputs_of(self, entry: str) -> tuple[str, ...]:
        """The outputs that a request entering at `entry` can ask for."""
        return reachable_outputs(self.graph, entry)

    def route(self, entry: str, outputs: tuple[str, ...]) -> Route:
        """The part of the graph that such a request runs."""
        return route(self.graph.all_edges, self.graph.absent, entry, outputs)

    def to_json(self) -> bytes:
        """The stable schema of `omniflow explain --json` (docs/explain.md)."""
        return msgspec.json.encode(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain values, in the schema of `explain --json`."""
        profile = self.graph.profile
        return {
            "schema": 1,
            "graph": self.name,
            "profile": profile.name if profile else None,
            "cluster": {
                "name": self.cluster.name,
                "cpu_cores": self.cluster.cpu_cores,
                "gpus": [
                    {**msgspec.structs.asdict(gpu), "planned_bytes": planned}
                    for gpu, planned in zip(self.cluster.gpus, self.gpu_bytes, strict=True)
                ],
            },
            "hosts": [
                {
                    "name": host.name,
                    "stages": host.stages,
                    "devices": host.devices,
                    "budget_bytes": host.budget_bytes,
                    "device_bytes": host.device_bytes,
                    "pool_bytes": host.pool_bytes,
                    "process": host.process,
                    "start_method": host.start_method,
                    "restart": host.restart.strategy,
                    "in_flight": host.restart.in_flight,
                    "reason": host.reason,
                }
                for host in self.hosts
            ],
            "stages": [
                {
                    "name": stage.name,
                    "actor": f"{stage.actor.__module__}:{stage.actor.__qualname__}",
                    "host": None if stage.name in self.graph.absent else self.host_of(stage.name),
                    "device": stage.device,
                    "tp": stage.tp,
                    "memory_bytes": stage.memory.total_bytes,
                    "kv_tokens": stage.memory.kv_tokens,
                    "settings": {key: _plain(value) for key, value in stage.settings.items()},
                    "absent": self.graph.absent.get(stage.name),
                }
                for stage in self.graph.stages
            ],
            "edges": [
                {
                    "id": edge.id,
                    "kind": edge.kind,
                    "source": f"{edge.source}.{edge.source_port}",
                    "target": f"{edge.target}.{edge.target_port}",
                    "type": type_name(edge.type),
                    "transport": edge.transport,
                    "bound": edge.bound,
                    "policy": edge.policy if edge.kind == "stream" else None,
                    "reason": edge.reason,
                }
                for edge in self.edges
            ],
        }


def shares_of(graph: GraphSpec, hosts: Iterable[PlannedHost], gpu: int) -> list[tuple[str, int]]:
    """Who takes how much of a GPU: its stages, and the pools of their hosts."""
    found = []
    for host in hosts:
        if f"gpu:{gpu}" not in host.devices:
            continue
        stages = [graph.stage(name) for name in host.stages]
        found += [(stage.name, share_of(stage)) for stage in stages if stage.device != "cpu"]
        if host.pool_bytes and host.devices[0] == f"gpu:{gpu}":
            found.append((f"values of {host.name} on their way", host.pool_bytes))
    return found


def share_of(stage: Stage) -> int:
    """Bytes that a stage may take of each of its GPUs."""
    return stage.memory.share_bytes(stage.tp)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


__all__ = ["CLIENT", "FRONT", "Plan", "PlannedEdge", "PlannedHost", "Transport"]
