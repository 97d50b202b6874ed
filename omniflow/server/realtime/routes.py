"""The routes of this room."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route, WebSocketRoute

from omniflow.server.call import Endpoint
from omniflow.server.realtime.client_secrets import create_client_secret
from omniflow.server.realtime.endpoint import Realtime
from omniflow.server.realtime.sockets import Sockets
from omniflow.server.service import Service
from omniflow.telemetry import Metrics


def realtime_routes(service: Service, metrics: Metrics, sockets: Sockets) -> list[BaseRoute]:
    """The WebSocket, and where keys for it are issued."""
    secrets = Endpoint("realtime.client_secrets", create_client_secret, service)
    return [
        WebSocketRoute("/v1/realtime", Realtime(service, metrics, sockets)),
        Route("/v1/realtime/client_secrets", secrets, methods=["POST"]),
    ]
