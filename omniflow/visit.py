"""One request in one host: what its stages have received, which of them run, and the scopes that cancel them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec

from omniflow.actor import Context, Emit, Port, Ports
from omniflow.errors import ProtocolError, UnsupportedError
from omniflow.mailbox import Credits, Mailbox
from omniflow.messages import Waiting

SendItem = Callable[[int, int, int, object], Awaitable[None] | None]
"""(edge, request, seq, value): the host's way out to whichever link the edge has."""


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
        """A port that this stage still waits for, if it waits for any."""
        return min(self.missing, default=None)


class Visit:
    """All of one request in this host. `over` is set by a failure or a cancel, and nothing starts after that."""

    __slots__ = ("context", "credits", "num_running", "over", "request", "runs", "scopes", "unfinished")

    def __init__(self, request: int, context: Context) -> None:
        self.request = request
        self.context = context
        self.runs: dict[str, Run] = {}
        self.credits: dict[int, Credits] = {}
        self.scopes: set[anyio.CancelScope] = set()
        self.num_running = 0
        self.unfinished: tuple[Waiting, ...] = ()
        self.over = False

    def stop(self) -> None:
        """Cancel every run; remember what each was doing."""
        if self.over:
            return
        self.over = True
        self.unfinished = tuple(Waiting(name, run.waiting_port) for name, run in self.runs.items())
        for scope in list(self.scopes):
            scope.cancel()


class PortEmit(Emit[Any]):
    """The sending end of one stream port of one run: one `Credits` for each edge that reads it."""

    __slots__ = ("_credits", "_loops", "_port", "_refusal", "_request", "_send", "_stage")

    def __init__(
        self,
        stage: str,
        port: Port,
        request: int,
        send: SendItem,
        readers: dict[int, Credits],
        loops: dict[int, int],
        refusal: str | None,
    ) -> None:
        self._stage = stage
        self._port = port
        self._request = request
        self._send = send
        self._credits = readers
        self._loops = loops
        self._refusal = refusal

    @property
    def wanted(self) -> bool:
        return self._refusal is not None or any(not reader.gone for reader in self._credits.values())

    async def send(self, value: Any) -> None:
        if self._refusal is not None:
            raise UnsupportedError(self._refusal, stage=self._stage)
        refuse_wrong_type(self._stage, self._port, value)
        for edge, reader in self._credits.items():
            seq = await reader.take()
            if seq < 0:
                continue
            if seq >= self._loops.get(edge, seq + 1):
                raise ProtocolError(f"feedback port {self._port.name!r} sent more than its bound", stage=self._stage)
            pending = self._send(edge, self._request, seq, value)
            if pending is not None:
                await pending


def refuse_wrong_type(stage: str, port: Port, value: Any) -> None:
    """Raises ProtocolError where `value` is not of the port's type (checked for plain classes)."""
    if isinstance(port.type, type) and not isinstance(value, port.type) and port.type is not float:
        raise ProtocolError(
            f"port {port.name!r} gives {port.type.__name__}, but got {type(value).__name__}", stage=stage
        )
