from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from omniflow.config import ServerConfig
from omniflow.server.app import build_app

from .scripted import ScriptedRuntime


@pytest.fixture
def runtime() -> ScriptedRuntime:
    return ScriptedRuntime()


@pytest.fixture
async def client(runtime: ScriptedRuntime) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app without a socket between them."""
    config = ServerConfig(max_body_bytes=300_000)
    app = build_app(runtime, model="tiny", aliases=["tiny-alias"], config=config)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
        yield client
