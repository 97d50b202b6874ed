"""The encoder half of Ming's AudioVAE: a recording to latents at 12.5 Hz, all of it at once.

sound -> frames of 20 ms -> two linears -> Qwen2 -> Qwen2 with a summary input behind each 4 frames -> linear
-> mean and spread of a latent
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from actors.ming.config import AudioVae
from actors.ming.qwen2 import KeyValues, Qwen2Decoder, step
from actors.ming.weights import AUDIO_VAE, load, part
from omniflow.errors import ContextLengthError, WeightsError

_AGGREGATOR_LAYERS = 4
"""In every AudioVAE, whatever its config.json says of the other decoder."""
_LEAST_SPREAD = 1e-4


class AudioVaeEncoder(nn.Module):
    """Mono samples to latents; float32, on the device that it is moved to.

    Raises WeightsError where `config` tells no encoder.
    """

    def __init__(self, config: AudioVae) -> None:
        super().__init__()
        encoder = config.enc_kwargs
        if encoder is None or config.patch_size < 1:
            raise WeightsError("the AudioVAE's config.json tells no encoder of patches")
        self._config, self._ratio = encoder, config.patch_size
        self._inner = encoder.backbone.with_layers(_AGGREGATOR_LAYERS)
        self.sample_rate_hz, self.samples_per_latent = config.sample_rate, config.patch_size * encoder.hop_size
        self.latent_dim, hidden = encoder.latent_dim, encoder.backbone.hidden_size
        self.max_latents = encoder.backbone.max_position_embeddings // (config.patch_size + 1)
        """For each there are the inputs of its frames, and its own."""
        self.fc1 = nn.Linear(encoder.input_dim, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, hidden)
        self.encoder = Qwen2Decoder(encoder.backbone.shape)
        self.cls_embed = nn.Parameter(torch.zeros(1, 1, hidden))
        self.aggregator = Qwen2Decoder(self._inner.shape)
        self.fc3 = nn.Linear(hidden, 2 * encoder.latent_dim)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take the encoder's weights of a checkpoint, its own folder's or those under `audio.`. Raises WeightsError."""
        own = part(weights, tuple(f"{prefix}encoder." for prefix in AUDIO_VAE))
        for unused in ("encoder.embed_tokens.weight", "aggregator.embed_tokens.weight", "norm.weight", "norm.bias"):
            own.pop(unused, None)
        load(self, own, "the AudioVAE's encoder")

    @torch.inference_mode()
    def forward(self, samples: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """`samples` [n] to [latents, latent_dim], a begun one counting as a whole one; `noise` is of the same shape.

        Raises ContextLengthError for more than `max_latents`.
        """
        mean, spread = self.distribution(samples)
        return mean + spread * noise

    @torch.inference_mode()
    def distribution(self, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of each latent; see `forward`."""
        num_latents = -(-len(samples) // self.samples_per_latent)
        if num_latents > self.max_latents:
            raise ContextLengthError(f"{num_latents} latents in one recording; at most {self.max_latents} fit")
        hidden = self.fc2(self.fc1(self._frames(samples)))
        (seen,) = step(self.encoder, [KeyValues(self._config.backbone)], [hidden])
        patches = F.pad(seen, (0, 0, 0, num_latents * self._ratio - len(seen))).reshape(num_latents, self._ratio, -1)
        inputs = torch.cat([patches, self.cls_embed.expand(num_latents, -1, -1)], dim=1).flatten(0, 1)
        (summed,) = step(self.aggregator, [KeyValues(self._inner)], [inputs])
        mean, scale = self.fc3(summed[self._ratio :: self._ratio + 1]).chunk(2, dim=-1)
        return mean, F.softplus(scale) + _LEAST_SPREAD

    def _frames(self, samples: torch.Tensor) -> torch.Tensor:
        """[n, input_dim], each `hop_size` after the last; what is missing at the end is silence."""
        hop, size = self._config.hop_size, self._config.input_dim
        length = (-(-len(samples) // hop) - 1) * hop + size
        return F.pad(samples, (0, length - len(samples))).unfold(0, size, hop)


def load_audio_vae_encoder(config: AudioVae, weights: Mapping[str, torch.Tensor]) -> AudioVaeEncoder:
    """The encoder of `config` with its weights, float32 on the CPU. Raises WeightsError where they do not fit."""
    encoder = AudioVaeEncoder(config)
    encoder.load(weights)
    return encoder.requires_grad_(False).eval()
