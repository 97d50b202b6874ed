"""Encoders: float frames become the bytes of an audio format, piece by piece or whole."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import av
    from av.audio.stream import AudioStream

Samples = NDArray[np.float32]
"""float32 [num_frames, channels]."""

_OPEN_SIZE = 0xFFFFFFFF
_MP3_HZ = frozenset({8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000})
_MP3_KBPS = 64
_MP3_LEVEL = 7
"""Of 0 to 9: from here on LAME leaves out what cannot be heard in speech."""
_OPUS_HZ = frozenset({8000, 12000, 16000, 24000, 48000})
_AAC_HZ = _MP3_HZ | {7350, 64000, 88200, 96000}


class Encoder(Protocol):
    """Frames in, bytes out."""

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

    def __init__(self, sample_rate_hz: int, channels: int, open_ended: bool) -> None:
        """Rate and channels are the reader's knowledge: nothing in the bytes tells them."""

    def write(self, samples: Samples) -> bytes:
        return pcm16(samples)

    def finish(self) -> bytes:
        return b""

    def head(self) -> bytes:
        return b""


class WavEncoder:
    """16-bit PCM behind one WAV header: with open sizes as streamed, with true ones in `head`."""

    def __init__(self, sample_rate_hz: int, channels: int, open_ended: bool) -> None:
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


class Codec(msgspec.Struct, frozen=True):
    """A codec of FFmpeg and the container around it. `bit_rate` is that of one channel; None: lossless."""

    name: str
    container: str
    sample_format: str
    bit_rate: int | None = None
    options: dict[str, str] = {}
    container_options: dict[str, str] = {}

    def __call__(self, sample_rate_hz: int, channels: int, open_ended: bool) -> FileEncoder:
        """An encoder of this codec."""
        return FileEncoder(self, sample_rate_hz, channels, open_ended)


class FileEncoder:
    """A compressed format, by PyAV. Of an `open_ended` file nothing says how long it is.

    What `write` gives is whole frames of the codec: it holds back 24 to 170 ms of sound.
    """

    def __init__(self, codec: Codec, sample_rate_hz: int, channels: int, open_ended: bool) -> None:
        # Imported here: it takes 0.1 s and 30 MiB, which a server that is asked for pcm and wav only should not spend.
        import av

        layout = "stereo" if channels == 2 else "mono"
        self._tape = _Tape(seekable=not open_ended)
        self._container = av.open(self._tape, "w", format=codec.container, container_options=codec.container_options)
        self._stream = cast(
            "AudioStream",
            self._container.add_stream(
                codec.name, rate=sample_rate_hz, layout=layout, options=codec.options, format=codec.sample_format
            ),
        )
        if codec.bit_rate is not None:
            self._stream.bit_rate = codec.bit_rate * channels
        self._sample_rate_hz = sample_rate_hz
        self._sample_format = codec.sample_format
        self._layout = layout
        self._position = 0

    def write(self, samples: Samples) -> bytes:
        if len(samples):
            self._mux(self._frame(samples))
        return self._tape.take()

    def finish(self) -> bytes:
        self._mux(None)
        self._container.close()
        return self._tape.take()

    def head(self) -> bytes:
        return bytes(self._tape.head)

    def _mux(self, frame: av.AudioFrame | None) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)

    def _frame(self, samples: Samples) -> av.AudioFrame:
        import av

        planar = self._sample_format.endswith("p")
        planes = np.ascontiguousarray(samples.T if planar else samples.reshape(1, -1))
        values = int16(planes) if self._sample_format.startswith("s16") else planes
        frame = av.AudioFrame.from_ndarray(values, self._sample_format, self._layout)
        frame.sample_rate = self._sample_rate_hz
        frame.pts = self._position
        self._position += len(samples)
        return frame


class LameEncoder:
    """An open-ended mp3. It is LAME as in PyAV, built for speed: a quarter of the time for the same bytes a second.

    It writes no tag that says how long the file is, which is why whole files are not made by it.
    """

    def __init__(self, sample_rate_hz: int, channels: int) -> None:
        import lameenc

        self._lame = lameenc.Encoder()
        self._lame.silence()
        self._lame.set_in_sample_rate(sample_rate_hz)
        self._lame.set_out_sample_rate(sample_rate_hz)
        self._lame.set_channels(channels)
        self._lame.set_bit_rate(_MP3_KBPS * channels)
        self._lame.set_quality(_MP3_LEVEL)
        self._begun = False

    def write(self, samples: Samples) -> bytes:
        self._begun = True
        return bytes(self._lame.encode(pcm16(samples)))

    def finish(self) -> bytes:
        return bytes(self._lame.flush()) if self._begun else b""

    def head(self) -> bytes:
        return b""


class _Tape(io.RawIOBase):
    """The file that FFmpeg writes to: `take` gives what was appended; `head` holds what it may rewrite later."""

    _HEAD_BYTES = 4096

    def __init__(self, seekable: bool) -> None:
        self._seekable = seekable
        self.head = bytearray()
        self._fresh = bytearray()
        self._size = 0
        self._at = 0

    def take(self) -> bytes:
        fresh, self._fresh = self._fresh, bytearray()
        return bytes(fresh)

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._seekable

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
    """One audio format of the API. `encoder` is called with rate (Hz), channels and whether the file is open-ended.

    `rates_hz` None: any rate.
    """

    media_type: str
    encoder: Callable[[int, int, bool], Encoder]
    rates_hz: frozenset[int] | None = None
    max_channels: int = 2
    states_length: bool = False
    """True where the header tells the length: unless streaming is asked for, a file is better sent whole."""
    slow: bool = False
    """True where a second of sound takes milliseconds to encode: too long for the event loop."""


# Milliseconds of a core for a second of 24 kHz mono, and the same with what the codec does by default.
_MP3 = Codec(  # 4.9 (8.0)
    "libmp3lame",
    "mp3",
    "fltp",
    bit_rate=1000 * _MP3_KBPS,
    options={"compression_level": str(_MP3_LEVEL)},
    container_options={"id3v2_version": "0"},
)
_OPUS = Codec(  # 2.1 (9.0); a page of 0.1 s, where the default of 1 s would hold back the first sound
    "libopus",
    "ogg",
    "flt",
    bit_rate=48_000,
    options={"compression_level": "4"},
    container_options={"page_duration": "100000"},
)
_AAC_OPTIONS = {"aac_coder": "fast", "aac_tns": "0", "aac_pns": "0", "cutoff": "9000"}
"""The fast coder alone takes 4.4 ms here: 0.8 of them go to shaping noise, 1.2 to what lies above 9 kHz."""
_AAC = Codec("aac", "adts", "fltp", bit_rate=48_000, options=_AAC_OPTIONS)  # 2.5 (7.7)
_FLAC = Codec("flac", "flac", "s16")  # 0.4


def _mp3(sample_rate_hz: int, channels: int, open_ended: bool) -> Encoder:  # open-ended: 1.3
    return LameEncoder(sample_rate_hz, channels) if open_ended else _MP3(sample_rate_hz, channels, open_ended)


_PCM = Format("audio/pcm", PcmEncoder, rates_hz=frozenset({24000}), max_channels=1)
_FILES = {
    "mp3": Format("audio/mpeg", _mp3, rates_hz=_MP3_HZ, slow=True),
    "opus": Format("audio/ogg", _OPUS, rates_hz=_OPUS_HZ, slow=True),
    "aac": Format("audio/aac", _AAC, rates_hz=_AAC_HZ, slow=True),
    "flac": Format("audio/flac", _FLAC, states_length=True, slow=True),
    "wav": Format("audio/wav", WavEncoder, max_channels=8, states_length=True),
}
SPEECH_FORMATS: Mapping[str, Format] = {**_FILES, "pcm": _PCM}
"""What `response_format` of /v1/audio/speech may be."""
CHAT_FORMATS: Mapping[str, Format] = {**_FILES, "pcm16": _PCM}
"""What `audio.format` of /v1/chat/completions may be."""
