"""The values that a graph is made of: stages, edges, profiles, the frozen `GraphSpec`, and the way of a request in it.

Nothing here does I/O or starts anything; `graph.Graph` builds these values, `validation` proves them, the planner and
the hosts read them.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from omniflow.actor import Actor, Count, Port, Ports, ports_of
from omniflow.errors import GraphError
from omniflow.mailbox import Policy

K = TypeVar("K", bound=Hashable)
EdgeKind = Literal["result", "stream", "fan-in"]
CLIENT = "client"
"""The name that stands for the caller: source of entry edges, target of output edges. No stage may have it."""
RESERVED_NAMES = (CLIENT, "runtime", "server", "front", "main")
"""Names of tables of settings, and of hosts that are not named after a stage."""


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stage may hold on its device: bytes as a number or text like '4 GiB', and KV tokens.

    A stage that is split over GPUs (`tp`) has its weights and its keys and values split, and a workspace on each. Its
    attention `heads` must divide evenly; where there are fewer `kv_heads` than GPUs, each has one of them whole. 0: the
    graph does not say.
    """

    weights: int | str = 0
    workspace: int | str = 0
    kv_tokens: int = 0
    kv_bytes_per_token: int | str = 0
    heads: int = 0
    kv_heads: int = 0

    @property
    def total_bytes(self) -> int:
        """Everything, in bytes, on one device."""
        return self.share_bytes(1)

    def share_bytes(self, tp: int) -> int:
        """What each of `tp` GPUs holds of it, in bytes."""
        kv = self.kv_tokens * parse_bytes(self.kv_bytes_per_token)
        parts = min(tp, self.kv_heads) if self.kv_heads else tp
        return -(-parse_bytes(self.weights) // tp) + parse_bytes(self.workspace) + -(-kv // parts)


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
    "tp": Count,
    "isolate": bool,
    "near": str | None,
    "threads": Count,
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


class Checkpoint(msgspec.Struct, frozen=True):
    """The checkpoint that a profile serves: `model` where the user names none, else one whose config.json is as `when`.

    Keys of `when` are dotted paths in config.json. A value is what has to stand there, or a tuple or a range of what
    may; None is for where nothing stands.
    """

    model: str
    when: dict[str, Any]

    def takes(self, config: Mapping[str, Any]) -> bool:
        """True for the config.json of a checkpoint of this kind."""
        return all(entry_of(config, path) in _allowed(wanted) for path, wanted in self.when.items())

    def __str__(self) -> str:
        return ", ".join(f"{path} {_in_words(wanted)}" for path, wanted in self.when.items())


class FromCheckpoint(msgspec.Struct, frozen=True):
    """Stands in a binding for the profile's checkpoint; see `CHECKPOINT`."""


CHECKPOINT = FromCheckpoint()
"""`bind(Talker, model=CHECKPOINT)`: the checkpoint that the user names with --model, else the profile's own."""


def entry_of(config: Mapping[str, Any], path: str) -> Any:
    """What stands at the dotted `path` of a config.json; None where nothing does."""
    found: Any = config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _allowed(wanted: Any) -> tuple[Any, ...] | range:
    return wanted if isinstance(wanted, tuple | range) else (wanted,)


def _in_words(wanted: Any) -> str:
    if isinstance(wanted, range):
        return f"from {wanted[0]} to {wanted[-1]}"
    return " or ".join("absent" if each is None else str(each) for each in _allowed(wanted))


class Profile(msgspec.Struct, frozen=True):
    """A binding of stages to models. `why` is the line that tells a user what it is."""

    name: str
    why: str
    bindings: dict[str, Binding | Absent]
    checkpoint: Checkpoint | None = None
    of_checkpoint: tuple[str, ...] = ()
    """The settings, as `stage.setting`, that name the checkpoint."""


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
        return port_named(self.stage(edge.target).ports.inputs, edge.target_port)


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' or the known names, for error texts."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names) or 'none'}"


def port_named(ports: Iterable[Port], name: str) -> Port:
    """The port called `name`, which is among `ports`."""
    return next(port for port in ports if port.name == name)


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


class Refusal(NamedTuple):
    """Why nobody takes the values of a port: the stage that would is absent, for that reason."""

    stage: str
    reason: str


class Route(msgspec.Struct, frozen=True):
    """The part of a graph that one kind of request runs, from its entry to its outputs.

    `edges` are all that carry something, entry and exits included. `refusals` are the (stage, port) whose values
    nobody can take.
    """

    stages: frozenset[str]
    edges: tuple[Edge, ...]
    refusals: dict[tuple[str, str], Refusal]


def route(edges: Iterable[Edge], absent: Mapping[str, str], entry: str, outputs: Iterable[str]) -> Route:
    """Prune a graph (`GraphSpec.all_edges`) to what `outputs` need from `entry`."""
    known, wanted = list(edges), set(outputs)
    inner = [edge for edge in known if CLIENT not in (edge.source, edge.target)]
    starts = [edge for edge in known if edge.source == CLIENT and edge.source_port == entry]
    exits = [edge for edge in known if edge.target == CLIENT and edge.target_port in wanted]
    inside = walk([edge.target for edge in starts], inner, forward=True)
    inside &= walk([edge.source for edge in exits], inner, forward=False)
    active = inside - absent.keys()
    carrying = [edge for edge in inner if edge.source in active and edge.target in active]
    refusals = {
        (edge.source, edge.source_port): Refusal(edge.target, absent[edge.target])
        for edge in inner
        if edge.source in active and edge.target in inside and edge.target in absent
    }
    return Route(frozenset(active), (*starts, *carrying, *exits), refusals)


def reachable_outputs(spec: GraphSpec, entry: str) -> tuple[str, ...]:
    """The outputs that a request entering at `entry` can ask for."""
    starts = [edge.target for edge in spec.inputs if edge.source_port == entry and edge.target not in spec.absent]
    seen = walk(starts, spec.edges, forward=True)
    return tuple(exit.target_port for exit in spec.outputs if exit.source in seen and exit.source not in spec.absent)


def walk(start: Iterable[str], edges: Iterable[Edge], *, forward: bool) -> set[str]:
    """The stages that edges lead to from `start`; with `forward=False`, from which they lead to it."""
    nexts: dict[str, list[str]] = {}
    for edge in edges:
        a, b = (edge.source, edge.target) if forward else (edge.target, edge.source)
        nexts.setdefault(a, []).append(b)
    return reach(start, nexts)


def reach(start: Iterable[K], nexts: Mapping[K, Iterable[K]]) -> set[K]:
    """Everything that can be reached from `start`, itself included."""
    seen: set[K] = set()
    todo = list(start)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += nexts.get(name, ())
    return seen
