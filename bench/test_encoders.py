"""pytest-benchmark suites of what sound goes through in the server: a second of it out, in chunks of 0.2 s, and in.

    python -m pytest bench/test_encoders.py

bench/streams.py has the target; these are for comparing two commits.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import soxr

from omniflow.media import AudioChunk
from omniflow.server.decoding import Clip
from omniflow.server.encoders import SPEECH_FORMATS, Encoder
from omniflow.server.media import AudioWriter
from tests.speech import samples_of

Bench = Callable[..., Any]
RATE_HZ = 24_000
SECONDS = 10


@pytest.fixture(scope="module")
def sound() -> np.ndarray:
    """`SECONDS` of recorded speech, float32 [n]."""
    once = soxr.resample(samples_of("fox"), 16_000, RATE_HZ)
    return np.resize(once, SECONDS * RATE_HZ)


def seconds_of(sound: np.ndarray) -> Iterator[list[np.ndarray]]:
    """A second after the other, each as five chunks; for ever."""
    while True:
        for second in np.split(sound, SECONDS):
            yield np.split(second, 5)


@pytest.mark.parametrize("name", SPEECH_FORMATS)
def test_encode_a_second(benchmark: Bench, sound: np.ndarray, name: str) -> None:
    encoder: Encoder = SPEECH_FORMATS[name].encoder(RATE_HZ, 1, True)
    seconds = seconds_of(sound)

    def encode() -> None:
        for chunk in next(seconds):
            encoder.write(chunk[:, None])

    benchmark(encode)


def test_resample_a_second_for_pcm(benchmark: Bench, sound: np.ndarray) -> None:
    """22.05 kHz to the 24 kHz that headerless pcm promises."""
    writer = AudioWriter(SPEECH_FORMATS["pcm"])
    seconds = seconds_of(sound)

    def write() -> None:
        for chunk in next(seconds):
            writer._write(AudioChunk(chunk, 22_050))

    benchmark(write)


@pytest.mark.parametrize("name", ["wav", "mp3", "opus", "flac", "aac"])
def test_decode_ten_seconds(benchmark: Bench, sound: np.ndarray, name: str) -> None:
    """Of an upload, with its resampling to 16 kHz."""
    encoder = SPEECH_FORMATS[name].encoder(RATE_HZ, 1, False)
    data = encoder.write(sound[:, None]) + encoder.finish()
    file = encoder.head() + data[len(encoder.head()) :]

    def decode() -> int:
        clip, count = Clip(io.BytesIO(file)), 0
        while len(block := clip.read_block()):
            count += len(block)
        clip.close()
        return count

    assert benchmark(decode) == pytest.approx(SECONDS * 16_000, rel=0.02)
