"""The cut graphs in a row are the voice as it was published."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import pytest

from actors.piper import PIPER_JOE
from actors.piper.convert import convert
from actors.piper.voice import NUM_CHANNELS, SAMPLES_PER_FRAME, Voice, open_graph

PUBLISHED = msgspec.structs.replace(PIPER_JOE, name="piper-joe-as-published", convert=None)
PHONEMES = "ðə kwˈɪk bɹˈaʊn fˈɑːks, həlˈoʊ!"


@pytest.fixture(scope="module")
def source() -> Path:
    return PUBLISHED.fetch()


@functools.cache
def graph(path: Path) -> onnxruntime.InferenceSession:
    return open_graph(path)


def run(folder: Path, ids: np.ndarray, scales: list[float], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    inputs = {
        "phonemes": ids,
        "num_phonemes": np.array([ids.shape[1]]),
        "scales": np.array(scales, np.float32),
        "duration_noise": rng.standard_normal((1, 2, ids.shape[1]), np.float32),
    }
    mean, log_scale = graph(folder / "encoder.onnx").run(["mean", "log_scale"], inputs)
    assert mean.shape == log_scale.shape == (1, NUM_CHANNELS, mean.shape[2])
    prior = mean + np.float32(scales[0]) * np.exp(log_scale) * rng.standard_normal(mean.shape, np.float32)
    (latent,) = graph(folder / "flow.onnx").run(["latent"], {"prior": prior})
    (samples,) = graph(folder / "decoder.onnx").run(["samples"], {"latent": latent})
    assert samples.size == SAMPLES_PER_FRAME * mean.shape[2]
    return samples.ravel()


@pytest.mark.parametrize("length_scale", [1.0, 0.7])
def test_without_noise_it_is_the_published_voice(source: Path, length_scale: float) -> None:
    folder = PIPER_JOE.fetch()
    ids = np.array([Voice.load(folder).ids(PHONEMES)])
    scales = [0.0, length_scale, 0.0]
    inputs = {"input": ids, "input_lengths": np.array([ids.shape[1]]), "scales": np.array(scales, np.float32)}
    (expected,) = graph(source / "voice.onnx").run(["output"], inputs)
    got = run(folder, ids, scales)
    assert got.shape == expected.ravel().shape
    assert np.abs(got - expected.ravel()).max() <= 1e-6


def test_noise_is_an_input(source: Path) -> None:
    folder = PIPER_JOE.fetch()
    ids = np.array([Voice.load(folder).ids(PHONEMES)])
    scales = [0.667, 1.0, 0.8]
    once = run(folder, ids, scales, seed=1)
    assert np.array_equal(once, run(folder, ids, scales, seed=1))
    other = run(folder, ids, scales, seed=2)
    assert once.shape != other.shape or np.abs(once - other).max() > 0.01


def test_converting_again_gives_the_same_files(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"encoder.onnx", "flow.onnx", "decoder.onnx", "voice.json"}
    for name in names:
        assert (tmp_path / name).read_bytes() == (PIPER_JOE.folder / name).read_bytes()
