"""A response while it is made: what the graph gives becomes items, and the events that tell of them. Pure.

    response.created, then for each item
        response.output_item.added, conversation.item.added, [response.content_part.added]
        the deltas
        their .done, [response.content_part.done], response.output_item.done, conversation.item.done
    response.done

A response beside the conversation (`conversation: "none"`) has no `conversation.*` events. Whatever happens, everything
that was added is done, and nothing comes after `response.done`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from omniflow.errors import ProtocolError
from omniflow.media import AudioChunk, Generated, ToolCallDelta
from omniflow.server.chat_request import Voice, voice_name
from omniflow.server.realtime import server_events as events
from omniflow.server.realtime.audio import AudioFormat, AudioOut
from omniflow.server.realtime.items import Conversation, Entry, Spoken, Written
from omniflow.server.realtime.server_events import Item, ServerEvent, StatusDetails, new_id

_PIECE_BYTES = 48 * 1024
"""64 KiB in base64: a message far below the 1 MiB that clients take, and no other event waits long behind it."""

Emit = Callable[[ServerEvent], None]
Ending = Literal["completed", "cancelled", "failed", "incomplete"]


class Manner(msgspec.Struct, frozen=True):
    """How a response is given."""

    aloud: bool
    format: AudioFormat
    voice: Voice
    max_output_tokens: int | Literal["inf"]
    metadata: dict[str, str] | None = None


class Answer:
    """One response. `conversation` None: beside it."""

    def __init__(self, manner: Manner, conversation: Conversation | None, emit: Emit) -> None:
        self.id = new_id("resp")
        self.over = False
        self.generated: Generated | None = None
        self.audio_s = 0.0
        self._manner = manner
        self._conversation = conversation
        self._emit = emit
        self._sound = AudioOut(manner.format)
        self._output: list[Entry] = []
        self._message: Entry | None = None
        self._calls: dict[int, Entry] = {}
        self._done: set[str] = set()
        emit(events.ResponseCreated(response=self._shown("in_progress", None)))

    @property
    def in_conversation(self) -> bool:
        """False for a response beside the conversation."""
        return self._conversation is not None

    # -- what the graph gives --------------------------------------------------------------------------------------

    def text(self, text: str) -> None:
        """More of what is written, or said."""
        if not text:
            return
        message = self._opened_message()
        where = self._place(message) | {"content_index": 0}
        match message.pieces[0]:
            case Spoken() as spoken:
                spoken.transcript += text
                self._emit(events.TranscriptDelta(delta=text, **where))
            case Written() as written:
                written.text += text
                self._emit(events.TextDelta(delta=text, **where))

    def sound(self, chunk: AudioChunk) -> None:
        """More of what is said. Raises ProtocolError where it does not go on as it began."""
        if self._manner.aloud:
            self._say(self._sound.push(chunk))

    def call(self, delta: ToolCallDelta) -> None:
        """More of a call. Raises ProtocolError where its first piece does not name it, or the next call has begun."""
        entry = self._calls.get(delta.index)
        if entry is None:
            entry = self._opened_call(delta)
        if delta.arguments:
            if entry.id in self._done:
                raise ProtocolError(f"call {delta.index} goes on after the next one has begun")
            entry.arguments += delta.arguments
            call_id = entry.call_id or ""
            self._emit(events.ArgumentsDelta(call_id=call_id, delta=delta.arguments, **self._place(entry)))

    # -- its end ---------------------------------------------------------------------------------------------------

    def end(self, status: Ending, details: StatusDetails | None = None) -> None:
        """Close whatever is open; nothing comes after."""
        if self.over:
            return
        spoken_to_its_end = status in ("completed", "incomplete")
        if spoken_to_its_end:
            self._say(self._sound.flush())
        if self._message is not None:
            self._close_message(self._message, spoken_to_its_end, whole=status == "completed")
        for entry in self._calls.values():
            self._close_call(entry, whole=status == "completed")
        self.over = True
        self._emit(events.ResponseDone(response=self._shown(status, details)))

    # -- items -----------------------------------------------------------------------------------------------------

    def _opened_message(self) -> Entry:
        if self._message is None:
            entry = Entry(id=new_id("item"), status="in_progress", role="assistant")
            self._add(entry)
            entry.pieces.append(Spoken() if self._manner.aloud else Written("", "output_text"))
            part = events.Part("audio", transcript="") if self._manner.aloud else events.Part("text", text="")
            self._emit(events.PartAdded(part=part, content_index=0, **self._place(entry)))
            self._message = entry
        return self._message

    def _opened_call(self, first: ToolCallDelta) -> Entry:
        if not first.name:
            raise ProtocolError(f"the first piece of call {first.index} has no name")
        for entry in self._calls.values():  # the one before is whole now
            self._close_call(entry, whole=True)
        call_id = first.id or new_id("call")
        entry = Entry(id=new_id("item"), type="function_call", status="in_progress", name=first.name, call_id=call_id)
        self._add(entry)
        self._calls[first.index] = entry
        return entry

    def _add(self, entry: Entry) -> None:
        self._output.append(entry)
        index = len(self._output) - 1
        self._emit(events.OutputItemAdded(response_id=self.id, output_index=index, item=entry.shown()))
        if self._conversation is not None:
            previous = self._conversation.last_id
            self._conversation.insert(entry)
            self._emit(events.ItemAdded(previous_item_id=previous, item=entry.shown()))

    def _say(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            message = self._opened_message()
            (spoken,) = message.pieces
            seconds = self._sound.seconds(len(piece))
            self.audio_s += seconds
            if isinstance(spoken, Spoken):
                spoken.audio_ms += seconds * 1000
            self._emit(events.AudioDelta(delta=piece, content_index=0, **self._place(message)))

    def _close_message(self, entry: Entry, spoken_to_its_end: bool, *, whole: bool) -> None:
        where = self._place(entry) | {"content_index": 0}
        match entry.pieces[0]:
            case Spoken() as spoken:
                spoken.whole = spoken_to_its_end
                self._emit(events.AudioDone(**where))
                self._emit(events.TranscriptDone(transcript=spoken.transcript, **where))
                part = events.Part("audio", transcript=spoken.transcript)
            case Written(text=text):
                self._emit(events.TextDone(text=text, **where))
                part = events.Part("text", text=text)
        self._emit(events.PartDone(part=part, **where))
        self._close(entry, whole=whole)

    def _close_call(self, entry: Entry, *, whole: bool) -> None:
        if entry.id in self._done:
            return
        if whole:  # half a call must not be made: clients make it at this event
            entry.arguments = entry.arguments or "{}"
            call_id, name = entry.call_id or "", entry.name or ""
            self._emit(
                events.ArgumentsDone(call_id=call_id, name=name, arguments=entry.arguments, **self._place(entry))
            )
        self._close(entry, whole=whole)

    def _close(self, entry: Entry, *, whole: bool) -> None:
        self._done.add(entry.id)
        entry.status = "completed" if whole else "incomplete"
        index = self._output.index(entry)
        item = entry.shown()
        self._emit(events.OutputItemDone(response_id=self.id, output_index=index, item=item))
        if self._conversation is not None:
            # A client may have deleted it meanwhile: then it has no place any more.
            known = entry.id in self._conversation
            previous = self._conversation.previous_of(entry.id) if known else None
            self._emit(events.ItemDone(previous_item_id=previous, item=item))

    def _place(self, entry: Entry) -> dict[str, Any]:
        return {"response_id": self.id, "output_index": self._output.index(entry), "item_id": entry.id}

    # -- the response as clients see it ----------------------------------------------------------------------------

    def _shown(self, status: events.ResponseStatus, details: StatusDetails | None) -> events.Response:
        manner = self._manner
        output: tuple[Item, ...] = () if status == "in_progress" else tuple(entry.shown() for entry in self._output)
        return events.Response(
            id=self.id,
            object="realtime.response",
            status=status,
            output=output,
            output_modalities=("audio",) if manner.aloud else ("text",),
            max_output_tokens=manner.max_output_tokens,
            # A session's voice may be an object with an id; of a response, clients take a name only.
            audio={"output": {"format": msgspec.to_builtins(manner.format), "voice": voice_name(manner.voice)}},
            conversation_id=self._conversation.id if self._conversation is not None else None,
            status_details=details,
            metadata=manner.metadata,
            usage=_usage(self.generated) if status != "in_progress" else None,
        )


def _usage(generated: Generated | None) -> events.Usage:
    if generated is None:
        generated = Generated("stop", 0, 0)
    text = generated.prompt_tokens - generated.audio_tokens - generated.image_tokens
    return events.Usage(
        total_tokens=generated.prompt_tokens + generated.completion_tokens,
        input_tokens=generated.prompt_tokens,
        output_tokens=generated.completion_tokens,
        input_token_details=events.InputTokens(
            text_tokens=text,
            audio_tokens=generated.audio_tokens,
            image_tokens=generated.image_tokens,
            cached_tokens=generated.cached_tokens,
            cached_tokens_details={"text_tokens": generated.cached_tokens, "audio_tokens": 0},
        ),
        output_token_details=events.OutputTokens(text_tokens=generated.completion_tokens),
    )
