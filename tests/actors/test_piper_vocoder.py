from __future__ import annotations

import functools
from collections.abc import AsyncIterator

import anyio
import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.piper import PIPER_JOE
from actors.piper.talker import Acoustics
from actors.piper.vocoder import FIRST_FRAMES, PiperDecoder, PiperVocoder
from actors.piper.voice import NUM_CHANNELS, SAMPLES_PER_FRAME
from actors.streaming_decoder import check_streaming_decoder
from omniflow.errors import ProtocolError
from omniflow.media import AudioChunk, Latents
from tests.doubles import ListEmit, ListStream

pytestmark = pytest.mark.anyio
SENTENCE = "ðə kwˈɪk bɹˈaʊn fˈɑːks dʒˈʌmps ˌoʊvɚ ðə lˈeɪzi dˈɑːɡ."


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def vocoder(anyio_backend: str) -> AsyncIterator[PiperVocoder]:
    actor = PiperVocoder()
    for weights in actor.weights():
        weights.fetch()
    await actor.setup()
    yield actor
    await actor.close()


@functools.cache
def decoder() -> PiperDecoder:
    return PiperDecoder(PIPER_JOE.fetch())


@functools.cache
def acoustics() -> Acoustics:
    return Acoustics(PIPER_JOE.fetch())


@functools.cache
def speech(seed: int = 0) -> np.ndarray:
    """The frames of a sentence, about 220."""
    prior = acoustics().prior(SENTENCE, 1.0, np.random.default_rng(seed))
    return acoustics().frames(prior, 0, len(prior))


@functools.cache
def decoded(count: int) -> np.ndarray:
    return decoder().decode(speech()[:count])


def latents(frames: np.ndarray, *sizes: int, segment: int = 0) -> list[Latents]:
    """One segment, cut into pieces of `sizes` and a rest."""
    bounds = np.minimum(np.cumsum([0, *sizes]), len(frames)).tolist()
    parts = [frames[start:stop] for start, stop in zip(bounds, [*bounds[1:], len(frames)], strict=True)]
    parts = [part for part in parts if len(part)]
    return [Latents(part, segment, part is parts[-1]) for part in parts]


async def sound(vocoder: PiperVocoder, parts: list[Latents]) -> list[AudioChunk]:
    emit: ListEmit[AudioChunk] = ListEmit()
    await vocoder.run(ListStream(parts), emit)
    return emit.items


def joined(chunks: list[AudioChunk]) -> np.ndarray:
    return np.concatenate([chunk.samples for chunk in chunks])


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([1, 9, 30, 70]), st.lists(st.integers(0, 25), max_size=6))
def test_any_chunking_gives_the_sound_of_the_whole(count: int, sizes: list[int]) -> None:
    check_streaming_decoder(decoder(), speech()[:count], decoded(count), sizes, 1e-5)


def test_speech_in_small_chunks_is_the_whole_utterance() -> None:
    count = len(speech())
    check_streaming_decoder(decoder(), speech(), decoded(count), [16] * (count // 16), 1e-5)


async def test_the_stream_is_the_whole_resampled(vocoder: PiperVocoder) -> None:
    got = joined(await sound(vocoder, latents(speech(), 32, 64)))
    whole = soxr.resample(decoded(len(speech())), 22050, 24000)
    assert len(got) == len(whole)
    assert np.abs(got - whole).max() <= 2e-5


@pytest.mark.parametrize("sizes", [(1,) * 40, (26,), (300,), (5, 90, 3), (64, 64, 64)])
async def test_samples_do_not_depend_on_how_frames_arrive(vocoder: PiperVocoder, sizes: tuple[int, ...]) -> None:
    """Sample for sample."""
    whole = await sound(vocoder, latents(speech()))
    cut = await sound(vocoder, latents(speech(), *sizes))
    assert [len(chunk.samples) for chunk in cut] == [len(chunk.samples) for chunk in whole]
    assert np.array_equal(joined(cut), joined(whole))


async def test_chunks_are_playable_small_at_first_and_grow(vocoder: PiperVocoder) -> None:
    chunks = await sound(vocoder, latents(speech(), 32, 64))
    for chunk in chunks:
        assert (chunk.sample_rate_hz, chunk.channels, chunk.samples.dtype) == (24000, 1, np.float32)
        assert 0 < np.abs(chunk.samples).max() <= 1
    first_s = FIRST_FRAMES * SAMPLES_PER_FRAME / 22050
    assert first_s - 0.04 < chunks[0].duration_s < first_s  # the resampler keeps 37 ms
    assert chunks[0].duration_s < chunks[1].duration_s < chunks[2].duration_s


async def test_the_first_chunk_needs_26_frames(vocoder: PiperVocoder) -> None:
    stream = ListStream(latents(speech(), 26, 5))
    chunks = vocoder.run(stream, StopAtFirst())
    with pytest.raises(StopAtFirst.Reached):
        await chunks
    assert len(stream.left) == 2


class StopAtFirst(ListEmit[AudioChunk]):
    class Reached(Exception):
        pass

    async def send(self, value: AudioChunk) -> None:
        raise self.Reached


async def test_segments_follow_without_a_seam(vocoder: PiperVocoder) -> None:
    """Each is decoded for itself; the resampler runs on."""
    parts = [*latents(speech()[:90], 40), *latents(speech()[100:150], 7, segment=1)]
    each = [decoder().decode(frames) for frames in (speech()[:90], speech()[100:150])]
    whole = soxr.resample(np.concatenate(each), 22050, 24000)
    got = joined(await sound(vocoder, parts))
    assert len(got) == len(whole)
    assert np.abs(got - whole).max() <= 2e-5


async def test_each_segment_begins_with_a_small_chunk(vocoder: PiperVocoder) -> None:
    """A player may be waiting for it. The resampler keeps 1 to 4 frames, the decoder 10 until it has all."""
    parts = [*latents(speech()[:180]), *latents(speech()[:180], segment=1)]
    chunks = await sound(vocoder, parts)
    frames = [chunk.duration_s * 22050 / SAMPLES_PER_FRAME for chunk in chunks]
    assert frames == pytest.approx([12, 32, 64, 68, *(22, 64, 64, 30, 4)], abs=4)


async def test_requests_at_once_do_not_disturb_each_other(vocoder: PiperVocoder) -> None:
    alone = [joined(await sound(vocoder, latents(speech(seed), 32, 64))) for seed in (0, 1)]
    together: dict[int, np.ndarray] = {}
    firsts: list[float] = []
    lasts: list[float] = []

    async def one(seed: int) -> None:
        emit: ListEmit[AudioChunk] = ListEmit()
        await vocoder.run(ListStream(latents(speech(seed), 32, 64)), emit)
        together[seed] = joined(emit.items)
        firsts.append(emit.times_s[0])
        lasts.append(emit.times_s[-1])

    async with anyio.create_task_group() as group:
        group.start_soon(one, 0)
        group.start_soon(one, 1)
    assert all(np.array_equal(together[seed], alone[seed]) for seed in (0, 1))
    assert max(firsts) < min(lasts)


async def test_no_frames_give_no_sound(vocoder: PiperVocoder) -> None:
    assert await sound(vocoder, []) == []


@pytest.mark.parametrize("count", [1, 26, 58])
async def test_frames_that_end_amid_a_segment_are_an_error(vocoder: PiperVocoder, count: int) -> None:
    with pytest.raises(ProtocolError, match="not marked"):
        await sound(vocoder, [Latents(speech()[:count], 0, False)])


async def test_an_empty_last_part_ends_its_segment(vocoder: PiperVocoder) -> None:
    empty = np.zeros((0, NUM_CHANNELS), np.float32)
    got = await sound(vocoder, [Latents(speech()[:50], 0, False), Latents(empty, 0, True)])
    assert np.abs(joined(got) - soxr.resample(decoded(50), 22050, 24000)).max() <= 2e-5


async def test_other_rates() -> None:
    actor = PiperVocoder(sample_rate_hz=16000)
    await actor.setup()
    chunks = await sound(actor, latents(speech()[:50]))
    assert {chunk.sample_rate_hz for chunk in chunks} == {16000}
    assert sum(chunk.duration_s for chunk in chunks) == pytest.approx(50 * SAMPLES_PER_FRAME / 22050, abs=1e-3)
