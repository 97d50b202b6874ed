"""Building graphs: `Graph` collects declarations; `Graph.spec(profile)` gives the frozen, proven `GraphSpec`.

The values that it is made of are in `topology`; those that a graph file writes can be imported from here.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from omniflow.actor import Actor, Port, ports_of
from omniflow.errors import GraphError
from omniflow.mailbox import Policy
from omniflow.topology import (
    CHECKPOINT,
    CLIENT,
    RESERVED_NAMES,
    STAGE_FIELDS,
    Absent,
    Binding,
    Budget,
    Checkpoint,
    Edge,
    EdgeKind,
    FromCheckpoint,
    GraphSpec,
    Opening,
    Profile,
    Restart,
    Stage,
    absent,
    bind,
    entry_of,
    fits,
    nearest,
    one_for_one,
    type_name,
)
from omniflow.validation import validate


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
        if not name.isidentifier() or name in RESERVED_NAMES:
            raise GraphError(f"{name!r} cannot name a stage; use an identifier other than {', '.join(RESERVED_NAMES)}")
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

    def profile(
        self, profile: str, why: str, checkpoint: Checkpoint | None = None, /, **bindings: Binding | Absent
    ) -> None:
        """Declare a profile: which actor, model and settings each stage gets. The first one is the default.

        With a `checkpoint`, settings that are `CHECKPOINT` become it.
        """
        if profile in self._profiles:
            raise GraphError(f"profile {profile!r} is declared twice")
        for name in bindings:
            if name not in self._stages:
                raise GraphError(f"profile {profile!r} binds unknown stage {name!r}{nearest(name, self._stages)}")
        of_checkpoint = _of_checkpoint(bindings)
        if bool(of_checkpoint) != (checkpoint is not None):
            lacks = "no setting of it is CHECKPOINT" if checkpoint else f"{of_checkpoint[0]} is CHECKPOINT"
            has = "has a checkpoint" if checkpoint else "has no checkpoint"
            raise GraphError(f"profile {profile!r} {has}, but {lacks}; it takes both or neither")
        if checkpoint is not None:
            bindings = {name: _with_model(binding, checkpoint.model) for name, binding in bindings.items()}
        self._profiles[profile] = Profile(profile, why, bindings, checkpoint, of_checkpoint)

    def profile_for(self, model: str, config: Mapping[str, Any]) -> Profile:
        """The first profile that takes the checkpoint `model`, whose config.json is `config`.

        Raises GraphError with what the profiles take.
        """
        kinds = {profile.name: profile.checkpoint for profile in self._profiles.values() if profile.checkpoint}
        for name, kind in kinds.items():
            if kind.takes(config):
                return self._profiles[name]
        if not kinds:
            raise GraphError(f"graph {self.name!r} has no profile that takes a checkpoint, so --model means nothing")
        paths = dict.fromkeys(path for kind in kinds.values() for path in kind.when)
        found = ", ".join(f"{path} {entry_of(config, path)}" for path in paths if entry_of(config, path) is not None)
        raise GraphError(
            f"{model}: no profile of {self.name!r} is for such a checkpoint. Its config.json has "
            f"{found or 'no ' + ', no '.join(paths)}. What they take: "
            f"{'; '.join(f'{name}: {kind}' for name, kind in kinds.items())}. Where one fits all the same, name it: "
            f"--profile {next(iter(kinds))}"
        )

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


def _of_checkpoint(bindings: Mapping[str, Binding | Absent]) -> tuple[str, ...]:
    return tuple(
        f"{name}.{setting}"
        for name, binding in bindings.items()
        if isinstance(binding, Binding)
        for setting, value in binding.settings.items()
        if isinstance(value, FromCheckpoint)
    )


def _with_model(binding: Binding | Absent, model: str) -> Binding | Absent:
    if isinstance(binding, Absent):
        return binding
    settings = {key: model if isinstance(value, FromCheckpoint) else value for key, value in binding.settings.items()}
    return msgspec.structs.replace(binding, settings=settings)


def _side(end: Stage | Opening) -> tuple[Stage, str | None]:
    if isinstance(end, Opening):
        return end.stage, end.port
    if isinstance(end, Stage):
        return end, None
    raise GraphError(f"an edge connects stages, not {type(end).__name__}; pass what graph.stage() returned")


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


__all__ = [
    "Absent",
    "Binding",
    "Budget",
    "CHECKPOINT",
    "Checkpoint",
    "Edge",
    "Graph",
    "GraphSpec",
    "Policy",
    "Profile",
    "Restart",
    "Stage",
    "absent",
    "bind",
    "one_for_one",
]
