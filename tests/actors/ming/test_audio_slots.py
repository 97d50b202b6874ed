from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.ming.audio_slots import AudioSlots
from actors.ming.audio_vae import load_audio_vae
from actors.streaming_decoder import check_streaming_decoder
from omniflow.errors import ContextLengthError, ProtocolError
from tests.actors.ming.reference import CONFIG, expected, weights

VAE = CONFIG.audio_tokenizer_config
LATENTS = expected()["vae.latents"].numpy()
WHOLE = load_audio_vae(VAE, weights())


def slots_of(ratio: int = 4, *, slots: int = 3, positions: int = 512, device: str = "cpu") -> AudioSlots:
    decoder = load_audio_vae(msgspec.structs.replace(VAE, patch_size=ratio), weights(), device)
    return AudioSlots(decoder, slots=slots, positions=positions, dtype=torch.float32)


@pytest.fixture(scope="module")
def decoder() -> AudioSlots:
    return slots_of()


def whole(latents: np.ndarray) -> np.ndarray:
    return WHOLE.step(WHOLE.init(), latents, True)


def check(decoder: AudioSlots, latents: np.ndarray, wanted: np.ndarray, sizes: list[int]) -> None:
    decoder._free[:] = range(decoder._cache.spare)  # the check does not end its streams
    check_streaming_decoder(decoder, latents, wanted, sizes, 1e-5)
    decoder._free[:] = range(decoder._cache.spare)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 30), st.lists(st.integers(0, 9), max_size=12))
def test_any_chunking_gives_the_whole(decoder: AudioSlots, count: int, sizes: list[int]) -> None:
    check(decoder, LATENTS[:count], whole(LATENTS[:count]), sizes)


@pytest.mark.parametrize("ratio", [-1, 2, 3, 5])
def test_other_ratios_sound_as_without_slots(ratio: int) -> None:
    plain = load_audio_vae(msgspec.structs.replace(VAE, patch_size=ratio), weights())
    check(slots_of(ratio), LATENTS, plain.step(plain.init(), LATENTS, True), [1, 3, 0, 2, 11])


def test_streams_that_step_together_sound_as_alone(decoder: AudioSlots) -> None:
    """Of other lengths and chunks, in slots that others had before; one has nothing new in some steps."""
    ends = [[4, 8, 12, 24], [0, 1, 1, 30], [7, 7]]
    states, parts = [decoder.init() for _ in ends], [[np.zeros(0, np.float32)] for _ in ends]
    for number in range(4):
        there = [each for each, own in enumerate(ends) if number < len(own)]
        bounds = [(ends[each][number - 1] if number else 0, ends[each][number]) for each in there]
        frames = [LATENTS[each:][start:stop] for each, (start, stop) in zip(there, bounds, strict=True)]
        last = [number == len(ends[each]) - 1 for each in there]
        for each, sound in zip(there, decoder.step_together([states[n] for n in there], frames, last), strict=True):
            parts[each].append(sound)
    for each, own in enumerate(parts):
        wanted = whole(LATENTS[each:][: ends[each][-1]])
        assert len(wanted) == len(np.concatenate(own))
        assert abs(np.concatenate(own) - wanted).max() <= 1e-5
        decoder.end(states[each])


def test_a_slot_forgets(decoder: AudioSlots) -> None:
    """What was no number before is one for the next stream."""
    for frames in (LATENTS[:8] * np.nan, LATENTS[:8]):
        states = [decoder.init() for _ in range(3)]
        sounds = decoder.step_together(states, [frames] * 3, [True] * 3)
        for state in states:
            decoder.end(state)
    assert all(abs(sound - whole(LATENTS[:8])).max() <= 1e-5 for sound in sounds)


def test_the_first_step_sounds_at_once(decoder: AudioSlots) -> None:
    state, hop = decoder.init(), VAE.dec_kwargs.output_dim
    assert [len(decoder.step(state, LATENTS[:4], False)) for _ in range(2)] == [25 * hop // 2, 16 * hop]
    decoder.end(state)


def test_a_stream_and_the_slots_have_an_end() -> None:
    """The last frames of the longest stream are as those of one that has more room."""
    decoder, roomy = slots_of(slots=1, positions=98), slots_of(slots=1)
    assert decoder.max_latents == 24
    assert abs(decoder.step(decoder.init(), LATENTS[:24], True) - whole(LATENTS[:24])).max() <= 1e-5
    state = roomy.init()
    with pytest.raises(ProtocolError, match="all 1 slots are taken"):
        roomy.init()
    roomy.step(state, np.tile(LATENTS[:4], (31, 1)), False)
    with pytest.raises(ContextLengthError, match="128 latents in one segment; at most 127 fit"):
        roomy.step(state, LATENTS[:4], False)
    roomy.step(state, LATENTS[:3], True)
    roomy.end(state)
    roomy.end(state)
    roomy.init()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_on_a_gpu_sound_as_a_cpu_does() -> None:
    check(slots_of(device="cuda"), LATENTS, whole(LATENTS), [4, 1, 0, 9, 4])
