"""How to reach a server, and its refusals as errors of ours."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from omniflow.errors import OmniflowError

DONE = "[DONE]"


class ServerError(OmniflowError):
    """A server refused a request, broke it off, or could not be reached. `code` names the kind, for counting."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Server(msgspec.Struct, frozen=True):
    """Where to call. `url` is that of the API with its version: http://127.0.0.1:8000/v1."""

    url: str
    api_key: str | None = None
    timeout_s: float = 600.0

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def websocket_url(self) -> str:
        """The same place for WebSockets: ws:// for http://, wss:// for https://."""
        return "ws" + self.url.removeprefix("http")

    @asynccontextmanager
    async def connect(self, connections: int = 1) -> AsyncIterator[Connection]:
        """A pool of connections; no proxy is asked for a server on this machine."""
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        timeout = httpx.Timeout(self.timeout_s, connect=10.0)
        async with httpx.AsyncClient(headers=self.headers, timeout=timeout, limits=limits) as http:
            yield Connection(self, http)


class Connection:
    """Requests to one server. What goes wrong is a `ServerError` that says what the server said."""

    def __init__(self, server: Server, http: httpx.AsyncClient) -> None:
        self.server = server
        self._http = http

    async def model(self, asked: str | None) -> str:
        """`asked`, or the first model that the server lists."""
        if asked:
            return asked
        found = json.loads(await self.get("/models"))
        names = [entry["id"] for entry in found["data"]]
        if not names:
            raise ServerError(f"{self.server.url} serves no model", "no_model")
        return str(names[0])

    async def get(self, path: str) -> bytes:
        """The body of a GET."""
        async with self._answer("GET", path) as answer:
            return await answer.aread()

    async def post(self, path: str, **content: Any) -> bytes:
        """The whole answer to a POST; `content` as httpx takes it (json=, data=, files=)."""
        async with self._answer("POST", path, **content) as answer:
            return await answer.aread()

    async def bytes_of(self, path: str, **content: Any) -> AsyncIterator[bytes]:
        """The answer to a POST, piece by piece as it arrives."""
        async with self._answer("POST", path, **content) as answer:
            async for piece in answer.aiter_bytes():
                yield piece

    async def events_of(self, path: str, **content: Any) -> AsyncIterator[dict[str, Any]]:
        """The server-sent events of an answer. Raises ServerError for an error among them, and where the stream breaks
        off: chat ends with [DONE], the others with an event whose type ends in `.done`.
        """
        ended = False
        async with self._answer("POST", path, **content) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == DONE:
                    return
                event = json.loads(data)
                if event.get("error"):
                    raise ServerError(*_said(event))
                ended = str(event.get("type", "")).endswith(".done")
                yield event
        if not ended:
            raise ServerError("the server broke the answer off", "broken_off")

    @asynccontextmanager
    async def _answer(self, method: str, path: str, **content: Any) -> AsyncIterator[httpx.Response]:
        url = self.server.url.rstrip("/") + path
        try:
            async with self._http.stream(method, url, **content) as answer:
                if answer.is_error:
                    raise _refused(answer.status_code, await answer.aread())
                yield answer
        except httpx.ConnectError as error:
            lost = f"{self.server.url} cannot be reached: {error}; is the server running?"
            raise ServerError(lost, "connect") from error
        except httpx.TimeoutException as error:
            raise ServerError(f"{url} did not answer within {self.server.timeout_s:g} s", "timeout") from error
        except httpx.HTTPError as error:
            raise ServerError(f"{url} broke the answer off: {error}", "broken_off") from error


def _refused(status: int, body: bytes) -> ServerError:
    try:
        message, code = _said(json.loads(body))
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError):
        message, code = body[:200].decode(errors="replace"), str(status)
    return ServerError(f"the server refused ({status}): {message}", code)


def _said(event: dict[str, Any]) -> tuple[str, str]:
    """Message and code of an error object, in the forms that servers give it."""
    error = event.get("error")
    if isinstance(error, dict):
        return str(error.get("message")), str(error.get("code") or error.get("type") or "error")
    return str(error or event.get("message") or event), "error"
