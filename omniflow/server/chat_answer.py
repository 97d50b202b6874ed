"""One choice of an answer, while the graph gives it: put together, or chunk by chunk."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from omniflow.media import Generated, TextDelta, TextLogprob, ToolCall, ToolCallDelta
from omniflow.server.chat_reply import (
    AnswerMessage,
    AnswerToolCall,
    CalledFunction,
    CallJoiner,
    Choice,
    Chunk,
    ChunkChoice,
    Delta,
    DeltaAudio,
    FinishReason,
    Logprobs,
    SpokenAnswer,
    delta_of,
    finish_reason,
    logprobs_of,
)
from omniflow.server.encoders import Format
from omniflow.server.media import AudioWriter, Base64Cutter
from omniflow.server.transcripts import Transcripts
from omniflow.telemetry import RequestTimes


class Answering(msgspec.Struct, frozen=True):
    """What a reply needs to know of its request. `audio` None: text only."""

    hex_id: str
    model: str
    audio: Format | None
    logprobs: bool
    usage_chunk: bool
    transcripts: Transcripts
    times: RequestTimes
    created: int
    n: int = 1

    @property
    def id(self) -> str:
        return f"chatcmpl-{self.hex_id}"

    def audio_id(self, index: int) -> str:
        """What later turns call the sound of choice `index`."""
        return f"audio_{self.hex_id}_{index}" if index else f"audio_{self.hex_id}"

    def writer(self) -> AudioWriter | None:
        """For the sound of one choice."""
        return AudioWriter(self.audio) if self.audio is not None else None


class WholeChoice:
    """One answer, put together."""

    def __init__(self, answering: Answering, index: int) -> None:
        self._answering = answering
        self._index = index
        self._texts: list[str] = []
        self._logprobs: list[TextLogprob] = []
        self._calls = CallJoiner()
        self._writer = answering.writer()
        self._sound = bytearray()
        self.generated: Generated | None = None

    async def take(self, name: str, value: Any) -> None:
        """An output of the graph."""
        if not self._index:
            self._answering.times.stamp(value)
        if name == "text":
            self._texts.append(value.text)
            self._logprobs += value.logprobs
        elif name == "tool_calls":
            self._calls.push(value)
        elif name == "audio" and self._writer is not None:
            self._sound += await self._writer.write(value)
        elif name == "usage":
            self.generated = value

    async def finish(self) -> Choice:
        """The answer, which has ended."""
        text, calls = "".join(self._texts), [_answer_call(call) for call in self._calls.calls()]
        content = text if text or not calls else None
        audio: SpokenAnswer | UnsetType = UNSET
        if self._writer is not None:
            self._sound += await self._writer.finish()
            if content is not None:
                content, audio = None, self._spoken(text, self._writer)
        message = AnswerMessage(content, audio, tuple(calls) or UNSET)
        logprobs = logprobs_of(self._logprobs) if self._answering.logprobs else None
        return Choice(message, finish_reason(self.generated, bool(calls)), self._index, logprobs)

    def _spoken(self, transcript: str, writer: AudioWriter) -> SpokenAnswer:
        audio_id = self._answering.audio_id(self._index)
        expires_at = self._answering.transcripts.keep(audio_id, transcript)
        data = base64.b64encode(writer.whole(bytes(self._sound))).decode()
        return SpokenAnswer(audio_id, data, transcript, expires_at)


def _answer_call(call: ToolCall) -> AnswerToolCall:
    return AnswerToolCall(call.id, CalledFunction(call.name, call.arguments))


class ChoiceChunks:
    """The chunks of one streamed choice.

    The role comes first and once, and with audio its id; base64 is cut so that clients may join the strings.
    """

    def __init__(self, answering: Answering, index: int = 0) -> None:
        self._answering = answering
        self._index = index
        self._writer = answering.writer()
        self._cutter = Base64Cutter()
        self._has_role = self._has_audio = self._has_calls = False
        self._texts: list[str] = []
        self.generated: Generated | None = None

    async def take(self, name: str, value: Any) -> Iterable[Chunk]:
        """An output of the graph."""
        if not self._index:
            self._answering.times.stamp(value)
        if name == "text":
            return self._text(value)
        if name == "tool_calls":
            return self._call(value)
        if name == "audio" and self._writer is not None:
            return self._sound(await self._writer.write(value))
        if name == "usage":
            self.generated = value
        return ()

    async def end(self) -> Iterable[Chunk]:
        """The last sound, when the audio expires, and why the choice ended."""
        rest = await self._writer.finish() if self._writer is not None else b""
        return self._end(rest)

    def _text(self, delta: TextDelta) -> Iterator[Chunk]:
        """A piece of the answer: content, or the transcript of what is spoken."""
        logprobs = logprobs_of(delta.logprobs) if self._answering.logprobs else None
        if delta.text or delta.logprobs:
            yield from self._begin()
            self._texts.append(delta.text)
            spoken = Delta(audio=DeltaAudio(transcript=delta.text))
            yield self._chunk(Delta(content=delta.text) if self._writer is None else spoken, logprobs=logprobs)

    def _call(self, delta: ToolCallDelta) -> Iterator[Chunk]:
        if not self._has_role:
            self._has_role = True
            yield self._chunk(Delta("assistant"))
        self._has_calls = True
        yield self._chunk(Delta(tool_calls=(delta_of(delta),)))

    def _sound(self, data: bytes) -> Iterator[Chunk]:
        """A piece of 16-bit PCM; what does not fill 6 bytes waits for the next."""
        if piece := self._cutter.push(data):
            yield from self._begin()
            yield self._chunk(Delta(audio=DeltaAudio(data=piece)))

    def _end(self, sound: bytes) -> Iterator[Chunk]:
        if not self._has_calls:
            yield from self._begin()
        if self._has_audio:
            if piece := self._cutter.push(sound) + self._cutter.flush():
                yield self._chunk(Delta(audio=DeltaAudio(data=piece)))
            audio_id = self._answering.audio_id(self._index)
            expires_at = self._answering.transcripts.keep(audio_id, "".join(self._texts))
            yield self._chunk(Delta(audio=DeltaAudio(expires_at=expires_at)))
        yield self._chunk(Delta(), finish_reason(self.generated, self._has_calls))

    def _begin(self) -> Iterator[Chunk]:
        """The role and, before the first text or sound of a spoken answer, the id of its audio."""
        role: Literal["assistant"] | None = None if self._has_role else "assistant"
        if self._writer is not None and not self._has_audio:
            self._has_role = self._has_audio = True
            yield self._chunk(Delta(role, audio=DeltaAudio(id=self._answering.audio_id(self._index))))
        elif role is not None:
            self._has_role = True
            yield self._chunk(Delta(role, content=""))

    def _chunk(self, delta: Delta, ended: FinishReason | None = None, logprobs: Logprobs | None = None) -> Chunk:
        answering = self._answering
        usage = None if answering.usage_chunk else UNSET
        choice = ChunkChoice(delta, ended, self._index, logprobs)
        return Chunk(answering.id, answering.created, answering.model, (choice,), usage)
