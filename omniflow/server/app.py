"""The OpenAI-compatible HTTP application of one graph."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from omniflow.errors import RequestError
from omniflow.server import failures, health, models
from omniflow.server.call import Endpoint
from omniflow.server.chat import create_chat_completion
from omniflow.server.exchange import Exchanges
from omniflow.server.service import Service
from omniflow.server.speech import create_speech
from omniflow.server.transcripts import Transcripts
from omniflow.telemetry import Metrics

if TYPE_CHECKING:
    from omniflow.runtime import Runtime

MAX_BODY_BYTES = 64 * 2**20


def build_app(
    runtime: Runtime, *, model: str, aliases: Collection[str] = (), max_body_bytes: int = MAX_BODY_BYTES
) -> Starlette:
    """The ASGI app that serves `runtime` as `model`; requests may also call it by one of `aliases`.

    It starts and stops nothing: the runtime may be starting or draining, and /ready says so.
    """
    service = Service(runtime, model, frozenset(aliases), Transcripts())
    metrics = Metrics(runtime.status)
    chat = Endpoint("chat.completions", create_chat_completion, service, max_body_bytes)
    speech = Endpoint("audio.speech", create_speech, service, max_body_bytes)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/audio/speech", speech, methods=["POST"]),
            Route("/v1/models", partial(models.list_models, service)),
            Route("/v1/models/{model:path}", partial(models.get_model, service)),
            Route("/live", partial(health.live, service)),
            Route("/ready", partial(health.ready, service)),
            Route("/health", partial(health.health, service)),
            Route("/metrics", partial(health.metrics, metrics)),
        ],
        middleware=[Middleware(Exchanges, metrics=metrics)],
        exception_handlers={
            RequestError: failures.on_request_error,
            HTTPException: failures.on_http_error,
            ClientDisconnect: failures.on_disconnect,
            Exception: failures.on_unexpected,
        },
    )
    app.router.redirect_slashes = False  # a redirected POST loses its body in some clients; a 404 is plain
    return app
