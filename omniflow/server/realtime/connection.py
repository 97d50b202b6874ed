"""One session on its socket: a loop that reads, a loop that writes, and a task for each thing that the graph works on.

All of them are in one scope: whatever ends the session (the client, a limit, a drain) ends them, and with them what the
graph does for it. A client that does not read holds up its own responses, by the room in its outbox and the credits
behind it, and nobody else; after `server.send_s` it is cut off.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

import anyio
import anyio.abc
import msgspec
import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from omniflow.errors import OmniflowError, RequestError, UnavailableError
from omniflow.media import AudioChunk, Transcript
from omniflow.server.realtime.audio import HEARD_HZ, Pcm16
from omniflow.server.realtime.ears import Ears
from omniflow.server.realtime.hearing import Listen, Transcribe
from omniflow.server.realtime.outbox import Outbox
from omniflow.server.realtime.protocol import Protocol
from omniflow.server.realtime.responses import Respond, Stop, error_detail
from omniflow.server.realtime.server_events import ErrorEvent
from omniflow.server.scopes import unwrapped
from omniflow.server.service import Service
from omniflow.telemetry import OK, Metrics, RequestTimes

GOING_AWAY = 1001
"""Close code that clients take for "connect again"."""
REFUSED = 1008
_BROKEN = 1011
_CLOSE_S = 1.0


class Farewell(NamedTuple):
    """How a session ends from our side."""

    code: int
    reason: str
    patient: bool = False
    """True where a response under way may end first."""


class Connection:
    """Runs `protocol` on `socket`, which has been accepted."""

    def __init__(self, socket: WebSocket, service: Service, metrics: Metrics, protocol: Protocol, ears: Ears) -> None:
        self._socket = socket
        self._runtime = service.runtime
        self._config = service.config
        self._metrics = metrics
        self._protocol = protocol
        self._ears = ears
        self._outbox = Outbox()
        self._running: dict[str, anyio.CancelScope] = {}
        self._farewell: Farewell | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._ends_s = time.monotonic() + self._config.realtime_session_s
        self._idle_from_s = time.monotonic()

    def leave(self) -> None:
        """The server drains: end once no response runs."""
        self._protocol.leave()
        self._part(Farewell(GOING_AWAY, "the server is about to stop", patient=True))

    async def run(self) -> Farewell | None:
        """Returns when the session is over: how we ended it, or None where the client did."""
        with unwrapped():
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._write)
                self._flush()
                if self._protocol.session.audio.input.turn_detection is not None:
                    self._tasks.start_soon(self._warm)
                await self._read()
                self._tasks.cancel_scope.cancel()
        if self._farewell is not None:
            with anyio.move_on_after(_CLOSE_S):
                await self._close(self._farewell)
        return self._farewell

    async def _close(self, farewell: Farewell) -> None:
        try:
            await self._socket.close(farewell.code, farewell.reason)
        except (WebSocketDisconnect, RuntimeError):  # Starlette raises the latter where the client has closed, too
            return

    def _part(self, farewell: Farewell) -> None:
        """End the session, once all is sent."""
        if self._farewell is None or (self._farewell.patient and not farewell.patient):
            self._farewell = farewell
        self._outbox.wake()

    # -- the loop that writes, and keeps the time ------------------------------------------------------------------

    async def _write(self) -> None:
        while not self._done():
            # Here, and not around each read: a timer for every message would be a third of what it costs to take one.
            with anyio.move_on_after(max(0.0, self._next_s() - time.monotonic())):
                await self._outbox.filled()
            self._on_time()
            while not self._outbox.empty:
                if not await self._send(self._outbox.take()):
                    self._stop()
                    return
        self._stop()

    def _next_s(self) -> float:
        """When time may bring something."""
        due_s = self._protocol.due_s
        until_s = min(self._ends_s, self._idle_from_s + self._config.realtime_idle_s)
        return until_s if due_s is None else min(until_s, due_s)

    def _on_time(self) -> None:
        """What time brings by now."""
        now_s = time.monotonic()
        if self._farewell is not None and not self._farewell.patient:
            return
        if now_s >= self._ends_s:
            self._expire("session_expired", f"the session has lasted {self._config.realtime_session_s:g} s")
        elif now_s >= self._idle_from_s + self._config.realtime_idle_s:
            if self._protocol.idle:
                self._expire("session_idle", f"nothing came for {self._config.realtime_idle_s:g} s")
            self._idle_from_s = now_s
        due_s = self._protocol.due_s
        if due_s is not None and now_s >= due_s:
            self._protocol.tick()
            self._flush()

    def _expire(self, code: str, message: str) -> None:
        error = error_detail(UnavailableError(f"{message}; connect again"), None)
        self._outbox.put([ErrorEvent(error=msgspec.structs.replace(error, code=code))])
        self._part(Farewell(GOING_AWAY, message))

    async def _send(self, message: str) -> bool:
        """False where the client has gone, or takes nothing."""
        with anyio.move_on_after(self._config.send_s) as scope:
            try:
                await self._socket.send_text(message)
            except WebSocketDisconnect:
                return False
        if scope.cancelled_caught:
            self._farewell = Farewell(REFUSED, "the client does not read what it is sent")
        return not scope.cancelled_caught

    def _done(self) -> bool:
        farewell = self._farewell
        return farewell is not None and self._outbox.empty and (self._protocol.idle or not farewell.patient)

    def _stop(self) -> None:
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    # -- the loop that reads ---------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while (message := await self._next()) is not None:
            self._protocol.receive(message)
            await self._judge()
            self._flush()
            await self._outbox.room_for_replies()

    async def _next(self) -> str | bytes | None:
        """The client's next message; None where it has gone."""
        received = await self._socket.receive()
        if received["type"] == "websocket.disconnect":
            return None
        self._idle_from_s = time.monotonic()
        text: str | None = received.get("text")
        return text if text is not None else received.get("bytes") or b""

    async def _warm(self) -> None:
        with contextlib.suppress(OmniflowError):  # said where it matters, once sound comes
            await self._ears.warm()

    async def _judge(self) -> None:
        """Find the turns in what has come."""
        frames = self._protocol.frames()
        if not len(frames):
            return
        try:
            self._protocol.heard(await self._ears.listen(frames))
        except OmniflowError as error:
            detail = error_detail(UnavailableError(f"turns cannot be detected: {error}"), None)
            self._outbox.put([ErrorEvent(error=detail)])
            self._part(Farewell(_BROKEN, "turns cannot be detected"))
            await anyio.sleep_forever()  # the loop that writes ends this, once that is sent

    # -- what the protocol asks for --------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Send what there is to send, start what there is to do."""
        events, work = self._protocol.take()
        self._outbox.put(events)
        assert self._tasks is not None
        for task in work:
            match task:
                case Respond(response_id=id):
                    self._running[id] = scope = anyio.CancelScope()
                    self._tasks.start_soon(self._respond, task, scope)
                case Stop(response_id=id):
                    if id in self._running:
                        self._running[id].cancel()
                case Transcribe():
                    self._tasks.start_soon(self._transcribe, task)
                case Listen():
                    self._tasks.start_soon(self._listen, task)

    async def _respond(self, task: Respond, scope: anyio.CancelScope) -> None:
        times = RequestTimes()
        outcome = "cancelled"
        try:
            with scope:
                outcome = await self._ask(task, times)
        finally:
            del self._running[task.response_id]
            self._metrics.request_ended("realtime", outcome, times)
        self._flush()
        self._outbox.wake()  # it may have been the last that a drain waited for

    async def _ask(self, task: Respond, times: RequestTimes) -> str:
        protocol = self._protocol
        try:
            reply = await self._runtime.submit(
                "chat", task.chat, outputs=task.outputs, options=task.options, request_id=task.response_id
            )
            async with reply:
                async for _, value in reply:
                    times.stamp(value)
                    protocol.output(task.response_id, value)
                    self._flush()
                    await self._outbox.room_for_responses()
        except RequestError as error:
            protocol.failed(task.response_id, error)
            return error.code
        protocol.ended(task.response_id)
        return OK

    async def _transcribe(self, task: Transcribe) -> None:
        protocol = self._protocol
        texts: list[str] = []
        try:
            async with aclosing(self._words(task)) as words:
                async for text in words:
                    protocol.wrote(task.item_id, f" {text}" if texts else text)
                    texts.append(text)
                    self._flush()
                    await self._outbox.room_for_responses()
        except RequestError as error:
            protocol.not_written(task.item_id, error)
        else:
            protocol.written(task.item_id, " ".join(texts), round(len(task.samples) / HEARD_HZ, 3))
        self._flush()

    async def _listen(self, task: Listen) -> None:
        said: str | None = None
        with contextlib.suppress(RequestError):  # nobody can tell: the pause lasts as long as where nobody was asked
            async with aclosing(self._words(task)) as words:
                said = " ".join([text async for text in words])
        self._protocol.understood(task.pause, said)

    async def _words(self, task: Transcribe | Listen) -> AsyncGenerator[str]:
        reply = await self._runtime.submit(
            "transcription", _chunks(task.samples), outputs={"transcript"}, options=task.options
        )
        async with reply:
            async for _, value in reply:
                if isinstance(value, Transcript) and value.text:
                    yield value.text


def _chunks(samples: Pcm16) -> list[AudioChunk]:
    """A second each."""
    floats = samples.astype(np.float32) / np.float32(32768)
    return [AudioChunk(floats[start : start + HEARD_HZ], HEARD_HZ) for start in range(0, len(floats), HEARD_HZ)]
