"""One HTTP/1.1 connection: uvicorn's, with limits to how long a client may take, and errors that clients can read.

uvicorn bounds neither the time for the head of a request nor the time for which a client may not read its reply: a few
hundred such clients would hold all the descriptors of the process.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from omniflow.config import ServerConfig
from omniflow.server.failures import error_body_of

_BREAK_OFF = "omniflow.break_off"
_GOODBYE_S = 0.5


def break_off(scope: Scope) -> None:
    """End the connection of a reply that has begun and cannot be finished: no client may take it for whole."""
    if _BREAK_OFF in scope:
        cast(Callable[[], None], scope[_BREAK_OFF])()


class Connection(H11Protocol):
    """What `limited` makes the class of all connections of a server."""

    limits = ServerConfig()

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.app = self._limited(self.app)
        self._waiting: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    # -- a client that is slow to ask ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._owes_us():
            self._wait_for_head()
        else:
            self._stop_waiting()
        self._keep_listening()

    def _keep_listening(self) -> None:
        """uvicorn reads no further where anything follows a request: nobody would see then that its client has gone."""
        at_work = self.cycle is not None and not self.cycle.response_complete
        if at_work and self.conn.their_state is h11.DONE:
            ahead, _ = self.conn.trailing_data
            if len(ahead) <= self.limits.max_header_bytes:
                self.flow.resume_reading()

    def _owes_us(self) -> bool:
        """True while the head of a request is to come, or the rest of a body whose request was answered before it."""
        answered = self.cycle is not None and self.cycle.response_complete
        return self.conn.their_state is h11.IDLE or (answered and self.conn.their_state is h11.SEND_BODY)

    def _wait_for_head(self) -> None:
        # Not moved by what comes meanwhile: a byte now and then is no progress.
        if self._waiting is None:
            self._waiting = self.loop.call_later(self.limits.header_s, self._waited)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _waited(self) -> None:
        self._waiting = None
        began, _ = self.conn.trailing_data
        if began:
            self._refuse(408, "request_timeout", f"no whole request came within {self.limits.header_s:g} s")
        else:
            self.transport.close()

    # -- a client that does not read -----------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _watch_reader(self, unsent: int) -> None:
        def look() -> None:
            now = self.transport.get_write_buffer_size()
            if now >= unsent:
                self.transport.abort()  # closing would wait for the very client
            else:
                self._watch_reader(now)

        self._stalled = self.loop.call_later(self.limits.send_s, look)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Called when the server stops: an idle connection ends, a reply under way may first."""
        super().shutdown()
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.scheme == "https" and not self.flow.write_paused:
            # TLS waits for the other end's goodbye, which one that keeps a connection for later does not say.
            self.loop.call_later(_GOODBYE_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timers()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._forget_timers()
        super().handle_websocket_upgrade(event)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: a client that would rather speak HTTP/2 is answered in HTTP/1.1, and knows it."""

    def _forget_timers(self) -> None:
        self._stop_waiting()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def send_400_response(self, msg: str) -> None:
        """Called while the parser's error is handled: it says what is wrong, and whether it was too much."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        code = "header_too_large" if status == 431 else "invalid_http"
        self._refuse(status, code, f"this is no valid HTTP request: {error or msg}")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer what never became a request, where no other answer is under way, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error_body_of(message, status, code)
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            head = h11.Response(
                status_code=status, headers=[*headers, (b"connection", b"close")], reason=HTTPStatus(status).phrase
            )
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._break_off()

    def _limited(self, app: Any) -> ASGIApp:
        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            # The parser limits only what comes in several pieces.
            if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > self.limits.max_header_bytes:
                self._refuse(431, "header_too_large", f"the head is larger than {self.limits.max_header_bytes} bytes")
                return
            # To HTTP/1.0 (some proxies) the end of a connection is the end of a reply; a reset is not.
            scope[_BREAK_OFF] = self._reset if scope["http_version"] == "1.0" else self._break_off
            await app(scope, receive, send)

        return limited

    def _reset(self) -> None:
        """Close so that the other end gets an error, whatever was still to be sent."""
        linger_not = struct.pack("ii", 1, 0)
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_not)
        self._break_off()
        self.transport.abort()

    def _break_off(self) -> None:
        """Close once all is written that was handed over. The application is told that its client has gone."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def limited(config: ServerConfig) -> type[Connection]:
    """The class of connections under the limits of `config`."""
    return type("LimitedConnection", (Connection,), {"limits": config})
