"""Errors as clients read them: always `{"error": {message, type, param, code}}`, never a traceback."""

from __future__ import annotations

import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from omniflow.errors import InvalidInputError, NotFoundError, OverloadedError, RequestError, UnavailableError
from omniflow.server.exchange import exchange_of

_RETRIED_BY_CLIENTS = frozenset({408, 409, 429})
_BEFORE_ANY_WORK = (OverloadedError, UnavailableError)
"""Errors of requests of which nothing has run. OpenAI's clients send a request up to twice more by themselves: one that
had begun may be what killed its stage, and must not do it three times."""
_DEFAULT_RETRY_AFTER_S = 1.0
_MESSAGE_CHARS = 2000
"""Messages quote what was sent, which may be as long as a body."""


class MalformedBodyError(InvalidInputError):
    """The body is not JSON."""

    code = "invalid_json"


class BodyTooLargeError(InvalidInputError):
    """The body is larger than the server takes."""

    status = 413
    code = "body_too_large"


class BodyTimeoutError(InvalidInputError):
    """The body did not come in time. Sent again over the same line it would not, either."""

    status = 408
    code = "body_timeout"


class AuthenticationError(RequestError):
    """The caller has no key, or none that is known here."""

    status = 401
    code = "invalid_api_key"


class ModelNotFoundError(NotFoundError):
    """`model` names none that is served here."""

    code = "model_not_found"


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inner object of every error reply."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every error reply."""

    error: ErrorDetail


def error_body(error: RequestError) -> bytes:
    """The JSON of `error`."""
    return _body(str(error), error.status, error.param, error.code)


def error_body_of(message: str, status: int, code: str) -> bytes:
    """The JSON of an error that is none of the tree: what never became a request."""
    return _body(message, status, None, code)


def error_event(error: RequestError) -> bytes:
    """`error` as a server-sent event, for a stream that has begun; clients raise on it."""
    return b"data: " + error_body(error) + b"\n\n"


def error_response(error: RequestError) -> Response:
    """The reply for `error`, with the headers that tell a client whether and when to try again."""
    headers: dict[str, str] = {}
    if error.status in _RETRIED_BY_CLIENTS or error.status >= 500:
        headers["x-should-retry"] = "true" if isinstance(error, _BEFORE_ANY_WORK) else "false"
    if error.status in (429, 503):
        after_s = error.retry_after_s or _DEFAULT_RETRY_AFTER_S
        headers["retry-after"] = str(max(1, math.ceil(after_s)))
        headers["retry-after-ms"] = str(math.ceil(after_s * 1e3))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["connection"] = "close"  # else the client goes on sending what nobody reads
    return _response(error_body(error), error.status, headers)


async def on_request_error(request: Request, error: Exception) -> Response:
    """Handler for everything of the error tree that ends one request."""
    assert isinstance(error, RequestError)
    exchange_of(request.scope).failure = error.code
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handler for what routing refuses: unknown paths, methods that a path does not have."""
    assert isinstance(error, HTTPException)
    exchange_of(request.scope).failure = code = "method_not_allowed" if error.status_code == 405 else "not_found"
    headers = {"allow": ", ".join(sorted(_methods(request)))} if error.status_code == 405 else {}
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _response(_body(message, error.status_code, None, code), error.status_code, headers)


def _methods(request: Request) -> set[str]:
    """What may be asked of the path: Starlette itself looks at the first of its routes only."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return {
        method for route in routes if route.matches(request.scope)[0] != Match.NONE for method in route.methods or ()
    }


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Handler for a client that went away while it sent its body: nobody reads this reply."""
    exchange_of(request.scope).failure = "cancelled"
    return Response(status_code=499)


async def on_unexpected(request: Request, error: Exception) -> Response:
    """Handler for bugs of this server; the traceback goes to the log."""
    exchange = exchange_of(request.scope)
    exchange.failure = "internal_error"
    message = f"internal error; the server's log has it under {exchange.request_id}"
    # Starlette raises the error once more behind this reply, and uvicorn closes the connection on it.
    headers = {"x-should-retry": "false", "connection": "close"}
    return _response(_body(message, 500, None, "internal_error"), 500, headers)


def _body(message: str, status: int, param: str | None, code: str) -> bytes:
    if len(message) > _MESSAGE_CHARS:
        message = message[:_MESSAGE_CHARS] + "..."
    return msgspec.json.encode(ErrorReply(ErrorDetail(message, _type_of(status), param, code)))


def _type_of(status: int) -> str:
    """The `type` that OpenAI gives to errors of this status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _response(body: bytes, status: int, headers: dict[str, str]) -> Response:
    return Response(body, status, headers, media_type="application/json")
