"""The OpenAI-compatible HTTP application of one graph."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from omniflow.config import ServerConfig
from omniflow.errors import InvalidInputError, RequestError
from omniflow.server import failures, health, models
from omniflow.server.audio import audio_routes
from omniflow.server.call import Endpoint
from omniflow.server.chat import create_chat_completion
from omniflow.server.exchange import Exchanges
from omniflow.server.keys import OPEN_PATHS, KeyCheck, Keys
from omniflow.server.openapi import openapi
from omniflow.server.realtime.routes import realtime_routes
from omniflow.server.realtime.sockets import Sockets
from omniflow.server.remote import Limits, RemoteMedia
from omniflow.server.service import Service
from omniflow.server.transcripts import Transcripts
from omniflow.server.voices import voices_of
from omniflow.telemetry import Metrics

if TYPE_CHECKING:
    from omniflow.runtime import Runtime

EXPOSED_HEADERS = ("x-request-id", "openai-processing-ms", "retry-after", "retry-after-ms", "x-should-retry")


def build_app(
    runtime: Runtime,
    *,
    model: str,
    aliases: Collection[str] = (),
    config: ServerConfig | None = None,
    sockets: Sockets | None = None,
) -> ASGIApp:
    """The ASGI app that serves `runtime` as `model`; requests may also call it by one of `aliases`.

    It starts and stops nothing: the runtime may be starting or draining, and /ready says so. Of `config` it heeds what
    concerns requests; sockets, TLS and the log are `serve`'s and the caller's. `sockets` is given by who drains them.
    """
    config = config or ServerConfig()
    service = Service(
        runtime,
        model,
        frozenset(aliases),
        Transcripts(),
        Keys(config.api_keys),
        config,
        _remote(config),
        voices_of(runtime.plan),
    )
    metrics = Metrics(runtime.status)
    app = Starlette(
        routes=[
            Route(
                "/v1/chat/completions", Endpoint("chat.completions", create_chat_completion, service), methods=["POST"]
            ),
            *audio_routes(service),
            Route("/v1/models", partial(models.list_models, service)),
            Route("/v1/models/{model:path}", partial(models.get_model, service)),
            Route("/live", partial(health.live, service)),
            Route("/ready", partial(health.ready, service)),
            Route("/health", partial(health.health, service)),
            Route("/metrics", partial(health.metrics, metrics)),
            Route("/openapi.json", partial(openapi, service)),
            *realtime_routes(service, metrics, sockets or Sockets()),
        ],
        exception_handlers={
            RequestError: failures.on_request_error,
            HTTPException: failures.on_http_error,
            ClientDisconnect: failures.on_disconnect,
            Exception: failures.on_unexpected,
        },
    )
    app.router.redirect_slashes = False  # a redirected POST loses its body in some clients; a 404 is plain
    return _guarded(app, service, metrics)


class _Cors(CORSMiddleware):
    """Starlette's; a page that may not call is told so in the form of all errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        refused = failures.error_response(InvalidInputError(bytes(response.body).decode()))
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        refused.headers.update(kept)
        return refused


def _remote(config: ServerConfig) -> RemoteMedia | None:
    return RemoteMedia(Limits(config.max_body_bytes)) if config.remote_media else None


def _guarded(app: Starlette, service: Service, metrics: Metrics) -> ASGIApp:
    """`app` behind what every request passes. Outside of Starlette, so that replies to bugs of ours pass it, too."""
    config = service.config
    guarded: ASGIApp = KeyCheck(app, service.keys, OPEN_PATHS if config.guard_metrics else OPEN_PATHS | {"/metrics"})
    if config.cors_origins:
        # `*` mirrors what is asked for: OpenAI's clients send a dozen of x-stainless-... headers.
        guarded = _Cors(
            guarded,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return Exchanges(guarded, metrics)
