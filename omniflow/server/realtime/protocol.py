"""A session as a machine that does no I/O: client events and what the graph gives go in, events and work come out.

    receive   a message of the client
    frames    sound that is to be judged;  heard  takes the judgement
    output, ended, failed          what became of a `Respond`
    wrote, written, not_written    what became of a `Transcribe`
    understood                     what became of a `Listen`
    tick      it is `due_s`
    take      the events to send and the work to do since the last call

Whatever is fed in, in whatever order: nothing raises, each `response.created` has one `response.done`, and what a
cancelled response still gives is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import msgspec

from omniflow.errors import (
    InvalidInputError,
    OverloadedError,
    ProtocolError,
    RequestError,
    UnavailableError,
    UnsupportedError,
)
from omniflow.media import AudioChunk, Chat, Generated, Options, TextDelta, ToolCallDelta
from omniflow.server.failures import ModelNotFoundError
from omniflow.server.realtime import client_events as client
from omniflow.server.realtime import server_events as events
from omniflow.server.realtime.answers import Answer, Ending, Manner
from omniflow.server.realtime.hearing import Hearing, Listen, Transcribe
from omniflow.server.realtime.items import Conversation, Entry, Heard, ItemError, Spoken, chat_of, entry_of
from omniflow.server.realtime.server_events import ErrorDetail, ServerEvent, StatusDetails, new_id
from omniflow.server.realtime.settings import FunctionTool, NamedTool, Session, ToolChoice, updated, view
from omniflow.server.realtime.turns import ServerVad

_MOST_BESIDE = 4
"""Responses beside the conversation that run at once."""
_MOST_WRITTEN = 8
"""Transcriptions that run at once."""


class Respond(NamedTuple):
    """To do: ask the graph."""

    response_id: str
    chat: Chat
    outputs: frozenset[str]
    options: Options
    speech_ended: bool
    """True where it answers a turn that has just been detected."""


class Stop(NamedTuple):
    """To do: stop a `Respond`; what it still gives is dropped anyway."""

    response_id: str


Work = Respond | Stop | Transcribe | Listen


class Abilities(NamedTuple):
    """What the graph can do."""

    models: frozenset[str]
    outputs: frozenset[str]
    """Of its input `chat`."""
    transcribes: bool


class Bounds(NamedTuple):
    """What a session may hold."""

    items: int = 1000
    buffer_s: float = 120.0


class ActiveResponseError(InvalidInputError):
    """A response of the conversation runs, and there is one at a time."""

    code = "conversation_already_has_active_response"


class NoResponseError(InvalidInputError):
    """Nothing to cancel."""

    code = "response_cancel_not_active"


class Protocol:
    """One session."""

    def __init__(
        self,
        session: Session,
        abilities: Abilities,
        bounds: Bounds,
        expires_at: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if "audio" not in abilities.outputs:
            session = msgspec.structs.replace(session, output_modalities=("text",))
        self.id = new_id("sess")
        self.session = session
        self.due_s: float | None = None
        self._abilities = abilities
        self._expires_at = expires_at
        self._clock = clock
        self._events: list[ServerEvent] = []
        self._work: list[Work] = []
        self._conversation = Conversation(bounds.items, int(2 * bounds.buffer_s * 16_000))
        self._hearing = Hearing(session, self._conversation, self._events.append, bounds.buffer_s)
        self._answers: dict[str, Answer] = {}
        self._first_sound_s: dict[str, float] = {}
        self._num_writing = 0
        self._waiting = False
        self._leaving = False
        self._events.append(events.SessionCreated(session=self._view()))

    def take(self) -> tuple[list[ServerEvent], list[Work]]:
        """The events to send, in order, and the work to do since the last call."""
        for id in self._conversation.overflow():
            self._conversation.delete(id)
            self._events.append(events.ItemDeleted(item_id=id))
        self._conversation.spare_sound()
        self._take_writing()
        sent, todo = list(self._events), list(self._work)
        self._events.clear()
        self._work.clear()
        return sent, todo

    def _take_writing(self) -> None:
        for task in self._hearing.work:
            if isinstance(task, Listen):
                if self._abilities.transcribes:
                    self._work.append(task)
            elif not self._abilities.transcribes:
                self._not_written(task.item_id, UnsupportedError("this graph does not transcribe"))
            elif self._num_writing >= _MOST_WRITTEN:
                self._not_written(task.item_id, OverloadedError("too many turns of this session wait for their words"))
            else:
                self._num_writing += 1
                self._work.append(task)
        self._hearing.work.clear()

    @property
    def idle(self) -> bool:
        """True while no response runs, and nothing is being written down."""
        return not self._answers and not self._num_writing

    def leave(self) -> None:
        """The server drains: what runs may end, nothing new begins."""
        self._leaving = True

    # -- the client ------------------------------------------------------------------------------------------------

    def receive(self, message: str | bytes) -> None:
        """Serve a message; what cannot be served is an `error` event, and the session goes on."""
        event_id = None
        try:
            event = client.read_event(message)
            event_id = event.event_id
            self._serve(event)
        except RequestError as error:
            self._refuse(error, event_id or client.event_id_of(message))

    def _serve(self, event: client.ClientEvent) -> None:
        match event:
            case client.BufferAppend(audio=audio):
                self._hearing.append(audio)
            case client.SessionUpdate(session=update):
                self._update(update)
            case client.BufferCommit():
                self._hearing.commit()
            case client.BufferClear():
                self._hearing.clear()
                self._events.append(events.BufferCleared())
            case client.OutputBufferClear():
                self._events.append(events.OutputBufferCleared())
            case client.ItemCreate():
                self._create_item(event)
            case client.ItemRetrieve(item_id=id):
                entry = self._conversation.find(id, "item_retrieve_invalid_item_id")
                self._events.append(events.ItemRetrieved(item=entry.shown()))
            case client.ItemDelete(item_id=id):
                self._conversation.find(id, "item_delete_invalid_item_id")
                self._conversation.delete(id)
                self._events.append(events.ItemDeleted(item_id=id))
            case client.ItemTruncate():
                self._truncate(event)
            case client.ResponseCreate(response=params):
                self._respond(params or client.ResponseParams())
            case client.ResponseCancel(response_id=id):
                self._cancel_asked(id)

    def _refuse(self, error: RequestError, event_id: str | None) -> None:
        self._events.append(events.ErrorEvent(error=error_detail(error, event_id)))

    # -- settings --------------------------------------------------------------------------------------------------

    def _update(self, update: dict[str, Any]) -> None:
        new = updated(self.session, update)
        if new.model != self.session.model and new.model not in self._abilities.models:
            raise ModelNotFoundError(f"model {new.model!r} is not served here", param="session.model")
        if new.speaks and not self.session.speaks:
            self._require("audio", "session.output_modalities")
        if new.tools and not self.session.tools:
            self._require("tool_calls", "session.tools")
        self.session = new
        self._hearing.configure(new)
        self._schedule_idle()
        self._events.append(events.SessionUpdated(session=self._view()))

    def _require(self, output: str, param: str) -> None:
        if output not in self._abilities.outputs:
            what = {"audio": "speech", "tool_calls": "calls of tools"}[output]
            raise UnsupportedError(f"{param}: this graph gives no {what}", param=param)

    def _view(self) -> dict[str, Any]:
        return view(self.session, self.id, self._expires_at)

    # -- items -----------------------------------------------------------------------------------------------------

    def _create_item(self, event: client.ItemCreate) -> None:
        at = self._conversation.place(event.item.id, event.previous_item_id)
        entry = entry_of(event.item, self.session.audio.input.format)
        self._conversation.insert(entry, at)
        previous = self._conversation.previous_of(entry.id)
        self._events.append(events.ItemAdded(previous_item_id=previous, item=entry.shown()))
        self._events.append(events.ItemDone(previous_item_id=previous, item=entry.shown()))

    def _truncate(self, event: client.ItemTruncate) -> None:
        entry = self._conversation.find(event.item_id, "item_truncate_invalid_item_id")
        if entry.role != "assistant":
            message = f"item_id: {event.item_id[:128]!r} was not said by the model; only what it said can be truncated"
            raise InvalidInputError(message, param="item_id")
        for piece in entry.pieces:
            if isinstance(piece, Spoken):
                heard_ms = min(event.audio_end_ms, piece.audio_ms) if piece.whole else event.audio_end_ms
                piece.heard_ms = heard_ms if piece.heard_ms is None else min(heard_ms, piece.heard_ms)
        self._events.append(
            events.ItemTruncated(
                item_id=event.item_id, content_index=event.content_index, audio_end_ms=int(event.audio_end_ms)
            )
        )

    # -- the user's speech -----------------------------------------------------------------------------------------

    def frames(self) -> Any:
        """Samples that are to be judged, whole frames; see `heard`."""
        return self._hearing.frames()

    def heard(self, probabilities: Collection[float]) -> None:
        """How likely each of `frames` is speech."""
        for probability in probabilities:
            heard = self._hearing.push(probability)
            detection = self.session.audio.input.turn_detection
            if detection is None:
                return
            if heard == "started":
                self.due_s = None
                if detection.interrupt_response:
                    self._interrupt()
            elif heard == "stopped" and detection.create_response:
                self._answer_turn()

    def _interrupt(self) -> None:
        self._waiting = False
        for answer in list(self._answers.values()):
            if answer.in_conversation:
                self._cancel(answer, "turn_detected")

    def _answer_turn(self) -> None:
        if self.session.type != "realtime" or self._leaving:
            return
        if self._active is not None:
            self._waiting = True
            return
        try:
            self._begin(client.ResponseParams(), speech_ended=True)
        except InvalidInputError as error:
            self._refuse(error, None)

    def understood(self, pause: int, text: str) -> None:
        """What was said before a pause, as a `Listen` asked."""
        self._hearing.understood(pause, text)

    def wrote(self, item_id: str, delta: str) -> None:
        """More of a transcript."""
        if delta:
            self._events.append(events.TranscriptionDelta(item_id=item_id, content_index=0, delta=delta))

    def written(self, item_id: str, transcript: str, seconds: float) -> None:
        """A transcript is whole."""
        self._num_writing -= 1
        if item_id in self._conversation:
            entry = self._conversation.find(item_id, "")
            for piece in entry.pieces:
                if isinstance(piece, Heard):
                    piece.transcript = transcript
        self._events.append(
            events.TranscriptionCompleted(
                item_id=item_id, content_index=0, transcript=transcript, usage=events.Seconds(seconds)
            )
        )

    def not_written(self, item_id: str, error: RequestError) -> None:
        """A turn could not be transcribed."""
        self._num_writing -= 1
        self._not_written(item_id, error)

    def _not_written(self, item_id: str, error: RequestError) -> None:
        self._events.append(
            events.TranscriptionFailed(item_id=item_id, content_index=0, error=error_detail(error, None))
        )

    # -- responses -------------------------------------------------------------------------------------------------

    @property
    def _active(self) -> Answer | None:
        """The response of the conversation that runs."""
        return next((answer for answer in self._answers.values() if answer.in_conversation), None)

    def _respond(self, params: client.ResponseParams) -> None:
        if self.session.type != "realtime":
            raise UnsupportedError("type: a transcription session gives no responses", param="type")
        if self._leaving:
            raise UnavailableError("the server is about to stop; connect again")
        if params.conversation == "none":
            if sum(not answer.in_conversation for answer in self._answers.values()) >= _MOST_BESIDE:
                raise OverloadedError(f"{_MOST_BESIDE} responses run beside the conversation; wait for one to end")
        elif params.conversation not in (None, "auto"):
            message = "response.conversation: expected 'auto' or 'none'"
            raise InvalidInputError(message, param="response.conversation")
        elif self._active is not None:
            message = f"the conversation has an active response: {self._active.id}; wait for its end, or cancel it"
            raise ActiveResponseError(message)
        self._begin(params, speech_ended=False)

    def _begin(self, params: client.ResponseParams, *, speech_ended: bool) -> None:
        """Ask the graph. Raises InvalidInputError before anything of the response is seen."""
        session = self.session
        aloud = session.speaks if params.output_modalities is None else "audio" in params.output_modalities
        if aloud:
            self._require("audio", "response.output_modalities")
        tools = session.tools if params.tools is None else params.tools
        if tools:
            self._require("tool_calls", "response.tools")
        chat = chat_of(_first(params.instructions, session.instructions), self._context(params))
        manner = self._manner(params, aloud=aloud)
        answer = Answer(manner, None if params.conversation == "none" else self._conversation, self._events.append)
        self._answers[answer.id] = answer
        self._waiting = False
        self.due_s = None
        wanted = {"text", "usage"} | ({"audio"} if aloud else set()) | ({"tool_calls"} if tools else set())
        outputs = frozenset(wanted & self._abilities.outputs)
        options = self._options(params, manner, tools)
        self._work.append(Respond(answer.id, chat, outputs, options, speech_ended))

    def _context(self, params: client.ResponseParams) -> list[Entry]:
        if params.input is None:
            return list(self._conversation)
        format = self.session.audio.input.format
        entries = []
        for at, item in enumerate(params.input):
            where = f"response.input[{at}]"
            if isinstance(item, client.ReferenceIn):
                entries.append(self._conversation.find(item.id, "item_reference_invalid_item_id", f"{where}.id"))
            else:
                entries.append(entry_of(item, format, where))
        return entries

    def _manner(self, params: client.ResponseParams, *, aloud: bool) -> Manner:
        output = self.session.audio.output
        asked = params.audio.output if params.audio is not None else None
        return Manner(
            aloud=aloud,
            format=_first(asked.format if asked else None, output.format),
            voice=_first(asked.voice if asked else None, output.voice),
            max_output_tokens=_first(params.max_output_tokens, self.session.max_output_tokens),
            metadata=params.metadata,
        )

    def _options(self, params: client.ResponseParams, manner: Manner, tools: tuple[FunctionTool, ...]) -> Options:
        choice: ToolChoice = _first(params.tool_choice, self.session.tool_choice)
        mode: Literal["auto", "none", "required"] = "required" if isinstance(choice, NamedTool) else choice
        return Options(
            max_tokens=None if manner.max_output_tokens == "inf" else manner.max_output_tokens,
            voice=None if manner.voice == "default" else manner.voice,
            speed=self.session.audio.output.speed,
            tools=tuple(tool.for_graph() for tool in tools),
            tool_choice=mode if tools else "auto",
            tool_name=choice.name if isinstance(choice, NamedTool) and tools else None,
            parallel_tool_calls=_first(params.parallel_tool_calls, self.session.parallel_tool_calls),
        )

    def _cancel_asked(self, id: str | None) -> None:
        answer = self._active if id is None else self._answers.get(id)
        if answer is None:
            raise NoResponseError("Cancellation failed: no active response found", param="response_id" if id else None)
        self._cancel(answer, "client_cancelled")
        self._after_response()

    def _cancel(self, answer: Answer, reason: Literal["turn_detected", "client_cancelled"]) -> None:
        self._work.append(Stop(answer.id))
        self._end(answer, "cancelled", StatusDetails("cancelled", reason=reason))

    # -- what the graph gives --------------------------------------------------------------------------------------

    def output(self, response_id: str, value: object) -> None:
        """More of a response."""
        answer = self._answers.get(response_id)
        if answer is None:
            return
        try:
            match value:
                case TextDelta(text=text):
                    answer.text(text)
                case AudioChunk():
                    self._first_sound_s.setdefault(response_id, self._clock())
                    answer.sound(value)
                case ToolCallDelta():
                    answer.call(value)
                case Generated():
                    answer.generated = value
        except ProtocolError as error:
            self._work.append(Stop(response_id))
            self.failed(response_id, error)

    def ended(self, response_id: str) -> None:
        """A response has come to its end."""
        answer = self._answers.get(response_id)
        if answer is None:
            return
        if answer.generated is not None and answer.generated.finish_reason == "length":
            self._end(answer, "incomplete", StatusDetails("incomplete", reason="max_output_tokens"))
        else:
            self._end(answer, "completed", None)
        self._after_response()

    def failed(self, response_id: str, error: RequestError) -> None:
        """A response could not be given, or not all of it."""
        answer = self._answers.get(response_id)
        if answer is not None:
            self._end(answer, "failed", StatusDetails("failed", error=error_detail(error, None)))
            self._after_response()

    def _end(self, answer: Answer, status: Ending, details: StatusDetails | None) -> None:
        del self._answers[answer.id]
        answer.end(status, details)
        began_s = self._first_sound_s.pop(answer.id, None)
        played_s = self._clock() if began_s is None else began_s + answer.audio_s
        for entry in self._conversation:
            entry.drop_known_sound()
        self._schedule_idle(max(played_s, self._clock()))

    def _after_response(self) -> None:
        if self._waiting and self._active is None:
            self._answer_turn()

    # -- time ------------------------------------------------------------------------------------------------------

    def _schedule_idle(self, since_s: float | None = None) -> None:
        """The user's silence is counted from the end of what was said, where the session asks for it."""
        detection = self.session.audio.input.turn_detection
        timeout_ms = detection.idle_timeout_ms if isinstance(detection, ServerVad) else None
        if timeout_ms is None:
            self.due_s = None
        elif since_s is not None and self._active is None and not self._hearing.speaking:
            self.due_s = since_s + timeout_ms / 1000

    def tick(self) -> None:
        """It is `due_s`: the user has been silent for too long."""
        if self.due_s is None or self._clock() < self.due_s:
            return
        self.due_s = None
        if self._active is None and not self._hearing.speaking:
            self._hearing.commit_silence()
            self._answer_turn()


def error_detail(error: RequestError, event_id: str | None) -> ErrorDetail:
    """`error` as clients read it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    code = error.item_code if isinstance(error, ItemError) else error.code
    return ErrorDetail(kind, str(error), code, error.param, event_id)


def _first(asked: Any, otherwise: Any) -> Any:
    return otherwise if asked is None else asked
