"""Transcription with Whisper: speech of any length to stretches of text, each word with its time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from actors.mel import SAMPLE_RATE_HZ
from actors.stage import ModelStage
from actors.whisper import WHISPER_TINY_EN
from actors.whisper.model import NOTHING, Heard, TimedWord, Whisper, shared_whisper
from actors.whisper.windows import WINDOWS_S, Cutter, Window, window_s
from omniflow.actor import Context, Emit, Stream
from omniflow.errors import ProtocolError, UnsupportedError
from omniflow.media import AudioChunk, Options, Transcript, Word

if TYPE_CHECKING:
    import soxr

SENTENCE_ENDS = (".", "?", "!")
BREATH_S = 0.15
"""Between two sentences; the dot of "Mr." is followed by less."""
PAUSE_S = 1.0
"""A pause that ends a stretch without a mark."""
LONGEST_STRETCH_S = 15.0
"""Nobody reads longer subtitles."""


class WhisperScribe(ModelStage):
    """Writes down what is said, in stretches of a sentence or up to a pause. The default model knows English only.

    A step is the encoding or the reading of a window of at most 30 s: 0.1 to 0.7 s of one core; a request holds one
    window and what was sent last. It shares its model with a `WhisperTranscriber` of the same settings in its process.
    """

    def __init__(self, *, model: str = WHISPER_TINY_EN.name, threads: int = 1) -> None:
        super().__init__(model, threads=threads)
        self._whisper: Whisper

    async def setup(self) -> None:
        """Load the model (0.3 s), unless another stage of this process has."""
        self._whisper = await self.offload(shared_whisper, self._weights.path(), self._threads)

    async def run(self, audio: Stream[AudioChunk], emit: Emit[Transcript], ctx: Context) -> None:
        """Any rate and number of channels. Raises UnsupportedError for another language than English."""
        _refuse_other_languages(ctx.options)
        cutter, mixer = Cutter(), _Mixer()
        async for chunk in audio:
            for window in cutter.push(mixer.mix(chunk)):
                await self._write(window, emit, ctx.options)
        for window in (*cutter.push(mixer.rest()), *cutter.rest()):
            await self._write(window, emit, ctx.options)

    async def _write(self, window: Window, emit: Emit[Transcript], options: Options) -> None:
        heard, words = await self._understand(window.samples, options.hint or "", options.temperature or 0.0)
        for stretch in stretches(words):
            await emit.send(_transcript(stretch, window.start / SAMPLE_RATE_HZ, heard, options.words))

    async def _understand(
        self, samples: np.ndarray, hint: str, temperature: float
    ) -> tuple[Heard, Sequence[TimedWord]]:
        """In several steps: between them others get their turn, and a request can be cancelled."""
        # Again in the window that it was trained with, where it repeats itself much less.
        for length_s in (window_s(samples), WINDOWS_S[-1]):
            encoded = await self.offload(self._whisper.encode, [samples], length_s)
            (heard,) = await self.offload(self._whisper.generate, encoded, [samples], length_s, hint, temperature)
            if heard is not None:
                return heard, await self.offload(self._whisper.words, encoded, samples, heard)
        return NOTHING, ()


def stretches(words: Iterable[TimedWord]) -> Iterator[list[TimedWord]]:
    """Words by sentence; a long pause ends a stretch too, and so does a length that nobody reads at once."""
    stretch: list[TimedWord] = []
    for word in words:
        if stretch:
            pause_s = word.start_s - stretch[-1].end_s
            ended = stretch[-1].text.endswith(SENTENCE_ENDS) and pause_s >= BREATH_S
            if ended or pause_s >= PAUSE_S or word.end_s - stretch[0].start_s > LONGEST_STRETCH_S:
                yield stretch
                stretch = []
        stretch.append(word)
    if stretch:
        yield stretch


def _transcript(stretch: Sequence[TimedWord], at_s: float, heard: Heard, with_words: bool) -> Transcript:
    timed = [Word(word.text, round(at_s + word.start_s, 2), round(at_s + word.end_s, 2)) for word in stretch]
    return Transcript(
        text=" ".join(word.text for word in stretch),
        start_s=timed[0].start_s,
        end_s=timed[-1].end_s,
        language="en",
        words=tuple(timed) if with_words else (),
        tokens=tuple(token for word in stretch for token in word.ids),
        avg_logprob=float(np.mean([logprob for word in stretch for logprob in word.logprobs])),
        no_speech_prob=heard.no_speech_prob,
    )


def _refuse_other_languages(options: Options) -> None:
    if options.translate:
        raise UnsupportedError("this model does not translate: it knows English only")
    if options.language is not None and options.language.partition("-")[0].lower() not in ("en", "english"):
        raise UnsupportedError(
            f"language: {options.language!r} is not known to this model, which hears English ('en') only",
            param="language",
        )


class _Mixer:
    """The sound of one request as Whisper wants it: mono, 16 kHz."""

    def __init__(self) -> None:
        self._source: tuple[int, int] | None = None
        self._resampler: soxr.ResampleStream | None = None

    def mix(self, chunk: AudioChunk) -> np.ndarray:
        """float32 [n]. Raises ProtocolError where the rate or the number of channels changes."""
        source = (chunk.sample_rate_hz, chunk.channels)
        if self._source is None:
            self._source = source
            if chunk.sample_rate_hz != SAMPLE_RATE_HZ:
                import soxr

                self._resampler = soxr.ResampleStream(chunk.sample_rate_hz, SAMPLE_RATE_HZ, 1, dtype="float32")
        if source != self._source:
            raise ProtocolError(f"audio began with {self._source} (Hz, channels) and went on with {source}")
        samples = np.asarray(chunk.samples, np.float32)
        mono: np.ndarray = samples if chunk.channels == 1 else samples.reshape(-1, chunk.channels).mean(axis=1)
        return mono if self._resampler is None else self._resampler.resample_chunk(mono)

    def rest(self) -> np.ndarray:
        """What the resampler still holds."""
        nothing = np.zeros(0, np.float32)
        return nothing if self._resampler is None else self._resampler.resample_chunk(nothing, last=True)
