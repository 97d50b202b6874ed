from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.ming.audio_vae import AudioVaeDecoder, load_audio_vae
from actors.streaming_decoder import check_streaming_decoder
from omniflow.errors import ContextLengthError, WeightsError
from tests.actors.ming.reference import CONFIG, apart, expected, weights

VAE = CONFIG.audio_tokenizer_config
LATENTS = expected()["vae.latents"].numpy()
SAMPLES = expected()["vae.samples"]
HOP = VAE.dec_kwargs.output_dim


@pytest.fixture(scope="module")
def decoder() -> AudioVaeDecoder:
    return load_audio_vae(VAE, weights())


def decode(decoder: AudioVaeDecoder, latents: np.ndarray) -> np.ndarray:
    return decoder.step(decoder.init(), latents, True)


def test_it_sounds_as_the_reference_does(decoder: AudioVaeDecoder) -> None:
    assert SAMPLES.std() > 0.05  # silence would agree with anything
    assert apart(torch.from_numpy(decode(decoder, LATENTS)), SAMPLES) <= 1e-5
    assert (decoder.sample_rate_hz, decoder.samples_per_frame, decoder.holdback) == (44100, 4 * HOP, 1)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 30), st.lists(st.integers(0, 9), max_size=12))
def test_any_chunking_gives_the_whole(decoder: AudioVaeDecoder, count: int, sizes: list[int]) -> None:
    whole = decode(decoder, LATENTS[:count])
    check_streaming_decoder(decoder, LATENTS[:count], whole, sizes, 1e-6)


def test_latent_after_latent_is_as_the_reference_whole(decoder: AudioVaeDecoder) -> None:
    check_streaming_decoder(decoder, LATENTS, SAMPLES.numpy(), [1] * 30, 2e-6)


def test_streams_that_step_together_sound_as_alone(decoder: AudioVaeDecoder) -> None:
    """Three of other lengths and chunks; one has ended, and one has nothing new, in some of the steps."""
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
        whole = decode(decoder, LATENTS[each:][: ends[each][-1]])
        assert len(whole) == len(np.concatenate(own))
        assert abs(np.concatenate(own) - whole).max() <= 1e-6


def test_the_first_step_sounds_at_once(decoder: AudioVaeDecoder) -> None:
    """All of its 16 frames but two of half a latent and one and a half of the overlap."""
    state = decoder.init()
    assert len(decoder.step(state, LATENTS[:4], False)) == 25 * HOP // 2
    assert len(decoder.step(state, LATENTS[4:8], False)) == 16 * HOP


def test_an_empty_stream_gives_nothing(decoder: AudioVaeDecoder) -> None:
    assert len(decode(decoder, LATENTS[:0])) == 0


@pytest.mark.parametrize("ratio", [-1, 2, 3, 5])
def test_other_ratios_interpolate_as_torch_does_and_stream(ratio: int) -> None:
    decoder = load_audio_vae(msgspec.structs.replace(VAE, patch_size=ratio), weights())
    state = decoder.init()
    latents = torch.from_numpy(LATENTS[:7]) @ torch.ones(8, 32)
    wanted = torch.nn.functional.interpolate(latents.T[None], scale_factor=abs(ratio), mode="linear")[0].T
    assert (
        apart(
            torch.cat([decoder._spread(state, latents[:3], False), decoder._spread(state, latents[3:], True)]), wanted
        )
        <= 1e-6
    )
    check_streaming_decoder(decoder, LATENTS, decode(decoder, LATENTS), [1, 3, 0, 2, 11], 1e-6)


def test_a_layer_with_a_window_keeps_no_more_and_a_stream_has_an_end(decoder: AudioVaeDecoder) -> None:
    """512 positions hold 128 latents; layer 0 sees all of them, the two others 20 positions each."""
    state = decoder.init()
    rng = np.random.default_rng(0)
    for _ in range(32):
        decoder.step(state, rng.standard_normal((4, 8), np.float32), False)
    assert state.past.num_stored == 510 + 2 * 19
    assert state.tails.untyped_storage().nbytes() == 2 * 3 * HOP * 4
    with pytest.raises(ContextLengthError, match="129 latents in one segment; at most 128 fit"):
        decoder.step(state, LATENTS[:1], False)
    # Refused as a whole, and before anything: the other stream goes on as if nothing had been asked.
    other = decoder.init()
    with pytest.raises(ContextLengthError):
        decoder.step_together([other, state], [LATENTS[:1]] * 2, [False, False])
    assert abs(decoder.step(other, LATENTS, True) - SAMPLES.numpy()).max() <= 1e-5


def test_weights_that_do_not_fit_are_named() -> None:
    less = {name: each for name, each in weights().items() if name != "audio.decoder.fc1.bias"}
    with pytest.raises(WeightsError, match="AudioVAE's decoder do not fit.*fc1.bias"):
        load_audio_vae(VAE, less)
    more = weights() | {"audio.decoder.fc9.bias": torch.zeros(1)}
    with pytest.raises(WeightsError, match="fc9.bias"):
        load_audio_vae(VAE, more)
    alone = {name.removeprefix("audio."): each for name, each in weights().items() if name.startswith("audio.")}
    assert len(decode(load_audio_vae(VAE, alone), LATENTS)) == len(SAMPLES)
