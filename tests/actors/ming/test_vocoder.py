from __future__ import annotations

from collections.abc import Sequence

import anyio
import numpy as np
import pytest
import torch

from actors.ming.audio_slots import AudioSlots
from actors.ming.audio_vae import AudioStream, AudioVaeDecoder, load_audio_vae
from actors.ming.vocoder import MingVocoder
from omniflow.errors import ContextLengthError, ProtocolError
from omniflow.media import AudioChunk, Latents
from tests.actors.ming.reference import CHECKPOINT, CONFIG, expected, weights
from tests.doubles import ListEmit, ListStream, context
from tests.waiting import HANGS_S

pytestmark = pytest.mark.anyio
LATENTS = expected()["vae.latents"].numpy()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def vocoder(anyio_backend: str) -> MingVocoder:
    actor = MingVocoder(model=str(CHECKPOINT))
    await actor.setup()
    return actor


@pytest.fixture(scope="module")
def decoder() -> AudioVaeDecoder:
    return load_audio_vae(CONFIG.audio_tokenizer_config, weights())


class Deaf(ListEmit[AudioChunk]):
    """Takes nothing."""

    async def send(self, value: AudioChunk) -> None:
        await anyio.sleep_forever()


def parts(latents: np.ndarray, segment: int = 0) -> list[Latents]:
    starts = range(0, len(latents), 4)
    return [Latents(latents[start : start + 4], segment, start == starts[-1]) for start in starts]


async def sound(vocoder: MingVocoder, items: Sequence[Latents]) -> list[AudioChunk]:
    emit: ListEmit[AudioChunk] = ListEmit()
    await vocoder.run(ListStream(items), emit, context())
    return emit.items


def samples_of(chunks: list[AudioChunk]) -> np.ndarray:
    return np.concatenate([chunk.samples for chunk in chunks])


async def test_each_message_sounds_and_each_segment_begins_anew(vocoder: MingVocoder, decoder: AudioVaeDecoder) -> None:
    chunks = await sound(vocoder, parts(LATENTS[:12]) + parts(LATENTS[5:25], 1))
    wanted = [decoder.step(decoder.init(), each, True).clip(-1, 1) for each in (LATENTS[:12], LATENTS[5:25])]
    assert len(chunks) == 8 and {(chunk.sample_rate_hz, chunk.channels) for chunk in chunks} == {(44100, 1)}
    assert np.abs(samples_of(chunks) - np.concatenate(wanted)).max() <= 1e-5
    assert np.std(samples_of(chunks)) > 0.05


async def test_requests_that_wait_step_together_and_sound_as_alone(
    vocoder: MingVocoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [samples_of(await sound(vocoder, parts(LATENTS[n : n + 16]))) for n in range(6)]
    sizes, step_together = [], vocoder._decoder.step_together

    def counted(states: Sequence[AudioStream], *args: Sequence[object]) -> list[np.ndarray]:
        sizes.append(len(states))
        made: list[np.ndarray] = step_together(states, *args)  # type: ignore[arg-type]
        return made

    monkeypatch.setattr(vocoder._decoder, "step_together", counted)
    together: dict[int, np.ndarray] = {}

    async def one(n: int) -> None:
        together[n] = samples_of(await sound(vocoder, parts(LATENTS[n : n + 16])))

    async with anyio.create_task_group() as group:
        for n in range(6):
            group.start_soon(one, n)
    assert sum(sizes) == 24 and max(sizes) > 1
    assert not vocoder._waiting
    for n in range(6):
        assert np.abs(together[n] - alone[n]).max() <= 1e-6


async def test_where_there_are_slots_segments_wait_for_one_and_leave_it() -> None:
    """As on a GPU: six requests of two segments each, and one that breaks off, for two slots."""
    actor = MingVocoder(model=str(CHECKPOINT))
    await actor.setup()
    alone = [samples_of(await sound(actor, parts(LATENTS[n : n + 16]) + parts(LATENTS[n:12], 1))) for n in range(6)]
    vae = load_audio_vae(CONFIG.audio_tokenizer_config, weights())
    actor._decoder = slots = AudioSlots(vae, slots=2, positions=512, dtype=torch.float32)
    actor._places = anyio.CapacityLimiter(2)
    together: dict[int, np.ndarray] = {}

    async def one(n: int) -> None:
        together[n] = samples_of(await sound(actor, parts(LATENTS[n : n + 16]) + parts(LATENTS[n:12], 1)))

    async def broken() -> None:
        with pytest.raises(ProtocolError, match="not marked as such"):
            await sound(actor, parts(LATENTS[:12])[:2])

    async with anyio.create_task_group() as group:
        for n in range(6):
            group.start_soon(one, n)
        group.start_soon(broken)
    for n in range(6):
        assert np.abs(together[n] - alone[n]).max() <= 1e-5
    assert sorted(slots._free) == [0, 1] and not actor._places.borrowed_tokens
    actor._places.total_tokens = 1
    async with anyio.create_task_group() as group:  # one who does not listen, and one who does
        group.start_soon(actor.run, ListStream(parts(LATENTS[:16])), Deaf(), context())
        with anyio.fail_after(HANGS_S):
            assert np.abs(samples_of(await sound(actor, parts(LATENTS[:16]))) - alone[0][: 16 * 392]).max() <= 1e-5
        group.cancel_scope.cancel()
    assert sorted(slots._free) == [0, 1] and not actor._places.borrowed_tokens


async def test_a_segment_that_is_too_long_fails_alone(vocoder: MingVocoder) -> None:
    """512 positions hold 128 latents."""
    good: list[AudioChunk] = []

    async def one() -> None:
        good.extend(await sound(vocoder, parts(LATENTS[:28])))

    async def other() -> None:
        with pytest.raises(ContextLengthError, match="a segment of more than 128 latents"):
            await sound(vocoder, parts(np.tile(LATENTS[:4], (33, 1))))

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        group.start_soon(other)
    assert len(samples_of(good)) == 28 * 392


async def test_what_is_no_segment_is_said(vocoder: MingVocoder) -> None:
    with pytest.raises(ProtocolError, match="not marked as such"):
        await sound(vocoder, parts(LATENTS[:12])[:2])
    with pytest.raises(ProtocolError, match=r"latents of shape \[4, 5\]; this vocoder takes \[n, 8\]"):
        await sound(vocoder, parts(LATENTS[:4, :5]))
    assert await sound(vocoder, []) == []
