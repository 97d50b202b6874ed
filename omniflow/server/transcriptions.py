"""POST /v1/audio/transcriptions and /v1/audio/translations: a file of speech to text, whole or as it is understood."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import anyio
import anyio.to_thread
from msgspec import Meta, Struct, field

from omniflow.errors import InvalidInputError, UnsupportedError
from omniflow.media import Options, TextDelta, Transcript
from omniflow.server.call import EVENT_STREAM, Call
from omniflow.server.decoding import Clip, audio_chunks
from omniflow.server.service import Service
from omniflow.server.transcription_reply import FORMS, Result, Shape, TranscriptDelta, TranscriptDone, event

if TYPE_CHECKING:
    from omniflow.runtime import Reply

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"]
Temperature = Annotated[float, Meta(ge=0, le=1)]
Language = Annotated[str, Meta(max_length=64)]


class TranscriptionRequest(Struct, frozen=True, kw_only=True):
    """The fields of the form, beside `file`. `chunking_strategy` is taken and has no effect: sound is cut where nobody
    speaks anyway. `languages[]` and `keywords[]` say what may be spoken, and how names are spelled.
    """

    model: str
    language: Language | None = None
    languages: list[Language] = field(name="languages[]", default_factory=list)
    prompt: str | None = None
    keywords: list[str] = field(name="keywords[]", default_factory=list)
    response_format: ResponseFormat | None = None
    temperature: Temperature | None = None
    timestamp_granularities: list[Literal["word", "segment"]] = field(
        name="timestamp_granularities[]", default_factory=list
    )
    include: list[str] = field(name="include[]", default_factory=list)
    stream: bool | None = None


class TranslationRequest(Struct, frozen=True, kw_only=True):
    """The fields of the form, beside `file`."""

    model: str
    prompt: str | None = None
    response_format: ResponseFormat | None = None
    temperature: Temperature | None = None


async def create_transcription(service: Service, call: Call) -> None:
    """Write down what is said in a file, in its language."""
    request = call.read(TranscriptionRequest)
    service.require_model(request.model)
    _refuse_what_does_not_fit(request)
    hint = " ".join(part for part in (request.prompt, ", ".join(request.keywords)) if part)
    language = request.language or (request.languages[0] if len(request.languages) == 1 else None)
    options = Options(
        temperature=request.temperature,
        language=language,
        hint=hint or None,
        words="word" in request.timestamp_granularities,
    )
    granularities = frozenset(request.timestamp_granularities or ["segment"])
    shape = Shape("transcribe", granularities, request.temperature or 0.0)
    async with _transcribed(service, call, options) as (reply, clip):
        if request.stream:
            await call.stream(_events(reply, clip, call), EVENT_STREAM)
        else:
            await _send_whole(reply, clip, call, request.response_format, shape)


async def create_translation(service: Service, call: Call) -> None:
    """Write down in English what is said in a file."""
    request = call.read(TranslationRequest)
    service.require_model(request.model)
    _refuse_speakers(request.response_format)
    options = Options(temperature=request.temperature, hint=request.prompt, translate=True)
    shape = Shape("translate", frozenset({"segment"}), request.temperature or 0.0)
    async with _transcribed(service, call, options) as (reply, clip):
        await _send_whole(reply, clip, call, request.response_format, shape)


def _refuse_what_does_not_fit(request: TranscriptionRequest) -> None:
    _refuse_speakers(request.response_format)
    if request.include:
        raise UnsupportedError(
            "include[]: log-probabilities are not told by this model; leave it out", param="include[]"
        )
    if request.timestamp_granularities and request.response_format != "verbose_json":
        raise InvalidInputError(
            "timestamp_granularities[]: needs response_format 'verbose_json'", param="timestamp_granularities[]"
        )
    if request.stream and request.response_format not in (None, "json", "text"):
        raise InvalidInputError(
            f"stream: {request.response_format!r} is made of the whole text; stream 'json', or leave it out",
            param="stream",
        )


def _refuse_speakers(response_format: ResponseFormat | None) -> None:
    if response_format == "diarized_json":
        raise UnsupportedError(
            "response_format: 'diarized_json' needs a model that tells speakers apart; this one does not",
            param="response_format",
        )


@asynccontextmanager
async def _transcribed(service: Service, call: Call, options: Options) -> AsyncIterator[tuple[Reply, Clip]]:
    """The text of the file of `call`, as the graph gives it. The file is opened before anything of it runs."""
    service.require_entry("transcription", "speech to write down")
    service.require_output("transcription", "transcript")
    clip = await anyio.to_thread.run_sync(Clip, call.file("file"))
    try:
        first = await anyio.to_thread.run_sync(clip.read_block)
        if not len(first):
            raise InvalidInputError("file: holds no sound", param="file")
        reply = await service.runtime.submit(
            "transcription",
            audio_chunks(clip, first),
            outputs={"transcript"},
            options=options,
            deadline_s=call.deadline_s,
            request_id=call.request_id,
        )
        async with reply:
            yield reply, clip
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(clip.close)


async def _send_whole(
    reply: Reply, clip: Clip, call: Call, response_format: ResponseFormat | None, shape: Shape
) -> None:
    stretches = []
    async for _, stretch in reply:
        call.times.stamp(TextDelta(stretch.text))
        stretches.append(stretch)
    media_type, form = FORMS[response_format or "json"]
    await call.send(form(Result(stretches, clip.seconds), shape), media_type)


async def _events(reply: Reply, clip: Clip, call: Call) -> AsyncGenerator[bytes]:
    """Server-sent events; the `done` event ends a text that is whole, and only that."""
    stretches: list[Transcript] = []
    async for _, stretch in reply:
        call.times.stamp(TextDelta(stretch.text))
        yield event(TranscriptDelta(f" {stretch.text}" if stretches else stretch.text))
        stretches.append(stretch)
    result = Result(stretches, clip.seconds)
    yield event(TranscriptDone(result.text, result.tokens))
