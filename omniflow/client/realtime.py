"""A spoken turn over /v1/realtime: speech in at the pace at which people speak, the answer's times out."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import anyio
import anyio.abc
import websockets
from websockets.asyncio.client import ClientConnection, connect

from omniflow.client.connection import Server, ServerError
from omniflow.client.turns import SPEECH_HZ, Turn, new_turn
from omniflow.telemetry import Sound

FRAME_S = 0.04
"""What a client sends at once."""
_AUDIO = "response.output_audio.delta"
_TEXTS = ("response.output_audio_transcript.delta", "response.output_text.delta")

Ends = Literal["vad", "manual"]


@asynccontextmanager
async def session(server: Server, model: str, ends: Ends) -> AsyncIterator[ClientConnection]:
    """A session whose turns end where the server hears silence (`vad`), or where the client says so (`manual`)."""
    detection = {"type": "server_vad", "interrupt_response": True} if ends == "vad" else None
    update = {
        "type": "realtime",
        "output_modalities": ["audio"],
        "audio": {"input": {"turn_detection": detection, "format": {"type": "audio/pcm", "rate": SPEECH_HZ}}},
    }
    url = f"{server.websocket_url.rstrip('/')}/realtime?model={model}"
    try:
        async with connect(url, additional_headers=server.headers, max_size=2**24) as socket:
            await _until(socket, "session.created")
            await _send(socket, {"type": "session.update", "session": update})
            await _until(socket, "session.updated")
            yield socket
    except (OSError, websockets.WebSocketException) as error:
        raise ServerError(f"{url} cannot be used: {error}", "realtime") from error


async def spoken_turn(socket: ClientConnection, speech: bytes, ends: Ends, interrupt_after_s: float | None) -> Turn:
    """Say `speech` (PCM as in `SPEECH_HZ`) and hear the answer; times count from the end of the speech.

    With `interrupt_after_s` the speaker says it again once so many seconds of the answer have come, and the turn ends
    when the answer has fallen silent.
    """
    turn = new_turn()
    async with anyio.create_task_group() as tasks:
        if ends == "vad":
            tasks.start_soon(_speak_into_microphone, socket, speech, turn)
        else:
            await _speak(socket, speech, paced=False)
            await _send(socket, {"type": "input_audio_buffer.commit"})
            await _send(socket, {"type": "response.create"})
            turn.times.started_s = time.monotonic()
        error = await _heard(socket, speech, turn, interrupt_after_s, tasks)
        tasks.cancel_scope.cancel()
    if error is not None:  # raised out here, it is no group of one
        raise error
    turn.ended_s = time.monotonic()
    return turn


async def _speak_into_microphone(socket: ClientConnection, speech: bytes, turn: Turn) -> None:
    """At the pace of speech, then silence until the answer is through: a microphone never stops."""
    await _speak(socket, speech, paced=True)
    turn.times.started_s = time.monotonic()
    silence = bytes(round(FRAME_S * SPEECH_HZ) * 2)
    while True:
        await _append(socket, silence)
        await anyio.sleep(FRAME_S)


async def _speak(socket: ClientConnection, speech: bytes, *, paced: bool) -> None:
    frame = round(FRAME_S * SPEECH_HZ) * 2
    began = time.monotonic()
    for number, start in enumerate(range(0, len(speech), frame)):
        await _append(socket, speech[start : start + frame])
        if paced:
            await anyio.sleep(max(0.0, began + (number + 1) * FRAME_S - time.monotonic()))


async def _heard(
    socket: ClientConnection, speech: bytes, turn: Turn, interrupt_after_s: float | None, tasks: anyio.abc.TaskGroup
) -> ServerError | None:
    try:
        await _listen(socket, speech, turn, interrupt_after_s, tasks)
    except ServerError as error:
        return error
    return None


async def _listen(
    socket: ClientConnection, speech: bytes, turn: Turn, interrupt_after_s: float | None, tasks: anyio.abc.TaskGroup
) -> None:
    interrupted_s: float | None = None
    async for event in _events(socket):
        kind = event["type"]
        if kind in _TEXTS:
            turn.times.text_s.append(time.monotonic())
            turn.text += event["delta"]
        elif kind == _AUDIO:
            sound = len(base64.b64decode(event["delta"])) / 2 / SPEECH_HZ
            turn.times.sounds.append(Sound(time.monotonic(), sound))
            if interrupt_after_s is not None and interrupted_s is None and turn.times.audio_s >= interrupt_after_s:
                interrupted_s = time.monotonic()
                tasks.start_soon(partial(_speak, socket, speech, paced=True))
        elif kind == "response.done":
            response = event["response"]
            turn.usage = response.get("usage") or {}
            if interrupted_s is not None:
                turn.barge_in_s = time.monotonic() - interrupted_s
            elif response["status"] != "completed":
                details = response.get("status_details") or {}
                error = details.get("error") or {}
                turn.error = str(error.get("code") or details.get("reason") or response["status"])
            return


async def _append(socket: ClientConnection, pcm: bytes) -> None:
    await _send(socket, {"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()})


async def _send(socket: ClientConnection, event: dict[str, Any]) -> None:
    await socket.send(json.dumps(event))


async def _events(socket: ClientConnection) -> AsyncIterator[dict[str, Any]]:
    async for data in socket:
        event: dict[str, Any] = json.loads(data)
        if event["type"] == "error":
            error = event["error"]
            raise ServerError(f"the server says: {error.get('message')}", str(error.get("code") or "error"))
        yield event
    raise ServerError("the server closed the session", "closed")


async def _until(socket: ClientConnection, kind: str) -> None:
    async for event in _events(socket):
        if event["type"] == kind:
            return
