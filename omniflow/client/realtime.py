"""A spoken turn over /v1/realtime: speech in at the pace at which people speak, the answer's times out."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal
from urllib.parse import urlencode

import anyio
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
async def session(server: Server, model: str, ends: Ends, max_tokens: int) -> AsyncIterator[ClientConnection]:
    """A session whose turns end where the server hears silence (`vad`), or where the client says so (`manual`)."""
    detection = {"type": "server_vad", "interrupt_response": True} if ends == "vad" else None
    update = {
        "type": "realtime",
        "output_modalities": ["audio"],
        "max_output_tokens": max_tokens,
        "audio": {"input": {"turn_detection": detection, "format": {"type": "audio/pcm", "rate": SPEECH_HZ}}},
    }
    url = f"{server.websocket_url.rstrip('/')}/realtime?{urlencode({'model': model})}"
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

    With `interrupt_after_s` the speaker says it again once so many seconds of the answer have come (`manual`: cancels
    it), and the turn ends when the answer has fallen silent.
    """
    turn = new_turn()
    speaker = _Speaker(socket, speech, ends)
    error: ServerError | None = None
    try:
        async with anyio.create_task_group() as tasks:
            if ends == "vad":
                tasks.start_soon(speaker.speak_into_microphone, turn)
            else:
                await _speak(socket, speech, paced=False)
                await _send(socket, {"type": "input_audio_buffer.commit"})
                await _send(socket, {"type": "response.create"})
                turn.times.started_s = time.monotonic()
            error = await _heard(socket, turn, interrupt_after_s, speaker)
            tasks.cancel_scope.cancel()
    except* (OSError, websockets.WebSocketException) as lost:
        error = error or ServerError(f"the server broke the session off: {lost.exceptions[0]}", "broken_off")
    if error is not None:  # raised out here, it is no group of one
        raise error
    turn.ended_s = time.monotonic()
    return turn


class _Speaker:
    """Who talks to the server, and may interrupt it."""

    interrupted_s: float | None = None
    """When the interruption began."""

    def __init__(self, socket: ClientConnection, speech: bytes, ends: Ends) -> None:
        self._socket = socket
        self._speech = speech
        self._ends = ends
        self._wanted = False

    async def speak_into_microphone(self, turn: Turn) -> None:
        """At the pace of speech, then silence until the answer is through: a microphone never stops."""
        await _speak(self._socket, self._speech, paced=True)
        turn.times.started_s = time.monotonic()
        silence = bytes(round(FRAME_S * SPEECH_HZ) * 2)
        while True:
            if self._wanted and self.interrupted_s is None:
                self.interrupted_s = time.monotonic()
                await _speak(self._socket, self._speech, paced=True)
            await _append(self._socket, silence)
            await anyio.sleep(FRAME_S)

    async def interrupt(self) -> None:
        """Speak again instead of the silence; without a microphone, cancel the answer. The first call counts."""
        if self._ends == "manual" and not self._wanted:
            self.interrupted_s = time.monotonic()
            await _send(self._socket, {"type": "response.cancel"})
        self._wanted = True


async def _speak(socket: ClientConnection, speech: bytes, *, paced: bool) -> None:
    frame = round(FRAME_S * SPEECH_HZ) * 2
    began = time.monotonic()
    for number, start in enumerate(range(0, len(speech), frame)):
        await _append(socket, speech[start : start + frame])
        if paced:
            await anyio.sleep(max(0.0, began + (number + 1) * FRAME_S - time.monotonic()))


async def _heard(
    socket: ClientConnection, turn: Turn, interrupt_after_s: float | None, speaker: _Speaker
) -> ServerError | None:
    try:
        await _listen(socket, turn, interrupt_after_s, speaker)
    except ServerError as error:
        return error
    return None


async def _listen(socket: ClientConnection, turn: Turn, interrupt_after_s: float | None, speaker: _Speaker) -> None:
    async for event in _events(socket):
        kind = event["type"]
        if kind in _TEXTS:
            turn.times.text_s.append(time.monotonic())
            turn.text += event["delta"]
        elif kind == _AUDIO:
            sound = len(base64.b64decode(event["delta"])) / 2 / SPEECH_HZ
            turn.times.sounds.append(Sound(time.monotonic(), sound))
            if interrupt_after_s is not None and turn.times.audio_s >= interrupt_after_s:
                await speaker.interrupt()
        elif kind == "response.done":
            response = event["response"]
            turn.usage = response.get("usage") or {}
            if speaker.interrupted_s is not None and response["status"] == "cancelled":
                turn.barge_in_s = time.monotonic() - speaker.interrupted_s
            else:
                turn.error = _failure(response)
            return


def _failure(response: dict[str, Any]) -> str | None:
    """Why an answer is not what was asked for; one that is as long as allowed is."""
    details = response.get("status_details") or {}
    if response["status"] == "completed" or details.get("reason") == "max_output_tokens":
        return None
    return str((details.get("error") or {}).get("code") or details.get("reason") or response["status"])


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
