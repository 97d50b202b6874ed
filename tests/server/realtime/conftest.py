"""A graph with scripted stages behind a real server, and plain WebSocket clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from omniflow.config import ServerConfig
from omniflow.runtime import Runtime
from omniflow.server.app import build_app
from omniflow.server.realtime.sockets import Sockets
from omniflow.server.serve import serve

from .scene import Scene, answering_plan


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig()


@pytest.fixture
async def scene(config: ServerConfig) -> AsyncIterator[Scene]:
    """A server whose graph answers as its caller asks; see `scene.Answerer`."""
    sockets = Sockets()
    async with Runtime(answering_plan()) as runtime:
        app = build_app(runtime, model="scripted", aliases=["nick"], config=config, sockets=sockets)
        async with serve(app, config, port=0) as address:
            yield Scene(runtime, address, sockets)
            await Scene(runtime, address, sockets).settled()
