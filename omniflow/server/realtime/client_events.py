"""What clients send. Unknown keys are ignored; what cannot be read names the field, and the session goes on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from omniflow.errors import InvalidInputError
from omniflow.server.body import invalid_field
from omniflow.server.chat_request import Voice
from omniflow.server.failures import MalformedBodyError
from omniflow.server.realtime.audio import AudioFormat
from omniflow.server.realtime.settings import FunctionTool, MaxTokens, Modalities, ToolChoice

ItemId = Annotated[str, Meta(min_length=1, max_length=128)]


class UnknownEventError(InvalidInputError):
    """`type` is none of the protocol."""

    code = "unknown_event"


class Text(Struct, frozen=True, tag="input_text", tag_field="type"):
    """What somebody wrote."""

    text: str


class PlainText(Text, frozen=True, tag="text"):
    """The same, by its older name."""


class OutputText(Text, frozen=True, tag="output_text"):
    """What the model wrote."""


class InputAudio(Struct, frozen=True, tag="input_audio", tag_field="type"):
    """A clip in the session's input format; or, of an earlier session, only what was said."""

    audio: bytes | None = None
    transcript: str | None = None


class OutputAudio(Struct, frozen=True, tag="output_audio", tag_field="type"):
    """What the model said; its sound is not needed, and dropped."""

    transcript: str | None = None
    audio: str | None = None


class InputImage(Struct, frozen=True, tag="input_image", tag_field="type"):
    """A data URI."""

    image_url: str
    detail: str | None = None


MessagePart = Text | PlainText | OutputText | InputAudio | OutputAudio | InputImage


class MessageIn(Struct, frozen=True, tag="message", tag_field="type"):
    """A turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: tuple[MessagePart, ...]
    id: ItemId | None = None


class FunctionCallIn(Struct, frozen=True, tag="function_call", tag_field="type"):
    """A call that the model made, in this session or an earlier one."""

    name: str
    arguments: str
    call_id: str | None = None
    id: ItemId | None = None


class FunctionOutputIn(Struct, frozen=True, tag="function_call_output", tag_field="type"):
    """What a call gave."""

    call_id: str
    output: str
    id: ItemId | None = None


class ReferenceIn(Struct, frozen=True, tag="item_reference", tag_field="type"):
    """An item of the conversation, in the input of a response."""

    id: ItemId


ItemIn = MessageIn | FunctionCallIn | FunctionOutputIn


class ResponseOutput(Struct, frozen=True):
    """How a response sounds."""

    format: AudioFormat | None = None
    voice: Voice | None = None


class ResponseAudio(Struct, frozen=True):
    """How a response sounds."""

    output: ResponseOutput | None = None


class ResponseParams(Struct, frozen=True):
    """What one response does differently from its session."""

    conversation: str | None = None
    input: tuple[MessageIn | FunctionCallIn | FunctionOutputIn | ReferenceIn, ...] | None = None
    instructions: str | None = None
    output_modalities: Modalities | None = None
    audio: ResponseAudio | None = None
    tools: tuple[FunctionTool, ...] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: MaxTokens | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None


class _ClientEvent(Struct, frozen=True, kw_only=True, tag_field="type"):
    event_id: Annotated[str, Meta(max_length=512)] | None = None


class SessionUpdate(_ClientEvent, frozen=True, tag="session.update"):
    """Change settings; see `settings.updated`."""

    session: dict[str, Any]


class BufferAppend(_ClientEvent, frozen=True, tag="input_audio_buffer.append"):
    """More sound."""

    audio: bytes


class BufferCommit(_ClientEvent, frozen=True, tag="input_audio_buffer.commit"):
    """What is in the buffer is a turn of the user."""


class BufferClear(_ClientEvent, frozen=True, tag="input_audio_buffer.clear"):
    """Forget what is in the buffer."""


class OutputBufferClear(_ClientEvent, frozen=True, tag="output_audio_buffer.clear"):
    """Of WebRTC: over a WebSocket the client has the buffer."""


class ItemCreate(_ClientEvent, frozen=True, tag="conversation.item.create"):
    """Put an item behind `previous_item_id`: "root" is the front, None the end."""

    item: ItemIn
    previous_item_id: str | None = None


class ItemRetrieve(_ClientEvent, frozen=True, tag="conversation.item.retrieve"):
    """Show an item."""

    item_id: str


class ItemDelete(_ClientEvent, frozen=True, tag="conversation.item.delete"):
    """Drop an item."""

    item_id: str


class ItemTruncate(_ClientEvent, frozen=True, tag="conversation.item.truncate"):
    """The user heard no more than `audio_end_ms` of what the model said."""

    item_id: str
    audio_end_ms: Annotated[float, Meta(ge=0, le=2**53)]
    content_index: Annotated[int, Meta(ge=0, le=2**31)] = 0


class ResponseCreate(_ClientEvent, frozen=True, tag="response.create"):
    """Answer."""

    response: ResponseParams | None = None


class ResponseCancel(_ClientEvent, frozen=True, tag="response.cancel"):
    """Stop answering."""

    response_id: str | None = None


ClientEvent = (
    SessionUpdate
    | BufferAppend
    | BufferCommit
    | BufferClear
    | OutputBufferClear
    | ItemCreate
    | ItemRetrieve
    | ItemDelete
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
)


class _Head(Struct, frozen=True):
    type: Any = None
    event_id: Any = None


_decoder = msgspec.json.Decoder(ClientEvent)
_head_decoder = msgspec.json.Decoder(_Head)
_KNOWN = frozenset(member.__struct_config__.tag for member in ClientEvent.__args__)


def read_event(message: str | bytes) -> ClientEvent:
    """The event in `message`. Raises MalformedBodyError, UnknownEventError or InvalidInputError naming the field."""
    try:
        return _decoder.decode(message)
    except msgspec.ValidationError as error:
        kind = _head(message).type
        if isinstance(kind, str) and kind not in _KNOWN:
            raise UnknownEventError(f"type: there is no event {kind[:64]!r}", param="type") from error
        raise invalid_field(str(error), ClientEvent) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise MalformedBodyError(f"the event is not valid JSON: {error}") from error
    except RecursionError as error:
        raise MalformedBodyError("the event is nested too deeply") from error


def event_id_of(message: str | bytes) -> str | None:
    """The id of an event that could not be read, where it has one."""
    found = _head(message).event_id
    return found if isinstance(found, str) else None


def _head(message: str | bytes) -> _Head:
    try:
        return _head_decoder.decode(message)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _Head()
