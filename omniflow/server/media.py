"""Audio on its way out: the float chunks of a graph become bytes of a format, and bytes become base64 pieces."""

from __future__ import annotations

import base64

import anyio.to_thread
import numpy as np
import soxr

from omniflow.errors import ProtocolError
from omniflow.media import AudioChunk
from omniflow.server.encoders import Encoder, Format, Samples

PROMISED_HZ = 24000
"""The rate that OpenAI's clients take for granted in headerless pcm."""
_SHORT_S = 0.25
"""Sound that takes less to encode (1 ms at most) than to hand to a thread and back would cost, under load."""


class AudioWriter:
    """Turns the audio chunks of one reply into bytes of `format`.

    `write` and `finish` give what may be sent at once; `whole` gives the file, with a header that knows its length,
    unless it was `open_ended` from the start. Raises ProtocolError where a chunk has another rate or channel count than
    the first, or is not finite.
    """

    def __init__(self, format: Format, *, open_ended: bool = False) -> None:
        self._format = format
        self._open_ended = open_ended
        self._parts: tuple[_Mixer, Encoder] | None = None
        self.audio_s = 0.0
        """Seconds of sound so far."""

    @property
    def started(self) -> bool:
        """True once there was a chunk."""
        return self._parts is not None

    async def write(self, chunk: AudioChunk) -> bytes:
        """The bytes that `chunk` adds; may be empty while the encoder or the resampler looks ahead."""
        self.audio_s += chunk.duration_s
        if self._format.slow and (self._parts is None or chunk.duration_s > _SHORT_S):
            return await anyio.to_thread.run_sync(self._write, chunk)
        return self._write(chunk)

    async def finish(self) -> bytes:
        """The last bytes. A reply without any chunk is a file without samples, at 24 kHz."""
        if self._format.slow and self._parts is None:
            return await anyio.to_thread.run_sync(self._finish)
        return self._finish()

    def whole(self, streamed: bytes) -> bytes:
        """`streamed` (all of `write` and `finish`, joined) behind its true header."""
        head = self._parts[1].head() if self._parts is not None else b""
        return head + streamed[len(head) :]

    def _write(self, chunk: AudioChunk) -> bytes:
        mixer, encoder = self._opened(chunk)
        return encoder.write(mixer.mix(chunk))

    def _finish(self) -> bytes:
        mixer, encoder = self._opened(AudioChunk(np.zeros(0, np.float32), PROMISED_HZ))
        return encoder.write(mixer.rest()) + encoder.finish()

    def _opened(self, first: AudioChunk) -> tuple[_Mixer, Encoder]:
        if self._parts is None:
            mixer = _Mixer(first, self._format)
            self._parts = (mixer, self._format.encoder(mixer.rate_hz, mixer.channels, self._open_ended))
        return self._parts


class _Mixer:
    """The samples of one reply, at a rate and with channels that the format can hold."""

    def __init__(self, first: AudioChunk, format: Format) -> None:
        self._source = (first.sample_rate_hz, first.channels)
        self.channels = min(first.channels, format.max_channels)
        fits = format.rates_hz is None or first.sample_rate_hz in format.rates_hz
        self.rate_hz = first.sample_rate_hz if fits else PROMISED_HZ
        self._resampler = None if fits else soxr.ResampleStream(first.sample_rate_hz, self.rate_hz, self.channels)

    def mix(self, chunk: AudioChunk) -> Samples:
        """[num_frames, channels] of `chunk`; more channels than the format can hold are averaged."""
        if (chunk.sample_rate_hz, chunk.channels) != self._source:
            raise ProtocolError(
                f"audio began with {self._source[0]} Hz x {self._source[1]} channels "
                f"and went on with {chunk.sample_rate_hz} Hz x {chunk.channels}"
            )
        if len(chunk.samples) % chunk.channels or not np.isfinite(chunk.samples).all():
            raise ProtocolError(f"an audio chunk is not finite, or no multiple of its {chunk.channels} channels")
        samples: Samples = np.asarray(chunk.samples, np.float32).reshape(-1, chunk.channels)
        if chunk.channels > self.channels:
            samples = np.repeat(samples.mean(axis=1, keepdims=True), self.channels, axis=1)
        return samples if self._resampler is None else self._resampler.resample_chunk(samples)

    def rest(self) -> Samples:
        """What the resampler still holds."""
        nothing: Samples = np.zeros((0, self.channels), np.float32)
        return nothing if self._resampler is None else self._resampler.resample_chunk(nothing, last=True)


class Base64Cutter:
    """Base64 of a byte stream, cut where pieces can be joined as strings *and* decoded one by one as 16-bit PCM.

    That is every 6 bytes: 3 for base64, 2 for a sample. Up to 5 bytes wait for the next piece.
    """

    _STEP = 6

    def __init__(self) -> None:
        self._carry = b""

    def push(self, data: bytes) -> str:
        """Base64 of as much as can be cut now; may be empty."""
        data = self._carry + data
        cut = len(data) - len(data) % self._STEP
        self._carry = data[cut:]
        return base64.b64encode(data[:cut]).decode()

    def flush(self) -> str:
        """Base64 of the rest: the only piece that may end in padding."""
        rest, self._carry = self._carry, b""
        return base64.b64encode(rest).decode()
