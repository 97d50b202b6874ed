"""Files as they come from anywhere: whole, changed amid, damaged in any way."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile

from omniflow.errors import InvalidInputError
from omniflow.server.decoding import Clip
from omniflow.server.encoders import SPEECH_FORMATS, pcm16, wav_header

from .sound import RATE_HZ, encoded

TONE = (np.sin(np.arange(RATE_HZ) * 0.2) / 3).astype(np.float32)


def read(data: bytes) -> np.ndarray:
    clip = Clip(io.BytesIO(data))
    try:
        blocks = [np.zeros(0, np.float32)]
        while len(block := clip.read_block()):
            blocks.append(block)
        return np.concatenate(blocks)
    finally:
        clip.close()


def test_blocks_are_short_and_the_sound_is_the_same() -> None:
    samples = np.tile(TONE, 7)
    clip = Clip(io.BytesIO(wav_header(RATE_HZ, 1, 2 * len(samples)) + pcm16(samples)))
    blocks = []
    while len(block := clip.read_block()):
        blocks.append(block)
        assert clip.seconds == sum(map(len, blocks)) / RATE_HZ
    assert max(map(len, blocks)) < 2.5 * RATE_HZ
    np.testing.assert_allclose(np.concatenate(blocks), samples, atol=1e-4)


def test_a_closed_clip_has_ended() -> None:
    clip = Clip(io.BytesIO(wav_header(RATE_HZ, 1, 2 * len(TONE)) + pcm16(TONE)))
    clip.close()
    clip.close()
    assert len(clip.read_block()) == 0


def test_rate_and_channels_may_change_amid_a_file() -> None:
    """As in mp3s that somebody joined."""
    parts = []
    for rate_hz, channels in ((24_000, 1), (24_000, 2), (48_000, 2)):
        encoder = SPEECH_FORMATS["mp3"].encoder(rate_hz, channels, True)
        parts += [encoder.write(np.resize(TONE, (rate_hz, channels))), encoder.finish()]
    assert len(read(b"".join(parts))) / RATE_HZ == pytest.approx(3, abs=0.4)


def test_what_lies_in_front_of_an_mp3_is_passed_over() -> None:
    encoder = SPEECH_FORMATS["mp3"].encoder(24_000, 1, True)
    file = encoder.write(np.resize(TONE, (24_000, 1))) + encoder.finish()
    junk = np.random.default_rng(1).bytes(700)
    assert len(read(junk + file)) / RATE_HZ == pytest.approx(1, abs=0.2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    kinds = [
        ("mp4", "aac"),
        ("webm", "libopus"),
        ("ogg", "libopus"),
        ("mp3", "libmp3lame"),
        ("flac", "flac"),
        ("wav", "pcm_s16le"),
    ]
    folder: Path = tmp_path_factory.mktemp("sounds")
    return {container: encoded(TONE, container, codec, folder) for container, codec in kinds}


@pytest.mark.parametrize("seed", range(40))
def test_damage_is_read_or_refused_and_nothing_else(files: dict[str, bytes], seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray(files[list(files)[seed % len(files)]])
    for _ in range(rng.integers(1, 12)):
        at = int(rng.integers(0, min(len(data), 600 if rng.random() < 0.5 else len(data))))
        data[at : at + int(rng.integers(0, 3))] = rng.bytes(int(rng.integers(0, 40)))
    try:
        assert np.isfinite(read(bytes(data))).all()
    except InvalidInputError as error:
        assert error.param == "file"


def test_sound_of_an_unknown_kind_is_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(InvalidInputError, match="no sound that can be decoded"):
        read(files["webm"].replace(b"A_OPUS", b"A_XPUS"))


def test_a_film_without_sound_is_refused() -> None:
    film = io.BytesIO()
    with av.open(film, "w", format="matroska") as out:
        stream = out.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for _ in range(3):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), "rgb24")))
        out.mux(stream.encode(None))
    with pytest.raises(InvalidInputError, match="no sound that can be decoded"):
        read(film.getvalue())


def test_a_head_that_tells_of_more_sound_than_there_are_bytes_is_refused() -> None:
    """FFmpeg would take gigabytes for it."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=RATE_HZ, layout="mono")
        frame = av.AudioFrame.from_ndarray(TONE[None], format="fltp", layout="mono")
        frame.sample_rate = RATE_HZ
        file.mux([*stream.encode(frame), *stream.encode(None)])
    data = bytearray(out.getvalue())
    assert len(read(bytes(data))) / RATE_HZ == pytest.approx(1, abs=0.1)
    sizes = data.index(b"stsz")
    data[sizes + 8 : sizes + 16] = (1).to_bytes(4, "big") + (10**8).to_bytes(4, "big")
    with pytest.raises(InvalidInputError, match="file: its head tells of more sound than there are bytes"):
        read(bytes(data))


def test_sound_of_a_few_hertz_is_refused() -> None:
    """At 16 kHz each of its samples would be 16,000."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(4096, np.int16), 1, format="FLAC")
    with pytest.raises(InvalidInputError, match="sound of 1 Hz is not taken; send 4000 Hz or more"):
        read(file.getvalue())
