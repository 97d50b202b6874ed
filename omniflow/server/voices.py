"""GET, POST and DELETE /v1/audio/voices: what the talker of the graph can sound like."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from omniflow.actor import Actor, NamedVoice
from omniflow.errors import NotFoundError, UnsupportedError
from omniflow.planner.plan import Plan
from omniflow.server.call import Call
from omniflow.server.service import Service

_FIXED = "this model has the voices that it was trained with, and cannot learn others"


class ListedVoice(Struct, frozen=True):
    """A voice. `id` is what `voice` of a request takes."""

    id: str
    name: str
    language: str
    object: Literal["audio.voice"] = "audio.voice"


class VoiceList(Struct, frozen=True):
    """All voices, the default one first; `voices` are their names alone, as clients of vLLM-Omni read them."""

    data: tuple[ListedVoice, ...]
    voices: tuple[str, ...]
    object: Literal["list"] = "list"


def voices_of(plan: Plan) -> tuple[NamedVoice, ...]:
    """The voices that the stages of `plan` say they have; none where they take any name, or do not speak."""
    return tuple(
        voice
        for stage in plan.graph.stages
        if stage.name not in plan.graph.absent and stage.actor.voices is not Actor.voices
        for voice in stage.actor(**stage.settings).voices()
    )


async def list_voices(service: Service, request: Request) -> Response:
    """The voices of the served graph."""
    listed = tuple(ListedVoice(voice.name, voice.name, voice.language) for voice in service.voices)
    body = VoiceList(listed, tuple(voice.name for voice in service.voices))
    return Response(msgspec.json.encode(body), media_type="application/json")


async def create_voice(service: Service, call: Call) -> None:
    """Refused: no talker that is served here clones."""
    raise UnsupportedError(f"voices cannot be uploaded: {_FIXED}")


async def delete_voice(service: Service, request: Request) -> Response:
    """Refused as well: a voice of the model stays. Raises NotFoundError where there is no such voice."""
    name, known = request.path_params["voice"], [voice.name for voice in service.voices]
    if name not in known:
        raise NotFoundError(f"there is no voice {name!r}; there are {', '.join(known) or 'none'}", param="voice")
    raise UnsupportedError(f"voice {name!r} cannot be deleted: {_FIXED}", param="voice")
