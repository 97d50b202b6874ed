"""What a transcription looks like: JSON, plain text, subtitles, events."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from omniflow.media import Transcript

_LANGUAGES = {"en": "english"}
"""Names of languages, as OpenAI writes them."""


class DurationUsage(Struct, frozen=True, tag="duration", tag_field="type"):
    """Seconds of sound."""

    seconds: float


class TokenUsage(Struct, frozen=True, tag="tokens", tag_field="type"):
    """What the last event of a stream tells, for OpenAI's clients know no other usage there.

    An input token is 100 ms of sound, begun ones included, as with OpenAI's models; an output token is the model's.
    """

    input_tokens: int
    output_tokens: int
    total_tokens: int


class Transcription(Struct, frozen=True):
    """`json`."""

    text: str
    usage: DurationUsage


class VerboseSegment(Struct, frozen=True):
    """A stretch of speech. `seek` is its begin in 10 ms; `temperature` that of its tokens."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseWord(Struct, frozen=True):
    """A word, in seconds from the begin of the file."""

    word: str
    start: float
    end: float


class VerboseTranscription(Struct, frozen=True, kw_only=True):
    """`verbose_json`; segments and words where they were asked for."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: tuple[VerboseSegment, ...] | UnsetType = UNSET
    words: tuple[VerboseWord, ...] | UnsetType = UNSET
    usage: DurationUsage


class TranscriptDelta(Struct, frozen=True, tag="transcript.text.delta", tag_field="type"):
    """What was understood since the last one; joined, they are the text."""

    delta: str


class TranscriptDone(Struct, frozen=True, tag="transcript.text.done", tag_field="type"):
    """The whole text."""

    text: str
    usage: TokenUsage


class Shape(NamedTuple):
    """What `verbose_json` holds: the times of `granularities` (segment, word)."""

    task: Literal["transcribe", "translate"]
    granularities: frozenset[str]
    temperature: float


class Result:
    """A whole transcription: the stretches of speech in a file of `seconds`."""

    def __init__(self, stretches: Sequence[Transcript], seconds: float) -> None:
        self.stretches = stretches
        self.usage = DurationUsage(round(seconds, 2))

    @property
    def text(self) -> str:
        """All that was said."""
        return " ".join(stretch.text for stretch in self.stretches)

    @property
    def tokens(self) -> TokenUsage:
        """What was heard and written, in tokens."""
        heard = math.ceil(round(self.usage.seconds / 0.1, 1))
        written = sum(len(stretch.tokens) for stretch in self.stretches)
        return TokenUsage(heard, written, heard + written)


def _segment(number: int, stretch: Transcript, temperature: float) -> VerboseSegment:
    data = stretch.text.encode()
    return VerboseSegment(
        id=number,
        seek=round(stretch.start_s * 100),
        start=stretch.start_s,
        end=stretch.end_s,
        text=stretch.text,
        tokens=stretch.tokens,
        temperature=temperature,
        avg_logprob=stretch.avg_logprob,
        compression_ratio=len(data) / len(zlib.compress(data)),
        no_speech_prob=stretch.no_speech_prob,
    )


def _json(result: Result, shape: Shape) -> bytes:
    return msgspec.json.encode(Transcription(result.text, result.usage))


def _verbose(result: Result, shape: Shape) -> bytes:
    language = result.stretches[0].language if result.stretches else "en"
    segments = tuple(_segment(number, stretch, shape.temperature) for number, stretch in enumerate(result.stretches))
    words = tuple(
        VerboseWord(word.text, word.start_s, word.end_s) for stretch in result.stretches for word in stretch.words
    )
    return msgspec.json.encode(
        VerboseTranscription(
            task=shape.task,
            language=_LANGUAGES.get(language, language),
            duration=result.usage.seconds,
            text=result.text,
            segments=segments if "segment" in shape.granularities else UNSET,
            words=words if "word" in shape.granularities else UNSET,
            usage=result.usage,
        )
    )


def _text(result: Result, shape: Shape) -> bytes:
    return f"{result.text}\n".encode()


def _srt(result: Result, shape: Shape) -> bytes:
    cues = [
        f"{number}\n{_clock(stretch.start_s, ',')} --> {_clock(stretch.end_s, ',')}\n{stretch.text}\n\n"
        for number, stretch in enumerate(result.stretches, 1)
    ]
    return "".join(cues).encode()


def _vtt(result: Result, shape: Shape) -> bytes:
    cues = [
        f"{_clock(stretch.start_s, '.')} --> {_clock(stretch.end_s, '.')}\n{_escaped(stretch.text)}\n\n"
        for stretch in result.stretches
    ]
    return "".join(["WEBVTT\n\n", *cues]).encode()


def _escaped(text: str) -> str:
    """WebVTT reads `<` as the begin of a tag, and `-->` as the times of a cue."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"


FORMS: dict[str, tuple[str, Callable[[Result, Shape], bytes]]] = {
    "json": ("application/json", _json),
    "verbose_json": ("application/json", _verbose),
    "text": ("text/plain; charset=utf-8", _text),
    "srt": ("text/plain; charset=utf-8", _srt),
    "vtt": ("text/vtt; charset=utf-8", _vtt),
}
"""Media type and body of each `response_format`."""


def event(body: TranscriptDelta | TranscriptDone) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
