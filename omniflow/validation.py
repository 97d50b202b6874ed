"""The proof that every request of a graph can finish, for every input and every choice of outputs.

One check a mistake; each refusal names stage, port and the likely cause.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

from omniflow.errors import GraphError
from omniflow.topology import Edge, GraphSpec, nearest, port_named, reach, reachable_outputs, route, type_name, walk


def validate(spec: GraphSpec) -> None:
    """Prove that every request can finish. Raises GraphError that names stage, port and the likely mistake."""
    checks: list[Callable[[GraphSpec], None]] = [
        _refuse_no_ends,
        _refuse_blocking_streams,
        _refuse_lost_replays,
        _refuse_unknown_neighbours,
        _refuse_two_sources,
        _refuse_missing_sources,
        _refuse_unreachable,
        _refuse_unread,
        _refuse_cycles,
        _refuse_late_values,
        _refuse_lost_skips,
        _refuse_dead_routes,
    ]
    for check in checks:
        check(spec)


def _refuse_no_ends(spec: GraphSpec) -> None:
    if not spec.inputs:
        raise GraphError(f"graph {spec.name!r} has no input; name one with graph.input(chat=stage)")
    if not spec.outputs:
        raise GraphError(f"graph {spec.name!r} has no output; name one with graph.output(text=stage)")
    for ends, what in ((spec.inputs, "input"), (spec.outputs, "output")):
        names = [edge.source_port if what == "input" else edge.target_port for edge in ends]
        for name in names:
            if names.count(name) > 1:
                raise GraphError(f"{what} {name!r} is declared twice; names are unique")


def _refuse_blocking_streams(spec: GraphSpec) -> None:
    for stage in spec.stages:
        ports = [*stage.ports.inputs, *stage.ports.outputs]
        if any(port.kind == "stream" for port in ports) and not inspect.iscoroutinefunction(stage.actor.run):
            raise GraphError(
                f"stage {stage.name!r}: {stage.actor.__name__}.run() has stream ports, so it is an `async def`; "
                f"blocking work in it goes to self.offload(...)"
            )


def _refuse_lost_replays(spec: GraphSpec) -> None:
    for stage in spec.stages:
        if stage.restart is not None and stage.restart.strategy == "stop" and stage.restart.in_flight == "replay":
            raise GraphError(
                f"stage {stage.name!r}: in_flight='replay' needs a restart strategy that restarts it, "
                f"one_for_one(in_flight='replay')"
            )


def _refuse_unknown_neighbours(spec: GraphSpec) -> None:
    names = [stage.name for stage in spec.stages]
    for stage in spec.stages:
        if stage.near is not None and stage.near not in names:
            raise GraphError(
                f"stage {stage.name!r}: near={stage.near!r} names no stage of graph {spec.name!r}"
                f"{nearest(stage.near, names)}"
            )


def _refuse_two_sources(spec: GraphSpec) -> None:
    seen: dict[tuple[str, str], Edge] = {}
    for edge in spec.edges:
        key = (edge.target, edge.target_port)
        if key in seen:
            raise GraphError(
                f"stage {edge.target!r}: port {edge.target_port!r} has two sources, {seen[key].source!r} and "
                f"{edge.source!r}; give each its own port"
            )
        seen[key] = edge


def _refuse_missing_sources(spec: GraphSpec) -> None:
    fed = {(edge.target, edge.target_port) for edge in (*spec.edges, *spec.inputs)}
    for stage in spec.stages:
        known = any(edge.target == stage.name for edge in (*spec.edges, *spec.inputs))
        for port in stage.ports.inputs:
            if known and not port.optional and (stage.name, port.name) not in fed:
                raise GraphError(
                    f"stage {stage.name!r}: port {port.name!r} has no source; connect it with "
                    f"graph.fan_in({stage.name}, {port.name}=...), or make it optional"
                )


def _refuse_unreachable(spec: GraphSpec) -> None:
    reached = walk([edge.target for edge in spec.inputs], spec.edges, forward=True)
    for stage in spec.stages:
        if stage.name not in reached:
            raise GraphError(f"stage {stage.name!r} cannot be reached from any input; is an edge into it missing?")


def _refuse_unread(spec: GraphSpec) -> None:
    sources = {edge.source for edge in (*spec.edges, *spec.outputs)}
    for stage in spec.stages:
        if stage.name not in sources:
            raise GraphError(
                f"nobody reads what stage {stage.name!r} gives; connect it, or name it with graph.output(...)"
            )
    useful = walk([edge.source for edge in spec.outputs], spec.edges, forward=False)
    for stage in spec.stages:
        if stage.name not in useful:
            raise GraphError(f"stage {stage.name!r} leads to no output; connect it to one, or leave it out")


def _refuse_cycles(spec: GraphSpec) -> None:
    edges = [edge for edge in spec.edges if edge.loop is None]
    for edge in edges:
        if edge.source in walk([edge.target], edges, forward=True):
            raise GraphError(
                f"edge {edge} closes a cycle; a feedback edge is a stream declared with a bound, "
                f"graph.stream({edge.source}, {edge.target}, loop=100)"
            )


def _refuse_late_values(spec: GraphSpec) -> None:
    """A stage runs once its values are there; until then the writers of its streams stop at their bounds.

    So no value may depend on the end of such a writer. Edges of `needs` are 'cannot happen before': `start`; `end`;
    and `drain`, which is to take all that is sent, however much that is.
    """
    needs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    edges = [e for e in spec.edges if e.loop is None and e.source not in spec.absent and e.target not in spec.absent]
    for stage in spec.stages:
        needs["end", stage.name] = [("start", stage.name)]
        needs["drain", stage.name] = [("start", stage.name)]
    for edge in edges:
        if edge.kind == "stream":
            needs["end", edge.target].append(("end", edge.source))
            if edge.policy == "block":
                needs["end", edge.source].append(("drain", edge.target))
                needs["drain", edge.source].append(("drain", edge.target))
        else:
            needs.setdefault(("start", edge.target), []).append(("end", edge.source))
    for value in edges:
        before = reach([("end", value.source)], needs) if value.kind != "stream" else set()
        for stream in edges:
            waits = stream.kind == "stream" and stream.policy == "block" and ("end", stream.source) in before
            if waits and ("drain", value.target) in reach([("drain", stream.target)], needs):
                raise GraphError(
                    f"stage {value.target!r} would wait for ever: port {value.target_port!r} comes after the end of "
                    f"{stream.source!r}, which cannot end before {value.target!r} reads its stream; take the value in "
                    f"a stage of its own, or send it on the stream"
                )


def _refuse_lost_skips(spec: GraphSpec) -> None:
    """A skip passes through stages with one input, and must meet an optional port before what needs a value."""
    entries = [edge.target for edge in spec.inputs if edge.target not in spec.absent]
    reached = walk(entries, spec.edges, forward=True)
    # An absent stage that no request gets to skips nothing: what comes behind it is entered elsewhere.
    skipped = spec.absent.keys() & reached
    changed = True
    while changed:
        changed = False
        for edge in spec.edges:
            if edge.loop is not None or not _can_skip(spec, edge, skipped):
                continue
            stage = spec.stage(edge.target)
            port = port_named(stage.ports.inputs, edge.target_port)
            if port.optional or stage.name in skipped:
                continue
            if len(stage.ports.inputs) > 1:
                raise GraphError(
                    f"stage {stage.name!r}: port {port.name!r} is required, but {edge.source!r} may skip it; declare "
                    f"it optional (`{port.name}: {type_name(port.type)} | None`)"
                )
            skipped.add(stage.name)
            changed = True
    for exit in spec.outputs:
        if exit.source not in spec.absent and exit.source not in reached:
            raise GraphError(
                f"output {exit.target_port!r}: no request gets to stage {exit.source!r}: every stage before it is "
                f"absent; leave it out, too"
            )
        if exit.source not in spec.absent and exit.source in skipped:
            raise GraphError(
                f"output {exit.target_port!r}: stage {exit.source!r} may be skipped, so a request could end without "
                f"it; put a stage with an optional port before it"
            )


def _can_skip(spec: GraphSpec, edge: Edge, skipped: set[str]) -> bool:
    return edge.source in skipped or port_named(spec.stage(edge.source).ports.outputs, edge.source_port).optional


def _refuse_dead_routes(spec: GraphSpec) -> None:
    for entry in spec.inputs:
        if entry.target in spec.absent:
            continue
        outputs = reachable_outputs(spec, entry.source_port)
        if not outputs:
            raise GraphError(f"input {entry.source_port!r} leads to no output")
        for wanted in [*([name] for name in outputs), outputs]:
            _refuse_unfed_ports(spec, entry.source_port, wanted)


def _refuse_unfed_ports(spec: GraphSpec, entry: str, outputs: Iterable[str]) -> None:
    part = route(spec.all_edges, spec.absent, entry, outputs)
    fed: set[tuple[str, str]] = set()
    for edge in part.edges:
        if (edge.target, edge.target_port) in fed:
            raise GraphError(
                f"stage {edge.target!r}: port {edge.target_port!r} is fed by input {entry!r} and, in the same request, "
                f"by {edge.source!r}; give each its own port"
            )
        fed.add((edge.target, edge.target_port))
    for stage in spec.stages:
        if stage.name not in part.stages:
            continue
        for port in stage.ports.inputs:
            if (stage.name, port.name) not in fed and not port.optional:
                raise GraphError(
                    f"stage {stage.name!r}: port {port.name!r} gets nothing from input {entry!r}; connect it, or make "
                    f"it optional (`{port.name}: ... | None`)"
                )
