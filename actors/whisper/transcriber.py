"""The audio encoder of models that hear by transcription: clips to text with Whisper."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from actors.encoding import Recent, digest_of
from actors.mel import SAMPLE_RATE_HZ, checked_seconds
from actors.stage import ModelStage
from actors.whisper import WHISPER_TINY_EN
from actors.whisper.model import Whisper, joined, shared_whisper
from actors.whisper.windows import cut, window_s
from omniflow.actor import batched
from omniflow.media import AudioFeatures, Waveforms

MAX_BATCH = 2
"""Windows in one step. Two long ones take 1.6x the time of one, four 3.0x: more would only delay the first."""


class WhisperTranscriber(ModelStage):
    """Hears by transcription: fills `AudioFeatures.texts`. The default model knows English only.

    A step is one pass over at most two windows of one length: 0.11 to 1.6 s of one core. A conversation with more
    than `max_seconds` of audio is refused. The texts of the last `cached_clips` clips are kept, so that each turn of a
    conversation, which comes with all earlier ones, only has what is new to be heard.
    """

    heavy = True

    def __init__(
        self,
        *,
        model: str = WHISPER_TINY_EN.name,
        max_seconds: float = 600,
        cached_clips: int = 256,
        threads: int = 1,
    ) -> None:
        super().__init__(model, threads=threads)
        self._max_seconds = max_seconds
        self._texts: Recent[str] = Recent(cached_clips, lambda text: 1)
        self._whisper: Whisper

    async def setup(self) -> None:
        """Load the model (0.3 s)."""
        self._whisper = await self.offload(shared_whisper, self._weights.path(), self._threads)

    @batched(max_size=MAX_BATCH)
    async def run(self, audio: list[Waveforms]) -> list[AudioFeatures]:
        """One text a clip, "" where nothing was understood. Raises InvalidInputError where there is too much audio."""
        heard_s = [checked_seconds(request, self._max_seconds) for request in audio]
        digests = [
            [digest_of(np.ascontiguousarray(clip).data) for clip in request.samples] for request in audio
        ]  # 0.1 ms for a second of sound
        clips = {
            digest: clip
            for request, known_as in zip(audio, digests, strict=True)
            for digest, clip in zip(known_as, request.samples, strict=True)
        }
        known = {digest: text for digest in clips if (text := self._texts.get(digest)) is not None}
        texts = known | await self._hear({digest: clip for digest, clip in clips.items() if digest not in known})
        for digest, text in texts.items():
            self._texts.keep(digest, text)
        return [
            AudioFeatures(index=request.index, audio_s=seconds, texts=tuple(texts[digest] for digest in known_as))
            for request, seconds, known_as in zip(audio, heard_s, digests, strict=True)
        ]

    async def _hear(self, clips: dict[bytes, np.ndarray]) -> dict[bytes, str]:
        windows = [(digest, window) for digest, samples in clips.items() for window in cut(samples)]
        texts = [""] * len(windows)
        for batch in _batches([window for _, window in windows]):
            found = await self.offload(self._whisper.hear, [windows[index][1] for index in batch])
            for index, text in zip(batch, found, strict=True):
                texts[index] = text
        parts: dict[bytes, list[str]] = {digest: [] for digest in clips}
        for (digest, _), text in zip(windows, texts, strict=True):
            parts[digest].append(text)
        return {digest: joined(each) for digest, each in parts.items()}


def transcribe(samples: np.ndarray, rate: int) -> str:
    """The text of `samples` (mono, [n]) by Whisper tiny.en, which is fetched and loaded at the first call."""
    if rate != SAMPLE_RATE_HZ:
        import soxr

        samples = soxr.resample(samples, rate, SAMPLE_RATE_HZ)
    return _tiny_en().transcribe(samples.astype(np.float32, copy=False))


@functools.cache
def _tiny_en() -> Whisper:
    return Whisper(WHISPER_TINY_EN.fetch())


def _batches(windows: Sequence[np.ndarray]) -> Iterator[list[int]]:
    """Indices of windows of the same length, so that a clip sounds the same alone and in a batch."""
    same: dict[int, list[int]] = {}
    for index, window in enumerate(windows):
        same.setdefault(window_s(window), []).append(index)
    for indices in same.values():
        for start in range(0, len(indices), MAX_BATCH):
            yield indices[start : start + MAX_BATCH]
