from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import numpy as np
import pytest

from actors.piper import PIPER_JOE
from actors.piper.talker import FIRST_FRAMES, MOST_FRAMES, SENTENCE_PAUSE, PiperTalker
from actors.piper.voice import NUM_CHANNELS, Voice
from omniflow.errors import InvalidInputError, WeightsError
from omniflow.media import Latents, Segment
from tests.actors.test_piper_phonemes import IPA
from tests.doubles import ListEmit, ListStream, context

pytestmark = pytest.mark.anyio
TEXTS = ["Well, the first thing to say is this.", " And here, without haste, comes the second sentence."]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def talker(anyio_backend: str) -> AsyncIterator[PiperTalker]:
    actor = PiperTalker()
    for weights in actor.weights():
        weights.fetch()
    await actor.setup()
    yield actor
    await actor.close()


async def speak(talker: PiperTalker, *texts: str, **options: object) -> list[Latents]:
    emit: ListEmit[Latents] = ListEmit()
    segments = [Segment(text, index) for index, text in enumerate(texts)]
    await talker.run(ListStream(segments), emit, context(**options))
    return emit.items


def frames_of(items: list[Latents]) -> np.ndarray:
    return np.concatenate([item.frames for item in items])


async def test_segments_become_latents_in_order_and_end(talker: PiperTalker) -> None:
    items = await speak(talker, *TEXTS, seed=1)
    assert [item.segment for item in items] == sorted(item.segment for item in items)
    for index in (0, 1):
        assert [item.last for item in items if item.segment == index][-1]
        assert sum(item.last for item in items if item.segment == index) == 1
    for item in items:
        assert item.frames.dtype == np.float32
        assert item.frames.flags.c_contiguous
        assert item.frames.shape[1] == NUM_CHANNELS
        assert 0 < len(item.frames) <= MOST_FRAMES + SENTENCE_PAUSE
    assert len(items[0].frames) == FIRST_FRAMES


async def test_a_seed_gives_the_same_frames_alone_and_beside_others(talker: PiperTalker) -> None:
    alone = [frames_of(await speak(talker, *TEXTS, seed=seed)) for seed in (7, 8)]
    together: dict[int, np.ndarray] = {}

    async def one(seed: int) -> None:
        together[seed] = frames_of(await speak(talker, *TEXTS, seed=seed))

    async with anyio.create_task_group() as group:
        group.start_soon(one, 7)
        group.start_soon(one, 8)
    assert np.array_equal(together[7], alone[0])
    assert np.array_equal(together[8], alone[1])
    assert alone[0].shape != alone[1].shape or not np.allclose(alone[0], alone[1])


async def test_without_a_seed_no_two_are_alike(talker: PiperTalker) -> None:
    once, again = [frames_of(await speak(talker, TEXTS[0])) for _ in range(2)]
    assert once.shape != again.shape or not np.allclose(once, again)


async def test_any_integer_is_a_seed(talker: PiperTalker) -> None:
    for seed in (-1, 2**80):
        assert len(await speak(talker, "Yes.", seed=seed)) > 0


async def test_frames_made_in_steps_are_those_made_at_once(talker: PiperTalker) -> None:
    acoustics = talker._acoustics
    prior = acoustics.prior("ðə kwˈɪk bɹˈaʊn fˈɑːks dʒˈʌmps ˌoʊvɚ ðə lˈeɪzi dˈɑːɡ.", 0.7, np.random.default_rng(0))
    whole = acoustics.frames(prior, 0, len(prior))
    bounds = [0, 1, 33, 97, 100, len(prior)]
    steps = [acoustics.frames(prior, start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
    assert len(prior) > 150
    assert np.abs(np.concatenate(steps) - whole).max() <= 1e-4  # frames have a deviation of 0.9


@pytest.mark.parametrize(
    ("speed", "least", "most"),
    [(0.25, 3.7, 4.3), (0.5, 1.85, 2.15), (1.5, 0.63, 0.72), (2.0, 0.47, 0.57), (4.0, 0.3, 0.5)],
)
async def test_speed_scales_the_length(talker: PiperTalker, speed: float, least: float, most: float) -> None:
    normal = frames_of(await speak(talker, *TEXTS, seed=3))
    scaled = frames_of(await speak(talker, *TEXTS, seed=3, speed=speed))
    assert least <= len(scaled) / len(normal) <= most


@pytest.mark.parametrize("speed", [0.0, 0.24, 4.1, -1.0, float("nan"), float("inf")])
async def test_other_speeds_are_refused(talker: PiperTalker, speed: float) -> None:
    with pytest.raises(InvalidInputError, match=r"give 0\.25 to 4\.0") as refused:
        await speak(talker, *TEXTS, speed=speed)
    assert refused.value.param == "speed"


async def test_a_segment_without_words_is_left_out(talker: PiperTalker) -> None:
    items = await speak(talker, "你好。", "Yes.", "🙂", "...", "No.")
    assert {item.segment for item in items} == {1, 4}


@pytest.mark.parametrize("texts", [[], [""], ["?!"], ["你好，世界。", "🙂🙂"]])
async def test_a_request_without_words_is_silent(talker: PiperTalker, texts: list[str]) -> None:
    """An answer in chat may be a lone emoji; /v1/audio/speech refuses what gave no sound."""
    assert await speak(talker, *texts) == []


@pytest.mark.parametrize(
    "text", ["word " * 210, "a" * 100, "<speak>Hi</speak>", "1e999", "A. B. C. D.", "x" * 30 + "😀" * 30]
)
async def test_odd_texts_are_spoken_in_short_steps(talker: PiperTalker, text: str) -> None:
    items = await speak(talker, text, seed=1, speed=4.0)
    assert max(len(item.frames) for item in items) <= MOST_FRAMES + SENTENCE_PAUSE
    assert [item.last for item in items] == [False] * (len(items) - 1) + [True]


async def test_a_sentence_ends_in_silence_and_a_phrase_does_not_pause(talker: PiperTalker) -> None:
    ended = frames_of(await speak(talker, "I went home.", seed=1))
    assert np.array_equal(ended[-1 - SENTENCE_PAUSE :], ended[-1:].repeat(SENTENCE_PAUSE + 1, axis=0))
    still_open = frames_of(await speak(talker, "I went home", seed=1))
    assert len(still_open) < len(ended) - SENTENCE_PAUSE


def test_the_voice_knows_every_phoneme() -> None:
    voice = Voice.load(PIPER_JOE.fetch())
    assert set(voice.phoneme_id_map) >= IPA | set(" ˈˌː.,;:?!^_$")
    assert voice.ids("hə") == [1, 0, 20, 0, 59, 0, 2]
    assert voice.ids("你") == [1, 0, 2]


def test_an_unknown_voice_is_named() -> None:
    with pytest.raises(WeightsError, match="did you mean piper-joe"):
        PiperTalker(model="piper-jo")
