"""What clients are sent. Keys without a value are left out: some clients refuse null and drop the whole event."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from msgspec import Struct, field

Status = Literal["completed", "incomplete", "in_progress"]
ResponseStatus = Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}_{secrets.token_hex(10)}"


class Content(Struct, frozen=True, omit_defaults=True):
    """A part of an item."""

    type: Literal["input_text", "input_image", "output_text", "output_audio"]
    text: str | None = None
    transcript: str | None = None
    image_url: str | None = None
    detail: str | None = None


class HeardContent(Struct, frozen=True):
    """What the user said. Here, and only here, null must be told: agents-js stops at an item without it."""

    transcript: str | None
    type: Literal["input_audio"] = "input_audio"


class Item(Struct, frozen=True, omit_defaults=True):
    """An item of a conversation, as it is now. Its sound is left out: it would not fit into a message."""

    id: str
    object: Literal["realtime.item"]
    type: Literal["message", "function_call", "function_call_output"]
    status: Status
    role: Literal["system", "user", "assistant"] | None = None
    content: tuple[Content | HeardContent, ...] | None = None
    name: str | None = None
    call_id: str | None = None
    arguments: str | None = None
    output: str | None = None


class Part(Struct, frozen=True, omit_defaults=True):
    """A part of an answer."""

    type: Literal["text", "audio"]
    text: str | None = None
    transcript: str | None = None


class ErrorDetail(Struct, frozen=True, omit_defaults=True):
    """`event_id` is that of the client's event which could not be served."""

    type: str
    message: str
    code: str | None = None
    param: str | None = None
    event_id: str | None = None


class StatusDetails(Struct, frozen=True, omit_defaults=True):
    """Why a response ended."""

    type: ResponseStatus
    reason: Literal["turn_detected", "client_cancelled", "max_output_tokens"] | None = None
    error: ErrorDetail | None = None


class InputTokens(Struct, frozen=True):
    """Of the input."""

    text_tokens: int
    audio_tokens: int
    image_tokens: int
    cached_tokens: int
    cached_tokens_details: dict[str, int] = {}


class OutputTokens(Struct, frozen=True):
    """Of the output: the thinker's, which are text; speech is made of text."""

    text_tokens: int
    audio_tokens: int = 0


class Usage(Struct, frozen=True):
    """Token counts of a response."""

    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: InputTokens
    output_token_details: OutputTokens


class Response(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A response, as it is now."""

    id: str
    object: Literal["realtime.response"]
    status: ResponseStatus
    output: tuple[Item, ...]
    output_modalities: tuple[str, ...]
    max_output_tokens: int | Literal["inf"]
    audio: dict[str, Any]
    conversation_id: str | None = None
    status_details: StatusDetails | None = None
    metadata: dict[str, str] | None = None
    usage: Usage | None = None


class ServerEvent(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all that is sent."""

    event_id: str = field(default_factory=lambda: new_id("event"))


class ErrorEvent(ServerEvent, frozen=True, tag="error"):
    """An event of the client could not be served, or the session ends."""

    error: ErrorDetail


class SessionCreated(ServerEvent, frozen=True, tag="session.created"):
    """The first event of every session."""

    session: dict[str, Any]


class SessionUpdated(ServerEvent, frozen=True, tag="session.updated"):
    """All settings, after an update."""

    session: dict[str, Any]


class _OfItem(ServerEvent, frozen=True, kw_only=True):
    item_id: str


class BufferCommitted(_OfItem, frozen=True, tag="input_audio_buffer.committed"):
    """The buffer has become an item."""

    previous_item_id: str | None


class BufferCleared(ServerEvent, frozen=True, tag="input_audio_buffer.cleared"):
    """The buffer is empty."""


class OutputBufferCleared(ServerEvent, frozen=True, tag="output_audio_buffer.cleared"):
    """Of WebRTC. The response is the last one; empty where there was none."""

    response_id: str


class SpeechStarted(_OfItem, frozen=True, tag="input_audio_buffer.speech_started"):
    """A turn of the user begins."""

    audio_start_ms: int


class SpeechStopped(_OfItem, frozen=True, tag="input_audio_buffer.speech_stopped"):
    """A turn of the user is over."""

    audio_end_ms: int


class TimeoutTriggered(_OfItem, frozen=True, tag="input_audio_buffer.timeout_triggered"):
    """The user has been silent for `idle_timeout_ms`."""

    audio_start_ms: int
    audio_end_ms: int


class _WithItem(ServerEvent, frozen=True, kw_only=True):
    previous_item_id: str | None
    item: Item


class ItemAdded(_WithItem, frozen=True, tag="conversation.item.added"):
    """An item is in the conversation; one of an answer may still grow."""


class ItemDone(_WithItem, frozen=True, tag="conversation.item.done"):
    """An item is whole."""


class ItemRetrieved(ServerEvent, frozen=True, tag="conversation.item.retrieved"):
    """An item that was asked for."""

    item: Item


class ItemDeleted(_OfItem, frozen=True, tag="conversation.item.deleted"):
    """An item is gone: the client deleted it, or it was the oldest of too many."""


class ItemTruncated(_OfItem, frozen=True, tag="conversation.item.truncated"):
    """What was not heard of an item is gone."""

    content_index: int
    audio_end_ms: int


class _OfTranscription(_OfItem, frozen=True, kw_only=True):
    content_index: int


class TranscriptionDelta(_OfTranscription, frozen=True, tag="conversation.item.input_audio_transcription.delta"):
    """More of what the user said."""

    delta: str


class Seconds(Struct, frozen=True, tag="duration", tag_field="type"):
    """What a transcription took."""

    seconds: float


class TranscriptionCompleted(
    _OfTranscription, frozen=True, tag="conversation.item.input_audio_transcription.completed"
):
    """All that the user said."""

    transcript: str
    usage: Seconds


class TranscriptionFailed(_OfTranscription, frozen=True, tag="conversation.item.input_audio_transcription.failed"):
    """It could not be written down; the conversation goes on without."""

    error: ErrorDetail


class ResponseCreated(ServerEvent, frozen=True, tag="response.created"):
    """An answer has begun."""

    response: Response


class ResponseDone(ServerEvent, frozen=True, tag="response.done"):
    """An answer is over, whatever became of it."""

    response: Response


class _OfResponse(ServerEvent, frozen=True, kw_only=True):
    response_id: str
    output_index: int


class OutputItemAdded(_OfResponse, frozen=True, tag="response.output_item.added"):
    """An answer has one more item."""

    item: Item


class OutputItemDone(_OfResponse, frozen=True, tag="response.output_item.done"):
    """An item of an answer is whole, or all that there will be."""

    item: Item


class _OfOutputItem(_OfResponse, frozen=True, kw_only=True):
    item_id: str


class _OfPart(_OfOutputItem, frozen=True, kw_only=True):
    content_index: int


class PartAdded(_OfPart, frozen=True, tag="response.content_part.added"):
    """An item has one more part."""

    part: Part


class PartDone(_OfPart, frozen=True, tag="response.content_part.done"):
    """A part is whole."""

    part: Part


class TextDelta(_OfPart, frozen=True, tag="response.output_text.delta"):
    """More text."""

    delta: str


class TextDone(_OfPart, frozen=True, tag="response.output_text.done"):
    """All text."""

    text: str


class TranscriptDelta(_OfPart, frozen=True, tag="response.output_audio_transcript.delta"):
    """More of what is said."""

    delta: str


class TranscriptDone(_OfPart, frozen=True, tag="response.output_audio_transcript.done"):
    """All that is said."""

    transcript: str


class AudioDelta(_OfPart, frozen=True, tag="response.output_audio.delta"):
    """More sound, in base64: whole samples."""

    delta: bytes


class AudioDone(_OfPart, frozen=True, tag="response.output_audio.done"):
    """There is no more sound."""


class ArgumentsDelta(_OfOutputItem, frozen=True, tag="response.function_call_arguments.delta"):
    """More of the arguments of a call."""

    call_id: str
    delta: str


class ArgumentsDone(_OfOutputItem, frozen=True, tag="response.function_call_arguments.done"):
    """A call is whole: it may be made."""

    call_id: str
    name: str
    arguments: str
