"""A call of the graph over HTTP: what an endpoint sees of its client, whose going away ends all work for it."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import BinaryIO, TypeVar

import anyio
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omniflow.errors import InvalidInputError, RequestError
from omniflow.server.body import Intake, decode_json, read_body
from omniflow.server.connection import break_off
from omniflow.server.exchange import exchange_of
from omniflow.server.failures import error_event
from omniflow.server.form import Form, read_form
from omniflow.server.scopes import unwrapped
from omniflow.server.service import Service
from omniflow.telemetry import RequestTimes

EVENT_STREAM = "text/event-stream; charset=utf-8"
_TIMEOUT_HEADER = "x-request-timeout"
T = TypeVar("T")


class Call:
    """One request of a client, and the way back to it. Its body is JSON or, for some endpoints, a `form`."""

    def __init__(self, request: Request, body: bytes | Form, send: Send) -> None:
        self._request = request
        self._exchange = exchange_of(request.scope)
        self._body = body
        self._send = send

    @property
    def request_id(self) -> str:
        """The id that the client gets as `x-request-id` and that the runtime works under."""
        return self._exchange.request_id

    @property
    def times(self) -> RequestTimes:
        """Where what is sent is stamped."""
        return self._exchange.times

    @property
    def deadline_s(self) -> float | None:
        """Seconds that `X-Request-Timeout` allows. Raises InvalidInputError where it is no positive number."""
        text = self._request.headers.get(_TIMEOUT_HEADER)
        if text is None:
            return None
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise InvalidInputError(
                f"{_TIMEOUT_HEADER}: {text!r} is not a positive number of seconds", param=_TIMEOUT_HEADER
            )
        return seconds

    def header(self, name: str) -> str | None:
        """A header of the request."""
        return self._request.headers.get(name)

    def read(self, type: type[T]) -> T:
        """The body as a `type`; see `decode_json` and `Form.read`."""
        return self._body.read(type) if isinstance(self._body, Form) else decode_json(self._body, type)

    def file(self, name: str) -> BinaryIO:
        """A file of the form, which is closed when the call ends. Raises InvalidInputError where there is none."""
        if not isinstance(self._body, Form):
            raise InvalidInputError(f"{name}: is required, in a body of type multipart/form-data", param=name)
        return self._body.file(name)

    async def send(self, body: bytes, media_type: str) -> None:
        """Send a whole reply."""
        await Response(body, media_type=media_type)(self._request.scope, self._request.receive, self._send)

    async def stream(self, pieces: AsyncGenerator[bytes], media_type: str) -> None:
        """Send `pieces` as they come, chunked.

        The status goes out with the first piece, so an error before it is a plain error reply. An error after it
        ends an event stream with an error event; any other body breaks off, so that no client takes it for whole.
        """
        async with aclosing(pieces):
            first = await anext(pieces)
            await self._send({"type": "http.response.start", "status": 200, "headers": _stream_headers(media_type)})
            await self._send_piece(first)
            try:
                async for piece in pieces:
                    await self._send_piece(piece)
            except RequestError as error:
                self._exchange.failure = error.code
                if media_type != EVENT_STREAM:
                    break_off(self._request.scope)
                    return
                await self._send_piece(error_event(error))
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_piece(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})


def _stream_headers(media_type: str) -> list[tuple[bytes, bytes]]:
    """Headers of a reply whose pieces must not be held back on their way (nginx would, but for the last one)."""
    headers = {"content-type": media_type, "cache-control": "no-store", "x-accel-buffering": "no"}
    return Headers(headers).raw


Answer = Callable[[Service, Call], Awaitable[None]]
"""An endpoint: reads the call, runs the graph, sends the reply. RequestErrors that it raises become error replies."""


class Endpoint:
    """The ASGI side of an `Answer`: it runs only as long as its client is there. With `form` it takes uploads."""

    def __init__(self, name: str, answer: Answer, service: Service, *, form: bool = False) -> None:
        self._name = name
        self._answer = answer
        self._service = service
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange_of(scope).endpoint = self._name
        intake = Intake(Headers(scope=scope), receive, self._service.config)
        request = Request(scope, intake)
        if not self._form:
            await self._run(Call(request, await read_body(request), send), scope, receive)
            return
        async with read_form(request) as form:
            await self._run(Call(request, form, send), scope, receive)

    async def _run(self, call: Call, scope: Scope, receive: Receive) -> None:
        exchange = exchange_of(scope)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            if not exchange.complete:
                exchange.failure = exchange.failure or "cancelled"
                group.cancel_scope.cancel()

        with unwrapped():
            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                await self._answer(self._service, call)
                group.cancel_scope.cancel()
