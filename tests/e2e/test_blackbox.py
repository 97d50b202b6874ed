"""The real server as strangers use it: they leave anywhere, stop anywhere, and read with helpers."""

from __future__ import annotations

import json
import random
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import pydantic

from tests.e2e.conftest import Server
from tests.waiting import HANGS_S

STORY: Any = [{"role": "user", "content": "Tell me a very long story."}]
COUNT: Any = [{"role": "user", "content": "Count from one to five."}]
NUM_CLIENTS = 24


def request(rng: random.Random) -> bytes:
    """A call that takes seconds."""
    text = "This is said again and again. " * 20
    path, body = rng.choice(
        [
            ("chat/completions", {"messages": STORY, "max_tokens": 200}),
            ("chat/completions", {"messages": STORY, "n": 3, "max_tokens": 200}),
            ("chat/completions", {"messages": STORY, "modalities": ["text", "audio"], "max_tokens": 200}),
            ("chat/completions", {"messages": STORY, "response_format": {"type": "json_object"}}),
            ("audio/speech", {"input": text, "response_format": rng.choice(["mp3", "wav", "opus", "pcm"])}),
            ("audio/speech", {"input": text, "stream_format": "sse"}),
            ("audio/speech/batch", {"items": [{"input": text}] * 8}),
        ]
    )
    content = json.dumps({"model": "ming_omni", "stream": rng.random() < 0.5} | body).encode()
    return f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def leave_somewhere(server: Server, seed: int) -> None:
    """Send a request or a part of it, read some of what comes, and go: in order, or with a reset."""
    rng = random.Random(seed)
    sent, address = request(rng), urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.settimeout(rng.uniform(0.01, 1.5))
        connection.sendall(sent[: rng.choice([rng.randint(1, len(sent)), len(sent), len(sent)])])
        with suppress(TimeoutError):
            for _ in range(rng.randint(0, 12)):
                connection.recv(rng.choice([1, 100, 10_000]))
        if rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def in_flight(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=HANGS_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if "in_flight" in line and not line.startswith("#"))


def test_clients_that_leave_anywhere(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: leave_somewhere(server, seed), range(NUM_CLIENTS)))
    server.wait_until("no stage works for anybody", lambda: in_flight(server) == 0, 5.0)
    assert server.client().chat.completions.create(model="ming_omni", messages=COUNT, max_completion_tokens=2)


def test_a_stop_text_cuts_wherever_it_begins(server: Server) -> None:
    client = server.client()
    asked: Any = {"model": "ming_omni", "messages": COUNT, "max_completion_tokens": 16, "temperature": 0}
    full = client.chat.completions.create(**asked).choices[0].message.content or ""
    assert len(full) > 12
    for at in (1, 4, 7):
        stop = full[at : at + 3]
        whole = client.chat.completions.create(**asked, stop=[stop]).choices[0]
        assert (whole.message.content, whole.finish_reason) == (full[: full.index(stop)], "stop")
        pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stop=stop, stream=True)]
        assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
        assert pieces[-1].finish_reason == "stop"


class Place(pydantic.BaseModel):
    kind: Literal["city", "village"]
    is_large: bool
    rank: int | None


def test_the_stream_helper_parses(server: Server) -> None:
    with server.client().chat.completions.stream(
        model="ming_omni", messages=COUNT, response_format=Place, max_completion_tokens=80, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion().choices[0]
    assert {"content.delta", "content.done"} <= kinds
    assert isinstance(answer.message.parsed, Place) and answer.finish_reason == "stop"
