"""POST /v1/audio/speech/batch: many texts in one request, each with a result or an error of its own."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import anyio
import msgspec
from msgspec import Meta, Struct

from omniflow.errors import OverloadedError, RequestError
from omniflow.server.call import Call
from omniflow.server.chat_request import Int64, Voice
from omniflow.server.encoders import SPEECH_FORMATS
from omniflow.server.media import AudioWriter
from omniflow.server.service import Service
from omniflow.server.speech import RefText, SpeechRequest, SpeechUsage, speak, stream_audio, usage_of

_AT_ONCE = 4
"""Items of a batch under way at a time: it shares the talker with single requests, who wait for a first sound."""

SpeechFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
Speed = Annotated[float, Meta(ge=0.25, le=4)]


class SpeechBatchItem(Struct, frozen=True, kw_only=True):
    """A text to say. What is null is as the batch says."""

    input: str
    voice: Voice | None = None
    response_format: SpeechFormat | None = None
    speed: Speed | None = None
    seed: Int64 | None = None
    instructions: str | None = None
    ref_audio: str | None = None
    ref_text: RefText | None = None


class SpeechBatchRequest(Struct, frozen=True, kw_only=True):
    """Texts to say, and how: the names are those of vLLM-Omni."""

    model: str
    items: Annotated[list[SpeechBatchItem], Meta(min_length=1, max_length=32)]
    voice: Voice | None = None
    response_format: SpeechFormat | None = None
    speed: Speed | None = None
    seed: Int64 | None = None
    instructions: str | None = None
    ref_audio: str | None = None
    ref_text: RefText | None = None


class SpeechBatchResult(Struct, frozen=True):
    """What became of an item: a file in base64, or why there is none (message, code and field of the error)."""

    index: int
    status: Literal["success", "error"]
    audio_data: str | None = None
    media_type: str | None = None
    usage: SpeechUsage | None = None
    error: str | None = None
    code: str | None = None
    param: str | None = None


class SpeechBatch(Struct, frozen=True):
    """The results, in the order of the items."""

    id: str
    results: tuple[SpeechBatchResult, ...]
    total: int
    succeeded: int
    failed: int


async def create_speech_batch(service: Service, call: Call) -> None:
    """Say many texts, a few at a time. Each is a request of its own to the graph, admission included; one that found no
    place beside the others of its batch gets a second chance once those have ended.
    """
    batch = call.read(SpeechBatchRequest)
    service.require_model(batch.model)
    service.require_entry("speech", "text to say")
    service.require_output("speech", "audio")
    results: list[SpeechBatchResult | None] = [None] * len(batch.items)
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def say(index: int) -> None:
        async with limiter:
            results[index] = await _result(service, call, batch, index)

    async with anyio.create_task_group() as tasks:
        for index in range(len(batch.items)):
            tasks.start_soon(say, index)
    for index, result in enumerate(results):
        if result is not None and result.code == OverloadedError.code:
            results[index] = await _result(service, call, batch, index)
    done = tuple(result for result in results if result is not None)
    succeeded = sum(result.status == "success" for result in done)
    body = SpeechBatch(f"batch_{call.request_id}", done, len(done), succeeded, len(done) - succeeded)
    await call.send(msgspec.json.encode(body), "application/json")


async def _result(service: Service, call: Call, batch: SpeechBatchRequest, index: int) -> SpeechBatchResult:
    request = _request(batch, batch.items[index])
    within = f"items[{index}]."
    format = SPEECH_FORMATS[request.response_format or "wav"]
    writer = AudioWriter(format)
    try:
        async with await speak(
            service,
            request,
            deadline_s=call.deadline_s,
            request_id=f"{call.request_id}-{index}",
            within=within,
        ) as reply:
            pieces = [piece async for piece in stream_audio(reply, writer, call.times, within)]
    except RequestError as error:
        return SpeechBatchResult(index, "error", error=str(error), code=error.code, param=error.param)
    data = base64.b64encode(writer.whole(b"".join(pieces))).decode()
    return SpeechBatchResult(index, "success", data, format.media_type, usage_of(request, writer))


def _request(batch: SpeechBatchRequest, item: SpeechBatchItem) -> SpeechRequest:
    # An item that names a voice, or brings one, does not sound as the batch says.
    whose = item if item.ref_audio is not None or item.ref_text is not None or item.voice is not None else batch
    return SpeechRequest(
        model=batch.model,
        input=item.input,
        voice=item.voice or batch.voice,
        response_format=item.response_format or batch.response_format,
        speed=item.speed or batch.speed,
        seed=batch.seed if item.seed is None else item.seed,
        ref_audio=whose.ref_audio,
        ref_text=whose.ref_text,
    )
