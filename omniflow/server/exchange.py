"""One HTTP exchange or WebSocket session: its id, its times, its end; one line in the log, one count in the metrics."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import cast

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omniflow.server.logs import Fields
from omniflow.telemetry import OK, Metrics, RequestTimes

logger = logging.getLogger("omniflow.access")

_SCOPE_KEY = "omniflow.exchange"
_CLIENT_ID_HEADERS = ("x-client-request-id", "x-request-id")
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class Exchange(msgspec.Struct):
    """What is known of a request beside its content. `endpoint` is set by those that run the graph."""

    request_id: str
    times: RequestTimes
    endpoint: str | None = None
    failure: str | None = None
    """Code of the error that ended it."""
    status: int | None = None
    """Of the reply; 101 for a WebSocket that was accepted."""
    close_code: int | None = None
    """What a WebSocket was closed with, by either end."""
    complete: bool = False
    """True once the last byte of a reply was handed over, or the WebSocket was closed."""

    @property
    def outcome(self) -> str:
        """`ok`, or the code of what went wrong; half a reply that nobody accounts for is an internal error."""
        return self.failure or (OK if self.complete else "internal_error")

    @property
    def elapsed_ms(self) -> float:
        """How long ago it began."""
        return (time.monotonic() - self.times.started_s) * 1e3

    def sent(self, message: Message) -> None:
        """Note what goes to the client, and put this exchange's headers on the first of it."""
        match message["type"].removeprefix("websocket."):
            case "http.response.start":
                self.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = self.request_id
                headers["openai-processing-ms"] = str(round(self.elapsed_ms))
            case "http.response.body":
                self.complete = self.complete or not message.get("more_body", False)
            case "accept":
                self.status = 101
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["x-request-id"] = self.request_id
            case "close":
                self._closed(message)

    def received(self, message: Message) -> None:
        """Note how the client left a WebSocket."""
        if message["type"] == "websocket.disconnect":
            self._closed(message)

    def _closed(self, message: Message) -> None:
        if not self.complete:
            self.complete = True
            self.close_code = message.get("code", 1005)


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that `Exchanges` opened for this request."""
    return cast(Exchange, scope[_SCOPE_KEY])


class Exchanges:
    """ASGI middleware: gives every request and WebSocket an id (`x-request-id`), and records how it ended.

    The id is ours also where the client sent one: what the runtime works under must be unique. Theirs is in the log.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        exchange = Exchange(f"req_{uuid.uuid4().hex}", RequestTimes())
        scope[_SCOPE_KEY] = exchange

        async def noted_send(message: Message) -> None:
            exchange.sent(message)
            await send(message)

        async def noted_receive() -> Message:
            message = await receive()
            exchange.received(message)
            return message

        is_socket = scope["type"] == "websocket"
        try:
            await self._app(scope, noted_receive if is_socket else receive, noted_send)
        finally:
            self._record(scope, exchange)

    def _record(self, scope: Scope, exchange: Exchange) -> None:
        if exchange.endpoint is not None:
            self._metrics.request_ended(exchange.endpoint, exchange.outcome, exchange.times)
        # A probe every second would bury the requests.
        level = logging.DEBUG if scope.get("method") == "GET" and exchange.outcome == OK else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, "%s", Fields(_line(scope, exchange)))


def _line(scope: Scope, exchange: Exchange) -> dict[str, object]:
    """What the log says. The path is as it was on the wire: percent-encoded, so no line can be forged; no query."""
    times = exchange.times
    client = scope.get("client")
    fields: dict[str, object] = {
        "method": scope.get("method", "WS"),
        "path": scope["raw_path"].decode("ascii", "backslashreplace"),
        "status": exchange.status,
        "outcome": exchange.outcome,
        "duration_ms": round(exchange.elapsed_ms, 1),
        "request_id": exchange.request_id,
        "client": client[0] if client else None,
    }
    if exchange.close_code is not None:
        fields["close"] = exchange.close_code
    if client_id := _client_id(scope):
        fields["client_request_id"] = client_id
    if times.ttft_s is not None:
        fields["ttft_ms"] = round(times.ttft_s * 1e3, 1)
    if times.ttfa_s is not None:
        fields["ttfa_ms"] = round(times.ttfa_s * 1e3, 1)
        fields["audio_s"] = round(times.audio_s, 2)
    return fields


def _client_id(scope: Scope) -> str | None:
    """The id that the client, or a proxy before us, gave the request; one that could garble a log is left out."""
    headers = Headers(scope=scope)
    for name in _CLIENT_ID_HEADERS:
        if _CLIENT_ID.fullmatch(headers.get(name, "")):
            return headers[name]
    return None
