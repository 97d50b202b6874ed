"""POST /v1/audio/speech: create_speech -> Runtime.submit -> stream_audio."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from omniflow.errors import InvalidInputError
from omniflow.media import Options, TextDelta
from omniflow.server.call import EVENT_STREAM, Call
from omniflow.server.chat_request import Int64, Voice, voice_name
from omniflow.server.encoders import SPEECH_FORMATS, Format, audio_format
from omniflow.server.media import AudioWriter
from omniflow.server.service import Service
from omniflow.telemetry import RequestTimes

if TYPE_CHECKING:
    from omniflow.runtime import Reply


class SpeechRequest(Struct, frozen=True, kw_only=True):
    """The request. `stream` and `seed` are not OpenAI's: `stream` false asks for a whole file, true for one that starts
    at once; the same `seed` gives the same sound.

    `instructions` is taken and has no effect, as with OpenAI's tts-1: agents send it with every sentence.
    """

    model: str
    input: str
    voice: Voice | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None
    stream_format: Literal["audio", "sse"] | None = None
    stream: bool | None = None
    seed: Int64 | None = None
    instructions: str | None = None


class SpeechDelta(Struct, frozen=True, tag="speech.audio.delta", tag_field="type"):
    """A piece of the file, in base64 that is whole in itself."""

    audio: str


class SpeechUsage(Struct, frozen=True):
    """Tokens: speech enters the graph behind the stages that count any."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0


class SpeechDone(Struct, frozen=True, tag="speech.audio.done", tag_field="type"):
    """The file is whole."""

    usage: SpeechUsage = SpeechUsage()


async def create_speech(service: Service, call: Call) -> None:
    """Say a text: as bytes of a file while they are made, as a whole file, or as server-sent events."""
    request = call.read(SpeechRequest)
    service.require_model(request.model)
    service.require_entry("speech", "text to say")
    service.require_output("speech", "audio")
    if not request.input.strip():
        raise InvalidInputError("input: is empty; expected a text to say", param="input")
    format = audio_format(SPEECH_FORMATS, request.response_format or "mp3", "response_format")
    reply = await service.runtime.submit(
        "speech",
        [TextDelta(request.input)],
        outputs={"audio"},
        options=Options(voice=voice_name(request.voice), speed=request.speed or 1.0, seed=request.seed),
        deadline_s=call.deadline_s,
        request_id=call.request_id,
    )
    async with reply:
        writer = AudioWriter(format)
        audio = stream_audio(reply, writer, call.times)
        if request.stream_format == "sse":
            await call.stream(speech_events(audio), EVENT_STREAM)
        elif _is_streamed(request, call, format):
            await call.stream(audio, format.media_type)
        else:
            await call.send(writer.whole(b"".join([piece async for piece in audio])), format.media_type)


def _is_streamed(request: SpeechRequest, call: Call, format: Format) -> bool:
    """True where bytes go out as they come. A file whose header tells its length (wav) must be asked for so.

    `x-stainless-raw-response: stream` is how OpenAI's SDKs say that their caller reads the body piece by piece.
    """
    if request.stream is not None:
        return request.stream
    asked = request.stream_format is not None or call.header("x-stainless-raw-response") == "stream"
    return asked or not format.states_length


async def stream_audio(reply: Reply, writer: AudioWriter, times: RequestTimes) -> AsyncGenerator[bytes]:
    """The bytes of the spoken text, each as soon as its sound is there.

    Raises InvalidInputError where the text gave no sound at all.
    """
    async for _, chunk in reply:
        times.stamp(chunk)
        if piece := await writer.write(chunk):
            yield piece
    if not writer.started:
        raise InvalidInputError(
            "input: nothing in it can be spoken; give words or numbers in a language of this voice", param="input"
        )
    yield await writer.finish()


async def speech_events(audio: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """`audio` as server-sent events; the `done` event ends one that is whole, and only that."""
    async with aclosing(audio):
        async for piece in audio:
            if piece:
                yield _event(SpeechDelta(base64.b64encode(piece).decode()))
    yield _event(SpeechDone())


def _event(event: SpeechDelta | SpeechDone) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
