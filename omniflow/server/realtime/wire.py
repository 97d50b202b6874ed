"""One WebSocket connection: uvicorn's, with a limit to how long a client may not read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from omniflow.config import ServerConfig

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent


class Wire(WebSocketsSansIOProtocol):
    """What `limited_wire` makes the class of all WebSockets of a server."""

    limits = ServerConfig()
    _stalled: asyncio.TimerHandle | None = None

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
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
