"""Talker and vocoder together: what they say is understood."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from actors.piper.talker import PiperTalker
from actors.piper.vocoder import PiperVocoder
from actors.whisper.transcriber import transcribe
from omniflow.media import AudioChunk, Latents, Segment
from tests.doubles import ListEmit, ListStream, context
from tests.e2e.hearing import word_errors

pytestmark = pytest.mark.anyio

SENTENCES = [
    ("The quick brown fox jumps over the lazy dog.", "the quick brown fox jumps over the lazy dog"),
    ("Could you tell me where the nearest station is?", "could you tell me where the nearest station is"),
    ("Dr. Johnson bought twelve eggs and half a pound of butter.",
     "doctor johnson bought 12 eggs and half a pound of butter"),
    ("The temperature dropped to -12 degrees last night.", "the temperature dropped to minus 12 degrees last night"),
    ("Open the window, close the door, and turn off the lights.",
     "open the window close the door and turn off the lights"),
    ("I have read that book before, but I will read it again.",
     "i have read that book before but i will read it again"),
]  # fmt: skip


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def voice(anyio_backend: str) -> AsyncIterator[tuple[PiperTalker, PiperVocoder]]:
    actors = PiperTalker(), PiperVocoder()
    for actor in actors:
        for weights in actor.weights():
            weights.fetch()
        await actor.setup()
    yield actors


async def say(voice: tuple[PiperTalker, PiperVocoder], *texts: str, **options: object) -> np.ndarray:
    latents: ListEmit[Latents] = ListEmit()
    await voice[0].run(ListStream([Segment(t, i) for i, t in enumerate(texts)]), latents, context(**options))
    sound: ListEmit[AudioChunk] = ListEmit()
    await voice[1].run(ListStream(latents.items), sound)
    return np.concatenate([chunk.samples for chunk in sound.items])


async def test_it_is_understood(voice: tuple[PiperTalker, PiperVocoder]) -> None:
    wrong = total = 0
    for text, reference in SENTENCES:
        errors, count = word_errors(reference, transcribe(await say(voice, text, seed=1), 24000))
        wrong, total = wrong + errors, total + count
    assert wrong / total <= 0.12


@pytest.mark.parametrize("speed", [0.6, 1.6])
async def test_it_is_understood_slow_and_fast(voice: tuple[PiperTalker, PiperVocoder], speed: float) -> None:
    samples = await say(voice, "Please bring two cups of coffee to the kitchen.", seed=1, speed=speed)
    assert word_errors("please bring 2 cups of coffee to the kitchen", transcribe(samples, 24000))[0] <= 2


async def test_segments_of_one_reply_are_heard_in_order(voice: tuple[PiperTalker, PiperVocoder]) -> None:
    samples = await say(
        voice, "My sister planted", " yellow flowers behind the house.", " 你好 ", "It will rain.", seed=2
    )
    heard = transcribe(samples, 24000)
    assert word_errors("my sister planted yellow flowers behind the house it will rain", heard)[0] <= 2


async def test_a_sentence_is_followed_by_a_breath(voice: tuple[PiperTalker, PiperVocoder]) -> None:
    """0.3 to 0.7 s of silence between two sentences, and none of 0.25 s within one that was cut amid a phrase."""
    assert 0.3 <= longest_silence_s(await say(voice, "I went home.", " He stayed there.", seed=1)) <= 0.7
    assert longest_silence_s(await say(voice, "The old man", " walked along the river", seed=1)) < 0.25


def longest_silence_s(samples: np.ndarray) -> float:
    """Between the first and the last sound, in steps of 10 ms; silent is 40 dB below the peak."""
    level = np.abs(samples[: len(samples) // 240 * 240]).reshape(-1, 240).max(axis=1)
    loud = np.flatnonzero(level > 0.01 * level.max())
    return float(np.diff(loud).max() - 1) * 0.01
