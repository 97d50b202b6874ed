"""What HTTP costs: a request over a socket beside the same one by `Runtime.submit`, with stages that do nothing.

    python -m bench.http_cost [--json FILE] [--rounds N]

The client is a process of its own that sends prepared bytes and looks for the end of the reply, so that what it costs
itself is small. Rounds of requests by `submit` and over HTTP alternate. `floor` is an ASGI application that answers
any request with 200 bytes at once, behind the same server: the socket, the parser, the loop.
Prints one JSON object a case, in µs: the median of the best round, because others who use the machine can only add to
it, the 95th percentile of all, `extra_us` (HTTP less `submit`), and for streams the extra of each item. The last case
is none: a client leaves amid a reply, and `quiet_us` later nothing of it is under way.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import numpy as np
from anyio.streams.buffered import BufferedByteReceiveStream

from bench.loops import loops
from bench.workload import percentile
from omniflow.actor import Actor, Emit, Stream
from omniflow.graph import Graph
from omniflow.media import AudioChunk, Chat, ChatMessage, Generated, TextDelta, TextPart
from omniflow.planner import Cluster, plan
from omniflow.runtime import Runtime
from omniflow.server.app import build_app
from omniflow.server.serve import serve

PER_ROUND, WARM = 20, 40


class Count(Actor):
    """Answers `n` with n tokens, as fast as they are taken."""

    async def run(self, chat: Chat, text: Emit[TextDelta]) -> Generated:
        (part,) = chat.messages[-1].parts
        assert isinstance(part, TextPart)
        for number in range(int(part.text)):
            await text.send(TextDelta(f" {number}"))
        return Generated("stop", 1, int(part.text))


class Hum(Actor):
    """A chunk of 80 ms for each character."""

    chunk = AudioChunk(np.zeros(1920, np.float32), 24000)

    async def run(self, texts: Stream[TextDelta], audio: Emit[AudioChunk]) -> None:
        async for delta in texts:
            for _ in delta.text:
                await audio.send(self.chunk)


def graph() -> Graph:
    found = Graph("nothing")
    count, hum = found.stage("count", Count), found.stage("hum", Hum)
    found.stream(count["text"], hum)
    found.input(chat=count, speech=hum)
    found.output(text=count["text"], usage=count["result"], audio=hum)
    return found


class Case(NamedTuple):
    """`num_items`: pieces of a streamed reply, 1 for a whole one."""

    name: str
    path: str
    body: dict[str, Any]
    end: str
    num_items: int = 1


def chat(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "nothing", "messages": [{"role": "user", "content": str(tokens)}], **more}


WHOLE, CHUNKED, CLOSED = "length", "chunks", "0\r\n\r\n"
CASES = (
    Case("floor", "/floor", {}, WHOLE),
    Case("chat whole, 8 tokens", "/v1/chat/completions", chat(8), WHOLE),
    Case("chat stream, 1 token", "/v1/chat/completions", chat(1, stream=True), CHUNKED),
    Case("chat stream, 257 tokens", "/v1/chat/completions", chat(257, stream=True), CHUNKED, 257),
    Case(
        "speech wav, 0.8 s",
        "/v1/audio/speech",
        speech := {"model": "nothing", "input": "a" * 10, "response_format": "wav"},
        WHOLE,
    ),
    Case("speech pcm stream, 80 ms", "/v1/audio/speech", speech | {"input": "a", "response_format": "pcm"}, CHUNKED),
    Case(
        "speech pcm stream, 8 s",
        "/v1/audio/speech",
        speech | {"input": "a" * 100, "response_format": "pcm"},
        CHUNKED,
        100,
    ),
)


# -- by submit ---------------------------------------------------------------------------------------------------------


async def by_submit(runtime: Runtime, case: Case) -> None:
    if case.path == "/floor":
        return
    if "messages" in case.body:
        text = case.body["messages"][0]["content"]
        chat = Chat((ChatMessage("user", (TextPart(text),)),))
        reply = await runtime.submit("chat", chat, outputs={"text", "usage"})
    else:
        reply = await runtime.submit("speech", [TextDelta(case.body["input"])], outputs={"audio"})
    async with reply:
        async for _ in reply:
            pass


# -- over HTTP: the process that calls ---------------------------------------------------------------------------------


def client(port: int) -> None:
    """For each line on stdin, an index of CASES and a count: so many requests, and a line with their times in ns."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for line in sys.stdin:
        index, count = map(int, line.split())
        case = CASES[index]
        content = json.dumps(case.body).encode()
        head = f"POST {case.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
        times = [one_request(connection, request, case.end) for _ in range(count)]
        print(json.dumps(times), flush=True)


def one_request(connection: socket.socket, request: bytes, end: str) -> int:
    began = time.monotonic_ns()
    connection.sendall(request)
    reply = connection.recv(2**20)
    while b"\r\n\r\n" not in reply:
        reply += connection.recv(2**20)
    head, _, body = reply.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise AssertionError(reply)
    if end == CHUNKED:
        while not body.endswith(b"\r\n0\r\n\r\n"):
            body = body[-8:] + connection.recv(2**20)
    else:
        left = int(head.lower().partition(b"content-length:")[2].split()[0]) - len(body)
        while left:
            left -= len(connection.recv(2**20))
    return time.monotonic_ns() - began


@asynccontextmanager
async def caller(port: int) -> AsyncIterator[Callable[[int, int], Awaitable[list[float]]]]:
    command = [sys.executable, "-m", "bench.http_cost", "--client", str(port)]
    async with await anyio.open_process(command, stderr=None) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, BufferedByteReceiveStream(process.stdout)

        async def call(index: int, count: int) -> list[float]:
            await stdin.send(f"{index} {count}\n".encode())
            return list(json.loads(await stdout.receive_until(b"\n", 2**20)))

        yield call
        await stdin.aclose()


# -- both --------------------------------------------------------------------------------------------------------------


async def measure(loop: str, rounds: int) -> list[dict[str, Any]]:
    one_process = Cluster("bench", 2, 0, single_process=True)
    found = []
    async with Runtime(plan(graph().spec(), one_process)) as runtime:
        app = build_app(runtime, model="nothing")

        async def with_floor(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] != "/floor":
                await app(scope, receive, send)
                return
            while (await receive()).get("more_body"):
                pass
            headers = [(b"content-type", b"application/json"), (b"content-length", b"200")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b" " * 200})

        async with serve(with_floor, port=0) as address, caller(address.port) as call:
            for index, case in enumerate(CASES):
                found.append({"loop": loop} | await one_case(runtime, case, partial(call, index), rounds))
                print(json.dumps(found[-1]), flush=True)
            found.append({"loop": loop} | await left(runtime, address.port))
            print(json.dumps(found[-1]), flush=True)
    return found


async def left(runtime: Runtime, port: int) -> dict[str, Any]:
    """From the moment at which a client leaves in the middle of an endless reply until nothing of it is under way."""
    times: list[float] = []
    content = json.dumps(chat(10**9, stream=True)).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    for _ in range(PER_ROUND):
        async with await anyio.connect_tcp("127.0.0.1", port) as connection:
            await connection.send(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            await connection.receive()
        began = time.monotonic_ns()
        while runtime.status().in_flight:
            await anyio.lowlevel.checkpoint()
        times.append(time.monotonic_ns() - began)
    return {"case": "a client leaves", "quiet_us": round(percentile(times, 0.5) / 1e3, 1), "most_us": max(times) / 1e3}


async def one_case(
    runtime: Runtime, case: Case, call: Callable[[int], Awaitable[list[float]]], rounds: int
) -> dict[str, Any]:
    submitted: list[list[float]] = []
    called: list[list[float]] = []
    await call(WARM)
    for _ in range(rounds):
        submitted.append([await timed(runtime, case) for _ in range(PER_ROUND)])
        called.append(await call(PER_ROUND))
    submit_us, http_us = best(submitted), best(called)
    return {
        "case": case.name,
        "submit_us": round(submit_us, 1),
        "http_us": round(http_us, 1),
        "http_p95_us": round(percentile([each for times in called for each in times], 0.95) / 1e3, 1),
        "extra_us": round(http_us - submit_us, 1),
        **({"extra_each_us": round((http_us - submit_us) / case.num_items, 2)} if case.num_items > 1 else {}),
    }


async def timed(runtime: Runtime, case: Case) -> float:
    began = time.monotonic_ns()
    await by_submit(runtime, case)
    return time.monotonic_ns() - began


def best(rounds: list[list[float]]) -> float:
    """The lowest of the medians of the rounds, in µs."""
    return min(percentile(times, 0.5) for times in rounds) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--client", type=int)
    arguments = parser.parse_args()
    if arguments.client is not None:
        client(arguments.client)
        return
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a client that has just left
    before = os.getloadavg()
    rows = []
    for name, factory in loops().items():
        run = partial(measure, "asyncio" if name else "uvloop", arguments.rounds)
        rows += anyio.run(run, backend_options={"loop_factory": factory})
    if arguments.json:
        found = {"load": [before[0], os.getloadavg()[0]], "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
