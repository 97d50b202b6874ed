"""Placement: stages to devices, stages to hosts, a transport to every edge. Each decision leaves a sentence."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from omniflow.config import RuntimeConfig
from omniflow.errors import PlanError
from omniflow.planner.cluster import Cluster
from omniflow.planner.plan import FRONT, LANES, Plan, PlannedEdge, PlannedHost, Transport, share_of, shares_of
from omniflow.topology import CLIENT, Edge, GraphSpec, Restart, Stage, type_name

_CPU = ("cpu",)
_NCCL_BYTES = 900 * 10**6
"""Of both GPUs, for each direction between two hosts: two took 1,766 MB of an H200 (NCCL 2.28.9, 16 channels)."""


def plan(spec: GraphSpec, cluster: Cluster, config: RuntimeConfig | None = None) -> Plan:
    """Place `spec` on `cluster`. Raises PlanError that says which stage does not fit, and what would."""
    config = config or RuntimeConfig()
    stages = [stage for stage in spec.stages if stage.name not in spec.absent]
    devices = _place_devices(stages, cluster)
    groups = _fuse(spec, stages, devices, cluster)
    hosts = tuple(_host(group, why, devices, cluster) for group, why in groups)
    _refuse_over_memory(hosts, cluster)
    host_of = {name: host for host in hosts for name in host.stages}
    rules = _Rules(config, cluster)
    edges = [
        _planned_edge(number, edge, spec, host_of, rules)
        for number, edge in enumerate((*spec.inputs, *spec.edges, *spec.outputs))
        if edge.source not in spec.absent and edge.target not in spec.absent
    ]
    hosts = tuple(_with_pool(host, edges, config) for host in hosts)
    _refuse_over_gpus(spec, hosts, cluster)
    return Plan(spec, cluster, hosts, tuple(edges))


class _Rules(NamedTuple):
    """What decides how tensors go from GPU to GPU, beside where their stages are."""

    config: RuntimeConfig
    cluster: Cluster


def _place_devices(stages: list[Stage], cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """A stage with `device='gpu'` gets the `tp` GPUs with the most free bytes; `gpu:3` asks for one by number."""
    free = [gpu.memory_bytes for gpu in cluster.gpus]
    placed: dict[str, tuple[str, ...]] = {}
    order = sorted(stages, key=lambda stage: (":" not in stage.device, -stage.memory.total_bytes))
    for stage in order:
        _refuse_tp(stage)
        if stage.device == "cpu":
            why = stage.actor.refuses_cpu(stage.settings)
            if why is not None:
                raise PlanError(f"device='cpu' cannot be: {why}", stage=stage.name)
            placed[stage.name] = _CPU
            continue
        chosen = _choose_gpus(stage, free, cluster)
        if cluster.single_process:
            raise PlanError(
                f"all stages were to run in one process (single_process), and it runs on a GPU (device="
                f"{stage.device!r}), in a process of its own; leave that out, or {_set_cpu(stage)}",
                stage=stage.name,
            )
        need = share_of(stage)
        for index in chosen:
            if need > free[index]:
                raise PlanError(
                    f"it needs {_gib(need)} on GPU {index}, which has {_gib(free[index])} of "
                    f"{_gib(cluster.gpus[index].memory_bytes)} left; lower its kv_tokens, raise tp, or add a GPU",
                    stage=stage.name,
                )
            free[index] -= need
        placed[stage.name] = tuple(f"gpu:{index}" for index in chosen)
    return placed


def _refuse_tp(stage: Stage) -> None:
    if stage.tp < 1:
        raise PlanError(f"tp={stage.tp} is no number of GPUs; write 1 or more", stage=stage.name)
    if stage.tp == 1:
        return
    if stage.device == "cpu":
        raise PlanError(f"tp={stage.tp} needs GPUs; set device='gpu'", stage=stage.name)
    why = stage.actor.refuses_tp(stage.settings)
    if why is not None:
        raise PlanError(f"tp={stage.tp} cannot be: {why}", stage=stage.name)
    heads = stage.memory.heads
    if heads % stage.tp:
        fit = ", ".join(str(tp) for tp in range(1, heads + 1) if heads % tp == 0)
        raise PlanError(f"tp={stage.tp} does not divide its {heads} attention heads; {fit} do", stage=stage.name)


def _choose_gpus(stage: Stage, free: list[int], cluster: Cluster) -> list[int]:
    kind, _, number = stage.device.partition(":")
    if kind != "gpu" or (number and not number.isdigit()):
        raise PlanError(f"device {stage.device!r} is unknown; write cpu, gpu or gpu:0", stage=stage.name)
    if not cluster.gpus:
        raise PlanError(
            f"it wants a GPU (device={stage.device!r}), and cluster {cluster.name!r} has none; "
            f"choose a profile for CPUs (--profile), or {_set_cpu(stage)} "
            "(`omniflow doctor` shows the GPUs of this machine)",
            stage=stage.name,
        )
    if number:
        wanted = list(range(int(number), int(number) + stage.tp))
        if wanted[-1] >= len(cluster.gpus):
            raise PlanError(f"GPU {wanted[-1]} does not exist; there are {len(cluster.gpus)}", stage=stage.name)
        return wanted
    if stage.tp > len(cluster.gpus):
        raise PlanError(f"tp={stage.tp} needs as many GPUs; there are {len(cluster.gpus)}", stage=stage.name)
    return sorted(sorted(range(len(free)), key=lambda index: (-free[index], index))[: stage.tp])


def _set_cpu(stage: Stage) -> str:
    other = " and another engine" if stage.actor.refuses_cpu(stage.settings) is not None else ""
    return f"set {stage.name}.device=cpu{other}"


def _fuse(
    spec: GraphSpec, stages: list[Stage], devices: dict[str, tuple[str, ...]], cluster: Cluster
) -> list[tuple[list[Stage], str]]:
    """Group stages into hosts. A group is never split again, so order does not matter."""
    if cluster.single_process:
        return [(stages, "one process was asked for")]
    anchors = [stage for stage in stages if _is_anchor(stage)]
    groups = {stage.name: [stage] for stage in anchors}
    reasons = {stage.name: _anchor_reason(stage, devices[stage.name]) for stage in anchors}
    home = {stage.name: stage.name for stage in anchors}
    order = {stage.name: index for index, stage in enumerate(spec.stages)}
    _fuse_on_gpu(spec, groups, reasons, home, devices, order)
    riders = [stage for stage in stages if stage.name not in home]
    _ride(spec, riders, groups, reasons, home)
    result = []
    for name, group in groups.items():
        members = sorted(group, key=lambda stage: order[stage.name])
        light = [stage.name for stage in members if stage in riders]
        ride = f"; light stages ride along: {', '.join(light)}" if light and len(light) < len(members) else ""
        result.append((members, reasons[name] + ride))
    return sorted(result, key=lambda entry: order[entry[0][0].name])


def _is_anchor(stage: Stage) -> bool:
    return stage.actor.heavy or _owns_process(stage) or stage.isolate or stage.device != "cpu"


def _owns_process(stage: Stage) -> bool:
    return stage.actor.wants_process(stage.settings)


def _anchor_reason(stage: Stage, devices: tuple[str, ...]) -> str:
    if stage.tp > 1:
        return f"{stage.name} is split over {', '.join(devices)}: a process for each, which live and die together"
    if stage.isolate:
        return f"{stage.name} asked to be isolated"
    if _owns_process(stage):
        return f"the engine of {stage.name} owns its process"
    if stage.device != "cpu":
        return f"{stage.name} runs on a GPU"
    return f"{stage.name} keeps a core busy"


def _fuse_on_gpu(
    spec: GraphSpec,
    groups: dict[str, list[Stage]],
    reasons: dict[str, str],
    home: dict[str, str],
    devices: dict[str, tuple[str, ...]],
    order: dict[str, int],
) -> None:
    """Adjacent GPU stages on the same device run in one process, unless something keeps them apart."""
    for edge in spec.edges:
        if edge.source not in home or edge.target not in home or home[edge.source] == home[edge.target]:
            continue
        # A group has the name of its first stage, whatever the order of the edges.
        keep, gone = sorted((home[edge.source], home[edge.target]), key=order.__getitem__)
        first, second = spec.stage(edge.source), spec.stage(edge.target)
        if devices[first.name] == _CPU or devices[first.name] != devices[second.name]:
            continue
        if any(_stays_apart(stage) for stage in (*groups[keep], *groups[gone])) or first.restart != second.restart:
            continue
        groups[keep] = sorted([*groups[keep], *groups.pop(gone)], key=lambda stage: order[stage.name])
        names = ", ".join(stage.name for stage in groups[keep])
        reasons[keep] = f"{names} are adjacent and share {devices[first.name][0]}"
        reasons.pop(gone)
        home |= dict.fromkeys((stage.name for stage in groups[keep]), keep)


def _stays_apart(stage: Stage) -> bool:
    return stage.isolate or _owns_process(stage) or stage.tp > 1


def _ride(
    spec: GraphSpec,
    riders: list[Stage],
    groups: dict[str, list[Stage]],
    reasons: dict[str, str],
    home: dict[str, str],
) -> None:
    """Light stages go where they ask (`near`), else to the heaviest host that an edge joins them to."""
    todo = {stage.name: stage for stage in riders}
    for stage in [stage for stage in riders if stage.near is not None]:
        target = stage.near or ""
        if target in todo and groups:
            raise PlanError(f"near={target!r} names no stage with a host of its own", stage=stage.name)
        if target in home:
            _join(todo.pop(stage.name), home[target], groups, home)
    while todo:
        # One round gives every rider with a placed neighbour its host before any of them counts as a neighbour.
        found = {name: _heaviest(name, spec.edges, groups, home) for name in todo}
        placed = {name: host for name, host in found.items() if host is not None}
        if not placed:
            shared = next((name for name, group in groups.items() if not _is_closed(group)), None)
            if shared is None:
                shared = next(iter(todo))
                groups[shared], reasons[shared] = [], "light stages only: one host is enough"
            placed = dict.fromkeys(todo, shared)
        for name, host in placed.items():
            _join(todo.pop(name), host, groups, home)


def _join(stage: Stage, host: str, groups: dict[str, list[Stage]], home: dict[str, str]) -> None:
    groups[host].append(stage)
    home[stage.name] = host


def _is_closed(group: list[Stage]) -> bool:
    """A stage that asked to be isolated gets no company, unless that says `near`."""
    return any(stage.isolate for stage in group)


def _heaviest(name: str, edges: Iterable[Edge], groups: dict[str, list[Stage]], home: dict[str, str]) -> str | None:
    near = {home[edge.target] for edge in edges if edge.source == name and edge.target in home}
    near |= {home[edge.source] for edge in edges if edge.target == name and edge.source in home}
    open_hosts = [host for host in near if not _is_closed(groups[host])]
    return max(open_hosts, key=lambda host: (_weight(groups[host]), host), default=None)


def _weight(group: list[Stage]) -> int:
    return sum(stage.memory.total_bytes for stage in group)


def _host(group: list[Stage], why: str, devices: dict[str, tuple[str, ...]], cluster: Cluster) -> PlannedHost:
    anchors = [stage for stage in group if _is_anchor(stage)] or group
    used = tuple(sorted({device for stage in anchors for device in devices[stage.name]}, key=_by_number))
    inline = cluster.single_process
    restart = next((stage.restart for stage in anchors if stage.restart is not None), Restart())
    name = max(anchors, key=lambda stage: stage.memory.total_bytes).name
    shares = [share_of(stage) for stage in group if stage.device != "cpu"]
    for stage in group if not inline else ():
        if stage.restart not in (None, restart):
            raise PlanError(
                f"its restart= cannot hold: it shares the process of {name!r}, which restarts as a whole; "
                f"set restart= on {name!r}, or isolate=True on {stage.name!r}",
                stage=stage.name,
            )
    return PlannedHost(
        name="main" if inline else name,
        stages=tuple(stage.name for stage in group),
        devices=used,
        budget_bytes=_weight(group),
        process=not inline,
        start_method="inline" if inline else "forkserver" if used == _CPU else "spawn",
        restart=restart,
        reason=why,
        device_bytes=sum(shares) if all(shares) else 0,
        ranks=max(stage.tp for stage in anchors),
    )


def _by_number(device: str) -> tuple[int, str]:
    return len(device), device


def _with_pool(host: PlannedHost, edges: Iterable[PlannedEdge], config: RuntimeConfig) -> PlannedHost:
    """Hosts whose tensors stay on GPUs get pools for them, of one size whoever starts first: one for all that they
    send, but what goes to another GPU by cuda_ipc is written to a pool there, which is one sender's alone. NCCL takes
    memory of both ends.
    """
    size = config.device_pool_bytes
    out = [edge for edge in edges if edge.source_host == host.name and edge.transport in LANES]
    own = any(edge.transport == "nccl" or not edge.far for edge in out)
    writers = {
        edge.source_host
        for edge in edges
        if edge.target_host == host.name and edge.transport == "cuda_ipc" and edge.far
    }
    pairs = {(edge.source_host, edge.target_host) for edge in edges if edge.transport == "nccl"}
    by_nccl = sum(host.name in pair for pair in pairs)
    held = size * (own + len(writers)) + _NCCL_BYTES * by_nccl
    return msgspec.structs.replace(host, pool_bytes=held, lane_bytes=size if out or writers else 0)


def _refuse_over_memory(hosts: tuple[PlannedHost, ...], cluster: Cluster) -> None:
    need = sum(host.budget_bytes for host in hosts if host.devices == _CPU)
    if cluster.memory_bytes and need > cluster.memory_bytes:
        raise PlanError(
            f"the CPU stages need {_gib(need)}, the machine has {_gib(cluster.memory_bytes)}; "
            f"lower the budgets or choose a smaller profile"
        )


def _refuse_over_gpus(spec: GraphSpec, hosts: tuple[PlannedHost, ...], cluster: Cluster) -> None:
    """The stages fit by themselves (`_place_devices`); with the pools of their hosts, they must still."""
    for index, gpu in enumerate(cluster.gpus):
        shares = shares_of(spec, hosts, index)
        total = sum(share for _, share in shares)
        if total > gpu.memory_bytes:
            each = ", ".join(f"{who} {_gib(share)}" for who, share in shares if share)
            raise PlanError(
                f"GPU {index} has {_gib(gpu.memory_bytes)}, and {_gib(total)} are planned for it ({each}); "
                f"lower kv_tokens or runtime.device_pool_bytes, or add a GPU"
            )


def _planned_edge(
    number: int, edge: Edge, spec: GraphSpec, host_of: dict[str, PlannedHost], rules: _Rules
) -> PlannedEdge:
    source = FRONT if edge.source == CLIENT else host_of[edge.source].name
    target = FRONT if edge.target == CLIENT else host_of[edge.target].name
    carried = _carried_type(edge, spec)
    transport, reason = _transport(source, target, edge, host_of, carried, rules)
    if transport != "local_object":
        _refuse_unsendable(edge, carried)
    bound = (edge.bound or rules.config.stream_bound) if edge.kind == "stream" else 1
    return PlannedEdge(
        number, edge.kind, edge.source, edge.source_port, edge.target, edge.target_port, carried, bound, edge.loop,
        source, target, transport, reason, edge.policy,
        transport in LANES and host_of[edge.source].devices[0] != host_of[edge.target].devices[0],
    )  # fmt: skip


def _carried_type(edge: Edge, spec: GraphSpec) -> object:
    """What travels: the source's own type, so that the receiver rebuilds exactly that."""
    name, port = (edge.target, edge.target_port) if edge.source == CLIENT else (edge.source, edge.source_port)
    ports = spec.stage(name).ports
    return next(p.type for p in (ports.inputs if edge.source == CLIENT else ports.outputs) if p.name == port)


def _refuse_unsendable(edge: Edge, carried: object) -> None:
    """The receiver rebuilds a value from its bytes by the type of its port alone."""
    try:
        if carried in (Any, object):
            raise TypeError("it names no type that a receiver could rebuild")
        msgspec.msgpack.Decoder(carried, dec_hook=lambda hint, wire: wire)
    except TypeError as error:
        raise PlanError(
            f"edge {edge} carries {type_name(carried)} from process to process, which cannot be sent: {error}"
        ) from None


def _transport(
    source: str, target: str, edge: Edge, host_of: dict[str, PlannedHost], carried: object, rules: _Rules
) -> tuple[Transport, str]:
    inline = [host.name for host in host_of.values() if not host.process]
    if source == target:
        return "local_object", f"both stages run in host {source}: the object itself is handed over"
    if {source, target} <= {FRONT, *inline}:
        return "local_object", "the stage runs in the runtime's own process: the object itself is handed over"
    if edge.source == CLIENT or edge.target == CLIENT:
        return "arrow_shm", "to and from the client's process: bytes in shared memory, one copy in, none out"
    a, b = host_of[edge.source].devices[0], host_of[edge.target].devices[0]
    if a == "cpu" or b == "cpu" or not may_hold_tensor(carried):
        return "arrow_shm", f"hosts {source} and {target} share this node: one copy into shared memory, none out"
    return _between_gpus(a, b, rules)


def _between_gpus(a: str, b: str, rules: _Rules) -> tuple[Transport, str]:
    """How tensors go from GPU `a` to GPU `b`, which may be the same."""
    if not rules.config.device_pool_bytes:
        return "arrow_shm", f"tensors from {a} to {b} go through the host: runtime.device_pool_bytes is 0"
    if rules.cluster.unshared:
        return "arrow_shm", f"tensors from {a} to {b} go through the host: {rules.cluster.unshared}"
    if a == b:
        return "cuda_ipc", f"two hosts on {a}: device tensors are mapped, one copy on the device in, none out"
    if rules.config.between_gpus == "nccl":
        return "nccl", f"device tensors from {a} to {b}: point to point, as runtime.between_gpus says"
    return "cuda_ipc", f"device tensors from {a} to {b}: one copy from GPU to GPU, over NVLink where there is one"


def may_hold_tensor(hint: object, _seen: frozenset[object] = frozenset()) -> bool:
    """True where a value of this type may hold a torch tensor: it is one, or has one in a field or an argument."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        seen = _seen | {hint}
        return hint not in _seen and any(may_hold_tensor(field.type, seen) for field in msgspec.structs.fields(hint))
    if isinstance(hint, type) and hint.__name__ == "Tensor":
        return True
    return any(may_hold_tensor(each, _seen) for each in typing.get_args(hint))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
