"""A socket for an app: uvicorn inside the caller's task group, without its signal handling."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import msgspec
import uvicorn
from starlette.types import ASGIApp

from omniflow.errors import ConfigError
from omniflow.server.scopes import unwrapped

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that none of them finds one closed under a new request."""


class Address(msgspec.Struct, frozen=True):
    """Where a server can be reached; `port` is the bound one, also where 0 was asked for."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The base of all URLs, without a slash at its end."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the caller's: they drain the runtime first


@asynccontextmanager
async def serve(app: ASGIApp, *, host: str = "127.0.0.1", port: int = 8000, grace_s: int = 5) -> AsyncIterator[Address]:
    """Serve `app` while the block runs.

    On leaving it, no new connection is taken, replies under way get `grace_s` seconds to end, the rest is cut. To
    lose none, drain the runtime inside the block: new requests are then refused with 503 while old ones end.
    Raises ConfigError where the address cannot be had.
    """
    listener = _bind(host, port)
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
    )
    server = _Server(config)

    async def run() -> None:
        with anyio.CancelScope(shield=True):  # it ends by should_exit, so that replies under way may end too
            await server.serve([listener])

    with unwrapped():
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            try:
                yield Address(host, listener.getsockname()[1])
            finally:
                server.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket: clients may connect from now on, and wait until the loop takes them.

    The protocol is named, because asyncio sets TCP_NODELAY only where it is: without it a reply takes 44 ms, not 1.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return listener
