from __future__ import annotations

import msgspec
import pytest
import torch

from actors.ming.audio_vae import AudioVaeEncoder, load_audio_vae_encoder
from omniflow.errors import ContextLengthError, WeightsError
from tests.actors.ming.reference import CONFIG, apart, voice, weights

VAE = CONFIG.audio_tokenizer_config
SAMPLES, NOISE = voice()["encoder.samples"], voice()["encoder.noise"]


@pytest.fixture(scope="module")
def encoder() -> AudioVaeEncoder:
    return load_audio_vae_encoder(VAE, weights())


def test_latents_are_the_references(encoder: AudioVaeEncoder) -> None:
    """5000 samples are 52 frames, the last of them padded: 13 latents."""
    mean, spread = encoder.distribution(SAMPLES)
    hidden = voice()["encoder.hidden"]
    assert hidden.std() > 0.5
    assert apart(mean, hidden[:, :8]) <= 1e-5
    assert apart(spread, torch.nn.functional.softplus(hidden[:, 8:]) + 1e-4) <= 1e-5
    assert apart(encoder(SAMPLES, NOISE), voice()["encoder.latents"]) <= 1e-5


@pytest.mark.parametrize("length", [1, 97, 98, 391, 392, 393])
def test_a_begun_latent_is_a_whole_one(encoder: AudioVaeEncoder, length: int) -> None:
    """What follows does not change what was before, but for the frames of silence that fill up the last latent: those
    are zeros behind the first decoder, not silence before it.
    """
    latents = encoder.distribution(SAMPLES[:length])[0]
    assert latents.shape == (-(-length // 392), 8)
    if length >= 392:
        assert apart(latents[:1], encoder.distribution(SAMPLES)[0][:1]) <= 1e-5


def test_longer_than_its_positions_is_refused(encoder: AudioVaeEncoder) -> None:
    assert encoder.max_latents == 102
    assert encoder.distribution(torch.zeros(102 * 392))[0].shape == (102, 8)
    with pytest.raises(ContextLengthError, match="103 latents in one recording; at most 102 fit"):
        encoder.distribution(torch.zeros(102 * 392 + 1))


def test_weights_that_do_not_fit_are_named() -> None:
    less = {name: each for name, each in weights().items() if name != "audio.encoder.cls_embed"}
    with pytest.raises(WeightsError, match="AudioVAE's encoder do not fit.*cls_embed"):
        load_audio_vae_encoder(VAE, less)
    with pytest.raises(WeightsError, match="tells no encoder"):
        AudioVaeEncoder(msgspec.structs.replace(VAE, enc_kwargs=None))
