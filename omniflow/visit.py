"""One request in one host: what its stages have received, which of them run, and the scopes that cancel them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import anyio
import msgspec

from omniflow.actor import Context, Emit, Outputs, Port, Ports
from omniflow.errors import EdgeFullError, ProtocolError, RequestError, UnsupportedError
from omniflow.mailbox import Credits, Mailbox
from omniflow.messages import Closed, Waiting
from omniflow.topology import Refusal, type_name
from omniflow.turns import Progress

SendItem = Callable[[int, int, int, object], Awaitable[None] | None]
"""(edge, request, seq, value): the host's way out to whichever link the edge has."""
_FAIR = 32
"""A stage that never has to wait for credit yields to the event loop after so many items."""


class StageRoute:
    """How one stage is wired for one kind of request: edge numbers by port, and what follows from them.

    `follow` is the stage that runs next in the same task, because the value of this one is all that it takes and all
    that this one gives: between the two there is no message, no mailbox and no turn of the event loop.
    """

    __slots__ = (
        "absent", "emits", "follow", "gives", "inputs", "missing", "outputs", "ports", "refusals", "stage",
        "stream_edges", "streams", "takes_values_only",
    )  # fmt: skip

    def __init__(
        self,
        stage: str,
        ports: Ports,
        inputs: dict[str, int],
        outputs: dict[str, tuple[int, ...]],
        refusals: dict[str, Refusal],
    ) -> None:
        self.stage = stage
        self.ports = ports
        self.inputs = inputs
        self.outputs = outputs
        self.refusals = refusals
        self.follow: StageRoute | None = None
        self.absent = {port.name: None for port in ports.inputs if port.name not in inputs}
        self.missing = [port.name for port in ports.inputs if port.kind == "value" and port.name in inputs]
        self.streams = [(p.name, inputs[p.name]) for p in ports.inputs if p.kind == "stream" and p.name in inputs]
        self.emits = [port for port in ports.outputs if port.kind == "stream"]
        self.stream_edges = [edge for port in self.emits for edge in outputs[port.name]]
        self.takes_values_only = not self.streams and not self.emits and ports.context is None
        self.gives = class_of(ports.outputs[0]) if ports.outputs else type(None)

    def row_edges(self) -> Iterator[int]:
        """The stream edges that leave this stage, and those that follow it."""
        yield from self.stream_edges
        if self.follow is not None:
            yield from self.follow.row_edges()

    def edges(self) -> Iterator[int]:
        """All edges of this stage, and of those that follow it."""
        yield from self.inputs.values()
        yield from itertools.chain.from_iterable(self.outputs.values())
        if self.follow is not None:
            yield from self.follow.edges()

    @property
    def only_output(self) -> int | None:
        """The edge of a value that this stage gives for certain, to one reader, and nothing else."""
        if self.ports.split or len(self.ports.outputs) != 1 or self.refusals:
            return None
        (port,) = self.ports.outputs
        edges = self.outputs[port.name]
        return edges[0] if port.kind == "value" and not port.optional and len(edges) == 1 else None

    @property
    def only_input(self) -> str | None:
        """The port of a value that this stage needs, where that is all that it takes."""
        ports = self.ports.inputs
        return ports[0].name if len(ports) == 1 and self.missing and not ports[0].optional else None


def in_rows(routes: dict[str, StageRoute], targets: Mapping[int, str]) -> list[StageRoute]:
    """Let each stage be followed by the one that only waits for it; gives the stages that follow none.

    `targets` says which stage reads an edge; stages that are not in `routes` run in other hosts.
    """
    following = set()
    for route in routes.values():
        edge = route.only_output
        reader = routes.get(targets[edge]) if edge is not None else None
        if reader is not None and reader.only_input is not None:
            route.follow = reader
            following.add(reader.stage)
    return [route for name, route in routes.items() if name not in following]


class Run:
    """One stage of one request, or a row of them: the values that have arrived, the streams, whether it has started."""

    __slots__ = ("head", "missing", "progress", "route", "started", "streams", "values")

    def __init__(self, route: StageRoute) -> None:
        self.head = route.stage
        """The first stage of the row: the one that values arrive for."""
        self.route = route
        """The stage that runs now, or is to run."""
        self.values: dict[str, Any] = dict(route.absent)
        self.streams: dict[str, Mailbox[Any]] = {}
        self.missing = set(route.missing)
        self.started = False
        self.progress = Progress()

    def follow(self, route: StageRoute, value: Any) -> None:
        """The next stage of the row takes the value of the last one."""
        self.route = route
        self.values = {route.missing[0]: value}
        self.streams = {}

    def unfinished(self) -> Iterator[Waiting]:
        """What the stages of the row are doing: one runs or waits for a port, the later ones wait for it."""
        port = None if self.started else min(self.missing or self.streams, default=None)
        yield Waiting(self.route.stage, port)
        later = self.route.follow
        while later is not None:
            yield Waiting(later.stage, later.missing[0])
            later = later.follow


class Visit:
    """All of one request in this host. `over` is set by a failure or a cancel, and nothing starts after that."""

    __slots__ = (
        *("_dropped", "context", "credits", "cut_off", "num_running", "over", "request", "runs", "scopes"),
        "unfinished",
    )

    def __init__(self, request: int, context: Context) -> None:
        self.request = request
        self.context = context
        self.runs: dict[str, Run] = {}
        self.credits: dict[int, Credits] = {}
        self.scopes: set[anyio.CancelScope] = set()
        self.num_running = 0
        self.unfinished: tuple[Waiting, ...] = ()
        self._dropped: dict[int, int] = {}
        self.over = False
        self.cut_off = False
        """The host ends before it does, and is not through with it."""

    def run_of(self, stage: str) -> Run | None:
        """The run of a stage that may still get something; None once it is through, even where its row goes on."""
        run = self.runs.get(stage)
        return run if run is not None and run.route.stage == stage else None

    def stop(self) -> None:
        """Cancel every run; remember what each was doing."""
        if self.over:
            return
        self.over = True
        self.unfinished = tuple(waiting for run in self.runs.values() for waiting in run.unfinished())
        for scope in list(self.scopes):
            scope.cancel()

    def leave(self, run: Run) -> None:
        """`run` reads nothing more."""
        for port, mailbox in run.streams.items():
            mailbox.discard()
            self._count_dropped(run.route.inputs[port], mailbox)

    def closed(self) -> Closed:
        """What the runtime is told once nothing of the request is left here."""
        for run in self.runs.values():
            for port, mailbox in run.streams.items():
                self._count_dropped(run.route.inputs[port], mailbox)
        return Closed(self.request, self.unfinished, tuple(self._dropped.items()))

    def _count_dropped(self, edge: int, mailbox: Mailbox[Any]) -> None:
        if mailbox.dropped:
            self._dropped[edge] = mailbox.dropped


class Reader(NamedTuple):
    """An edge as its writer sees it."""

    edge: int
    send: SendItem
    credits: Credits
    loop: int | None
    """The most items that a feedback edge carries."""
    if_full: EdgeFull | None
    """Set where a full edge ends the request."""


class EdgeFull(NamedTuple):
    """What the error says of an edge that is full."""

    message: str
    reader: str


class PortEmit(Emit[Any]):
    """The sending end of one stream port of one run, to each edge that reads it."""

    __slots__ = (
        "_class", "_num_sent", "_num_waiting", "_only", "_port", "_progress", "_readers", "_refusal", "_request",
        "_stage", "_turn",
    )  # fmt: skip

    def __init__(
        self,
        stage: str,
        port: Port,
        request: int,
        readers: Sequence[Reader],
        refusal: Refusal | None,
        progress: Progress,
    ) -> None:
        self._stage = stage
        self._port = port
        self._request = request
        self._readers = readers
        self._only = readers[0] if len(readers) == 1 else None
        self._refusal = refusal
        self._progress = progress
        self._class = class_of(port)
        self._num_sent = 0
        self._num_waiting = 0
        """Sends that have, or wait for, the turn: a lock that was just given to the next of them says it is free."""
        self._turn = asyncio.Lock()

    @property
    def wanted(self) -> bool:
        return self._refusal is not None or any(not reader.credits.gone for reader in self._readers)

    async def send(self, value: Any) -> None:
        if self._refusal is not None:
            raise UnsupportedError(self._refusal.reason, stage=self._refusal.stage)
        if not isinstance(value, self._class):
            refuse_wrong_type(self._stage, self._port, value)
        self._num_sent += 1
        if self._num_sent % _FAIR == 0:
            await asyncio.sleep(0)
        only = self._only
        if only is not None and not self._num_waiting and (seq := only.credits.try_take()) >= 0:
            # One reader, which has room: most often there is nothing to wait for.
            try:
                pending = (
                    self._send_item(only, seq, value) if only.loop else only.send(only.edge, self._request, seq, value)
                )
            except RequestError:
                only.credits.untake()  # it has not left, and `run` may go on with another
                raise
            if pending is not None:
                await self._in_turn(self._leave, only, pending)
        else:
            await self._in_turn(self._send_to_all, value)
        self._progress.has_sent = True

    async def _in_turn(self, call: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Tasks of one `run` that share a port send one after the other, so that numbers and items agree."""
        self._num_waiting += 1
        try:
            async with self._turn:
                await call(*arguments)
        finally:
            self._num_waiting -= 1

    async def _send_to_all(self, value: Any) -> None:
        # A wait for credit that is cancelled has sent nothing to anybody.
        for reader in self._readers:
            if reader.if_full is not None and reader.credits.exhausted:
                raise EdgeFullError(reader.if_full.message, stage=reader.if_full.reader)
            await reader.credits.wait()
        for reader in self._readers:
            await self._send_to(reader, value)

    async def _send_to(self, reader: Reader, value: Any) -> None:
        seq = reader.credits.try_take()
        try:
            pending = self._send_item(reader, seq, value) if seq >= 0 else None
        except RequestError:
            reader.credits.untake()
            raise
        if pending is not None:
            await self._leave(reader, pending)

    def _send_item(self, reader: Reader, seq: int, value: Any) -> Awaitable[None] | None:
        if reader.loop is not None and seq >= reader.loop:
            raise ProtocolError(f"feedback port {self._port.name!r} sent more than its bound", stage=self._stage)
        return reader.send(reader.edge, self._request, seq, value)

    async def _leave(self, reader: Reader, pending: Awaitable[None]) -> None:
        try:
            await pending
        except (asyncio.CancelledError, RequestError):
            # A wait that is cancelled has sent nothing, and `run` may go on after a timeout of its own.
            reader.credits.untake()
            raise


def results_of(route: StageRoute, result: Any) -> dict[str, Any]:
    """What `run` gave, by value port. Raises where a value is of the wrong type, or where nobody can take it."""
    if route.ports.split and not isinstance(result, Outputs):
        raise ProtocolError(
            f"run() gives its outputs as one Outputs, but got {type(result).__name__}", stage=route.stage
        )
    found: dict[str, Any] = {}
    for port in route.ports.outputs:
        if port.kind == "stream":
            continue
        value = msgspec.structs.asdict(result).get(port.name) if route.ports.split else result
        if value is not None or not port.optional:
            refuse_wrong_type(route.stage, port, value)
            if port.name in route.refusals:
                refusal = route.refusals[port.name]
                raise UnsupportedError(refusal.reason, stage=refusal.stage)
        found[port.name] = value
    return found


def class_of(port: Port) -> type:
    """What a value of `port` is an instance of; NoneType, which no value is, where that takes a closer look."""
    return port.type if isinstance(port.type, type) else type(None)


def accepts(hint: Any, value: object) -> bool:
    """True where `value` may stand on a port of type `hint`; only plain classes are checked.

    A Struct that derives from `hint` may not: in another process it would arrive without the fields that it adds.
    """
    if type(value) is hint:
        return True
    if hint is float:
        return isinstance(value, (int, float))
    return not isinstance(hint, type) or (isinstance(value, hint) and not isinstance(value, msgspec.Struct))


def refuse_wrong_type(stage: str, port: Port, value: Any) -> None:
    """Raises ProtocolError where `value` is not of the port's type."""
    if not accepts(port.type, value):
        raise ProtocolError(
            f"port {port.name!r} gives {type_name(port.type)}, but got {type(value).__name__}", stage=stage
        )
