"""An encoded clip that lies in memory, decoded block by block to mono sound at the rate that a model wants."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from omniflow.errors import InvalidInputError

if TYPE_CHECKING:
    import soundfile

BLOCK_FRAMES = 1 << 18
"""Frames decoded in one step: 5.5 s at 48 kHz; a step takes at most 60 ms."""
FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
MAX_CHANNELS = 8
MIN_RATE_HZ, MAX_RATE_HZ = 4_000, 384_000
_HEAD_BYTES = 4096
_FORMATS_TAKEN = "send wav, mp3, flac or ogg"


class Clip:
    """Decodes `data`; `where` is how its errors begin, and `param` the field of the request that they name.

    Raises InvalidInputError, when it is made and for each block, for what cannot be decoded.
    """

    def __init__(self, data: bytes, *, where: str, param: str, sample_rate_hz: int) -> None:
        import soundfile
        import soxr

        self._where, self._param = where, param
        if not data:
            raise self._invalid("the audio is empty (0 bytes)")
        try:
            self._file = _forwards(data)
        except soundfile.LibsndfileError as error:
            raise self._invalid(f"the audio cannot be decoded ({error.error_string}); {_FORMATS_TAKEN}") from error
        rate_hz, channels = self._file.samplerate, self._file.channels
        if self._file.format not in FORMATS:
            raise self._invalid(f"audio in the format {self._file.format} is not taken; {_FORMATS_TAKEN}")
        if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ or channels > MAX_CHANNELS:
            raise self._invalid(
                f"audio of {rate_hz} Hz with {channels} channels is not taken; "
                f"send {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz and at most {MAX_CHANNELS} channels"
            )
        same = rate_hz == sample_rate_hz
        self._resampler = None if same else soxr.ResampleStream(rate_hz, sample_rate_hz, 1, dtype="float32")
        self.ended = False

    def read_block(self) -> np.ndarray:
        """The next samples, float32 [n], in [-1, 1]."""
        import soundfile

        try:
            frames = self._file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise self._invalid(f"the audio is broken ({error.error_string})") from error
        self.ended = len(frames) < BLOCK_FRAMES
        mono: np.ndarray = frames.mean(axis=1)
        if not np.isfinite(mono).all():
            raise self._invalid("the audio holds samples that are not numbers (NaN or infinite)")
        mono = mono.clip(-1, 1)  # float files may hold anything up to 1e38, which no encoder survives
        if self._resampler is not None:
            mono = self._resampler.resample_chunk(mono, last=self.ended)
        return mono

    def _invalid(self, why: str) -> InvalidInputError:
        return InvalidInputError(f"{self._where}: {why}", param=self._param)


def _forwards(data: bytes) -> soundfile.SoundFile:
    """A sound file that is read from its begin to its end only.

    soundfile seeks behind every read where it can, and libsndfile fails to at the end of a FLAC whose head, as that of
    every streamed one, does not say how long it is.
    """
    import soundfile

    class Forwards(soundfile.SoundFile):  # type: ignore[misc]  # it has no types
        def seekable(self) -> bool:
            return False

    return Forwards(io.BytesIO(_with_a_size(data)))


def _with_a_size(data: bytes) -> bytes:
    """A WAV whose writer left 0 for a size that it did not know yet says "all that follows", as others do."""
    at = data.find(b"data\0\0\0\0", 12, _HEAD_BYTES) if data[:4] == b"RIFF" else -1
    return data if at < 0 else data[: at + 4] + b"\xff" * 4 + data[at + 8 :]
