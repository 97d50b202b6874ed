"""One request each: a chat, a text to say, a clip to write down; pieces as they arrive, with their times."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import msgspec

from omniflow.client.connection import Connection
from omniflow.telemetry import RequestTimes, Sound

SPEECH_HZ = 24000
"""Of `pcm` and `pcm16` in the API."""


class TextPiece(msgspec.Struct, frozen=True):
    """Some more text."""

    text: str


class SoundPiece(msgspec.Struct, frozen=True):
    """Some more sound: 16-bit PCM, mono, `SPEECH_HZ`; a piece may end within a sample."""

    data: bytes


class Turn(msgspec.Struct):
    """What is kept of one request: `usage` as the server told it, `error` the code of what ended it early."""

    times: RequestTimes
    text: str = ""
    usage: Mapping[str, Any] = {}
    ended_s: float = 0.0
    error: str | None = None
    barge_in_s: float | None = None
    """From the first sound of whoever interrupts until the answer was silent."""

    @property
    def seconds(self) -> float:
        """From the request to the end of its answer."""
        return self.ended_s - self.times.started_s

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, as the server counts them; 0 where it does not."""
        return int(self.usage.get("completion_tokens") or self.usage.get("output_tokens") or 0)


def new_turn() -> Turn:
    """A turn that starts now."""
    return Turn(RequestTimes())


async def chat(connection: Connection, body: Mapping[str, Any], turn: Turn) -> AsyncIterator[TextPiece | SoundPiece]:
    """A streamed chat completion; `body` is that of the API, without the fields that make it a stream."""
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async for event in connection.events_of("/chat/completions", json=streamed):
        turn.usage = event.get("usage") or turn.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            audio = delta.get("audio") or {}
            if text := delta.get("content") or audio.get("transcript"):
                turn.times.text_s.append(time.monotonic())
                turn.text += text
                yield TextPiece(text)
            if audio.get("data"):
                yield _heard(base64.b64decode(audio["data"]), turn)
    turn.ended_s = time.monotonic()


async def say(connection: Connection, body: Mapping[str, Any], turn: Turn) -> AsyncIterator[SoundPiece]:
    """A text said aloud, as PCM while it is made; `body` is that of the API, without the format."""
    streamed = {**body, "response_format": "pcm", "stream_format": "audio"}
    async for data in connection.bytes_of("/audio/speech", json=streamed):
        yield _heard(data, turn)
    turn.ended_s = time.monotonic()


async def transcribe(connection: Connection, file: Path, fields: Mapping[str, str]) -> AsyncIterator[str]:
    """What is said in `file`: bit by bit with `stream` among `fields`, else at once in the format asked for."""
    clip = (file.name, await anyio.Path(file).read_bytes())
    content: dict[str, Any] = {"data": dict(fields), "files": {"file": clip}}
    if fields.get("stream") != "true":
        yield (await connection.post("/audio/transcriptions", **content)).decode()
        return
    async for event in connection.events_of("/audio/transcriptions", **content):
        if event.get("type") == "transcript.text.delta":
            yield event["delta"]


def text_of(reply: str) -> str:
    """The text in a transcription's JSON."""
    return str(json.loads(reply)["text"])


def _heard(data: bytes, turn: Turn) -> SoundPiece:
    turn.times.sounds.append(Sound(time.monotonic(), len(data) / 2 / SPEECH_HZ))
    return SoundPiece(data)
