"""One request in one host: what its stages have received, which of them run, and the scopes that cancel them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import msgspec

from omniflow.actor import Context, Emit, Outputs, Port, Ports
from omniflow.errors import EdgeFullError, ProtocolError, UnsupportedError
from omniflow.graph import type_name
from omniflow.mailbox import Credits, Mailbox
from omniflow.messages import Closed, Waiting

SendItem = Callable[[int, int, int, object], Awaitable[None] | None]
"""(edge, request, seq, value): the host's way out to whichever link the edge has."""
_FAIR = 32
"""A stage that never has to wait for credit yields to the event loop after so many items."""


class StageRoute(msgspec.Struct, frozen=True):
    """How one stage is wired for one kind of request: edge numbers by port."""

    stage: str
    ports: Ports
    inputs: dict[str, int]
    outputs: dict[str, tuple[int, ...]]
    refusals: dict[str, str]


class Run:
    """One stage of one request: the values that have arrived, the streams, and whether it has started."""

    __slots__ = ("missing", "route", "started", "streams", "values")

    def __init__(self, route: StageRoute) -> None:
        self.route = route
        self.values: dict[str, Any] = {}
        self.streams: dict[str, Mailbox[Any]] = {}
        self.missing: set[str] = set()
        self.started = False

    @property
    def waiting_port(self) -> str | None:
        """A port that this stage still waits for; None once it runs."""
        return None if self.started else min(self.missing or self.streams, default=None)


class Visit:
    """All of one request in this host. `over` is set by a failure or a cancel, and nothing starts after that."""

    __slots__ = ("_dropped", "context", "credits", "num_running", "over", "request", "runs", "scopes", "unfinished")

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

    def stop(self) -> None:
        """Cancel every run; remember what each was doing."""
        if self.over:
            return
        self.over = True
        self.unfinished = tuple(Waiting(name, run.waiting_port) for name, run in self.runs.items())
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

    __slots__ = ("_num_sent", "_port", "_readers", "_refusal", "_request", "_send", "_stage", "_turn")

    def __init__(
        self,
        stage: str,
        port: Port,
        request: int,
        send: SendItem,
        readers: dict[int, Reader],
        refusal: str | None,
    ) -> None:
        self._stage = stage
        self._port = port
        self._request = request
        self._send = send
        self._readers = readers
        self._refusal = refusal
        self._num_sent = 0
        self._turn = asyncio.Lock()

    @property
    def wanted(self) -> bool:
        return self._refusal is not None or any(not reader.credits.gone for reader in self._readers.values())

    async def send(self, value: Any) -> None:
        if self._refusal is not None:
            raise UnsupportedError(self._refusal, stage=self._stage)
        refuse_wrong_type(self._stage, self._port, value)
        # Tasks of one `run` that share a port send one after the other, so that numbers and items agree.
        async with self._turn:
            self._num_sent += 1
            if self._num_sent % _FAIR == 0:
                await anyio.lowlevel.checkpoint()
            for edge, reader in self._readers.items():
                await self._send_to(edge, reader, value)

    async def _send_to(self, edge: int, reader: Reader, value: Any) -> None:
        if reader.if_full is not None and reader.credits.exhausted:
            raise EdgeFullError(reader.if_full.message, stage=reader.if_full.reader)
        seq = await reader.credits.take()
        if seq < 0:
            return
        if reader.loop is not None and seq >= reader.loop:
            raise ProtocolError(f"feedback port {self._port.name!r} sent more than its bound", stage=self._stage)
        pending = self._send(edge, self._request, seq, value)
        if pending is not None:
            try:
                await pending
            except asyncio.CancelledError:
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
                raise UnsupportedError(route.refusals[port.name], stage=route.stage)
        found[port.name] = value
    return found


def accepts(hint: Any, value: object) -> bool:
    """True where `value` may stand on a port of type `hint`; only plain classes are checked."""
    if hint is float:
        return isinstance(value, (int, float))
    return not isinstance(hint, type) or isinstance(value, hint)


def refuse_wrong_type(stage: str, port: Port, value: Any) -> None:
    """Raises ProtocolError where `value` is not of the port's type."""
    if not accepts(port.type, value):
        raise ProtocolError(
            f"port {port.name!r} gives {type_name(port.type)}, but got {type(value).__name__}", stage=stage
        )
