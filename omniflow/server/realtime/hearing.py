"""What the user says: sound comes in, turns are found in it, and become items of the conversation. Pure.

How likely a frame is speech is not worked out here: `frames` gives what is to be judged, `push` takes the judgement.
"""

from __future__ import annotations

from typing import NamedTuple

from omniflow.errors import InvalidInputError
from omniflow.media import Options
from omniflow.server.realtime import server_events as events
from omniflow.server.realtime.answers import Emit
from omniflow.server.realtime.audio import HEARD_HZ, SAMPLES_PER_MS, AudioIn, InputBuffer, Pcm16, bytes_per_s
from omniflow.server.realtime.items import Conversation, spoken_turn
from omniflow.server.realtime.server_events import new_id
from omniflow.server.realtime.settings import Session, Transcription
from omniflow.server.realtime.turns import FRAME_SAMPLES, ONSET_FRAMES, Heard, Turns

_SILENCE_KEPT_S = 5
"""Of sound in which no turn was found; a commit may still ask for it."""


class BufferEmptyError(InvalidInputError):
    """There is nothing to commit."""

    code = "input_audio_buffer_commit_empty"


class BufferFullError(InvalidInputError):
    """More sound than one turn may have."""

    code = "input_audio_buffer_full"


class Transcribe(NamedTuple):
    """To do: write down what was said in an item."""

    item_id: str
    samples: Pcm16
    options: Options


class Listen(NamedTuple):
    """To do: tell what was said before the pause that goes on; `pause` is its number."""

    pause: int
    samples: Pcm16
    options: Options


class Hearing:
    """The user's side of a session."""

    def __init__(self, session: Session, conversation: Conversation, emit: Emit, max_s: float) -> None:
        self._conversation = conversation
        self._emit = emit
        self._max_samples = int(max_s * HEARD_HZ)
        self._buffer = InputBuffer()
        self._audio = AudioIn(session.audio.input.format)
        self._turns: Turns | None = None
        self._item_id: str | None = None
        self._judged = 0
        self._pause = 0
        self.work: list[Transcribe | Listen] = []
        self.configure(session)

    def configure(self, session: Session) -> None:
        """The settings are new."""
        settings = session.audio.input
        self._transcription = settings.transcription
        if settings.format != self._audio.format:
            self._buffer.push(self._audio.flush())
            self._audio = AudioIn(settings.format)
        if settings.turn_detection is None:
            self._turns = self._item_id = None
        elif self._turns is None or self._turns.settings != settings.turn_detection:
            self._turns, self._item_id = Turns(settings.turn_detection), None
            self._judged = self._buffer.end

    @property
    def speaking(self) -> bool:
        """True within a turn."""
        return self._turns is not None and self._turns.speaking

    @property
    def now_ms(self) -> int:
        """Session time: of the sound that has come."""
        return self._buffer.end // SAMPLES_PER_MS

    def append(self, data: bytes) -> None:
        """More sound. Raises BufferFullError where it would not fit; a turn that was detected ends then instead."""
        num_samples = len(data) * HEARD_HZ // bytes_per_s(self._audio.format)
        if self._turns is None and self._buffer.end - self._buffer.start + num_samples > self._max_samples:
            seconds = self._max_samples / HEARD_HZ
            raise BufferFullError(f"audio: the buffer holds at most {seconds:g} s; commit or clear it", param="audio")
        self._buffer.push(self._audio.push(data))

    def frames(self) -> Pcm16:
        """Whole frames that nobody has judged yet; none where turns are not detected."""
        if self._turns is None:
            return self._buffer.look(0, 0)
        count = (self._buffer.end - self._judged) // FRAME_SAMPLES
        return self._buffer.look(self._judged, self._judged + count * FRAME_SAMPLES)

    def push(self, probability: float) -> Heard | None:
        """How likely the next frame is speech; tells of a turn's start and end. What it was is committed."""
        if self._turns is None or self._judged + FRAME_SAMPLES > self._buffer.end:
            return None  # what was being judged was committed meanwhile, as the user said nothing for too long
        self._judged += FRAME_SAMPLES
        heard = self._turns.push(probability)
        if heard == "started":
            self._start(self._turns.padding_ms)
        elif heard == "paused":
            self._ask()
        elif heard == "stopped" or (self.speaking and self._judged - self._buffer.start >= self._max_samples):
            self._stop()
            return "stopped"
        elif not self.speaking:
            self._buffer.drop_before(self._judged - _SILENCE_KEPT_S * HEARD_HZ)
        return heard

    def understood(self, pause: int, text: str) -> None:
        """The answer to a `Listen`."""
        if self._turns is not None and pause == self._pause:
            self._turns.understood(text)

    def commit(self) -> str:
        """All that is in the buffer becomes an item. Raises BufferEmptyError."""
        self._buffer.push(self._audio.flush())
        if self._buffer.end == self._buffer.start:
            raise BufferEmptyError("the input audio buffer is empty: append sound before it is committed")
        return self._commit(self._buffer.end)

    def commit_silence(self) -> str:
        """The user says nothing: what is in the buffer becomes an item, after the event that says so."""
        item_id = new_id("item")
        start = self._buffer.start // SAMPLES_PER_MS
        self._emit(events.TimeoutTriggered(item_id=item_id, audio_start_ms=start, audio_end_ms=self.now_ms))
        self._item_id = item_id
        return self._commit(self._buffer.end) if self._buffer.end > self._buffer.start else item_id

    def clear(self) -> None:
        """Forget what is in the buffer, and the turn under way."""
        self._audio.flush()
        self._buffer.drop_before(self._buffer.end)
        self._forget_turn()

    def _start(self, padding_ms: int) -> None:
        start = self._judged - ONSET_FRAMES * FRAME_SAMPLES - padding_ms * SAMPLES_PER_MS
        self._buffer.drop_before(start)
        self._item_id = new_id("item")
        start_ms = self._buffer.start // SAMPLES_PER_MS
        self._emit(events.SpeechStarted(item_id=self._item_id, audio_start_ms=start_ms))

    def _stop(self) -> None:
        end_ms = self._judged // SAMPLES_PER_MS
        self._item_id = self._item_id or new_id("item")
        self._emit(events.SpeechStopped(item_id=self._item_id, audio_end_ms=end_ms))
        self._commit(self._judged)

    def _ask(self) -> None:
        self._pause += 1
        said = self._buffer.look(self._buffer.start, self._judged)
        self.work.append(Listen(self._pause, said, _options(self._transcription)))

    def _commit(self, end: int) -> str:
        item_id = self._item_id or new_id("item")
        samples = self._buffer.take(end)
        self._forget_turn()
        previous = self._conversation.last_id
        entry = spoken_turn(samples, item_id)
        self._conversation.insert(entry)
        item = entry.shown()
        self._emit(events.BufferCommitted(item_id=item_id, previous_item_id=previous))
        self._emit(events.ItemAdded(previous_item_id=previous, item=item))
        self._emit(events.ItemDone(previous_item_id=previous, item=item))
        if self._transcription is not None:
            self.work.append(Transcribe(item_id, samples, _options(self._transcription)))
        return item_id

    def _forget_turn(self) -> None:
        self._item_id = None
        self._pause += 1
        if self._turns is not None:
            self._turns.reset()
            self._judged = max(self._judged, self._buffer.start)


def _options(transcription: Transcription | None) -> Options:
    if transcription is None:
        return Options()
    return Options(language=transcription.language or None, hint=transcription.prompt or None)
