"""Speech to text with Whisper through CTranslate2: the audio encoder of models that hear by transcription."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actors.catalogue import PACKAGED
from actors.whisper import WHISPER_TINY_EN
from actors.whisper.mel import SAMPLE_RATE_HZ, log_mel, mel_filters
from omniflow.actor import Actor, batched
from omniflow.errors import InvalidInputError, ProtocolError
from omniflow.media import AudioFeatures, Waveforms
from omniflow.weights import Weights, resolve

if TYPE_CHECKING:
    import ctranslate2

WINDOWS_S = (10, 20, 30)
"""Whisper was trained on 30 s, padded with silence; a shorter window costs less: 0.11, 0.26 and 0.5 s of one core."""
MARGIN_S = 6
"""Silence that a window shorter than 30 s keeps after its clip. With 2 s Whisper repeats itself in 1 clip of 10."""
MAX_TOKENS = 224
SILENCE = 1e-4
"""-80 dBFS: what never exceeds it holds nothing to hear."""
MAX_BATCH = 2
"""Windows in one step. Two long ones take 1.6x the time of one, four 3.0x: more would only delay the first."""


class Whisper:
    """A loaded model. A call keeps `threads` cores busy; calls come one at a time."""

    def __init__(self, folder: Path, threads: int = 1) -> None:
        import ctranslate2
        import tokenizers

        self._model = ctranslate2.models.Whisper(
            str(folder), device="cpu", compute_type="int8", inter_threads=1, intra_threads=threads
        )
        self._view = ctranslate2.StorageView.from_array
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._prompt = [self._tokenizer.token_to_id(token) for token in ("<|startoftranscript|>", "<|notimestamps|>")]
        self._filters = mel_filters()

    def transcribe(self, samples: np.ndarray) -> str:
        """The text of `samples`, float32 [n] at 16 kHz, of any length; "" where nothing was understood."""
        return _joined(text for window in cut(samples) for text in self.hear([window]))

    def hear(self, windows: Sequence[np.ndarray]) -> list[str]:
        """The texts of some windows as `cut` makes them, all of the same `window_s`."""
        length_s = window_s(windows[0])
        texts = self._generate(windows, length_s)
        for index, text in enumerate(texts):
            if text is None:
                # In the window that it was trained with it repeats itself much less.
                texts[index] = self._generate([windows[index]], WINDOWS_S[-1])[0]
        return [text or "" for text in texts]

    def _generate(self, windows: Sequence[np.ndarray], length_s: int) -> list[str | None]:
        """None for a text that did not end, as a loop does not."""
        # Fast speech has 6 tokens a second; a loop in a short window is cut off at twice that.
        most = MAX_TOKENS if length_s == WINDOWS_S[-1] else 16 + 12 * max(map(len, windows)) // SAMPLE_RATE_HZ
        results = self._model.generate(
            self._view(np.stack([log_mel(window, self._filters, length_s) for window in windows])),
            [self._prompt] * len(windows),
            beam_size=1,
            max_length=2 * most,  # Whisper models of CTranslate2 stop at half of it
            return_scores=True,
            return_no_speech_prob=True,
        )
        return [self._text(result, most) for result in results]

    def _text(self, result: ctranslate2.models.WhisperGenerationResult, most: int) -> str | None:
        ids = result.sequences_ids[0]
        # Noise has no_speech_prob >= 0.78 and a mean log-probability <= -0.87; speech <= 0.4 and mostly >= -0.8.
        if result.no_speech_prob > 0.6 and result.scores[0] < -0.8:
            return ""
        if len(ids) >= most and most < MAX_TOKENS:
            return None
        return str(self._tokenizer.decode(ids)).strip()


class WhisperTranscriber(Actor):
    """Hears by transcription: fills `AudioFeatures.texts`. The default model knows English only.

    A step is one pass over at most two windows of one length: 0.11 to 1.6 s of one core. A conversation with more
    than `max_seconds` of audio is refused.
    """

    heavy = True

    def __init__(self, *, model: str = WHISPER_TINY_EN.name, max_seconds: float = 600, threads: int = 1) -> None:
        self._weights = resolve(model, PACKAGED)
        self._max_seconds = max_seconds
        self._threads = threads
        self._whisper: Whisper

    def weights(self) -> Sequence[Weights]:
        """The files of the Whisper model."""
        return (self._weights,)

    async def setup(self) -> None:
        """Load the model (0.3 s)."""
        self._whisper = await self.offload(Whisper, self._weights.path(), self._threads)

    @batched(max_size=MAX_BATCH)
    async def run(self, audio: list[Waveforms]) -> list[AudioFeatures]:
        """One text a clip, "" where nothing was understood. Raises InvalidInputError where there is too much audio."""
        heard_s = [self._checked_seconds(request) for request in audio]
        clips = [clip for request in audio for clip in request.samples]
        windows = [(clip, window) for clip, samples in enumerate(clips) for window in cut(samples)]
        texts: dict[int, str] = {}
        for batch in _batches([window for _, window in windows]):
            found = await self.offload(self._whisper.hear, [windows[index][1] for index in batch])
            texts.update(zip(batch, found, strict=True))
        parts: list[list[str]] = [[] for _ in clips]
        for index, (clip, _) in enumerate(windows):
            parts[clip].append(texts[index])
        of_clip = iter(map(_joined, parts))
        return [
            AudioFeatures(
                index=request.index, audio_s=seconds, texts=tuple(itertools.islice(of_clip, len(request.index)))
            )
            for request, seconds in zip(audio, heard_s, strict=True)
        ]

    def _checked_seconds(self, request: Waveforms) -> float:
        if request.sample_rate_hz != SAMPLE_RATE_HZ:
            raise ProtocolError(f"audio arrived at {request.sample_rate_hz} Hz, not at {SAMPLE_RATE_HZ} Hz")
        seconds = sum(map(len, request.samples)) / SAMPLE_RATE_HZ
        if seconds > self._max_seconds:
            raise InvalidInputError(
                f"the conversation holds {seconds:.1f} s of audio; this model takes at most {self._max_seconds:g} s",
                param="messages",
            )
        return seconds


def transcribe(samples: np.ndarray, rate: int) -> str:
    """The text of `samples` (mono, [n]) by Whisper tiny.en, which is fetched and loaded at the first call."""
    if rate != SAMPLE_RATE_HZ:
        import soxr

        samples = soxr.resample(samples, rate, SAMPLE_RATE_HZ)
    return _tiny_en().transcribe(samples.astype(np.float32, copy=False))


@functools.cache
def _tiny_en() -> Whisper:
    return Whisper(WHISPER_TINY_EN.fetch())


def cut(samples: np.ndarray) -> list[np.ndarray]:
    """Windows of at most 30 s, cut in the quietest 0.2 s of the 10 s before; windows of silence are left out."""
    windows = []
    while len(samples) > WINDOWS_S[-1] * SAMPLE_RATE_HZ:
        earliest, latest = WINDOWS_S[-2] * SAMPLE_RATE_HZ, WINDOWS_S[-1] * SAMPLE_RATE_HZ
        stop = earliest + _quietest(samples[earliest:latest])
        windows.append(samples[:stop])
        samples = samples[stop:]
    windows.append(samples)
    return [window for window in windows if np.abs(window).max(initial=0) > SILENCE]


def window_s(window: np.ndarray) -> int:
    """The shortest of `WINDOWS_S` that leaves `MARGIN_S` after the window."""
    needed_s = len(window) / SAMPLE_RATE_HZ + MARGIN_S
    return next((length_s for length_s in WINDOWS_S if needed_s <= length_s), WINDOWS_S[-1])


def _quietest(samples: np.ndarray) -> int:
    """The middle of the quietest 0.2 s; the last of them where several are alike."""
    step = SAMPLE_RATE_HZ // 5
    energy = np.square(samples[: len(samples) // step * step].reshape(-1, step)).mean(axis=1)
    return step * (len(energy) - 1 - int(energy[::-1].argmin())) + step // 2


def _batches(windows: Sequence[np.ndarray]) -> Iterator[list[int]]:
    """Indices of windows of the same length, so that a clip sounds the same alone and in a batch."""
    same: dict[int, list[int]] = {}
    for index, window in enumerate(windows):
        same.setdefault(window_s(window), []).append(index)
    for indices in same.values():
        for start in range(0, len(indices), MAX_BATCH):
            yield indices[start : start + MAX_BATCH]


def _joined(texts: Iterable[str]) -> str:
    return " ".join(text for text in texts if text)
