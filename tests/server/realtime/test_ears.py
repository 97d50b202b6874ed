"""The voice activity detector on recorded speech."""

from __future__ import annotations

import numpy as np
import pytest

from omniflow.server.realtime.audio import Pcm16
from omniflow.server.realtime.ears import Ears, Model
from omniflow.server.realtime.turns import FRAME_SAMPLES, ServerVad, Turns
from tests.speech import samples_of

pytestmark = pytest.mark.anyio


def clip() -> Pcm16:
    """A sentence between 0.64 s and 1.28 s of silence, in whole frames."""
    speech = (samples_of("fox") * 32767).astype(np.int16)
    whole = np.concatenate([np.zeros(20 * FRAME_SAMPLES, np.int16), speech, np.zeros(40 * FRAME_SAMPLES, np.int16)])
    return whole[: len(whole) // FRAME_SAMPLES * FRAME_SAMPLES]


async def judged(samples: Pcm16, frames_a_call: int) -> list[float]:
    ears = Ears(Model())
    step = frames_a_call * FRAME_SAMPLES
    return [each for start in range(0, len(samples), step) for each in await ears.listen(samples[start : start + step])]


async def test_speech_is_told_from_silence() -> None:
    found = np.array(await judged(clip(), 1))
    spoken = len(samples_of("fox")) // FRAME_SAMPLES
    assert found[:18].max() < 0.3 and found[20 + spoken + 10 :].max() < 0.3
    assert (found[24 : 20 + spoken - 8] > 0.5).mean() > 0.8


@pytest.mark.parametrize("frames_a_call", [3, 6, 7, 10_000])
async def test_pieces_of_any_length_are_judged_alike(frames_a_call: int) -> None:
    one_by_one = await judged(clip(), 1)
    assert np.allclose(await judged(clip(), frames_a_call), one_by_one, atol=1e-4)


async def test_a_sentence_is_one_turn() -> None:
    turns = Turns(ServerVad())
    heard = [(at, what) for at, each in enumerate(await judged(clip(), 4)) if (what := turns.push(each))]
    assert [what for _, what in heard] == ["started", "stopped"]
    assert 18 <= heard[0][0] <= 30


async def test_noise_is_no_speech() -> None:
    rng = np.random.default_rng(0)
    for level in (30, 3000):
        noise = (rng.standard_normal(60 * FRAME_SAMPLES) * level).astype(np.int16)
        turns = Turns(ServerVad())
        assert [what for each in await judged(noise, 10) if (what := turns.push(each))] == []
