"""Clients that leave at any point, in any manner: what works for them ends, and nothing of it is left."""

from __future__ import annotations

import json
import random
import struct
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

import anyio
import anyio.abc
import httpx
import pytest

from omniflow.config import RuntimeConfig
from omniflow.runtime import Runtime
from omniflow.server.app import build_app
from omniflow.server.serve import Address, serve

from ..waiting import HANGS_S
from .scripted import parrot_plan

pytestmark = pytest.mark.anyio


def request(rng: random.Random) -> bytes:
    """Any call, half of which would never end by themselves."""
    words = " ".join(rng.choice(["one", "two", "three"]) for _ in range(rng.randint(1, 200)))
    words += " wait" * rng.randint(0, 1)
    body: dict[str, Any] = {"model": "parrot", "stream": rng.random() < 0.5}
    if rng.random() < 0.7:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": words}], "n": rng.choice([1, 1, 3])}
        if rng.random() < 0.5:
            body |= {"modalities": ["text", "audio"], "audio": {"voice": "a"}}
    else:
        path = "/v1/audio/speech"
        body |= {"input": words, "response_format": rng.choice(["wav", "pcm", "mp3"])}
    content = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


async def leave_somewhere(address: Address, rng: random.Random) -> None:
    """Send a request or a part of it, read a part of what comes, and go: in order, or with a reset."""
    sent = request(rng)
    async with await anyio.connect_tcp(address.host, address.port) as stream:
        await anyio.sleep(rng.uniform(0, 0.02))
        await stream.send(sent[: rng.choice([rng.randint(1, len(sent)), len(sent), len(sent)])])
        with anyio.move_on_after(rng.uniform(0, 0.08)):
            for _ in range(rng.randint(0, 4)):
                await stream.receive(rng.choice([1, 100, 10_000]))
        if rng.random() < 0.5:
            reset = struct.pack("ii", 1, 0)
            stream.extra(anyio.abc.SocketAttribute.raw_socket).setsockopt(SOL_SOCKET, SO_LINGER, reset)


async def in_flight(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith("omniflow_requests_in_flight ")).split()[1])


async def leave_and_look(seed: int, num_clients: int) -> None:
    rng = random.Random(seed)
    config = RuntimeConfig(max_in_flight=24, max_queued=1000, max_wait_share=1e9)
    async with Runtime(parrot_plan(), config) as runtime:
        app = build_app(runtime, model="parrot")
        async with serve(app, port=0) as address, httpx.AsyncClient(base_url=address.url, timeout=HANGS_S) as client:
            async with anyio.create_task_group() as group:
                for _ in range(num_clients):
                    group.start_soon(leave_somewhere, address, random.Random(rng.random()))
            with anyio.fail_after(HANGS_S):
                while await in_flight(client):
                    await anyio.sleep(0.01)
            body = {"model": "parrot", "messages": [{"role": "user", "content": "still there"}]}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == "still there "
        assert runtime._admission.num_taken == runtime._admission.num_queued == 0
        assert [host.num_open for host, _ in runtime._inline.values()] == [0] * len(runtime._inline)


@pytest.mark.parametrize("seed", range(3))
async def test_who_leaves_leaves_nothing(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    await leave_and_look(seed, 40)
    assert [record.message for record in caplog.records if record.exc_info or record.levelname == "ERROR"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_many_who_leave_leave_nothing() -> None:
    for seed in range(100, 160):
        await leave_and_look(seed, 60)
