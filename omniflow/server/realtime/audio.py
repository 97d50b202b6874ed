"""Sound as clients send and get it: 16-bit PCM at 24 kHz, or G.711 at 8 kHz; and as a session keeps it: at 16 kHz.

What hears (voice activity detection, speech recognition, the audio encoders of omni models) takes 16 kHz, so what
comes in is resampled once, as it comes.
"""

from __future__ import annotations

import functools
import io
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from omniflow.errors import ProtocolError
from omniflow.media import AudioChunk
from omniflow.server.encoders import int16, pcm16, wav_header

HEARD_HZ = 16_000
"""The rate at which a session keeps what it hears."""
SAMPLES_PER_MS = HEARD_HZ // 1000
_PCM_HZ = 24_000
_TELEPHONE_HZ = 8_000

Pcm16 = NDArray[np.int16]


class Pcm(msgspec.Struct, frozen=True, tag="audio/pcm", tag_field="type"):
    """16-bit little-endian samples, mono."""

    rate: Literal[24000] | None = 24000
    """Null where a client says null: it stands for the only one."""


class Pcmu(msgspec.Struct, frozen=True, tag="audio/pcmu", tag_field="type"):
    """G.711 mu-law, mono."""


class Pcma(msgspec.Struct, frozen=True, tag="audio/pcma", tag_field="type"):
    """G.711 A-law, mono."""


AudioFormat = Pcm | Pcmu | Pcma


class _Law(NamedTuple):
    """G.711 as libsndfile has it, in two tables: of its 256 codes, and of all 16-bit samples from the lowest on."""

    samples: Pcm16
    codes: NDArray[np.uint8]


@functools.cache
def _law(name: Literal["ULAW", "ALAW"]) -> _Law:
    codes = io.BytesIO(bytes(range(256)))
    samples, _ = soundfile.read(codes, samplerate=_TELEPHONE_HZ, channels=1, format="RAW", subtype=name, dtype="int16")
    written = io.BytesIO()
    soundfile.write(written, np.arange(-(2**15), 2**15, dtype=np.int16), _TELEPHONE_HZ, name, format="RAW")
    return _Law(samples, np.frombuffer(written.getvalue(), np.uint8))


def _law_of(format: Pcmu | Pcma) -> _Law:
    return _law("ULAW" if isinstance(format, Pcmu) else "ALAW")


def rate_hz(format: AudioFormat) -> int:
    """Samples a second."""
    return _PCM_HZ if isinstance(format, Pcm) else _TELEPHONE_HZ


def bytes_per_s(format: AudioFormat) -> int:
    """Of sound."""
    return rate_hz(format) * (2 if isinstance(format, Pcm) else 1)


class AudioIn:
    """Bytes of `format` become samples at 16 kHz, piece by piece; a piece may end within a sample."""

    def __init__(self, format: AudioFormat) -> None:
        self.format = format
        self._half = b""
        self._resampler = self._fresh()

    def push(self, data: bytes) -> Pcm16:
        """What can be heard of it by now: the resampler looks some milliseconds ahead."""
        return self._resampled(self._samples(data), last=False)

    def flush(self) -> Pcm16:
        """What is left, where the clip ends here. Half a sample is dropped."""
        self._half = b""
        rest = self._resampled(np.zeros(0, np.int16), last=True)
        self._resampler = self._fresh()
        return rest

    def _fresh(self) -> soxr.ResampleStream:
        return soxr.ResampleStream(rate_hz(self.format), HEARD_HZ, 1, dtype="int16")

    def _resampled(self, samples: Pcm16, *, last: bool) -> Pcm16:
        heard: Pcm16 = self._resampler.resample_chunk(samples, last=last)
        return heard

    def _samples(self, data: bytes) -> Pcm16:
        if not isinstance(self.format, Pcm):
            return _law_of(self.format).samples[np.frombuffer(data, np.uint8)]
        data = self._half + data
        whole = len(data) - len(data) % 2
        self._half = data[whole:]
        return np.frombuffer(data[:whole], "<i2")


def decode_clip(data: bytes, format: AudioFormat) -> Pcm16:
    """A whole clip at 16 kHz."""
    clip = AudioIn(format)
    return np.concatenate([clip.push(data), clip.flush()])


class AudioOut:
    """The chunks of one reply become bytes of `format`, whole samples in every piece.

    Raises ProtocolError where a chunk has another rate or channel count than the first, or is not finite.
    """

    def __init__(self, format: AudioFormat) -> None:
        self._format = format
        self._source: tuple[int, int] | None = None
        self._resampler: soxr.ResampleStream | None = None

    def push(self, chunk: AudioChunk) -> bytes:
        """The bytes that `chunk` adds; may be empty while the resampler looks ahead."""
        source = (chunk.sample_rate_hz, chunk.channels)
        if self._source is None:
            self._source = source
            if source[0] != rate_hz(self._format):
                self._resampler = soxr.ResampleStream(source[0], rate_hz(self._format), 1, dtype="float32")
        if source != self._source:
            raise ProtocolError(f"audio began with {self._source} (Hz, channels) and went on with {source}")
        if len(chunk.samples) % chunk.channels or not np.isfinite(chunk.samples).all():
            raise ProtocolError(f"an audio chunk is not finite, or no multiple of its {chunk.channels} channels")
        mono = np.asarray(chunk.samples, np.float32).reshape(-1, chunk.channels).mean(axis=1)
        return self._encoded(mono if self._resampler is None else self._resampler.resample_chunk(mono))

    def flush(self) -> bytes:
        """What the resampler still holds."""
        if self._resampler is None:
            return b""
        return self._encoded(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))

    def seconds(self, num_bytes: int) -> float:
        """How long so many bytes sound."""
        return num_bytes / bytes_per_s(self._format)

    def _encoded(self, samples: NDArray[np.float32]) -> bytes:
        if isinstance(self._format, Pcm):
            return pcm16(samples)
        return _law_of(self._format).codes[int16(samples).astype(np.int32) + 2**15].tobytes()


def wav(samples: Pcm16) -> bytes:
    """16 kHz mono samples as a WAV file."""
    data = samples.astype("<i2", copy=False).tobytes()
    return wav_header(HEARD_HZ, 1, len(data)) + data


class InputBuffer:
    """What was heard and not yet committed. Positions are samples since the session began."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.start = 0

    @property
    def end(self) -> int:
        """Where what comes next begins."""
        return self.start + len(self._data) // 2

    def push(self, samples: Pcm16) -> None:
        """Append."""
        self._data += samples.tobytes()

    def drop_before(self, position: int) -> None:
        """Forget what lies before `position`."""
        count = min(max(0, position - self.start), len(self._data) // 2)
        del self._data[: 2 * count]
        self.start += count

    def take(self, end: int) -> Pcm16:
        """What lies before `end`; it is no longer in the buffer."""
        count = min(max(0, end - self.start), len(self._data) // 2)
        taken = np.frombuffer(bytes(self._data[: 2 * count]), np.int16)
        self.drop_before(self.start + count)
        return taken

    def look(self, start: int, end: int) -> Pcm16:
        """A copy of what lies between."""
        first, last = max(0, start - self.start), max(0, end - self.start)
        return np.frombuffer(bytes(self._data[2 * first : 2 * last]), np.int16)
