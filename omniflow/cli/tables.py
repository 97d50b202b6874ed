"""Plans as people read them: rich tables that fit into 80 columns, and say each reason once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from omniflow.config import Configured, settings
from omniflow.mailbox import Policy
from omniflow.planner import Cluster, Plan, PlannedEdge, PlannedHost
from omniflow.planner.plan import shares_of
from omniflow.topology import CLIENT, Budget, Restart, type_name

PIPED_WIDTH = 100
"""Columns where the output is no terminal and COLUMNS is not set: every edge of our graphs fits on one line."""
_TRANSPORT_STYLES = {"local_object": "green", "arrow_shm": "cyan", "cuda_ipc": "magenta", "nccl": "magenta"}

_POLICIES: dict[Policy, str] = {
    "block": "stream N: at most N items are under way, then the producer waits",
    "drop_oldest": "stream N drop_oldest: once N items wait for the reader, the oldest is dropped",
    "fail": "stream N fail: once N items are under way, one more ends the request with an error",
}


def output_console(*, stderr: bool = False) -> Console:
    """A console on stdout (or stderr) that leaves our text as it is: no guessed colours, no markup."""
    stream = sys.stderr if stderr else sys.stdout
    piped = not stream.isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, highlight=False, markup=False, width=PIPED_WIDTH if piped else None)


def plan_view(plan: Plan) -> RenderableType:
    """The whole plan: hosts, edges, the reasons of their transports, and what the profile leaves out."""
    reasons = list(dict.fromkeys(edge.reason for edge in plan.edges))
    policies = {edge.policy for edge in plan.edges}
    notes = _notes_table(reasons, policies)
    parts: list[RenderableType] = [hosts_table(plan), "", edges_table(plan, reasons), "", notes]
    if plan.cluster.gpus:
        parts[2:2] = [*_gpu_lines(plan), ""]
    if plan.graph.absent:
        parts += ["", *absent_lines(plan.graph.absent)]
    return Group(*parts)


def hosts_table(plan: Plan) -> Table:
    """One row a host: stages, devices, memory, restart strategy; below them, why these stages are together."""
    table = new_table("host", "stages", "device", "memory", "restart")
    table.columns[3].justify = "right"
    for host in plan.hosts:
        stages = Text(", ".join(host.stages))
        stages.append(f"\n{host.reason}", style="dim")
        name = Text(host.name, style="bold")
        if not host.process:
            name.append("\nno process\nof its own", style="dim")
        table.add_row(name, stages, "\n".join(host.devices), size_text(host.budget_bytes), _restart(host))
    return table


def _gpu_lines(plan: Plan) -> Iterator[str]:
    """One line a GPU: what is planned for it, and for whom."""
    for index, (gpu, planned) in enumerate(zip(plan.cluster.gpus, plan.gpu_bytes, strict=True)):
        shares = []
        for who, size in shares_of(plan.graph, plan.hosts, index):
            tokens = next((s.memory.kv_tokens for s in plan.graph.stages if s.name == who), 0)
            shares.append(f"{who} {size_text(size)}" + (f" ({tokens} KV tokens)" if tokens else ""))
        total = f"{size_text(planned)} of {size_text(gpu.memory_bytes)}"
        yield f"gpu:{index}  {total:>19}: {', '.join(shares) or 'nothing is planned for it'}"


def edges_table(plan: Plan, reasons: list[str]) -> Table:
    """One row an edge: what it joins and carries, its kind with its bound, its transport, and the reason's number."""
    table = new_table("edge", "carries", "kind", "transport", "why")
    table.columns[4].justify = "right"
    for edge in plan.edges:
        ends = Text(f"{_end(edge.source, edge.source_port)} → {_end(edge.target, edge.target_port)}")
        transport = Text(edge.transport, style=_TRANSPORT_STYLES[edge.transport])
        table.add_row(ends, type_name(edge.type), _kind(edge), transport, str(reasons.index(edge.reason) + 1))
    return table


def settings_table(configured: Configured, *, every: bool = False) -> Table | None:
    """Settings with where they come from: `every` one, or those that somebody chose (None where there are none)."""
    found = settings(configured)
    shown = found if every else sorted(each for each in found if each.origin not in ("graph", "default"))
    if not shown:
        return None
    table = new_table("setting", "value", "from")
    for key, value, origin in shown:
        style = "dim" if origin == "default" else "bold" if every else ""
        table.add_row(Text(key, style=style), _setting_text(value), Text(origin, style="dim"))
    return table


def absent_lines(absent: Mapping[str, str]) -> Iterator[Text]:
    """One line a reason: the stages that are absent for it."""
    for reason in dict.fromkeys(absent.values()):
        stages = ", ".join(stage for stage, why in absent.items() if why == reason)
        yield Text.assemble("without ", (stages, "bold"), f": {reason}", style="yellow")


def cluster_text(cluster: Cluster) -> str:
    """'cpu: 2 cores, 7.8 GiB' or '8xh200: 128 cores, 8 x H200 with 134 GiB'."""
    parts = [f"{cluster.cpu_cores} core{'s' if cluster.cpu_cores != 1 else ''}"]
    if cluster.memory_bytes:
        parts.append(size_text(cluster.memory_bytes))
    kinds = [(gpu.model, size_text(gpu.memory_bytes)) for gpu in cluster.gpus]
    parts += [f"{kinds.count(kind)} x {kind[0]} with {kind[1]}" for kind in dict.fromkeys(kinds)]
    return f"{cluster.name}: {', '.join(parts)}"


def size_text(size: int) -> str:
    """Bytes as people read them, in units of 1024; '-' for none."""
    if size == 0:
        return "-"
    value, units = float(size), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.1f} {units[0]}" if value < 10 and units[0] != "B" else f"{value:.0f} {units[0]}"


def new_table(*columns: str) -> Table:
    """An open table; only its first two columns may break over lines."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold", border_style="dim")
    for index, name in enumerate(columns):
        table.add_column(name, no_wrap=index > 1, overflow="fold")
    return table


def _notes_table(reasons: list[str], policies: set[Policy]) -> Table:
    table = Table.grid(padding=(0, 2))
    for number, reason in enumerate(reasons, 1):
        table.add_row(Text(f"{number}", style="bold"), Text(reason, style="dim"))
    for policy, meaning in _POLICIES.items():
        if policy in policies:
            table.add_row("", Text(meaning, style="dim"))
    return table


def _end(stage: str, port: str) -> str:
    return f"({port})" if stage == CLIENT else f"{stage}.{port}"


def _kind(edge: PlannedEdge) -> str:
    if edge.kind != "stream":
        return edge.kind
    policy = "" if edge.policy == "block" else f" {edge.policy}"
    return f"stream {edge.bound}{policy}" + (f" loop {edge.loop}" if edge.loop is not None else "")


def _restart(host: PlannedHost) -> str:
    restart = host.restart
    if restart.strategy == "stop":
        return "stop"
    replay = "\nreplay" if restart.in_flight == "replay" else ""
    return f"{restart.strategy}\n{restart.max_restarts} in {restart.within_s:g} s{replay}"


def _setting_text(value: object) -> str:
    if isinstance(value, Budget):
        return size_text(value.total_bytes)
    if isinstance(value, Restart):
        return value.strategy
    return "-" if value is None else str(value) or "''"
