"""Graphs as values: stages, edges, named inputs and outputs, profiles, and the proof that every request can finish.

`Graph` collects declarations; `Graph.spec(profile)` gives the frozen, validated `GraphSpec` that the planner takes.
Nothing here does I/O or starts anything.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from omniflow.actor import Actor, Port, Ports, ports_of
from omniflow.errors import GraphError
from omniflow.mailbox import Policy

K = TypeVar("K", bound=Hashable)
EdgeKind = Literal["result", "stream", "fan-in"]
CLIENT = "client"
"""The name that stands for the caller: source of entry edges, target of output edges. No stage may have it."""
_RESERVED = (CLIENT, "runtime", "server", "front", "main")
"""Names of tables of settings, and of hosts that are not named after a stage."""


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stage may hold on its device: bytes as a number or text like '4 GiB', and KV tokens."""

    weights: int | str = 0
    workspace: int | str = 0
    kv_tokens: int = 0
    kv_bytes_per_token: int | str = 0

    @property
    def total_bytes(self) -> int:
        """Everything, in bytes."""
        kv = self.kv_tokens * parse_bytes(self.kv_bytes_per_token)
        return parse_bytes(self.weights) + parse_bytes(self.workspace) + kv


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(value: int | str) -> int:
    """'1.5 GiB' -> 1610612736. Raises GraphError for what is no size."""
    if isinstance(value, int):
        return value
    number = value.rstrip("BbKkMmGgIi ")
    unit = value[len(number) :].strip().lower()
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        raise GraphError(f"{value!r} is no size; write a number of bytes or text like '4 GiB'") from None


class Restart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the supervisor does when a host dies, and what becomes of the requests it was running.

    After more than `max_restarts` deaths within `within_s` the graph is unhealthy. `in_flight='replay'` runs a request
    again, once, where the client has taken nothing of it and its inputs are still held (`runtime.replay_bytes`).
    """

    strategy: Literal["stop", "one_for_one", "rest_for_one", "one_for_all"] = "stop"
    max_restarts: int = 3
    within_s: float = 60.0
    backoff_s: float = 0.05
    in_flight: Literal["fail", "replay"] = "fail"


def one_for_one(
    *,
    max_restarts: int = 3,
    within_s: float = 60.0,
    backoff_s: float = 0.05,
    in_flight: Literal["fail", "replay"] = "fail",
) -> Restart:
    """Restart only the host that died."""
    return Restart("one_for_one", max_restarts, within_s, backoff_s, in_flight)


class Opening(msgspec.Struct, frozen=True):
    """One port of one stage, for where the port cannot be guessed: `stage['port']`."""

    stage: Stage
    port: str


class Stage(msgspec.Struct, frozen=True):
    """A named node of a graph: an actor class, its settings and where it wants to run."""

    name: str
    actor: type[Actor]
    settings: dict[str, Any] = {}
    device: str = "cpu"
    tp: int = 1
    memory: Budget = Budget()
    isolate: bool = False
    near: str | None = None
    """Name of the stage that a light stage wants to share a host with."""
    restart: Restart | None = None
    threads: int = 1
    """CPU threads of one call of the stage's numerical library."""

    def __getitem__(self, port: str) -> Opening:
        return Opening(self, port)

    @property
    def ports(self) -> Ports:
        """The ports of its actor."""
        return ports_of(self.actor)


STAGE_FIELDS: dict[str, Any] = {
    "device": str,
    "tp": int,
    "isolate": bool,
    "near": str | None,
    "threads": int,
    "memory": Budget,
    "restart": Restart,
}
"""Fields of a stage that a profile or an override may set, beside its actor's own settings."""


class Edge(msgspec.Struct, frozen=True):
    """A typed connection. `loop` bounds the items of a declared feedback edge; `bound` its credits.

    `policy` says what a stream does once `bound` items are under way.
    """

    kind: EdgeKind
    source: str
    source_port: str
    target: str
    target_port: str
    bound: int | None = None
    loop: int | None = None
    policy: Policy = "block"

    def __str__(self) -> str:
        return f"{self.source}.{self.source_port} -> {self.target}.{self.target_port}"


class Binding(msgspec.Struct, frozen=True):
    """What a profile puts in a stage's place: another actor with fitting ports, settings, stage fields."""

    actor: type[Actor] | None = None
    fields: dict[str, Any] = {}
    settings: dict[str, Any] = {}


class Absent(msgspec.Struct, frozen=True):
    """A stage that a profile has no model for; a request that needs it is refused with `reason`."""

    reason: str


def bind(actor: type[Actor] | None = None, /, **values: Any) -> Binding:
    """Bind a stage to an actor; keywords are stage fields (device, memory, ...) or settings of the actor."""
    fields = {name: value for name, value in values.items() if name in STAGE_FIELDS}
    return Binding(actor, fields, {name: value for name, value in values.items() if name not in fields})


def absent(reason: str) -> Absent:
    """Leave a stage out of a profile; requests that need it get a 400 with `reason`."""
    return Absent(reason)


class Profile(msgspec.Struct, frozen=True):
    """A binding of stages to models. `why` is the line that tells a user what it is."""

    name: str
    why: str
    bindings: dict[str, Binding | Absent]


class GraphSpec(msgspec.Struct, frozen=True):
    """A whole graph as one frozen value, bound to a profile where it has any."""

    name: str
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]
    profile: Profile | None = None
    absent: dict[str, str] = {}

    @property
    def all_edges(self) -> tuple[Edge, ...]:
        """Entry edges, inner edges and exits."""
        return (*self.inputs, *self.edges, *self.outputs)

    def stage(self, name: str) -> Stage:
        """The stage called `name`. Raises GraphError with the nearest name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise GraphError(f"graph {self.name!r} has no stage {name!r}{nearest(name, [s.name for s in self.stages])}")

    def input_type(self, name: str) -> Port:
        """The port behind the input called `name`."""
        edge = next(edge for edge in self.inputs if edge.source_port == name)
        return _port(self.stage(edge.target).ports.inputs, edge.target_port)


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' or the known names, for error texts."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names) or 'none'}"


class Graph:
    """Collects a graph's declarations. See the package's documentation for an example."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._stages: dict[str, Stage] = {}
        self._edges: list[Edge] = []
        self._inputs: list[Edge] = []
        self._outputs: list[Edge] = []
        self._profiles: dict[str, Profile] = {}

    @property
    def profiles(self) -> Mapping[str, Profile]:
        """Declared profiles by name; the first is the default."""
        return self._profiles

    def stage(self, name: str, actor: type[Actor], /, **values: Any) -> Stage:
        """Add a stage. Keywords are stage fields (device, tp, memory, near, ...) or settings of the actor."""
        if name in self._stages:
            raise GraphError(f"stage {name!r} is declared twice; names are unique")
        if not name.isidentifier() or name in _RESERVED:
            raise GraphError(f"{name!r} cannot name a stage; use an identifier other than {', '.join(_RESERVED)}")
        ports_of(actor)
        fields = {key: value for key, value in values.items() if key in STAGE_FIELDS}
        settings = {key: value for key, value in values.items() if key not in fields}
        stage = Stage(name, actor, settings, **fields)
        self._stages[name] = stage
        return stage

    def result(self, source: Stage | Opening, target: Stage | Opening) -> None:
        """Connect a value port to a value port: one value a request, or a skip."""
        self._edges.append(self._connect("result", source, target))

    def stream(
        self,
        source: Stage | Opening,
        target: Stage | Opening,
        *,
        bound: int | None = None,
        loop: int | None = None,
        policy: Policy = "block",
    ) -> None:
        """Connect a stream port to a stream port. `bound`: credits; `loop`: a feedback edge, so many items.

        `policy`: once `bound` items are under way, the writer waits ("block"), the oldest of them is lost
        ("drop_oldest", for what is of no use when it is late), or the request ends with `EdgeFullError` ("fail").
        """
        if policy not in typing.get_args(Policy):
            raise GraphError(f"a stream edge has no policy {policy!r}{nearest(policy, typing.get_args(Policy))}")
        for name, value in (("bound", bound), ("loop", loop)):
            if value is not None and value < 1:
                raise GraphError(f"a stream edge with {name}={value} carries nothing; {name} is at least 1")
        self._edges.append(self._connect("stream", source, target, bound=bound, loop=loop, policy=policy))

    def fan_in(self, target: Stage, /, **sources: Stage | Opening) -> None:
        """Connect several sources to the value ports of `target`, each by the name of its port."""
        for port, source in sources.items():
            self._edges.append(self._connect("fan-in", source, Opening(target, port)))

    def input(self, **entries: Stage | Opening) -> None:
        """Name the places where requests enter; the value of an input has the type of that port."""
        for name, target in entries.items():
            stage, wanted = _side(target)
            self._own(stage)
            port = _choose(f"input {name!r}", stage, stage.ports.inputs, wanted)
            kind: EdgeKind = "stream" if port.kind == "stream" else "result"
            self._inputs.append(Edge(kind, CLIENT, name, stage.name, port.name))

    def output(self, **exits: Stage | Opening) -> None:
        """Name what requests can ask for, each from one output port."""
        for name, source in exits.items():
            stage, wanted = _side(source)
            self._own(stage)
            port = _choose(f"output {name!r}", stage, stage.ports.outputs, wanted)
            kind: EdgeKind = "stream" if port.kind == "stream" else "result"
            self._outputs.append(Edge(kind, stage.name, port.name, CLIENT, name))

    def profile(self, profile: str, why: str, /, **bindings: Binding | Absent) -> None:
        """Declare a profile: which actor, model and settings each stage gets. The first one is the default."""
        if profile in self._profiles:
            raise GraphError(f"profile {profile!r} is declared twice")
        for name in bindings:
            if name not in self._stages:
                raise GraphError(f"profile {profile!r} binds unknown stage {name!r}{nearest(name, self._stages)}")
        self._profiles[profile] = Profile(profile, why, bindings)

    def spec(self, profile: str | None = None) -> GraphSpec:
        """The frozen graph under `profile` (default: the first declared). Raises GraphError where it cannot work."""
        chosen = None
        if self._profiles:
            name = profile or next(iter(self._profiles))
            if name not in self._profiles:
                raise GraphError(f"graph {self.name!r} has no profile {name!r}{nearest(name, self._profiles)}")
            chosen = self._profiles[name]
        elif profile:
            raise GraphError(f"graph {self.name!r} declares no profiles, so --profile {profile} means nothing")
        bindings = chosen.bindings if chosen else {}
        stages = tuple(_bound(stage, bindings.get(stage.name)) for stage in self._stages.values())
        reasons = {name: b.reason for name, b in bindings.items() if isinstance(b, Absent)}
        for stage in stages:
            if inspect.isabstract(stage.actor) and stage.name not in reasons:
                where = f"profile {chosen.name!r}" if chosen else "the graph"
                raise GraphError(
                    f"stage {stage.name!r} has no model: {stage.actor.__name__} is only a role; bind it in {where}, "
                    f"{stage.name}=bind(...) or {stage.name}=absent('why')"
                )
        spec = GraphSpec(
            self.name, stages, tuple(self._edges), tuple(self._inputs), tuple(self._outputs), chosen, reasons
        )
        validate(spec)
        return spec

    def _own(self, stage: Stage) -> None:
        known = self._stages.get(stage.name)
        if known is not None and known is not stage:
            raise GraphError(f"stage {stage.name!r} is of another graph than {self.name!r}, which has one of that name")
        if known is None:
            raise GraphError(f"stage {stage.name!r} is not of graph {self.name!r}{nearest(stage.name, self._stages)}")

    def _connect(self, kind: EdgeKind, source: Stage | Opening, target: Stage | Opening, **extra: Any) -> Edge:
        from_stage, from_port = _side(source)
        to_stage, to_port = _side(target)
        self._own(from_stage)
        self._own(to_stage)
        where = f"{kind} edge {from_stage.name} -> {to_stage.name}"
        wanted = "stream" if kind == "stream" else "value"
        outputs = from_stage.ports.outputs
        known = outputs if from_port is None else [_choose(where, from_stage, outputs, from_port)]
        kept = [port for port in known if port.kind == wanted]
        inputs = to_stage.ports.inputs
        if to_port is None:
            fitting = [p for p in inputs if p.kind == wanted and any(fits(k.type, p.type) for k in kept)]
            _refuse_kind(where, to_stage, inputs, wanted, "into")
            target_port = _choose(where, to_stage, fitting or [p for p in inputs if p.kind == wanted], None)
        else:
            target_port = _choose(where, to_stage, inputs, to_port)
            _refuse_kind(where, to_stage, [target_port], wanted, "into")
        _refuse_kind(where, from_stage, known, wanted, "out of")
        fitting = [port for port in kept if fits(port.type, target_port.type)]
        source_port = _choose(where, from_stage, fitting or kept, None)
        if not fits(source_port.type, target_port.type):
            raise GraphError(
                f"{where}: port {source_port.name!r} gives {type_name(source_port.type)}, but port "
                f"{target_port.name!r} takes {type_name(target_port.type)}; is a stage missing between them?"
            )
        return Edge(kind, from_stage.name, source_port.name, to_stage.name, target_port.name, **extra)


def _side(end: Stage | Opening) -> tuple[Stage, str | None]:
    if isinstance(end, Opening):
        return end.stage, end.port
    if isinstance(end, Stage):
        return end, None
    raise GraphError(f"an edge connects stages, not {type(end).__name__}; pass what graph.stage() returned")


def _port(ports: Iterable[Port], name: str) -> Port:
    return next(port for port in ports if port.name == name)


def _choose(where: str, stage: Stage, ports: Iterable[Port], wanted: str | None) -> Port:
    found = list(ports)
    if wanted is not None:
        for port in found:
            if port.name == wanted:
                return port
        raise GraphError(
            f"{where}: stage {stage.name!r} has no port {wanted!r}{nearest(wanted, [p.name for p in found])}"
        )
    if len(found) == 1:
        return found[0]
    if not found:
        raise GraphError(f"{where}: stage {stage.name!r} has no port for it")
    names = ", ".join(repr(port.name) for port in found)
    raise GraphError(
        f"{where}: stage {stage.name!r} has several ports ({names}); say which: {stage.name}[{found[0].name!r}]"
    )


def _refuse_kind(where: str, stage: Stage, ports: Iterable[Port], wanted: str, way: str) -> None:
    found = list(ports)
    if any(port.kind == wanted for port in found):
        return
    if not found:
        what = "takes no input" if way == "into" else "gives no result and emits no stream"
        raise GraphError(f"{where}: stage {stage.name!r} {what}")
    other = "graph.stream" if wanted == "value" else "graph.result"
    names = ", ".join(repr(port.name) for port in found)
    kinds = "stream" if wanted == "value" else "value"
    raise GraphError(
        f"{where}: a {'stream' if wanted == 'stream' else 'result'} edge goes {way} stage {stage.name!r}, whose "
        f"port {names} is a {kinds} port; did you mean {other}?"
    )


def fits(source: Any, target: Any) -> bool:
    """True where every value of type `source` may stand on a port of type `target`."""
    if target is Any or target is object or source == target:
        return True
    arms = typing.get_args(source) if _is_union(source) else (source,)
    wanted = typing.get_args(target) if _is_union(target) else (target,)
    return all(any(_fits_one(arm, want) for want in wanted) for arm in arms)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Union or type(hint).__name__ == "UnionType"


def _fits_one(source: Any, target: Any) -> bool:
    if source == target:
        return True
    return isinstance(source, type) and isinstance(target, type) and issubclass(source, target)


def type_name(hint: Any) -> str:
    """A type as a reader writes it."""
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _bound(stage: Stage, binding: Binding | Absent | None) -> Stage:
    if not isinstance(binding, Binding):
        return stage
    actor = binding.actor or stage.actor
    settings = binding.settings if binding.actor else stage.settings | binding.settings
    if actor is not stage.actor:
        _refuse_misfit(stage, actor)
    return msgspec.structs.replace(stage, actor=actor, settings=settings, **binding.fields)


def _refuse_misfit(stage: Stage, actor: type[Actor]) -> None:
    declared, offered = stage.ports, ports_of(actor)
    pairs: list[tuple[str, tuple[Port, ...], tuple[Port, ...]]] = [
        ("takes", declared.inputs, offered.inputs),
        ("gives", declared.outputs, offered.outputs),
    ]
    for verb, wanted, found in pairs:
        by_name = {port.name: port for port in found}
        for port in wanted:
            other = by_name.get(port.name)
            if other is not None and other.kind == port.kind:
                source, target = (port, other) if verb == "takes" else (other, port)
                if fits(source.type, target.type):
                    continue
            raise GraphError(
                f"stage {stage.name!r} {verb} {port.kind} port {port.name!r} of {type_name(port.type)}; "
                f"{actor.__name__} does not, so it cannot be bound to it"
            )


class Route(msgspec.Struct, frozen=True):
    """The part of a graph that one kind of request runs, from its entry to its outputs.

    `edges` are all that carry something, entry and exits included. `refusals` are the (stage, port) whose values
    nobody can take, with the reason.
    """

    stages: frozenset[str]
    edges: tuple[Edge, ...]
    refusals: dict[tuple[str, str], str]


def route(edges: Iterable[Edge], absent: Mapping[str, str], entry: str, outputs: Iterable[str]) -> Route:
    """Prune a graph (`GraphSpec.all_edges`) to what `outputs` need from `entry`."""
    known, wanted = list(edges), set(outputs)
    inner = [edge for edge in known if CLIENT not in (edge.source, edge.target)]
    starts = [edge for edge in known if edge.source == CLIENT and edge.source_port == entry]
    exits = [edge for edge in known if edge.target == CLIENT and edge.target_port in wanted]
    inside = _walk([edge.target for edge in starts], inner, forward=True)
    inside &= _walk([edge.source for edge in exits], inner, forward=False)
    active = inside - absent.keys()
    carrying = [edge for edge in inner if edge.source in active and edge.target in active]
    refusals = {
        (edge.source, edge.source_port): absent[edge.target]
        for edge in inner
        if edge.source in active and edge.target in inside and edge.target in absent
    }
    return Route(frozenset(active), (*starts, *carrying, *exits), refusals)


def reachable_outputs(spec: GraphSpec, entry: str) -> tuple[str, ...]:
    """The outputs that a request entering at `entry` can ask for."""
    starts = [edge.target for edge in spec.inputs if edge.source_port == entry]
    seen = _walk(starts, spec.edges, forward=True)
    return tuple(exit.target_port for exit in spec.outputs if exit.source in seen and exit.source not in spec.absent)


def _walk(start: Iterable[str], edges: Iterable[Edge], *, forward: bool) -> set[str]:
    nexts: dict[str, list[str]] = {}
    for edge in edges:
        a, b = (edge.source, edge.target) if forward else (edge.target, edge.source)
        nexts.setdefault(a, []).append(b)
    return _reach(start, nexts)


def _reach(start: Iterable[K], nexts: Mapping[K, Iterable[K]]) -> set[K]:
    seen: set[K] = set()
    todo = list(start)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += nexts.get(name, ())
    return seen


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
    reached = _walk([edge.target for edge in spec.inputs], spec.edges, forward=True)
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
    useful = _walk([edge.source for edge in spec.outputs], spec.edges, forward=False)
    for stage in spec.stages:
        if stage.name not in useful:
            raise GraphError(f"stage {stage.name!r} leads to no output; connect it to one, or leave it out")


def _refuse_cycles(spec: GraphSpec) -> None:
    edges = [edge for edge in spec.edges if edge.loop is None]
    for edge in edges:
        if edge.source in _walk([edge.target], edges, forward=True):
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
        before = _reach([("end", value.source)], needs) if value.kind != "stream" else set()
        for stream in edges:
            waits = stream.kind == "stream" and stream.policy == "block" and ("end", stream.source) in before
            if waits and ("drain", value.target) in _reach([("drain", stream.target)], needs):
                raise GraphError(
                    f"stage {value.target!r} would wait for ever: port {value.target_port!r} comes after the end of "
                    f"{stream.source!r}, which cannot end before {value.target!r} reads its stream; take the value in "
                    f"a stage of its own, or send it on the stream"
                )


def _refuse_lost_skips(spec: GraphSpec) -> None:
    """A skip passes through stages with one input, and must meet an optional port before what needs a value."""
    skipped: set[str] = set(spec.absent)
    changed = True
    while changed:
        changed = False
        for edge in spec.edges:
            if edge.loop is not None or not _can_skip(spec, edge, skipped):
                continue
            stage = spec.stage(edge.target)
            port = _port(stage.ports.inputs, edge.target_port)
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
        if exit.source not in spec.absent and (exit.source in skipped):
            raise GraphError(
                f"output {exit.target_port!r}: stage {exit.source!r} may be skipped, so a request could end without "
                f"it; put a stage with an optional port before it"
            )


def _can_skip(spec: GraphSpec, edge: Edge, skipped: set[str]) -> bool:
    return edge.source in skipped or _port(spec.stage(edge.source).ports.outputs, edge.source_port).optional


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
