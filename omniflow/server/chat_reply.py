"""The bodies that POST /v1/chat/completions answers with, whole and in chunks."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from omniflow.media import Generated

FinishReason = Literal["stop", "length"]


class Usage(Struct, frozen=True):
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage_of(generated: Generated | None) -> Usage | None:
    """The token counts of a reply; None where the graph does not count."""
    if generated is None:
        return None
    prompt, completion = generated.prompt_tokens, generated.completion_tokens
    return Usage(prompt, completion, prompt + completion)


class SpokenAnswer(Struct, frozen=True):
    """`data` is base64 of the file."""

    id: str
    data: str
    transcript: str
    expires_at: int


class AnswerMessage(Struct, frozen=True):
    """A spoken answer has its text in `audio.transcript`, and `content` null."""

    content: str | None
    audio: SpokenAnswer | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Choice(Struct, frozen=True):
    """The one answer."""

    message: AnswerMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: None = None


class Completion(Struct, frozen=True):
    """A whole reply."""

    id: str
    created: int
    model: str
    choices: tuple[Choice]
    usage: Usage | None
    object: Literal["chat.completion"] = "chat.completion"


class DeltaAudio(Struct, frozen=True, omit_defaults=True):
    """Clients join the strings and add the numbers, so `id` and `expires_at` are sent once each."""

    id: str | None = None
    transcript: str | None = None
    data: str | None = None
    expires_at: int | None = None


class Delta(Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    audio: DeltaAudio | None = None


class ChunkChoice(Struct, frozen=True):
    """The one answer, a chunk of it; `finish_reason` is null until its end."""

    delta: Delta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: None = None


class Chunk(Struct, frozen=True):
    """`usage` is left out unless it was asked for; then it is null on all chunks but the last."""

    id: str
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | None | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
