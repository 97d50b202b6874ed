"""Sound on its way in and out."""

from __future__ import annotations

import numpy as np
import pytest

from omniflow.errors import ProtocolError
from omniflow.media import AudioChunk
from omniflow.server.realtime.audio import AudioFormat, AudioIn, AudioOut, InputBuffer, Pcm, Pcma, Pcmu, decode_clip


def sine(rate_hz: int, seconds: float = 1.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate_hz * seconds)) / rate_hz)).astype(np.float32)


def errors(heard: np.ndarray, rate_hz: int = 16000) -> float:
    """The largest difference from the sine, less the ends."""
    wanted = sine(rate_hz, len(heard) / rate_hz)
    return float(np.abs(heard.astype(np.float32) / 32768 - wanted)[800:-800].max())


@pytest.mark.parametrize("cut", [31, 4800, 100_000])
def test_pieces_of_any_length_sound_as_the_whole(cut: int) -> None:
    data = (sine(24000) * 32767).astype("<i2").tobytes()
    audio = AudioIn(Pcm())
    heard = np.concatenate([*(audio.push(data[at : at + cut]) for at in range(0, len(data), cut)), audio.flush()])
    assert len(heard) == 16000 and errors(heard) < 0.01
    # The resampler dithers.
    assert np.abs(heard.astype(int) - decode_clip(data, Pcm())).max() <= 2


@pytest.mark.parametrize("format", [Pcmu(), Pcma()])
def test_telephone_audio_there_and_back(format: AudioFormat) -> None:
    out = AudioOut(format)
    data = b"".join(out.push(AudioChunk(part, 24000)) for part in np.split(sine(24000), 10)) + out.flush()
    assert len(data) == 8000 and out.seconds(8000) == 1
    assert errors(decode_clip(data, format)) < 0.03


def test_known_codes() -> None:
    """G.711: 0xff is silence in mu-law, 0xd5 in A-law."""
    for format, code in ((Pcmu(), 0xFF), (Pcma(), 0xD5)):
        assert AudioOut(format).push(AudioChunk(np.zeros(3, np.float32), 8000)) == bytes([code] * 3)
        assert np.abs(decode_clip(bytes([code] * 800), format)).max() <= 12  # and the dither


@pytest.mark.parametrize(("rate_hz", "channels"), [(24000, 1), (22050, 1), (16000, 2), (48000, 2)])
def test_any_rate_and_channels_become_24_khz_mono(rate_hz: int, channels: int) -> None:
    out = AudioOut(Pcm())
    samples = np.repeat(sine(rate_hz), channels)
    data = b"".join(out.push(AudioChunk(part, rate_hz, channels)) for part in np.split(samples, 10)) + out.flush()
    assert len(data) == 2 * 24000
    assert errors(np.frombuffer(data, "<i2"), 24000) < 0.01


@pytest.mark.parametrize(
    "chunk", [AudioChunk(sine(8000), 8000), AudioChunk(sine(24000), 24000, 2), AudioChunk(sine(24000) * np.nan, 24000)]
)
def test_chunks_that_do_not_fit_the_first(chunk: AudioChunk) -> None:
    out = AudioOut(Pcm())
    out.push(AudioChunk(sine(24000), 24000))
    with pytest.raises(ProtocolError):
        out.push(chunk)


def test_the_buffer_keeps_positions() -> None:
    buffer = InputBuffer()
    buffer.push(np.arange(10, dtype=np.int16))
    buffer.drop_before(3)
    assert (buffer.start, buffer.end) == (3, 10)
    assert list(buffer.look(5, 7)) == [5, 6] and list(buffer.take(6)) == [3, 4, 5]
    buffer.push(np.arange(10, 12, dtype=np.int16))
    assert list(buffer.take(99)) == [6, 7, 8, 9, 10, 11] and (buffer.start, buffer.end) == (12, 12)
    assert list(buffer.take(5)) == [] and buffer.start == 12
