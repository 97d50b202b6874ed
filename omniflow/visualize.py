"""A graph, or a plan, as a Mermaid flowchart: text that GitHub, editors and mermaid.live draw.

Stages are boxes; inputs and outputs are rounded. A result edge is a thin arrow, a stream a thick one, a fan-in ends in
a dot. What a profile leaves out is grey and dashed. In a plan, hosts are boxes around their stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from omniflow.planner.plan import Plan, PlannedEdge, PlannedHost
from omniflow.topology import CLIENT, Edge, EdgeKind, GraphSpec, Stage, type_name

_ARROWS: dict[EdgeKind, str] = {"result": "-->", "stream": "==>", "fan-in": "--o"}
_COLOURS: dict[EdgeKind, str] = {"result": "#5b6b80", "stream": "#0b7a75", "fan-in": "#8a5a00"}
_STYLES = """\
    classDef stage fill:#eef3fb,stroke:#5b6b80,color:#16202c
    classDef port fill:#fff7e0,stroke:#b98a00,color:#16202c
    classDef absent fill:#f4f4f4,stroke:#9a9a9a,stroke-dasharray:5 4,color:#6f6f6f"""


def draw_graph(spec: GraphSpec) -> str:
    """The flowchart of a graph under its profile; edges carry the type that travels on them."""
    edges = spec.all_edges
    labels = [_carried(spec, edge) + _policy(edge) for edge in edges]
    return "\n".join(
        [
            "flowchart LR",
            *_ends(edges),
            *(_stage(stage, spec.absent) for stage in spec.stages),
            *_arrows(edges, labels),
            _STYLES,
            *_link_styles(edges, spec.absent),
        ]
    )


def draw_plan(plan: Plan) -> str:
    """The flowchart of a plan: hosts as boxes with their devices; edges carry their type and their transport."""
    spec = plan.graph
    labels = [f"{type_name(edge.type)}, {edge.transport}{_policy(edge)}" for edge in plan.edges]
    left_out = [_stage(stage, spec.absent) for stage in spec.stages if stage.name in spec.absent]
    return "\n".join(
        [
            "flowchart LR",
            *_ends(plan.edges),
            *(line for host in plan.hosts for line in _host(host, spec)),
            *left_out,
            *_arrows(plan.edges, labels),
            _STYLES,
            *_link_styles(plan.edges, spec.absent),
        ]
    )


def _ends(edges: Iterable[Edge | PlannedEdge]) -> Iterator[str]:
    for edge in edges:
        if edge.source == CLIENT:
            yield f'    in_{edge.source_port}(["{_text(edge.source_port)}"]):::port'
        if edge.target == CLIENT:
            yield f'    out_{edge.target_port}(["{_text(edge.target_port)}"]):::port'


def _stage(stage: Stage, absent: dict[str, str]) -> str:
    # Names get a prefix: a stage called `end` or `graph` would be a word of Mermaid's own.
    if stage.name in absent:
        return f'    stage_{stage.name}["{stage.name}<br/><small>absent</small>"]:::absent'
    return f'    stage_{stage.name}["{stage.name}<br/><small>{_text(stage.actor.__name__)}</small>"]:::stage'


def _host(host: PlannedHost, spec: GraphSpec) -> Iterator[str]:
    what = "process" if host.process else "the runtime's process"
    devices = ", ".join(host.devices)
    yield f'    subgraph host_{host.name}["{host.name}: {what}, {devices}"]'
    for name in host.stages:
        yield f"    {_stage(spec.stage(name), spec.absent)}"
    yield "    end"


def _arrows(edges: Iterable[Edge | PlannedEdge], labels: Iterable[str]) -> Iterator[str]:
    for edge, label in zip(edges, labels, strict=True):
        source = f"in_{edge.source_port}" if edge.source == CLIENT else f"stage_{edge.source}"
        target = f"out_{edge.target_port}" if edge.target == CLIENT else f"stage_{edge.target}"
        yield f'    {source} {_ARROWS[edge.kind]}|"{_text(label)}"| {target}'


def _link_styles(edges: Iterable[Edge | PlannedEdge], absent: dict[str, str]) -> Iterator[str]:
    """One line a look: links have no classes in Mermaid, only numbers."""
    looks: dict[str, list[str]] = {}
    for number, edge in enumerate(edges):
        left_out = edge.source in absent or edge.target in absent
        look = "stroke:#9a9a9a,stroke-dasharray:5 4" if left_out else f"stroke:{_COLOURS[edge.kind]}"
        looks.setdefault(look, []).append(str(number))
    for look, numbers in looks.items():
        yield f"    linkStyle {','.join(numbers)} {look}"


def _carried(spec: GraphSpec, edge: Edge) -> str:
    name, port = (edge.target, edge.target_port) if edge.source == CLIENT else (edge.source, edge.source_port)
    ports = spec.stage(name).ports
    openings = ports.inputs if edge.source == CLIENT else ports.outputs
    return type_name(next(opening.type for opening in openings if opening.name == port))


def _policy(edge: Edge | PlannedEdge) -> str:
    return "" if edge.policy == "block" else f", {edge.policy} {edge.bound or ''}".rstrip()


def _text(text: str) -> str:
    for character, code in {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "|": "#124;"}.items():
        text = text.replace(character, code)
    return text
