"""A server that breaks a spoken turn off, as `omniflow bench serve` meets it."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from websockets.asyncio.server import ServerConnection, serve

from omniflow.client.connection import Server, ServerError
from omniflow.client.realtime import session, spoken_turn

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("ends", ["vad", "manual"])
@pytest.mark.parametrize("code", [1001, 1008, 1011, 0])
async def test_a_socket_that_breaks_off_is_an_error_of_the_server(code: int, ends: Literal["vad", "manual"]) -> None:
    async def broken(socket: ServerConnection) -> None:
        await socket.send(json.dumps({"type": "session.created"}))
        await socket.recv()
        await socket.send(json.dumps({"type": "session.updated"}))
        await socket.recv()
        if code:
            await socket.close(code, "no more")
        else:
            socket.transport.abort()

    async with serve(broken, "127.0.0.1", 0) as server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        with pytest.raises(ServerError):
            async with session(Server(address), "m", ends, 10) as socket:
                await spoken_turn(socket, bytes(48_000), ends, None)
