"""POST /v1/realtime/client_secrets: a key that a browser may have, good for a while and for one kind of session."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from omniflow.errors import UnsupportedError
from omniflow.server.call import Call
from omniflow.server.chat_request import voice_name
from omniflow.server.realtime.server_events import new_id
from omniflow.server.realtime.settings import DEFAULT_VOICE, Session, updated, view
from omniflow.server.service import Service


class ExpiresAfter(Struct, frozen=True):
    """How long the key is good for, from now on."""

    seconds: Annotated[int, Meta(ge=10, le=7200)] | None = None
    anchor: Literal["created_at"] | None = None


class ClientSecretRequest(Struct, frozen=True):
    """The request. `session` is what `session.update` takes: sessions opened with the key begin with it."""

    session: dict[str, Any] | None = None
    expires_after: ExpiresAfter | None = None


class ClientSecretReply(Struct, frozen=True):
    """The reply: a key, when it expires (Unix seconds), and the session that it opens."""

    value: str
    expires_at: int
    session: dict[str, Any]


_DEFAULT_S = 600


async def create_client_secret(service: Service, call: Call) -> None:
    """Issue a key."""
    request = call.read(ClientSecretRequest)
    asked = request.session or {}
    session = updated(Session(model=service.model), asked)
    service.require_model(session.model)
    if session.type == "transcription":
        service.require_entry("transcription", "speech to transcribe")
    elif session.tools and "tool_calls" not in service.runtime.plan.outputs_of("chat"):
        raise UnsupportedError("session.tools: this graph gives no calls of tools", param="session.tools")
    output = session.audio.output
    if output.voice != DEFAULT_VOICE:
        service.voice(voice_name(output.voice), "session.audio.output.voice")
    seconds = request.expires_after.seconds if request.expires_after is not None else None
    secret = service.keys.issue(seconds or _DEFAULT_S, msgspec.json.encode(asked))
    shown = view(session, new_id("sess"), secret.expires_at)
    await call.send(msgspec.json.encode(ClientSecretReply(secret.value, secret.expires_at, shown)), "application/json")
