"""Where a turn of speech begins and ends, given for each frame of 32 ms how likely it is speech. Pure.

`server_vad` ends a turn after a fixed silence. `semantic_vad` asks, when a pause begins, what was said so far: a
sentence that is through ends the turn soon, one that is not gets longer; see `EAGERNESS` and `is_through`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

FRAME_SAMPLES = 512
"""Of 16 kHz."""
FRAME_MS = 32
ONSET_FRAMES = 2
"""Frames of speech in a row that begin a turn: a click is shorter than these 64 ms."""
_HYSTERESIS = 0.15
"""Speech goes on while a frame is at most this much below the threshold, as silero's own iterator has it."""
_LISTEN_MS = 192
"""Silence after which `semantic_vad` asks for what was said: shorter ones are between words."""
_SEMANTIC_THRESHOLD = 0.5
_SEMANTIC_PADDING_MS = 300


class ServerVad(msgspec.Struct, frozen=True, tag="server_vad", tag_field="type"):
    """A turn ends after `silence_duration_ms` without speech."""

    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=5000)] = 300
    silence_duration_ms: Annotated[int, Meta(ge=0, le=60_000)] = 500
    idle_timeout_ms: Annotated[int, Meta(ge=1000, le=600_000)] | None = None
    create_response: bool = True
    interrupt_response: bool = True


class SemanticVad(msgspec.Struct, frozen=True, tag="semantic_vad", tag_field="type"):
    """A turn ends sooner where what was said is through."""

    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    create_response: bool = True
    interrupt_response: bool = True


TurnDetection = ServerVad | SemanticVad


class Patience(NamedTuple):
    """Milliseconds of silence that end a turn."""

    through: int
    """... where what was said is a whole sentence."""
    unknown: int
    """... where nobody could tell what was said (yet)."""
    open: int
    """... where it is none."""


EAGERNESS: dict[str, Patience] = {
    "high": Patience(256, 640, 2000),
    "medium": Patience(416, 960, 4000),
    "auto": Patience(416, 960, 4000),
    "low": Patience(768, 1600, 8000),
}
"""The last numbers are the longest waits that OpenAI documents for each."""

_ENDS = re.compile(r"[.!?。！？](?<!\.\.)[\"')\]»”’]*$")
_LAST_WORD = re.compile(r"([\w']+)\W*$")
_LEADS_ON = frozenset(
    "a an and at because but by er from hmm if my of or our than the their to uh um while whose with your".split()
)


def is_through(text: str) -> bool:
    """True where `text` ends like a sentence: with its mark, and not with a word that leads on ("and", "the", "um").

    A recogniser writes a full stop where its clip ends, finished or not: hence the words. No language model is asked.
    """
    text = text.strip()
    last = _LAST_WORD.search(text.lower())
    return bool(_ENDS.search(text)) and (last is None or last[1] not in _LEADS_ON)


Heard = Literal["started", "paused", "stopped"]
"""`started`: a turn began `ONSET_FRAMES` ago. `paused`: tell by `understood` what was said. `stopped`: it has ended."""


class Turns:
    """Follows one session's speech, frame by frame."""

    def __init__(self, settings: TurnDetection) -> None:
        self.settings = settings
        self.speaking = False
        self._speech_frames = 0
        self._silence_ms = 0
        self._asked = False
        fixed = settings if isinstance(settings, ServerVad) else None
        self._threshold = fixed.threshold if fixed else _SEMANTIC_THRESHOLD
        self.padding_ms = fixed.prefix_padding_ms if fixed else _SEMANTIC_PADDING_MS
        self._patience_ms = self._first_patience_ms

    @property
    def _first_patience_ms(self) -> int:
        if isinstance(self.settings, ServerVad):
            return self.settings.silence_duration_ms
        return EAGERNESS[self.settings.eagerness].unknown

    def push(self, probability: float) -> Heard | None:
        """What the next frame brings."""
        return self._while_speaking(probability) if self.speaking else self._while_silent(probability)

    def _while_silent(self, probability: float) -> Heard | None:
        self._speech_frames = self._speech_frames + 1 if probability >= self._threshold else 0
        if self._speech_frames < ONSET_FRAMES:
            return None
        self.reset()
        self.speaking = True
        return "started"

    def _while_speaking(self, probability: float) -> Heard | None:
        if probability >= self._threshold - (_HYSTERESIS if self._silence_ms == 0 else 0):
            self._silence_ms = 0
            self._asked = False
            self._patience_ms = self._first_patience_ms
            return None
        self._silence_ms += FRAME_MS
        if self._silence_ms >= self._patience_ms:
            self.reset()
            return "stopped"
        if isinstance(self.settings, SemanticVad) and not self._asked and self._silence_ms >= _LISTEN_MS:
            self._asked = True
            return "paused"
        return None

    def understood(self, text: str) -> None:
        """What was said before the pause that goes on."""
        if isinstance(self.settings, SemanticVad) and self._asked:
            patience = EAGERNESS[self.settings.eagerness]
            self._patience_ms = patience.through if is_through(text) else patience.open

    def reset(self) -> None:
        """No turn is under way any more."""
        self.speaking = False
        self._speech_frames = 0
        self._silence_ms = 0
        self._asked = False
        self._patience_ms = self._first_patience_ms
