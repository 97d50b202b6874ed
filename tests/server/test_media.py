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

from omniflow.errors import ProtocolError, UnsupportedError
from omniflow.media import AudioChunk
from omniflow.server.encoders import CHAT_FORMATS, SPEECH_FORMATS, FileEncoder, audio_format, pcm16, wav_header
from omniflow.server.media import AudioWriter, Base64Cutter

from .scripted import tone


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


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["mp3", "opus", "wav", "pcm"])
async def test_a_streamed_format_starts_before_its_end_and_is_as_long_whole(name: str) -> None:
    writer = AudioWriter(SPEECH_FORMATS[name])
    pieces = await written(writer, [tone(12000, start=start) for start in range(0, 48000, 12000)])
    assert any(pieces[:-2]), "nothing was sent while sound was still being made"
    streamed = b"".join(pieces)
    assert len(writer.whole(streamed)) == len(streamed)
    assert streamed.endswith(writer.whole(streamed)[5000:])


@pytest.mark.anyio
async def test_a_whole_mp3_knows_its_length_and_a_streamed_one_its_bit_rate() -> None:
    writer = AudioWriter(SPEECH_FORMATS["mp3"])
    streamed = b"".join(await written(writer, [tone(24000)] * 3))
    assert soundfile.info(io.BytesIO(writer.whole(streamed))).frames == 72000
    assert soundfile.info(io.BytesIO(streamed)).frames == pytest.approx(72000, rel=0.05)


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


def test_a_format_that_cannot_be_made_names_those_that_can() -> None:
    with pytest.raises(UnsupportedError, match="mp3, opus, flac, wav, pcm16") as raised:
        audio_format(CHAT_FORMATS, "aac", "audio.format")
    assert raised.value.param == "audio.format"


def test_an_encoder_left_half_way_frees_its_file() -> None:
    encoder = FileEncoder("OGG", "OPUS", 24000, 1)
    encoder.write(np.zeros((100, 1), np.float32))
    del encoder
