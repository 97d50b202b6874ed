"""A socket for an app: uvicorn inside the caller's task group, without its signal handling."""

from __future__ import annotations

import math
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import msgspec
import uvicorn
from starlette.types import ASGIApp

from omniflow.config import ServerConfig
from omniflow.errors import ConfigError
from omniflow.server.connection import limited
from omniflow.server.realtime.wire import limited_wire
from omniflow.server.scopes import unwrapped

_BACKLOG = 2048


class Address(msgspec.Struct, frozen=True):
    """Where a server can be reached; `port` is the bound one, also where 0 was asked for."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        """The base of all URLs, without a slash at its end."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the caller's: they drain the runtime first

    def cut(self) -> None:
        """Let go of every client at once; what works for them is told."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


@asynccontextmanager
async def serve(
    app: ASGIApp, config: ServerConfig | None = None, *, port: int | None = None, grace_s: int = 5
) -> AsyncIterator[Address]:
    """Serve `app` while the block runs, as `config` says (by default: on port 8000 of 127.0.0.1); `port` overrides it.

    On leaving it, no new connection is taken, replies under way get `grace_s` seconds to end, the rest is cut; where
    the block was cancelled, all are cut at once. To lose none, drain the runtime inside the block: new requests are
    then refused with 503 while old ones end.
    Raises ConfigError where the address cannot be had, or the certificate cannot be used.
    """
    config = config or ServerConfig()
    context = tls_context(config)
    listener = _bind(config.host, config.port if port is None else port)
    server = _Server(_uvicorn_config(app, config, context, grace_s))

    async def run() -> None:
        with anyio.CancelScope(shield=True):  # it ends by should_exit, so that replies under way may end too
            await server.serve([listener])

    with unwrapped():
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            try:
                yield Address(config.host, listener.getsockname()[1], "http" if context is None else "https")
            except anyio.get_cancelled_exc_class():
                server.cut()
                raise
            finally:
                server.should_exit = True


def _uvicorn_config(app: ASGIApp, config: ServerConfig, context: ssl.SSLContext | None, grace_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited(config),
        h11_max_incomplete_event_size=config.max_header_bytes,
        ws=limited_wire(config),
        ws_max_size=config.realtime_message_bytes,
        ws_per_message_deflate=False,  # sound in base64 shrinks by a quarter, at ten times the cost of sending it
        ssl_context_factory=None if context is None else lambda *_: context,
        forwarded_allow_ips=list(config.trusted_proxies),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(config.keep_alive_s),
        timeout_graceful_shutdown=grace_s,
    )


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What TLS is spoken with; None where it is not. Raises ConfigError where certificate or key cannot be used."""
    if not config.ssl_certfile:
        if config.ssl_keyfile:
            raise ConfigError("server.ssl_keyfile needs the certificate, too: set server.ssl_certfile")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # A password, also an empty one: without it, OpenSSL asks for it on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, config.ssl_keyfile_password)
    except OSError as error:  # ssl.SSLError is one
        files = " and ".join(filter(None, [config.ssl_certfile, config.ssl_keyfile]))
        why = "the key does not fit, or its password is wrong" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"cannot use {files} for TLS: {why} ({error})") from error
    return context


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
