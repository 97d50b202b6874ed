"""An encoded clip that lies in memory, decoded block by block to mono sound at the rate that a model wants."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

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
            self._file: _Sound = _Mp3(data) if _is_mp3(data) else _forwards(data)
        except (soundfile.LibsndfileError, _BrokenError) as error:
            raise self._invalid(f"the audio cannot be decoded ({_why(error)}); {_FORMATS_TAKEN}") from error
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
        except (soundfile.LibsndfileError, _BrokenError) as error:
            raise self._invalid(f"the audio is broken ({_why(error)})") from error
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


class _Sound(Protocol):
    """What soundfile makes of a file."""

    format: str
    samplerate: int
    channels: int

    def read(self, frames: int, dtype: str, always_2d: bool) -> np.ndarray:
        """The next `frames`, fewer at the end: [n, channels]."""


class _BrokenError(Exception):
    pass


def _why(error: Exception) -> str:
    """Without the name of the object that soundfile was given."""
    import soundfile

    return str(error.error_string if isinstance(error, soundfile.LibsndfileError) else error)


def _is_mp3(data: bytes) -> bool:
    """Whether it begins with a frame of one, or with a tag that no FLAC follows."""
    if data[:3] == b"ID3":
        at = 10 + sum(byte << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=False))
        return data[at : at + 4] != b"fLaC"
    return len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x06 != 0


class _Mp3:
    """An mp3 as FFmpeg decodes it, mixed to mono: libsndfile's decoder writes to the terminal what it finds odd."""

    format = "MP3"
    channels = 1

    def __init__(self, data: bytes) -> None:
        import av

        try:
            self._container = av.open(io.BytesIO(data), "r", format="mp3", metadata_errors="ignore")
        except av.FFmpegError as error:
            raise _BrokenError(error.strerror) from error
        self.samplerate = self._container.streams.audio[0].codec_context.sample_rate
        self._left = np.zeros(0, np.float32)
        self._decoded = self._decode()

    def read(self, frames: int, dtype: str, always_2d: bool) -> np.ndarray:
        """The next `frames`, fewer at the end: float32 [n, 1]."""
        parts, missing = [self._left], frames - len(self._left)
        while missing > 0 and (part := next(self._decoded, None)) is not None:
            parts.append(part)
            missing -= len(part)
        samples = np.concatenate(parts)
        self._left = samples[frames:]
        return samples[:frames, None]

    def _decode(self) -> Iterator[np.ndarray]:
        import av

        with self._container as container:
            for packet in container.demux(container.streams.audio[0]):
                try:
                    decoded = packet.decode()
                except av.InvalidDataError:  # what is no frame; the next may be one
                    continue
                for frame in decoded:
                    if frame.sample_rate != self.samplerate:
                        raise _BrokenError(f"{self.samplerate} Hz become {frame.sample_rate} Hz amid it")
                    yield _in_one(frame.to_ndarray()).mean(axis=0, dtype=np.float32)


def _in_one(samples: np.ndarray) -> np.ndarray:
    """Samples in [-1, 1]: FFmpeg's decoders of layers 1 and 2 may give integers."""
    return samples if samples.dtype.kind == "f" else samples / np.float32(-float(np.iinfo(samples.dtype).min))


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
