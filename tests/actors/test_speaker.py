from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.speaker import SpeakerEncoder, voice_features
from omniflow.errors import WeightsError
from tests.actors.ming.reference import voice
from tests.actors.ming.tiny import write_campplus

SAMPLES = voice()["speaker.samples"].numpy()


def test_features_are_those_of_the_reference() -> None:
    features, wanted = voice_features(SAMPLES), voice()["speaker.features"].numpy()
    assert features.shape == wanted.shape == (58, 80) and features.dtype == np.float32
    assert wanted.std() > 0.5
    assert abs(features - wanted).max() <= 2e-4


def test_an_embedding_is_what_the_network_makes_of_them(tmp_path: Path) -> None:
    matrix = write_campplus(tmp_path / "campplus.onnx")
    embedding = SpeakerEncoder(tmp_path / "campplus.onnx")(SAMPLES)
    assert embedding.shape == (192,) and embedding.dtype == np.float32
    assert np.allclose(embedding, (voice_features(SAMPLES) ** 2).mean(0) @ matrix, atol=1e-4)
    assert abs(embedding - SpeakerEncoder(tmp_path / "campplus.onnx")(SAMPLES[:4800])).max() > 0.01


def test_what_is_no_such_network_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no network")
    for name in ("broken.onnx", "missing.onnx"):
        with pytest.raises(WeightsError, match=f"{name} is not a network"):
            SpeakerEncoder(tmp_path / name)
    write_campplus(tmp_path / "small.onnx", size=64)
    with pytest.raises(WeightsError, match=r"gives \(64,\) where an embedding \[192\] was expected"):
        SpeakerEncoder(tmp_path / "small.onnx")(SAMPLES)
