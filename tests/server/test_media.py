from __future__ import annotations

import base64
import io
import struct
import wave

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from omniflow.errors import ProtocolError
from omniflow.media import AudioChunk
from omniflow.server.encoders import CHAT_FORMATS, SPEECH_FORMATS, pcm16, wav_header
from omniflow.server.media import AudioWriter, Base64Cutter

from .scripted import tone
from .sound import decoded


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_cut_base64_may_be_joined_and_decoded_piece_by_piece(blocks: list[bytes]) -> None:
    cutter = Base64Cutter()
    pieces = [cutter.push(block) for block in blocks]
    assert all("=" not in piece and len(base64.b64decode(piece)) % 6 == 0 for piece in pieces)
    pieces.append(cutter.flush())
    whole = b"".join(blocks)
    assert base64.b64decode("".join(pieces), validate=True) == whole
    assert b"".join(base64.b64decode(piece) for piece in pieces) == whole
    assert cutter.flush() == ""


def test_pcm16_clips_and_rounds() -> None:
    samples = np.array([[0.0], [1.0], [-1.0], [1.5], [-7.0], [0.5 / 32767], [1.6 / 32767]], np.float32)
    assert struct.unpack("<7h", pcm16(samples)) == (0, 32767, -32767, 32767, -32767, 0, 2)


@pytest.mark.parametrize(("rate_hz", "channels", "num_frames"), [(24000, 1, 0), (22050, 1, 7), (48000, 2, 100)])
def test_a_wav_header_says_what_follows(rate_hz: int, channels: int, num_frames: int) -> None:
    data = bytes(2 * channels * num_frames)
    with wave.open(io.BytesIO(wav_header(rate_hz, channels, len(data)) + data)) as file:
        assert file.getparams()[:4] == (channels, 2, rate_hz, num_frames)


def test_an_open_wav_header_is_read_to_the_end_of_the_file() -> None:
    data = pcm16(tone(500).samples)
    samples, rate_hz = soundfile.read(io.BytesIO(wav_header(24000, 1, None) + data), dtype="int16")
    assert samples.tobytes() == data and rate_hz == 24000


async def written(writer: AudioWriter, chunks: list[AudioChunk]) -> list[bytes]:
    return [await writer.write(chunk) for chunk in chunks] + [await writer.finish()]


SECONDS = np.arange(3 * 24000) / 24000
SWEEP = (np.sin(2 * np.pi * (200 * SECONDS + 300 * SECONDS**2)) * np.sin(SECONDS * 9) / 4).astype(np.float32)
"""From 200 to 2000 Hz, louder and softer."""


def likeness(sound: np.ndarray, original: np.ndarray) -> float:
    """Correlation at the best delay: 1 for the same sound."""
    size = 2 * len(sound)
    correlation = np.fft.irfft(np.fft.rfft(sound, size) * np.conj(np.fft.rfft(original, size)))
    return float(correlation.max() / np.linalg.norm(sound) / np.linalg.norm(original))


@pytest.mark.anyio
@pytest.mark.parametrize("open_ended", [True, False])
@pytest.mark.parametrize("name", ["mp3", "opus", "aac", "flac", "wav"])
async def test_a_format_starts_before_its_end_and_sounds_alike(name: str, open_ended: bool) -> None:
    writer = AudioWriter(SPEECH_FORMATS[name], open_ended=open_ended)
    pieces = await written(writer, [AudioChunk(part, 24000) for part in np.split(SWEEP, 6)])
    assert any(pieces[:2]), "nothing was sent while sound was still being made"
    assert writer.audio_s == 3
    data = b"".join(pieces)
    samples, rate_hz, _ = decoded(data if open_ended else writer.whole(data))
    assert len(samples) / rate_hz == pytest.approx(3, abs=0.1)
    assert likeness(samples[:: rate_hz // 24000], SWEEP) > 0.97


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["mp3", "flac", "wav"])
async def test_a_whole_file_says_how_long_it_is(name: str) -> None:
    writer = AudioWriter(SPEECH_FORMATS[name])
    data = writer.whole(b"".join(await written(writer, [tone(24000)] * 3)))
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        assert (file.frames, file.samplerate, file.channels) == (72000, 24000, 1)
    assert decoded(data)[2] == 3


@pytest.mark.anyio
async def test_an_open_ended_file_says_nothing_of_its_length_and_is_read_to_its_end() -> None:
    for name in ("mp3", "flac"):
        writer = AudioWriter(SPEECH_FORMATS[name], open_ended=True)
        data = b"".join(await written(writer, [tone(24000)] * 3))
        assert b"Xing" not in data and b"Info" not in data
        assert (decoded(data)[2] is None) is (name == "flac")
        assert len(decoded(data)[0]) == pytest.approx(72000, abs=2400)


@pytest.mark.anyio
@pytest.mark.parametrize("chunk", [tone(48000, 48000, 2), tone(8000, 8000), tone(22050, 22050)])
async def test_an_open_ended_mp3_keeps_rate_and_channels(chunk: AudioChunk) -> None:
    data = b"".join(await written(AudioWriter(SPEECH_FORMATS["mp3"], open_ended=True), [chunk] * 2))
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        assert (file.samplerate, file.channels) == (chunk.sample_rate_hz, chunk.channels)
        assert len(file.read()) / file.samplerate == pytest.approx(2, abs=0.25)


@pytest.mark.anyio
async def test_lossless_formats_lose_nothing_and_hold_two_channels() -> None:
    stereo = tone(30000, channels=2)
    for name in ("flac", "wav"):
        writer = AudioWriter(SPEECH_FORMATS[name])
        data = writer.whole(b"".join(await written(writer, [stereo])))
        samples, _ = soundfile.read(io.BytesIO(data), dtype="int16")
        assert samples.shape == (30000, 2) and samples.tobytes() == pcm16(stereo.samples)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "rate_hz", "found_hz"), [("opus", 22050, 24000), ("mp3", 22050, 22050), ("mp3", 96000, 24000)]
)
async def test_a_rate_that_a_format_cannot_hold_becomes_24_khz(name: str, rate_hz: int, found_hz: int) -> None:
    writer = AudioWriter(SPEECH_FORMATS[name])
    data = b"".join(await written(writer, [tone(rate_hz // 2, rate_hz)] * 2))
    samples, actual_hz = soundfile.read(io.BytesIO(writer.whole(data)))
    assert actual_hz == found_hz and len(samples) == pytest.approx(found_hz, abs=10)


@pytest.mark.anyio
async def test_more_channels_than_a_format_holds_are_averaged() -> None:
    stereo = AudioChunk(np.array([0.2, 0.4, -0.2, 0.0], np.float32), 24000, 2)
    writer = AudioWriter(CHAT_FORMATS["pcm16"])
    samples = np.frombuffer(b"".join(await written(writer, [stereo])), "<i2") / 32767
    np.testing.assert_allclose(samples, [0.3, -0.1], atol=1e-4)


@pytest.mark.anyio
async def test_a_chunk_that_does_not_fill_its_channels_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no multiple of its 2 channels"):
        await AudioWriter(SPEECH_FORMATS["pcm"]).write(AudioChunk(np.zeros(3, np.float32), 24000, 2))


@pytest.mark.anyio
async def test_read_only_chunks_are_taken() -> None:
    chunk = tone(48000, 48000)
    chunk.samples.setflags(write=False)
    assert len(b"".join(await written(AudioWriter(SPEECH_FORMATS["pcm"]), [chunk]))) == 48000
