"""POST /v1/chat/completions: create_chat_completion -> Runtime.submit -> stream_chat or whole_chat."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from omniflow.errors import UnsupportedError
from omniflow.media import Generated
from omniflow.server.call import EVENT_STREAM, Call
from omniflow.server.chat_reply import (
    AnswerMessage,
    Choice,
    Chunk,
    ChunkChoice,
    Completion,
    Delta,
    DeltaAudio,
    FinishReason,
    SpokenAnswer,
    usage_of,
)
from omniflow.server.chat_request import ChatRequest, chat_of, refuse_unsupported
from omniflow.server.encoders import CHAT_FORMATS, Format, audio_format
from omniflow.server.media import AudioWriter, Base64Cutter
from omniflow.server.service import Service
from omniflow.server.transcripts import Transcripts
from omniflow.telemetry import RequestTimes

if TYPE_CHECKING:
    from omniflow.runtime import Reply

DONE = b"data: [DONE]\n\n"


class Answering(msgspec.Struct, frozen=True):
    """What a reply needs to know of its request. `audio` None: text only."""

    hex_id: str
    model: str
    audio: Format | None
    usage_chunk: bool
    transcripts: Transcripts
    times: RequestTimes
    created: int

    @property
    def id(self) -> str:
        return f"chatcmpl-{self.hex_id}"

    @property
    def audio_id(self) -> str:
        return f"audio_{self.hex_id}"


async def create_chat_completion(service: Service, call: Call) -> None:
    """Answer a conversation, in text or aloud, whole or as server-sent events."""
    request = call.read(ChatRequest)
    service.require_model(request.model)
    service.require_entry("chat", "conversations")
    service.require_output("chat", "text")
    refuse_unsupported(request)
    answering = _answering(service, call, request)
    wanted = {"text", "usage", "audio"} if request.wants_audio else {"text", "usage"}
    reply = await service.runtime.submit(
        "chat",
        chat_of(request, service.transcripts),
        outputs=wanted.intersection(service.runtime.plan.outputs_of("chat")),
        options=request.options(),
        deadline_s=call.deadline_s,
        request_id=call.request_id,
    )
    async with reply:
        if request.stream:
            await call.stream(stream_chat(reply, answering), EVENT_STREAM)
        else:
            await call.send(await whole_chat(reply, answering), "application/json")


def _answering(service: Service, call: Call, request: ChatRequest) -> Answering:
    return Answering(
        hex_id=call.request_id.removeprefix("req_"),
        model=request.model,
        audio=_audio_format(service, request),
        usage_chunk=request.wants_usage_chunk,
        transcripts=service.transcripts,
        times=call.times,
        created=int(time.time()),
    )


def _audio_format(service: Service, request: ChatRequest) -> Format | None:
    if not request.wants_audio:
        return None
    service.require_output("chat", "audio", param="modalities")
    asked = request.audio.format if request.audio is not None else None
    if request.stream and asked not in (None, "pcm16"):
        raise UnsupportedError(f"audio.format: {asked!r} cannot be streamed; ask for 'pcm16'", param="audio.format")
    return audio_format(CHAT_FORMATS, asked or ("pcm16" if request.stream else "wav"), "audio.format")


async def whole_chat(reply: Reply, answering: Answering) -> bytes:
    """The JSON of a whole answer."""
    texts: list[str] = []
    sound = bytearray()
    generated: Generated | None = None
    writer = AudioWriter(answering.audio) if answering.audio is not None else None
    async for name, value in reply:
        answering.times.stamp(value)
        if name == "text":
            texts.append(value.text)
        elif name == "audio" and writer is not None:
            sound += await writer.write(value)
        elif name == "usage":
            generated = value
    message = AnswerMessage("".join(texts))
    if writer is not None:
        sound += await writer.finish()
        message = _spoken("".join(texts), writer.whole(bytes(sound)), answering)
    choice = Choice(message, _finish_reason(generated))
    return msgspec.json.encode(
        Completion(answering.id, answering.created, answering.model, (choice,), usage_of(generated))
    )


def _spoken(transcript: str, sound: bytes, answering: Answering) -> AnswerMessage:
    expires_at = answering.transcripts.keep(answering.audio_id, transcript)
    data = base64.b64encode(sound).decode()
    return AnswerMessage(None, SpokenAnswer(answering.audio_id, data, transcript, expires_at))


def _finish_reason(generated: Generated | None) -> FinishReason:
    return generated.finish_reason if generated is not None else "stop"


async def stream_chat(reply: Reply, answering: Answering) -> AsyncGenerator[bytes]:
    """The server-sent events of an answer, each as soon as its text or sound is there.

    `[DONE]` ends an answer that is whole, and only that.
    """
    chunks = ChatChunks(answering)
    writer = AudioWriter(answering.audio) if answering.audio is not None else None
    generated: Generated | None = None
    async for name, value in reply:
        answering.times.stamp(value)
        events = b""
        if name == "text":
            events = _events(chunks.text(value.text))
        elif name == "audio" and writer is not None:
            events = _events(chunks.sound(await writer.write(value)))
        elif name == "usage":
            generated = value
        if events:
            yield events
    rest = await writer.finish() if writer is not None else b""
    yield _events(chunks.end(rest, generated)) + DONE


def _events(chunks: Iterable[Chunk]) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)


class ChatChunks:
    """The chunks of one streamed answer.

    The role comes first and once, and with audio its id; base64 is cut so that clients may join the strings.
    """

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._spoken = answering.audio is not None
        self._begun = False
        self._texts: list[str] = []
        self._cutter = Base64Cutter()

    def text(self, text: str) -> Iterator[Chunk]:
        """A piece of the answer: content, or the transcript of what is spoken."""
        if text:
            yield from self._begin()
            self._texts.append(text)
            yield self._chunk(Delta(audio=DeltaAudio(transcript=text)) if self._spoken else Delta(content=text))

    def sound(self, data: bytes) -> Iterator[Chunk]:
        """A piece of 16-bit PCM; what does not fill 6 bytes waits for the next."""
        if piece := self._cutter.push(data):
            yield from self._begin()
            yield self._chunk(Delta(audio=DeltaAudio(data=piece)))

    def end(self, sound: bytes, generated: Generated | None) -> Iterator[Chunk]:
        """The last sound, when the audio expires, why the answer ended, and what it took."""
        yield from self._begin()
        if self._spoken:
            if piece := self._cutter.push(sound) + self._cutter.flush():
                yield self._chunk(Delta(audio=DeltaAudio(data=piece)))
            answering = self._answering
            expires_at = answering.transcripts.keep(answering.audio_id, "".join(self._texts))
            yield self._chunk(Delta(audio=DeltaAudio(expires_at=expires_at)))
        yield self._chunk(Delta(), _finish_reason(generated))
        if self._answering.usage_chunk:
            yield msgspec.structs.replace(self._chunk(Delta()), choices=(), usage=usage_of(generated))

    def _begin(self) -> Iterator[Chunk]:
        if not self._begun:
            self._begun = True
            audio = DeltaAudio(id=self._answering.audio_id)
            yield self._chunk(Delta("assistant", audio=audio) if self._spoken else Delta("assistant", content=""))

    def _chunk(self, delta: Delta, finish_reason: FinishReason | None = None) -> Chunk:
        answering = self._answering
        usage = None if answering.usage_chunk else UNSET
        choice = ChunkChoice(delta, finish_reason)
        return Chunk(answering.id, answering.created, answering.model, (choice,), usage)
