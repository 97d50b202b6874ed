"""Several choices of one request in a real runtime: their places, their ends, and what a client that leaves leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from omniflow.config import RuntimeConfig
from omniflow.runtime import Runtime
from omniflow.server.app import build_app
from omniflow.server.serve import serve

from ..waiting import HANGS_S
from .scripted import parrot_plan

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def served(**config: Any) -> AsyncIterator[tuple[Runtime, httpx.AsyncClient]]:
    async with (
        Runtime(parrot_plan(), RuntimeConfig(**config)) as runtime,
        serve(build_app(runtime, model="parrot"), port=0) as address,
        httpx.AsyncClient(base_url=address.url, timeout=HANGS_S) as client,
    ):
        yield runtime, client


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "parrot", "messages": [{"role": "user", "content": text}], **more}


async def until(holds: Any) -> None:
    with anyio.fail_after(HANGS_S):
        while not holds():
            await anyio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
async def test_more_choices_than_places(stream: bool) -> None:
    async with served(max_in_flight=2) as (runtime, client):
        reply = await client.post("/v1/chat/completions", json=body("one two", n=7, stream=stream))
        assert reply.status_code == 200
        if stream:
            *frames, done = reply.text.removesuffix("\n\n").split("\n\n")
            chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
            texts = [""] * 7
            for choice in (chunk["choices"][0] for chunk in chunks):
                texts[choice["index"]] += choice["delta"].get("content", "")
            assert texts == ["one two "] * 7 and done == "data: [DONE]"
        else:
            assert [each["message"]["content"] for each in reply.json()["choices"]] == ["one two "] * 7
            assert reply.json()["usage"]["completion_tokens"] == 14 and reply.json()["usage"]["prompt_tokens"] == 2
        assert runtime.status().in_flight == 0


async def test_many_choices_stand_in_the_queue_as_one() -> None:
    """Of a request for 8 that finds no place, one waits, so that whoever comes next is second, not ninth."""
    async with (
        served(max_in_flight=1, max_queued=2, max_wait_share=1e6) as (runtime, client),
        anyio.create_task_group() as group,
    ):
        holding = client.stream("POST", "/v1/chat/completions", json=body("wait", stream=True))
        async with holding as held:
            pieces = held.aiter_bytes()  # the reply is closed with its iterator
            await anext(pieces)
            group.start_soon(lambda: client.post("/v1/chat/completions", json=body("one", n=8)))
            await until(lambda: runtime.status().queued == 1)
            group.start_soon(lambda: client.post("/v1/chat/completions", json=body("two")))
            await until(lambda: runtime.status().queued == 2)
            full = await client.post("/v1/chat/completions", json=body("three"))
            assert full.status_code == 429
        await until(lambda: runtime.status().in_flight == runtime.status().queued == 0)
        assert (await client.post("/v1/chat/completions", json=body("four", n=3))).status_code == 200


async def test_a_client_that_leaves_ends_all_its_choices() -> None:
    async with served(max_in_flight=3) as (runtime, client):
        asking = client.stream("POST", "/v1/chat/completions", json=body("one wait", n=5, stream=True))
        async with asking as reply:
            pieces = reply.aiter_bytes()
            await anext(pieces)
            await until(lambda: runtime.status().in_flight == 3)
        await until(lambda: runtime.status().in_flight == runtime.status().queued == 0)


async def test_one_deadline_for_all() -> None:
    async with served(max_in_flight=8) as (runtime, client):
        late = await client.post(
            "/v1/chat/completions", json=body("one wait", n=3), headers={"x-request-timeout": "0.2"}
        )
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
        await until(lambda: runtime.status().in_flight == 0)
