"""A conversation: items in order, what clients see of them, and the chat that they are for the graph. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
import numpy as np

from omniflow.errors import InvalidInputError
from omniflow.media import AudioPart, Chat, ChatMessage, ImagePart, Part, TextPart, ToolCall
from omniflow.server.realtime.audio import SAMPLES_PER_MS, AudioFormat, Pcm16, decode_clip, wav
from omniflow.server.realtime.client_events import (
    FunctionCallIn,
    FunctionOutputIn,
    InputAudio,
    InputImage,
    ItemIn,
    MessageIn,
    MessagePart,
    OutputAudio,
    Text,
)
from omniflow.server.realtime.server_events import Content, HeardContent, Item, Status, new_id
from omniflow.server.realtime.settings import MAX_ECHO_BYTES

_ROOT = "root"
_MAX_SHOWN_IMAGE = 65_536
_CHARS_PER_S = 15
"""English, spoken: how much of a text was heard where its speech was broken off and nobody knows its length."""

Role = Literal["system", "user", "assistant"]


class ItemError(InvalidInputError):
    """An item that is not there, or is there already; `code` names the event's problem."""

    def __init__(self, code: str, message: str, param: str) -> None:
        super().__init__(message, param=param)
        self.item_code = code


class Written(msgspec.Struct):
    """Text."""

    text: str
    type: Literal["input_text", "output_text"]

    def shown(self) -> Content:
        """As clients see it."""
        return Content(self.type, text=self.text)


class Heard(msgspec.Struct):
    """What the user said: its sound (16 kHz) as long as it is needed, its words once they are known."""

    samples: Pcm16 | None
    transcript: str | None = None

    def shown(self) -> HeardContent:
        """As clients see it."""
        return HeardContent(self.transcript)


class Seen(msgspec.Struct):
    """An image."""

    data: bytes
    image_url: str
    detail: str | None

    def shown(self) -> Content:
        """As clients see it. A large one is left out: clients take messages below 1 MiB."""
        url = self.image_url if len(self.image_url) <= _MAX_SHOWN_IMAGE else None
        return Content("input_image", image_url=url, detail=self.detail)


class Spoken(msgspec.Struct):
    """What the model said, and how much of it was heard."""

    transcript: str = ""
    audio_ms: float = 0.0
    whole: bool = False
    """True where `audio_ms` is the length of all of it."""
    heard_ms: float | None = None
    """None: all of it, as far as anybody knows."""

    @property
    def length_known(self) -> bool:
        """False while it is made, where it was broken off, and of an earlier session, whose sound was not sent."""
        return self.whole and self.audio_ms > 0

    def heard_text(self) -> str:
        """The words that were heard: as many of the text as time of the speech, up to the end of a word."""
        if self.heard_ms is None:
            return self.transcript
        if self.length_known:
            num_chars = len(self.transcript) * self.heard_ms / self.audio_ms
        else:
            num_chars = _CHARS_PER_S * self.heard_ms / 1000
        if num_chars >= len(self.transcript):
            return self.transcript
        cut = self.transcript[: int(num_chars) + 1]
        return cut[: max(cut.rfind(" "), 0)].rstrip()

    def shown(self) -> Content:
        """As clients see it."""
        return Content("output_audio", transcript=self.heard_text())


Piece = Written | Heard | Seen | Spoken


class Entry(msgspec.Struct, kw_only=True):
    """An item of a conversation."""

    id: str
    type: Literal["message", "function_call", "function_call_output"] = "message"
    status: Status = "completed"
    role: Role | None = None
    pieces: list[Piece] = []
    name: str | None = None
    call_id: str | None = None
    arguments: str = ""
    output: str = ""

    def shown(self) -> Item:
        """As clients see it."""
        item = Item(self.id, "realtime.item", self.type, self.status)
        match self.type:
            case "message":
                content = tuple(piece.shown() for piece in self.pieces)
                return msgspec.structs.replace(item, role=self.role, content=content)
            case "function_call":
                given = {"name": self.name, "call_id": self.call_id, "arguments": self.arguments}
                return msgspec.structs.replace(item, **given)
            case "function_call_output":
                return msgspec.structs.replace(item, call_id=self.call_id, output=self.output)

    def drop_known_sound(self) -> None:
        """Forget the sound of what is known in words."""
        for piece in self.pieces:
            if isinstance(piece, Heard) and piece.transcript is not None:
                piece.samples = None

    def num_samples(self) -> int:
        """Of the sound that it holds."""
        held = (piece.samples for piece in self.pieces if isinstance(piece, Heard))
        return sum(len(samples) for samples in held if samples is not None)


def entry_of(item: ItemIn, format: AudioFormat, where: str = "item") -> Entry:
    """The item that a client describes at `where`; clips are in `format`. Raises InvalidInputError naming the field."""
    id = item.id or new_id("item")
    match item:
        case MessageIn(role=role, content=content):
            pieces = [_piece(part, role, format, f"{where}.content[{at}]") for at, part in enumerate(content)]
            entry = Entry(id=id, role=role, pieces=pieces)
        case FunctionCallIn(name=name, arguments=arguments):
            call_id = item.call_id or new_id("call")
            entry = Entry(id=id, type="function_call", name=name, call_id=call_id, arguments=arguments)
        case FunctionOutputIn(call_id=call_id, output=output):
            entry = Entry(id=id, type="function_call_output", call_id=call_id, output=output)
    if len(msgspec.json.encode(entry.shown())) > MAX_ECHO_BYTES:
        raise InvalidInputError(f"{where}: its text is larger than {MAX_ECHO_BYTES} bytes", param=where)
    return entry


def _piece(part: MessagePart, role: Role, format: AudioFormat, where: str) -> Piece:
    """A part of a message. Its type is made to fit its role: clients that check types drop what does not."""
    match part:
        case Text(text=text):
            return Written(text, "output_text" if role == "assistant" else "input_text")
        case InputAudio(transcript=transcript) | OutputAudio(transcript=transcript) if role == "assistant":
            return Spoken(transcript or "", whole=True)
        case InputAudio(audio=audio, transcript=transcript) if role == "user":
            if audio is None and transcript is None:
                raise InvalidInputError(f"{where}.audio: is required", param=f"{where}.audio")
            return Heard(decode_clip(audio, format) if audio else None, transcript)
        case OutputAudio(transcript=transcript) if role == "user":
            return Heard(None, transcript or "")
        case InputImage(image_url=url, detail=detail) if role == "user":
            return Seen(_image_bytes(url, f"{where}.image_url"), url, detail)
    raise InvalidInputError(f"{where}: a message of role {role!r} takes no such part", param=where)


def _image_bytes(url: str, where: str) -> bytes:
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        message = f"{where}: expected a data URI like data:image/png;base64,...; remote URLs are not fetched"
        raise InvalidInputError(message, param=where)
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise InvalidInputError(f"{where}: is not base64: {error}", param=where) from error


class Conversation:
    """Items in order. Holds at most `max_items`, and `max_samples` of sound (16 kHz) in them."""

    def __init__(self, max_items: int, max_samples: int) -> None:
        self.id = new_id("conv")
        self._max_items = max_items
        self._max_samples = max_samples
        self._order: list[str] = []
        self._entries: dict[str, Entry] = {}
        self._grown = False

    def __contains__(self, id: str) -> bool:
        return id in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return (self._entries[id] for id in self._order)

    def find(self, id: str, code: str, param: str = "item_id") -> Entry:
        """The item. Raises ItemError with `code` where there is none."""
        if id not in self._entries:
            raise ItemError(code, f"{param}: the conversation has no item {id[:128]!r}", param)
        return self._entries[id]

    @property
    def last_id(self) -> str | None:
        """Of the last item."""
        return self._order[-1] if self._order else None

    def previous_of(self, id: str) -> str | None:
        """What comes before; None where it is the first."""
        at = self._order.index(id)
        return self._order[at - 1] if at else None

    def place(self, id: str | None, previous: str | None) -> int:
        """Where a new item `id` belongs that comes after `previous`. Raises ItemError where it cannot be put there."""
        if id == _ROOT:
            raise InvalidInputError(f"item.id: {_ROOT!r} is the front of a conversation, not an item", param="item.id")
        if id is not None and id in self._entries:
            message = f"item.id: the conversation has an item {id!r} already"
            raise ItemError("item_create_duplicate_item_id", message, "item.id")
        if previous is None:
            return len(self._order)
        if previous == _ROOT:
            return 0
        if previous not in self._entries:
            message = f"previous_item_id: the conversation has no item {previous[:128]!r}"
            raise ItemError("item_create_invalid_previous_item_id", message, "previous_item_id")
        return self._order.index(previous) + 1

    def insert(self, entry: Entry, at: int | None = None) -> None:
        """Put `entry` where `place` said, or at the end."""
        self._order.insert(len(self._order) if at is None else at, entry.id)
        self._entries[entry.id] = entry
        self._grown = True

    def delete(self, id: str) -> None:
        """Drop an item."""
        del self._entries[id]
        self._order.remove(id)

    def trim(self) -> list[str]:
        """Hold the limits: forget the oldest sound, drop the oldest items (those being made stay) and name them."""
        if not self._grown:
            return []
        self._grown = False
        surplus = max(0, len(self._order) - self._max_items)
        gone = [entry.id for entry in self if entry.status != "in_progress"][:surplus]
        for id in gone:
            self.delete(id)
        self._spare_sound()
        return gone

    def drop_answered_sound(self) -> None:
        """Forget the sound of what was said before the last answer and is known in words: it is not asked for again."""
        for at in range(_last_answer(list(self))):
            self._entries[self._order[at]].drop_known_sound()

    def _spare_sound(self) -> None:
        """What is not known in words then, is lost."""
        left = self._max_samples
        for id in reversed(self._order):
            entry = self._entries[id]
            left -= entry.num_samples()
            if left < 0:
                for piece in entry.pieces:
                    if isinstance(piece, Heard):
                        piece.samples = None


def chat_of(instructions: str, entries: Iterable[Entry]) -> Chat:
    """The conversation as a graph takes it.

    The user's last turn is sound where there is sound; what was said before is words where they are known.
    """
    items = list(entries)
    last_answer = _last_answer(items)
    messages = [ChatMessage("system", (TextPart(instructions),))] if instructions else []
    for at, entry in enumerate(items):
        message = _message(entry, aloud=at > last_answer)
        if message is None:
            continue
        if message.role == "assistant" and messages and messages[-1].role == "assistant":
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)
    return Chat(tuple(messages))


def _last_answer(entries: list[Entry]) -> int:
    """Where the last item stands that the user has not said; -1 where there is none."""
    answers = (at for at, entry in enumerate(entries) if entry.role == "assistant" or entry.type != "message")
    return max(answers, default=-1)


def _message(entry: Entry, *, aloud: bool) -> ChatMessage | None:
    match entry.type:
        case "function_call":
            call = ToolCall(entry.call_id or "", entry.name or "", entry.arguments)
            return ChatMessage("assistant", (), (call,)) if entry.status == "completed" else None
        case "function_call_output":
            return ChatMessage("tool", (TextPart(entry.output),), tool_call_id=entry.call_id)
        case "message":
            parts = tuple(part for piece in entry.pieces if (part := _part(piece, aloud=aloud)) is not None)
            return ChatMessage(entry.role or "user", parts) if parts else None


def _part(piece: Piece, *, aloud: bool) -> Part | None:
    match piece:
        case Written(text=text):
            return TextPart(text) if text else None
        case Seen(data=data):
            return ImagePart(data)
        case Spoken():
            return TextPart(text) if (text := piece.heard_text()) else None
        case Heard(samples=samples, transcript=transcript):
            if samples is not None and len(samples) and (aloud or transcript is None):
                return AudioPart(wav(samples), "wav")
            return TextPart(transcript) if transcript else None


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    return ChatMessage("assistant", first.parts + second.parts, first.tool_calls + second.tool_calls)


def spoken_turn(samples: Pcm16, id: str) -> Entry:
    """What the user said, as an item."""
    return Entry(id=id, role="user", pieces=[Heard(np.ascontiguousarray(samples))])


def duration_ms(samples: Pcm16) -> float:
    """Of sound at 16 kHz."""
    return len(samples) / SAMPLES_PER_MS
