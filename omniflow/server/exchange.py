"""One HTTP exchange: its id, its times, how it ended; one line in the log and one count in the metrics."""

from __future__ import annotations

import logging
import time
import uuid
from typing import cast

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omniflow.telemetry import OK, Metrics, RequestTimes

logger = logging.getLogger("omniflow.access")

_SCOPE_KEY = "omniflow.exchange"


class Exchange(msgspec.Struct):
    """What is known of a request beside its content. `endpoint` is set by those that run the graph."""

    request_id: str
    times: RequestTimes
    endpoint: str | None = None
    failure: str | None = None
    """Code of the error that ended it."""
    status: int | None = None
    complete: bool = False
    """True once the last byte of a reply was handed over."""

    @property
    def outcome(self) -> str:
        """`ok`, or the code of what went wrong; half a reply that nobody accounts for is an internal error."""
        return self.failure or (OK if self.complete else "internal_error")


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that `Exchanges` opened for this request."""
    return cast(Exchange, scope[_SCOPE_KEY])


class Exchanges:
    """ASGI middleware: gives every request an id (`x-request-id`), and records how it ended."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(f"req_{uuid.uuid4().hex}", RequestTimes())
        scope[_SCOPE_KEY] = exchange

        async def stamped_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = exchange.request_id
            elif not message.get("more_body", False):
                exchange.complete = True
            await send(message)

        try:
            await self._app(scope, receive, stamped_send)
        finally:
            self._record(scope, exchange)

    def _record(self, scope: Scope, exchange: Exchange) -> None:
        if exchange.endpoint is not None:
            self._metrics.request_ended(exchange.endpoint, exchange.outcome, exchange.times)
        # A probe every second would bury the requests.
        level = logging.DEBUG if scope["method"] == "GET" and exchange.outcome == OK else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, _line(scope, exchange))


def _line(scope: Scope, exchange: Exchange) -> str:
    """`key=value` pairs on one line. The path is as it was on the wire: percent-encoded, so no line can be forged."""
    times = exchange.times
    path = scope["raw_path"].decode("ascii", "backslashreplace")
    fields: dict[str, object] = {
        "method": scope["method"],
        "path": path,
        "status": exchange.status or "-",
        "outcome": exchange.outcome,
        "duration_ms": round((time.monotonic() - times.started_s) * 1e3, 1),
        "request_id": exchange.request_id,
    }
    if times.ttft_s is not None:
        fields["ttft_ms"] = round(times.ttft_s * 1e3, 1)
    if times.ttfa_s is not None:
        fields["ttfa_ms"] = round(times.ttfa_s * 1e3, 1)
        fields["audio_s"] = round(times.audio_s, 2)
    return " ".join(f"{key}={value}" for key, value in fields.items())
