from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.mel import log_mel, mel_filters
from actors.ming.audio_tower import load_audio_tower
from actors.ming.hearing import MingAudioEncoder
from omniflow.errors import InvalidInputError, ProtocolError
from omniflow.media import AudioFeatures, Waveforms
from tests.actors.ming.towers import HIDDEN, write_towers

RATE_HZ = 16_000


def sound(samples: int, seed: int = 0) -> np.ndarray:
    """Noise whose loudness and pitch wander, as those of speech do."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal(samples + 40).cumsum()
    noise = (noise[40:] - noise[:-40]) / 40
    return (noise * (0.55 + 0.45 * np.sin(np.arange(samples) / 1700 + seed)) * 0.2).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_towers(tmp_path_factory.mktemp("hearing"))


@pytest.fixture
async def encoder(folder: Path) -> AsyncIterator[MingAudioEncoder]:
    actor = MingAudioEncoder(model=str(folder), max_seconds=12)
    await actor.setup()
    yield actor
    await actor.close()


def rows_of(features: AudioFeatures) -> list[np.ndarray]:
    assert features.rows is not None and features.rows.dtype == np.float32 and features.rows.shape[1] == HIDDEN
    assert len(features.rows) == sum(features.num_rows)
    return np.split(features.rows, np.cumsum(features.num_rows)[:-1])


def mels_passed(encoder: MingAudioEncoder, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """How many frames the clips of each pass from now on have."""
    passes: list[list[int]] = []
    tower: Any = encoder._tower
    rows = tower.rows

    def watched(mels: list[np.ndarray]) -> Any:
        passes.append([mel.shape[1] for mel in mels])
        return rows(mels)

    monkeypatch.setattr(tower, "rows", watched)
    return passes


def test_features_are_transformers_without_its_silence_up_to_30_s() -> None:
    from transformers import WhisperFeatureExtractor

    for samples in (201, 1000, 16_000, 31_337):
        clip = sound(samples)
        wanted = WhisperFeatureExtractor(feature_size=128)(
            clip, sampling_rate=RATE_HZ, padding="do_not_pad", return_tensors="np"
        ).input_features[0]
        made = log_mel(clip, mel_filters(128))
        assert made.shape == wanted.shape == (128, samples // 160) and made.dtype == np.float32
        assert np.abs(made - wanted).max() <= 1e-5
        assert made.std() > 0.05


@pytest.mark.anyio
async def test_a_clip_becomes_the_rows_of_its_features(encoder: MingAudioEncoder, folder: Path) -> None:
    clip = sound(20_000)
    (features,) = await encoder.run([Waveforms([clip], (3,))])
    *_, wanted = load_audio_tower(folder).rows([log_mel(clip, mel_filters(128))])
    assert wanted is not None
    assert features.index == (3,) and features.audio_s == 1.25 and features.texts == ()
    assert features.num_rows == (32,)
    assert np.abs(features.rows - wanted[0]).max() <= 1e-6


@pytest.mark.anyio
async def test_a_clip_is_heard_the_same_alone_and_beside_those_of_others(folder: Path) -> None:
    requests = [
        Waveforms([sound(16_000), sound(9_999, 1)], (0, 2)),
        Waveforms([sound(30_000, 2)], (1,)),
        Waveforms([sound(150, 3), sound(16_000)], (0, 1)),
    ]
    together, alone = MingAudioEncoder(model=str(folder)), MingAudioEncoder(model=str(folder), cache_mb=0)
    await together.setup()
    await alone.setup()
    batch = await together.run(requests)
    assert [features.num_rows for features in batch] == [(25, 16), (47,), (1, 25)]
    for features, request in zip(batch, requests, strict=True):
        assert features.index == request.index
        for rows, clip in zip(rows_of(features), request.samples, strict=True):
            (single,) = await alone.run([Waveforms([clip], (0,))])
            assert np.abs(rows - single.rows).max() <= 1e-5
    assert np.abs(rows_of(batch[0])[0] - rows_of(batch[2])[1]).max() == 0
    assert np.abs(rows_of(batch[0])[0][:16] - rows_of(batch[0])[1]).max() > 0.05


@pytest.mark.anyio
async def test_what_was_heard_before_is_not_heard_again(
    encoder: MingAudioEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = mels_passed(encoder, monkeypatch)
    old, new = sound(16_000), sound(8_000, 1)
    (first,) = await encoder.run([Waveforms([old, old], (0, 1))])
    (second,) = await encoder.run([Waveforms([old, new], (0, 1))])
    assert passes == [[100], [50]]
    assert np.array_equal(rows_of(first)[1], rows_of(second)[0])
    encoder._recent = type(encoder._recent)(40 * HIDDEN * 4, lambda rows: rows.nbytes)
    for clip in (old, new, old, sound(16_000, 2), old):  # 25, 13 and 25 rows: the last does not fit beside the first
        await encoder.run([Waveforms([clip], (0,))])
    assert passes[2:] == [[100], [50], [100], [100]]


@pytest.mark.anyio
async def test_a_pass_is_bounded(encoder: MingAudioEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MingAudioEncoder, "most", 120)
    passes = mels_passed(encoder, monkeypatch)
    lengths = (40, 60, 20, 2, 300, 119)
    clips = [sound(160 * frames, frames) for frames in lengths]
    (features,) = await encoder.run([Waveforms(clips, tuple(range(6)))])
    assert passes == [[40, 60, 20], [2], [300], [119]]
    assert features.num_rows == (10, 15, 5, 1, 75, 30)


@pytest.mark.anyio
async def test_too_much_is_refused_and_the_next_is_heard(encoder: MingAudioEncoder) -> None:
    with pytest.raises(InvalidInputError, match=r"audio clip 2 lasts 8\.1 s; .* at most 8 s in one clip") as refused:
        await encoder.run([Waveforms([sound(100), sound(129_000)], (0, 1))])
    with pytest.raises(InvalidInputError, match=r"^messages\[4\] lasts 8\.1 s"):
        await encoder.run([Waveforms([sound(129_000)], (1,), where=("messages[4]",))])
    assert refused.value.param == "messages"
    with pytest.raises(InvalidInputError, match=r"holds 14\.0 s of audio; .* at most 12 s") as refused:
        await encoder.run([Waveforms([sound(112_000), sound(112_000)], (0, 1))])
    assert refused.value.param == "messages"
    with pytest.raises(ProtocolError, match="8000 Hz"):
        await encoder.run([Waveforms([sound(800)], (0,), 8000)])
    (longest,) = await encoder.run([Waveforms([sound(128_100)], (0,))])
    assert longest.num_rows == (200,)


@pytest.mark.anyio
async def test_16_bits_hear_nearly_the_same(encoder: MingAudioEncoder, folder: Path) -> None:
    actor = MingAudioEncoder(model=str(folder), dtype="bfloat16")
    await actor.setup()
    request = Waveforms([sound(20_000), sound(777, 1)], (0, 1))
    ((half,), (whole,)) = (await actor.run([request]), await encoder.run([request]))
    assert half.rows is not None and whole.rows is not None and half.rows.dtype == np.float32
    assert 1e-4 < np.abs(half.rows - whole.rows).max() < 0.03
    assert np.abs(np.linalg.norm(half.rows, axis=1) - 1).max() < 1e-6, "rows are of length 1 in 32 bits"


def test_it_says_what_it_reads(folder: Path) -> None:
    assert [weights.path() for weights in MingAudioEncoder(model=str(folder)).weights()] == [folder]
