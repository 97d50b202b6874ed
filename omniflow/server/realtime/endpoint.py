"""WS /v1/realtime: who is let in, and with which settings."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import msgspec
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from omniflow.errors import InvalidInputError, OverloadedError, RequestError, UnavailableError, UnsupportedError
from omniflow.server.exchange import exchange_of
from omniflow.server.keys import key_of
from omniflow.server.realtime.connection import REFUSED, Connection
from omniflow.server.realtime.ears import Ears, Model
from omniflow.server.realtime.protocol import Bounds, Protocol
from omniflow.server.realtime.responses import Abilities, error_detail
from omniflow.server.realtime.server_events import ErrorEvent
from omniflow.server.realtime.settings import Session, Transcription, updated
from omniflow.server.realtime.sockets import Sockets
from omniflow.server.service import Service
from omniflow.telemetry import Metrics

if TYPE_CHECKING:
    from omniflow.planner.plan import Plan

_SUBPROTOCOL = "realtime"
_RESTARTING = 1012
_TRY_LATER = 1013
_MAX_REASON = 120
"""Bytes, by the protocol 123."""


class ForeignOriginError(InvalidInputError):
    """A page of a site that is not named in `server.cors_origins`."""

    code = "origin_not_allowed"


class Realtime:
    """The ASGI side of all sessions of a server."""

    def __init__(self, service: Service, metrics: Metrics, sockets: Sockets) -> None:
        self._service = service
        self._metrics = metrics
        self._sockets = sockets
        self._model = Model()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One session. What is refused is refused after the handshake: in a browser, nothing else tells why."""
        socket = WebSocket(scope, receive, send)
        # Browsers drop a connection whose answer names none of the subprotocols that they offered.
        try:
            await socket.accept(_SUBPROTOCOL if _SUBPROTOCOL in scope.get("subprotocols", ()) else None)
        except WebSocketDisconnect:
            return
        try:
            self._require_origin(socket)
            self._require_room()
            session = first_settings(self._service, socket)
        except RequestError as error:
            await _refuse(socket, error)
            return
        await self._talk(socket, session)

    async def _talk(self, socket: WebSocket, session: Session) -> None:
        config = self._service.config
        abilities = _abilities(self._service)
        bounds = Bounds(config.realtime_items, config.realtime_buffer_s)
        protocol = Protocol(session, abilities, bounds, int(time.time() + config.realtime_session_s))
        connection = Connection(socket, self._service, self._metrics, protocol, Ears(self._model))
        with self._sockets.opened(connection.leave):
            self._metrics.realtime_sessions.inc()
            try:
                farewell = await connection.run()
            finally:
                self._metrics.realtime_sessions.dec()
        if farewell is not None and farewell.code == REFUSED:
            exchange_of(socket.scope).failure = "slow_reader"

    def _require_origin(self, socket: WebSocket) -> None:
        """No page of another site talks to a server that asks for no key: browsers let any page open a WebSocket."""
        origin, host = socket.headers.get("origin"), socket.headers.get("host")
        config = self._service.config
        known = {"*", origin}.intersection(config.cors_origins) or origin in (f"http://{host}", f"https://{host}")
        if origin is not None and not known and not self._service.keys.required:
            raise ForeignOriginError(f"pages of {origin!r} may not call: server.cors_origins does not name them")

    def _require_room(self) -> None:
        state = self._service.runtime.state
        if self._sockets.draining or state in ("draining", "stopped"):
            raise UnavailableError("the server is about to stop; connect again")
        if state != "ready":
            raise OverloadedError(f"the runtime is {state}; connect again later")
        if self._sockets.num_open >= self._service.config.realtime_sessions:
            raise OverloadedError(f"{self._sockets.num_open} sessions are open, the most that are served at once")


def first_settings(service: Service, socket: WebSocket) -> Session:
    """What a session begins with. Raises ModelNotFoundError or UnsupportedError where it cannot begin."""
    query = socket.query_params
    if "call_id" in query:
        raise UnsupportedError("call_id: calls over SIP or WebRTC are not served, only WebSockets", param="call_id")
    session = Session(model=query.get("model") or service.model)
    secret = service.keys.secret(key_of(socket.scope))
    if secret is not None and secret.session:
        session = updated(session, msgspec.json.decode(secret.session))
    if query.get("intent") != "transcription" and session.type == "realtime":
        service.require_model(session.model)
        service.require_entry("chat", "conversations")
        service.require_output("chat", "text")
        return session
    service.require_entry("transcription", "speech to transcribe")
    return _transcribing(session)


def _transcribing(session: Session) -> Session:
    before = session.audio.input
    audio = msgspec.structs.replace(before, transcription=before.transcription or Transcription())
    return msgspec.structs.replace(
        session, type="transcription", audio=msgspec.structs.replace(session.audio, input=audio)
    )


def _abilities(service: Service) -> Abilities:
    plan: Plan = service.runtime.plan
    outputs = frozenset(plan.outputs_of("chat")) if "chat" in plan.inputs else frozenset()
    transcribes = "transcription" in plan.inputs
    return Abilities(service.aliases | {service.model}, outputs, transcribes, service.voice, service.with_learned_voice)


async def _refuse(socket: WebSocket, error: RequestError) -> None:
    exchange_of(socket.scope).failure = error.code
    code = {429: _TRY_LATER, 503: _RESTARTING}.get(error.status, REFUSED)
    with contextlib.suppress(WebSocketDisconnect):
        await socket.send_text(msgspec.json.encode(ErrorEvent(error=error_detail(error, None))).decode())
        await socket.close(code, str(error).encode()[:_MAX_REASON].decode(errors="ignore"))
