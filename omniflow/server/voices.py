"""GET, POST and DELETE /v1/audio/voices: what the talker of the graph can sound like, and what it is to learn."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import anyio.to_thread
import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from omniflow.actor import Actor, NamedVoice
from omniflow.errors import InvalidInputError, NotFoundError, UnsupportedError
from omniflow.planner.plan import Plan
from omniflow.server.call import Call
from omniflow.server.learned import MAX_SAMPLE_BYTES, NamedCode
from omniflow.server.service import STOCK_VOICES, Service

UNKNOWN_LANGUAGE = "und"
"""Of a voice that was uploaded, in BCP 47."""


class ListedVoice(Struct, frozen=True):
    """A voice. `id` is what `voice` of a request takes."""

    id: str
    name: str
    language: str
    object: Literal["audio.voice"] = "audio.voice"


class UploadedVoice(Struct, frozen=True):
    """What is known of an upload, with the names of vLLM-Omni."""

    name: str
    consent: str
    created_at: int
    file_size: int
    ref_text: str
    speaker_description: str


class VoiceList(Struct, frozen=True):
    """All voices, the default one first; `voices` are their names alone, as clients of vLLM-Omni read them."""

    data: tuple[ListedVoice, ...]
    voices: tuple[str, ...]
    uploaded_voices: tuple[UploadedVoice, ...] = ()
    object: Literal["list"] = "list"


class VoiceUpload(Struct, frozen=True):
    """The fields of the form, beside `audio_sample`, a recording. `ref_text` is what is said in it."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=64,
            pattern=r"^[^\s/](?:[^\n/]*[^\s/])?$",
            description="1 to 64 characters in one line, none of them a slash, with no space at either end",
        ),
    ]
    consent: str = ""
    ref_text: Annotated[str, Meta(max_length=4096)] = ""
    speaker_description: Annotated[str, Meta(max_length=4096)] = ""


class CreatedVoice(Struct, frozen=True):
    """A voice that was learned, as OpenAI and as vLLM-Omni answer it."""

    id: str
    name: str
    created_at: int
    voice: UploadedVoice
    success: Literal[True] = True
    object: Literal["audio.voice"] = "audio.voice"


class DeletedVoice(Struct, frozen=True):
    """A voice that is no more."""

    id: str
    deleted: Literal[True] = True
    success: Literal[True] = True
    object: Literal["audio.voice.deleted"] = "audio.voice.deleted"


def voices_of(plan: Plan) -> tuple[NamedVoice, ...]:
    """The voices that the stages of `plan` say they have; none where they take any name, or do not speak."""
    return tuple(
        voice
        for stage in plan.graph.stages
        if stage.name not in plan.graph.absent and stage.actor.voices is not Actor.voices
        for voice in stage.actor(**stage.settings).voices()
    )


async def list_voices(service: Service, request: Request) -> Response:
    """The voices of the served graph, and those that were uploaded."""
    learned = service.learned.named()
    listed = [ListedVoice(voice.name, voice.name, voice.language) for voice in service.voices]
    listed += [ListedVoice(voice.name, voice.name, UNKNOWN_LANGUAGE) for voice in learned]
    body = VoiceList(tuple(listed), tuple(voice.name for voice in listed), tuple(map(_uploaded, learned)))
    return Response(msgspec.json.encode(body), media_type="application/json")


async def create_voice(service: Service, call: Call) -> None:
    """Learn a voice, and keep it under a name. Raises UnsupportedError where the graph learns none."""
    service.require_learning(None)
    request = call.read(VoiceUpload)
    if request.name in STOCK_VOICES or request.name in [voice.name for voice in service.voices]:
        raise InvalidInputError(f"name: {request.name!r} is a voice of the model; give another name", param="name")
    data = await anyio.to_thread.run_sync(call.file("audio_sample").read, MAX_SAMPLE_BYTES + 1)
    code = await service.learned.code_of(
        service.runtime, data, "audio_sample", deadline_s=call.deadline_s, request_id=call.request_id
    )
    voice = NamedCode(
        name=request.name,
        code=code,
        text=request.ref_text.strip(),
        consent=request.consent,
        description=request.speaker_description,
        sample_bytes=len(data),
        created_at=int(time.time()),
    )
    service.learned.put(voice)
    created = CreatedVoice(voice.name, voice.name, voice.created_at, _uploaded(voice))
    await call.send(msgspec.json.encode(created), "application/json")


async def delete_voice(service: Service, request: Request) -> Response:
    """Forget an upload. Raises UnsupportedError for a voice of the model, NotFoundError where there is no such one."""
    name = request.path_params["voice"]
    if service.learned.remove(name):
        return Response(msgspec.json.encode(DeletedVoice(name)), media_type="application/json")
    known = [voice.name for voice in service.voices] + [voice.name for voice in service.learned.named()]
    if name not in known:
        raise NotFoundError(f"there is no voice {name!r}; there are {', '.join(known) or 'none'}", param="voice")
    raise UnsupportedError(f"voice {name!r} cannot be deleted: it is one of the model's own", param="voice")


def _uploaded(voice: NamedCode) -> UploadedVoice:
    return UploadedVoice(voice.name, voice.consent, voice.created_at, voice.sample_bytes, voice.text, voice.description)
