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
from typing import Any, NamedTuple

import msgspec

from omniflow.errors import InvalidInputError, OverloadedError, RequestError, UnsupportedError
from omniflow.server.failures import ModelNotFoundError
from omniflow.server.realtime import client_events as client
from omniflow.server.realtime import server_events as events
from omniflow.server.realtime.audio import HEARD_HZ, Pcm16
from omniflow.server.realtime.hearing import Hearing, Listen, Transcribe
from omniflow.server.realtime.items import Conversation, Heard, Spoken, entry_of
from omniflow.server.realtime.responses import Abilities, Respond, Responses, Stop, error_detail
from omniflow.server.realtime.server_events import ServerEvent, new_id
from omniflow.server.realtime.settings import Session, updated, view
from omniflow.server.realtime.turns import ServerVad

_MOST_WRITTEN = 8
"""Transcriptions that run at once."""
_MOST_LISTENED = 2
"""Questions about pauses that run at once: sound may come faster than it is spoken, and bring many."""


Work = Respond | Stop | Transcribe | Listen


class Bounds(NamedTuple):
    """What a session may hold."""

    items: int = 1000
    buffer_s: float = 120.0


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
        self._abilities = abilities
        self._expires_at = expires_at
        self._clock = clock
        self._events: list[ServerEvent] = []
        emit = self._events.append
        self._conversation = Conversation(bounds.items, int(2 * bounds.buffer_s * HEARD_HZ))
        self._hearing = Hearing(session, self._conversation, emit, bounds.buffer_s)
        self._responses = Responses(session, self._conversation, abilities, emit, clock)
        self._num_writing = 0
        self._num_listening = 0
        self._events.append(events.SessionCreated(session=self._view()))

    def take(self) -> tuple[list[ServerEvent], list[Work]]:
        """The events to send, in order, and the work to do since the last call."""
        for id in self._conversation.trim():
            self._events.append(events.ItemDeleted(item_id=id))
        work = [*self._responses.work, *self._take_writing()]
        self._responses.work.clear()
        sent = list(self._events)
        self._events.clear()
        return sent, work

    def _take_writing(self) -> list[Listen | Transcribe]:
        wanted, self._hearing.work = self._hearing.work, []
        return [task for task in wanted if self._is_written(task)]

    def _is_written(self, task: Listen | Transcribe) -> bool:
        """False where it cannot be; the client is told."""
        if isinstance(task, Listen):
            listens = self._abilities.transcribes and self._num_listening < _MOST_LISTENED
            self._num_listening += listens
            return listens
        if not self._abilities.transcribes:
            self._not_written(task.item_id, UnsupportedError("this graph does not transcribe"))
        elif self._num_writing >= _MOST_WRITTEN:
            self._not_written(task.item_id, OverloadedError("too many turns of this session wait for their words"))
        else:
            self._num_writing += 1
            return True
        return False

    @property
    def idle(self) -> bool:
        """True while no response runs, and nothing is being written down."""
        return self._responses.idle and not self._num_writing

    def leave(self) -> None:
        """The server drains: what runs may end, nothing new begins."""
        self._responses.leaving = True

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
                self._events.append(events.OutputBufferCleared(response_id=self._responses.last_id))
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
                self._responses.create(params or client.ResponseParams())
            case client.ResponseCancel(response_id=id):
                self._responses.cancel(id)

    def _refuse(self, error: RequestError, event_id: str | None) -> None:
        self._events.append(events.ErrorEvent(error=error_detail(error, event_id)))

    # -- settings --------------------------------------------------------------------------------------------------

    def _update(self, update: dict[str, Any]) -> None:
        new = updated(self.session, update)
        if new.model != self.session.model and new.model not in self._abilities.models:
            raise ModelNotFoundError(f"model {new.model!r} is not served here", param="session.model")
        if new.type == "realtime" and "text" not in self._abilities.outputs and self.session.type != "realtime":
            message = "session.type: this graph holds no conversations; it only transcribes"
            raise UnsupportedError(message, param="session.type")
        if new.speaks and not self.session.speaks:
            self._responses.require("audio", "session.output_modalities")
        if new.tools and not self.session.tools:
            self._responses.require("tool_calls", "session.tools")
        self._responses.voice(new.audio.output.voice, "session.audio.output.voice")
        self.session = self._responses.session = new
        self._hearing.configure(new)
        self._events.append(events.SessionUpdated(session=self._view()))

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
                heard_ms = min(event.audio_end_ms, piece.audio_ms) if piece.length_known else event.audio_end_ms
                piece.heard_ms = heard_ms if piece.heard_ms is None else min(heard_ms, piece.heard_ms)
        self._events.append(
            events.ItemTruncated(
                item_id=event.item_id, content_index=event.content_index, audio_end_ms=int(event.audio_end_ms)
            )
        )

    # -- the user's speech -----------------------------------------------------------------------------------------

    def frames(self) -> Pcm16:
        """Samples that are to be judged, whole frames; see `heard`."""
        return self._hearing.frames()

    def heard(self, probabilities: Collection[float]) -> None:
        """How likely each of `frames` is speech."""
        for probability in probabilities:
            heard = self._hearing.push(probability)
            detection = self.session.audio.input.turn_detection
            if detection is None:
                return
            if heard == "started" and detection.interrupt_response:
                self._responses.interrupt()
            if heard in ("started", "stopped"):
                self._responses.quiet_since_s = None
            if heard == "stopped" and detection.create_response:
                self._responses.answer_turn()

    def understood(self, pause: int, text: str | None) -> None:
        """What was said before a pause, as a `Listen` asked; None where nobody can tell."""
        self._num_listening -= 1
        if text is not None:
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

    def output(self, response_id: str, value: object) -> None:
        """More of a response."""
        self._responses.output(response_id, value)

    def ended(self, response_id: str) -> None:
        """A response has come to its end."""
        self._responses.ended(response_id)

    def failed(self, response_id: str, error: RequestError) -> None:
        """A response could not be given, or not all of it."""
        self._responses.failed(response_id, error)

    # -- time ------------------------------------------------------------------------------------------------------

    @property
    def due_s(self) -> float | None:
        """When the user will have been silent for too long, by the clock; None: never, as things are."""
        if self._hearing.speaking:  # a response may begin or end meanwhile
            return None
        detection = self.session.audio.input.turn_detection
        timeout_ms = detection.idle_timeout_ms if isinstance(detection, ServerVad) else None
        since_s = self._responses.quiet_since_s
        return since_s + timeout_ms / 1000 if timeout_ms is not None and since_s is not None else None

    def tick(self) -> None:
        """It is `due_s`, or not yet."""
        due_s = self.due_s
        if due_s is not None and self._clock() >= due_s:
            self._responses.quiet_since_s = None
            self._hearing.commit_silence()
            self._responses.answer_turn()
