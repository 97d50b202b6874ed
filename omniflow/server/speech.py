"""POST /v1/audio/speech: create_speech -> Runtime.submit -> stream_audio."""

from __future__ import annotations

import base64
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Literal

import anyio
import msgspec
from msgspec import Meta, Struct

from omniflow.errors import InvalidInputError
from omniflow.media import Options, TextDelta
from omniflow.server.call import EVENT_STREAM, Call
from omniflow.server.chat_request import Int64, Voice, bytes_of_base64, is_remote, media_of, voice_name
from omniflow.server.encoders import SPEECH_FORMATS, Format
from omniflow.server.media import AudioWriter
from omniflow.server.remote import Wanted
from omniflow.server.service import Service
from omniflow.telemetry import RequestTimes

if TYPE_CHECKING:
    from omniflow.runtime import Reply


RefText = Annotated[str, Meta(max_length=4096)]


class SpeechRequest(Struct, frozen=True, kw_only=True):
    """The request. `stream` and `seed` are not OpenAI's: `stream` false asks for a whole file, true for one that starts
    at once; the same `seed` gives the same sound.

    `instructions` is taken and has no effect, as with OpenAI's tts-1: agents send it with every sentence.

    `ref_audio` is a recording to sound like, instead of a `voice`: a data URI, base64, or http(s) where this server
    fetches media; `ref_text` is what is said in it, without which only the timbre is taken.
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
    ref_audio: str | None = None
    ref_text: RefText | None = None


class SpeechDelta(Struct, frozen=True, tag="speech.audio.delta", tag_field="type"):
    """A piece of the file, in base64 that is whole in itself."""

    audio: str


class SpeechUsage(Struct, frozen=True):
    """What was spoken. Speech enters the graph behind the stages that count tokens, so the units are of another kind:
    an input token is a character of `input`, an output token 50 ms of sound, begun ones included.
    """

    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechDone(Struct, frozen=True, tag="speech.audio.done", tag_field="type"):
    """The file is whole."""

    usage: SpeechUsage


async def create_speech(service: Service, call: Call) -> None:
    """Say a text: as bytes of a file while they are made, as a whole file, or as server-sent events."""
    request = call.read(SpeechRequest)
    service.require_model(request.model)
    format = SPEECH_FORMATS[request.response_format or "mp3"]
    is_streamed = request.stream_format == "sse" or _is_streamed(request, call, format)
    writer = AudioWriter(format, open_ended=is_streamed)
    async with await speak(service, request, deadline_s=call.deadline_s, request_id=call.request_id) as reply:
        audio = stream_audio(reply, writer, call.times)
        if request.stream_format == "sse":
            await call.stream(speech_events(audio, request, writer), EVENT_STREAM)
        elif is_streamed:
            await call.stream(audio, format.media_type)
        else:
            await call.send(writer.whole(b"".join([piece async for piece in audio])), format.media_type)


async def speak(
    service: Service, request: SpeechRequest, *, deadline_s: float | None, request_id: str, within: str = ""
) -> Reply:
    """Let the graph say `request.input`. Raises InvalidInputError for what cannot be said; `within` is the path of the
    request, where that is a part of something.
    """
    service.require_entry("speech", "text to say")
    service.require_output("speech", "audio")
    if not request.input.strip():
        raise InvalidInputError(f"{within}input: is empty; expected a text to say", param=f"{within}input")
    started_s = anyio.current_time()
    options = Options(speed=request.speed or 1.0, seed=request.seed)
    voiced = await _with_voice(service, request, options, deadline_s=deadline_s, request_id=request_id, within=within)
    if deadline_s is not None:
        deadline_s = max(0.001, deadline_s - (anyio.current_time() - started_s))
    return await service.runtime.submit(
        "speech",
        [TextDelta(request.input)],
        outputs={"audio"},
        options=voiced,
        deadline_s=deadline_s,
        request_id=request_id,
    )


async def _with_voice(
    service: Service,
    request: SpeechRequest,
    options: Options,
    *,
    deadline_s: float | None,
    request_id: str,
    within: str,
) -> Options:
    """`options` with whom to speak as: a voice that has a name, or the one of a recording."""
    at, text = f"{within}ref_audio", request.ref_text
    if request.ref_audio is None:
        if text is not None:
            param = f"{within}ref_text"
            raise InvalidInputError(f"{param}: needs ref_audio, the recording in which it is said", param=param)
        voice = service.voice(voice_name(request.voice), f"{within}voice")
        return service.with_learned_voice(msgspec.structs.replace(options, voice=voice))
    service.require_learning(at)
    if text is not None and not text.strip():
        param = f"{within}ref_text"
        raise InvalidInputError(f"{param}: is empty; give what is said in ref_audio, or leave it out", param=param)
    started_s = anyio.current_time()
    data = await _recording(service, request.ref_audio, at, deadline_s)
    if deadline_s is not None and is_remote(request.ref_audio):
        deadline_s = max(0.001, deadline_s - (anyio.current_time() - started_s))
    code = await service.learned.code_of(service.runtime, data, at, deadline_s=deadline_s, request_id=request_id)
    return msgspec.structs.replace(options, voice_code=code, voice_text=text or "")


async def _recording(service: Service, given: str, at: str, deadline_s: float | None) -> bytes:
    """The bytes of `ref_audio`, in whichever form it came."""
    remote = service.remote if is_remote(given) else None
    fetched = await remote.fetch([Wanted(given, at)], deadline_s) if remote is not None else {}
    if is_remote(given) or given[:5].lower() == "data:":
        return media_of(given, at, "audio/", fetched)[1]
    return bytes_of_base64(given, at)


def _is_streamed(request: SpeechRequest, call: Call, format: Format) -> bool:
    """True where bytes go out as they come. A file whose header tells its length (wav) must be asked for so.

    `x-stainless-raw-response: stream` is how OpenAI's SDKs say that their caller reads the body piece by piece.
    """
    if request.stream is not None:
        return request.stream
    asked = request.stream_format is not None or call.header("x-stainless-raw-response") == "stream"
    return asked or not format.states_length


async def stream_audio(
    reply: Reply, writer: AudioWriter, times: RequestTimes, within: str = ""
) -> AsyncGenerator[bytes]:
    """The bytes of the spoken text, each as soon as its sound is there.

    Raises InvalidInputError where the text gave no sound at all.
    """
    async for _, chunk in reply:
        times.stamp(chunk)
        if piece := await writer.write(chunk):
            yield piece
    if not writer.started:
        raise InvalidInputError(
            f"{within}input: nothing in it can be spoken; give words or numbers in a language of this voice",
            param=f"{within}input",
        )
    yield await writer.finish()


async def speech_events(
    audio: AsyncGenerator[bytes], request: SpeechRequest, writer: AudioWriter
) -> AsyncGenerator[bytes]:
    """`audio` as server-sent events; the `done` event ends one that is whole, and only that."""
    async with aclosing(audio):
        async for piece in audio:
            if piece:
                yield _event(SpeechDelta(base64.b64encode(piece).decode()))
    yield _event(SpeechDone(usage_of(request, writer)))


def usage_of(request: SpeechRequest, writer: AudioWriter) -> SpeechUsage:
    """What a text was, and what became of it."""
    characters, sounds = len(request.input), math.ceil(writer.audio_s / 0.05)
    return SpeechUsage(characters, sounds, characters + sounds)


def _event(event: SpeechDelta | SpeechDone) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
