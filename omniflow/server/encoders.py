"""Encoders: float frames become the bytes of an audio format, piece by piece or whole."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Protocol, cast

import msgspec
import numpy as np
import soundfile
from numpy.typing import NDArray

from omniflow.errors import UnsupportedError

Samples = NDArray[np.float32]
"""float32 [num_frames, channels]."""

_OPEN_SIZE = 0xFFFFFFFF
_MP3_HZ = frozenset({8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000})
_OPUS_HZ = frozenset({8000, 12000, 16000, 24000, 48000})


class Encoder(Protocol):
    """Frames in, bytes out."""

    slow: ClassVar[bool]
    """True where a second of sound takes milliseconds (mp3 7, Opus 20): too long for the event loop."""

    def write(self, samples: Samples) -> bytes:
        """Encode more frames; returns the bytes that are ready by now."""
        ...

    def finish(self) -> bytes:
        """The last bytes."""
        ...

    def head(self) -> bytes:
        """What the file begins with, now that its length is known: takes the place of as many streamed bytes."""
        ...


def int16(samples: Samples) -> NDArray[np.int16]:
    """Little-endian 16-bit samples; what exceeds [-1, 1] is clipped."""
    whole: NDArray[np.int16] = np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2")
    return whole


def pcm16(samples: Samples) -> bytes:
    """The bytes of `int16`, frame by frame."""
    return int16(samples).tobytes()


def wav_header(sample_rate_hz: int, channels: int, num_bytes: int | None) -> bytes:
    """The 44 bytes before 16-bit PCM in a WAV file; `num_bytes` None leaves the sizes open (0xFFFFFFFF)."""
    frame_bytes = 2 * channels
    riff, data = (_OPEN_SIZE, _OPEN_SIZE) if num_bytes is None else (36 + num_bytes, num_bytes)
    form = (16, 1, channels, sample_rate_hz, sample_rate_hz * frame_bytes, frame_bytes, 16)
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", riff, b"WAVE", b"fmt ", *form, b"data", data)


class PcmEncoder:
    """Headerless 16-bit PCM."""

    slow: ClassVar[bool] = False

    def __init__(self, sample_rate_hz: int, channels: int) -> None:
        """Rate and channels are the reader's knowledge: nothing in the bytes tells them."""

    def write(self, samples: Samples) -> bytes:
        return pcm16(samples)

    def finish(self) -> bytes:
        return b""

    def head(self) -> bytes:
        return b""


class WavEncoder:
    """16-bit PCM behind one WAV header: with open sizes as streamed, with true ones in `head`."""

    slow: ClassVar[bool] = False

    def __init__(self, sample_rate_hz: int, channels: int) -> None:
        self._form = (sample_rate_hz, channels)
        self._num_bytes = 0
        self._open_header = wav_header(*self._form, None)

    def write(self, samples: Samples) -> bytes:
        data = pcm16(samples)
        self._num_bytes += len(data)
        return self._take_header() + data

    def finish(self) -> bytes:
        return self._take_header()

    def head(self) -> bytes:
        return wav_header(*self._form, self._num_bytes)

    def _take_header(self) -> bytes:
        header, self._open_header = self._open_header, b""
        return header


class FileEncoder:
    """A compressed format of libsndfile (mp3, Ogg Opus, flac).

    A streamed mp3 lacks only its seek table, which `head` has; it has a constant bit rate, because players guess
    its length by the first frame. Opus comes in pages of a second. flac, the lossless one, is held back to its end:
    without its length in the head, libsndfile itself cannot read it.
    """

    slow: ClassVar[bool] = True

    def __init__(self, container: str, codec: str, sample_rate_hz: int, channels: int) -> None:
        self._tape = _Tape()
        self._lossless = codec == "PCM_16"
        quality = {"compression_level": 0.5, "bitrate_mode": "CONSTANT"} if container == "MP3" else {}
        self._file = soundfile.SoundFile(self._tape, "w", sample_rate_hz, channels, codec, format=container, **quality)

    def write(self, samples: Samples) -> bytes:
        self._file.write(int16(samples) if self._lossless else samples)
        return b"" if self._lossless else self._tape.take()

    def finish(self) -> bytes:
        self._file.close()
        rest = self._tape.take()
        return self.head() + rest[len(self.head()) :] if self._lossless else rest

    def head(self) -> bytes:
        return bytes(self._tape.head)


class _Tape(io.RawIOBase):
    """The file that libsndfile writes to: `take` gives what was appended; `head` holds what it may rewrite later."""

    _HEAD_BYTES = 4096

    def __init__(self) -> None:
        self.head = bytearray()
        self._fresh = bytearray()
        self._size = 0
        self._at = 0

    def take(self) -> bytes:
        fresh, self._fresh = self._fresh, bytearray()
        return bytes(fresh)

    def write(self, data: object) -> int:
        written = bytes(cast(bytes, data))
        rewritten = written[: self._size - self._at]
        appended = written[len(rewritten) :]
        if rewritten and self._at + len(rewritten) > len(self.head):
            raise OSError(f"byte {self._at} of a stream was rewritten; only its first {self._HEAD_BYTES} may be")
        self.head[self._at : self._at + len(rewritten)] = rewritten
        self.head += appended[: max(0, self._HEAD_BYTES - len(self.head))]
        self._fresh += appended
        self._size += len(appended)
        self._at += len(written)
        return len(written)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at


class Format(msgspec.Struct, frozen=True):
    """One audio format of the API: `encoder` is called with rate (Hz) and channels. `rates_hz` None: any rate."""

    media_type: str
    encoder: Callable[[int, int], Encoder]
    rates_hz: frozenset[int] | None = None
    max_channels: int = 2
    states_length: bool = False
    """True where the header tells the length: unless streaming is asked for, a file is better sent whole."""


_PCM = Format("audio/pcm", PcmEncoder, rates_hz=frozenset({24000}), max_channels=1)
_FILES = {
    "mp3": Format("audio/mpeg", partial(FileEncoder, "MP3", "MPEG_LAYER_III"), rates_hz=_MP3_HZ),
    "opus": Format("audio/ogg", partial(FileEncoder, "OGG", "OPUS"), rates_hz=_OPUS_HZ),
    "flac": Format("audio/flac", partial(FileEncoder, "FLAC", "PCM_16"), max_channels=8),
    "wav": Format("audio/wav", WavEncoder, max_channels=8, states_length=True),
}
SPEECH_FORMATS: Mapping[str, Format] = {**_FILES, "pcm": _PCM}
"""What `response_format` of /v1/audio/speech may be."""
CHAT_FORMATS: Mapping[str, Format] = {**_FILES, "pcm16": _PCM}
"""What `audio.format` of /v1/chat/completions may be."""


def audio_format(formats: Mapping[str, Format], name: str, param: str) -> Format:
    """The format called `name`. Raises UnsupportedError naming `param` where it cannot be made (aac)."""
    if name not in formats:
        raise UnsupportedError(f"audio cannot be encoded as {name!r}; ask for {', '.join(formats)}", param=param)
    return formats[name]
