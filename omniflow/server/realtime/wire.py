"""One WebSocket connection: uvicorn's, with a limit to how long a client may not read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from omniflow.config import ServerConfig
from omniflow.server.failures import error_body_of

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent


class Wire(WebSocketsSansIOProtocol):
    """What `limited_wire` makes the class of all WebSockets of a server."""

    limits = ServerConfig()
    _stalled: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except UnicodeEncodeError:  # websockets quotes what it refuses, which need not be text
            self._refuse("a header that is read holds more than ASCII")
            return
        error = self.conn.handshake_exc
        if error is not None and not self.handshake_initiated:
            # uvicorn would say nothing, and wait for ever: POST with an upgrade, a line of more than 8 KiB.
            self._refuse(str(error.__cause__ or error))

    def _refuse(self, why: str) -> None:
        """Answer what is no handshake, and close."""
        body = error_body_of(f"this is no valid WebSocket handshake: {why}", 400, "invalid_http")
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()

    async def send(self, message: ASGISendEvent) -> None:
        try:
            await super().send(message)
        except RuntimeError:
            if not self.close_sent:
                raise
            # uvicorn has closed by itself (a frame that breaks the protocol, a ping without an answer): to a session,
            # that is a client that has gone.
            raise ClientDisconnected from None
        if self.initial_response is not None and self.close_sent:
            # Refused, and the refusal is sent: uvicorn would log an error, "without completing handshake", for each.
            self.handshake_complete = True

    def pause_writing(self) -> None:
        super().pause_writing()
        # A second after the session's own patience is over: then it has said why in the log, and closing would wait
        # for the very client that does not read.
        self._stalled = self.loop.call_later(self.limits.send_s + 1, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_stall()
        super().connection_lost(exc)

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def limited_wire(config: ServerConfig) -> type[Wire]:
    """The class of WebSockets under the limits of `config`."""
    return type("LimitedWire", (Wire,), {"limits": config})
