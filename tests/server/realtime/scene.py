"""A graph whose stages do what they are told, and clients that say it over real sockets."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from omniflow.actor import Actor, Context, Emit, Stream
from omniflow.errors import UnavailableError
from omniflow.graph import Graph
from omniflow.media import AudioChunk, AudioPart, Chat, Generated, TextDelta, TextPart, ToolCallDelta, Transcript
from omniflow.planner import Cluster, Plan, plan
from omniflow.runtime import Runtime
from omniflow.server.realtime.sockets import Sockets
from omniflow.server.serve import Address

from ...waiting import HANGS_S
from .machine import Reader

MANUAL = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
TEXT = {"output_modalities": ["text"]}


class Answerer(Actor):
    """Says the last thing that it was told, word by word. "wait": for ever. "fail": fails. "call": calls the first tool
    that it was given. "long N": N words of 0.1 s. Sound: tells how long it is, and
    where that is more than 10 s, waits for ever.
    """

    async def run(self, chat: Chat, text: Emit[TextDelta], tool_calls: Emit[ToolCallDelta], ctx: Context) -> Generated:
        part = chat.messages[-1].parts[-1]
        said = part.text if isinstance(part, TextPart) else "nothing"
        if isinstance(part, AudioPart):
            seconds = (len(part.data) - 44) / 32000
            said = f"you spoke for {seconds:.1f} s" + " wait" * (seconds > 10)
        words = said.split()
        if words[:1] == ["long"]:
            words = ["word"] * int(words[1])
        for word in words:
            if word == "fail":
                raise UnavailableError("it fails when told so", stage="answer")
            if word == "call" and ctx.options.tools:
                await tool_calls.send(ToolCallDelta(0, "", "call_1", ctx.options.tools[0].name))
                await tool_calls.send(ToolCallDelta(0, '{"city": "Oslo"}'))
                break
            await text.send(TextDelta(word + " "))
            if word == "wait":
                await anyio.sleep_forever()
        return Generated("stop", 11, len(words))


class Speaker(Actor):
    """0.1 s of sound for each delta."""

    async def run(self, texts: Stream[TextDelta], audio: Emit[AudioChunk]) -> None:
        async for _ in texts:
            await audio.send(AudioChunk(np.full(2400, 0.25, np.float32), 24000))


class Writer(Actor):
    """Writes how long it heard, and what language it was told."""

    async def run(self, audio: Stream[AudioChunk], transcript: Emit[Transcript], ctx: Context) -> None:
        seconds = 0.0
        async for chunk in audio:
            seconds += chunk.duration_s
        await transcript.send(Transcript(f"{seconds:.1f} s", 0.0, seconds, ctx.options.language or "en"))
        await transcript.send(Transcript("of speech.", 0.0, seconds, "en"))


def answering_plan() -> Plan:
    """All of it in the process of the runtime."""
    graph = Graph("scripted")
    answer, speak, write = graph.stage("answer", Answerer), graph.stage("speak", Speaker), graph.stage("write", Writer)
    graph.stream(answer["text"], speak)
    graph.input(chat=answer, transcription=write)
    graph.output(
        text=answer["text"], tool_calls=answer["tool_calls"], usage=answer["result"], audio=speak, transcript=write
    )
    return plan(graph.spec(), Cluster("test", cpu_cores=2, memory_bytes=2**30, single_process=True))


class Client:
    """A WebSocket client that checks the order of all it reads."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.reader = Reader()
        self.events: list[dict[str, Any]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def next(self) -> dict[str, Any]:
        with anyio.fail_after(HANGS_S):
            event: dict[str, Any] = json.loads(await self.socket.recv())
        self.reader.read(event)
        self.events.append(event)
        return event

    async def until(self, *kinds: str) -> list[dict[str, Any]]:
        """All events up to the next of one of `kinds`."""
        read = [await self.next()]
        while read[-1]["type"] not in kinds:
            read.append(await self.next())
        return read

    async def update(self, **session: Any) -> dict[str, Any]:
        await self.send("session.update", session=session)
        return (await self.until("session.updated", "error"))[-1]

    async def ask(self, text: str, **response: Any) -> None:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        await self.send("conversation.item.create", item=item)
        await self.send("response.create", response=response)

    async def turn(self, text: str = "hello there") -> dict[str, Any]:
        """A whole turn; its response."""
        await self.ask(text)
        response: dict[str, Any] = (await self.until("response.done"))[-1]["response"]
        return response

    async def say(self, samples: np.ndarray, ms: int = 100) -> None:
        """Sound at 24 kHz, in pieces, as fast as they are taken."""
        data = (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
        for start in range(0, len(data), 48 * ms):
            audio = base64.b64encode(data[start : start + 48 * ms]).decode()
            await self.send("input_audio_buffer.append", audio=audio)


class Scene:
    """A server and what tests ask about it."""

    def __init__(self, runtime: Runtime, address: Address, sockets: Sockets) -> None:
        self.runtime = runtime
        self.address = address
        self.sockets = sockets

    def url(self, query: str = "model=scripted") -> str:
        return f"ws://{self.address.host}:{self.address.port}/v1/realtime?{query}"

    @asynccontextmanager
    async def client(self, query: str = "model=scripted", **options: Any) -> AsyncIterator[Client]:
        async with connect(self.url(query), **options) as socket:
            client = Client(socket)
            await client.until("session.created", "error")
            yield client

    async def settled(self) -> None:
        """Nothing of any session is left."""
        with anyio.fail_after(HANGS_S):
            while self.sockets.num_open or self.runtime.status().in_flight:
                await anyio.sleep(0.005)

    async def metrics(self) -> str:
        async with httpx.AsyncClient(timeout=HANGS_S) as client:
            return (await client.get(f"{self.address.url}/metrics")).text
