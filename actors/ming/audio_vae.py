"""Ming's AudioVAE: sound to latents at 12.5 Hz (50 Hz without patches, as the preview's), and latents to sound.

Its decoder has a carried state instead of windows:

    latents -> linear -> linear interpolation to 4 frames each -> Qwen2 -> spectra -> overlapping windows, added up

All that it sees of the future is half a latent for the interpolation and one and a half frames for the overlap. So the
first step gives sound at once, and each further step all but the last 3.5 frames (of 20 ms) of what it has been given.

Its encoder takes a recording at once:

    sound -> frames of 20 ms -> two linears -> Qwen2 -> Qwen2 with a summary input behind each 4 frames -> linear
    -> mean and spread of a latent

Without patches there is no second Qwen2: each frame is a latent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from actors.checkpoint import load
from actors.ming.config import AudioVae
from actors.ming.weights import AUDIO_VAE, part
from actors.qwen2 import KeyValues, Qwen2Decoder, step
from actors.streaming_decoder import BatchedDecoder
from omniflow.errors import ContextLengthError, WeightsError

OVERLAP = 4
"""Frames that sound at the same time: a window is as many hops long."""
_MAX_MAGNITUDE = 100.0
_AGGREGATOR_LAYERS = 4
"""In every AudioVAE, whatever its config.json says of the encoder's other decoder."""
_LEAST_SPREAD = 1e-4


class AudioStream:
    """The state of one stream of an `AudioVaeDecoder`."""

    def __init__(self, past: KeyValues, tails: torch.Tensor, skip: int) -> None:
        self.past = past
        self.latent: torch.Tensor | None = None
        """The last one [1, hidden], whose second half waits for the next."""
        self.num_latents = 0
        self.tails = tails
        """[2, overlap - 1, hop]: sound, and the sum of squared windows, to which later frames add."""
        self.skip = skip
        """Samples at the front that are no part of the sound."""


class AudioVaeDecoder(nn.Module, BatchedDecoder[AudioStream]):
    """float32 latents [n, latent_dim] to mono samples; float32, on the device that it is moved to.

    A stream is a segment: its keys and values grow with it, up to `max_latents`, in layers without a window.
    """

    channels = 1
    window: torch.Tensor
    """[overlap * hop]: of a frame's wave."""
    weights: torch.Tensor
    """[ratio, 1]: where the frames between two latents are."""

    def __init__(self, config: AudioVae) -> None:
        super().__init__()
        decoder, ratio = config.dec_kwargs, max(1, config.patch_size)
        self.backbone = decoder.backbone
        self.hop, self.ratio = decoder.output_dim, ratio
        """Samples per frame, and frames per latent."""
        self.edge = (OVERLAP - 1) * self.hop // 2
        """Samples that are cut off at the front, and as many at the end."""
        self.first = (ratio + 1) // 2
        """Frames of a latent that do not look at the next one."""
        self.sample_rate_hz, self.samples_per_frame = config.sample_rate, ratio * self.hop
        self.latent_dim = decoder.latent_dim
        self.max_latents = decoder.backbone.max_position_embeddings // ratio
        # Half a latent, and as much of the last frames as is cut off at the front.
        self.holdback = -(-(2 * (ratio - self.first) + OVERLAP - 1) // (2 * ratio))
        hidden = decoder.backbone.hidden_size
        self.fc1 = nn.Linear(decoder.latent_dim, hidden)
        self.decoder = Qwen2Decoder(decoder.backbone.shape)
        self.head = nn.ModuleDict({"out": nn.Linear(hidden, OVERLAP * self.hop + 2)})
        self.register_buffer("window", torch.hann_window(OVERLAP * self.hop), persistent=False)
        places = torch.arange(ratio) + (1.0 if ratio % 2 else 0.5)
        self.register_buffer("weights", (places / ratio)[:, None], persistent=False)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take the decoder's weights of a checkpoint, its own folder's or those under `audio.`. Raises WeightsError."""
        own = part(weights, tuple(f"{prefix}decoder." for prefix in AUDIO_VAE))
        own.pop("decoder.embed_tokens.weight", None)  # never used: its inputs are no tokens
        unused = ("fc2.", "fc3.", "semantic_model.")  # of the branch for understanding, which makes no sound
        load(self, {name: each for name, each in own.items() if not name.startswith(unused)}, "the AudioVAE's decoder")

    def init(self) -> AudioStream:
        """The state of a new stream."""
        tails = self.window.new_zeros(2, OVERLAP - 1, self.hop)
        return AudioStream(KeyValues(self.backbone.windows), tails, self.edge)

    def step(self, state: AudioStream, frames: np.ndarray, last: bool) -> np.ndarray:
        """See `StreamingDecoder.step`. Raises ContextLengthError for a stream of more than `max_latents`."""
        return self.step_together([state], [frames], [last])[0]

    @torch.inference_mode()
    def step_together(
        self, states: Sequence[AudioStream], frames: Sequence[np.ndarray], last: Sequence[bool]
    ) -> list[np.ndarray]:
        """See `BatchedDecoder.step_together`."""
        sizes = [len(each) for each in frames]
        longest = max(state.num_latents + size for state, size in zip(states, sizes, strict=True))
        if longest > self.max_latents:
            raise ContextLengthError(
                f"{longest} latents in one segment; at most {self.max_latents} fit: begin a new stream"
            )
        latents = torch.from_numpy(np.concatenate(frames, dtype=np.float32)).to(self.window.device)
        embedded = torch.split(self.fc1(latents), sizes)
        spread = [self._spread(*each) for each in zip(states, embedded, last, strict=True)]
        waves = [self.window.new_zeros(0, len(self.window))] * len(states)
        if any(map(len, spread)):
            waves = self._waves([state.past for state in states], spread)
        sounds = [self._sound(*each) for each in zip(states, waves, last, strict=True)]
        samples: np.ndarray = torch.cat(sounds).cpu().numpy()
        return np.split(samples, np.cumsum([len(each) for each in sounds])[:-1])

    def end(self, state: AudioStream) -> None:
        """See `BatchedDecoder.end`: nothing of a stream is left behind."""

    def _spread(self, state: AudioStream, latents: torch.Tensor, last: bool) -> torch.Tensor:
        """The frames [n * ratio, hidden] on the lines between the latents [n, hidden], level before the first."""
        state.num_latents += len(latents)
        known = latents if state.latent is None else torch.cat([state.latent, latents])
        if not len(known):
            return known
        start, end = known[:-1, None], known[1:, None]
        frames = [torch.lerp(start, end, self.weights).flatten(0, 1)]
        if state.latent is None:
            frames.insert(0, known[:1].expand(self.first, -1))
        if last:
            frames.append(known[-1:].expand(self.ratio - self.first, -1))
        state.latent = known[-1:].clone()
        return torch.cat(frames)

    def _waves(self, pasts: Sequence[KeyValues], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each stream's `inputs` [n, hidden] the waves [n, overlap * hop] of its frames."""
        sizes = [len(each) for each in inputs]
        there = [number for number, size in enumerate(sizes) if size]
        hidden = step(self.decoder, [pasts[number] for number in there], [inputs[number] for number in there])
        return list(torch.split(self.waves(torch.cat(hidden)), sizes))

    def waves(self, hidden: torch.Tensor) -> torch.Tensor:
        """The waves [..., overlap * hop] of frames, float32, of what the backbone gave them."""
        magnitude, phase = self.head["out"](hidden).float().chunk(2, dim=-1)
        spectrum = torch.polar(magnitude.exp().clamp(max=_MAX_MAGNITUDE), phase)
        waves: torch.Tensor = torch.fft.irfft(spectrum, len(self.window)) * self.window
        return waves

    def _sound(self, state: AudioStream, waves: torch.Tensor, last: bool) -> torch.Tensor:
        """The samples that the next `waves` make certain."""
        count, size = len(waves), (OVERLAP, self.hop)
        parts = torch.stack([waves, self.window.square().expand_as(waves)]).reshape(2, count, *size)
        sums = waves.new_zeros(2, count + OVERLAP - 1, self.hop)
        sums[:, : OVERLAP - 1] = state.tails
        for offset in range(OVERLAP):
            sums[:, offset : offset + count] += parts[:, :, offset]
        state.tails = sums[:, count:].clone()
        sound, weight = (sums if last else sums[:, :count]).flatten(1)
        stop = len(sound) - self.edge if last else len(sound)
        skip = min(state.skip, stop)
        state.skip -= skip
        samples: torch.Tensor = sound[skip:stop] / weight[skip:stop]
        return samples


def load_audio_vae(config: AudioVae, weights: Mapping[str, torch.Tensor], device: str = "cpu") -> AudioVaeDecoder:
    """The decoder of `config` with its weights, float32. Raises WeightsError where they do not fit."""
    if config.dec_kwargs.output_dim % 2:
        raise WeightsError(f"output_dim is {config.dec_kwargs.output_dim}; half of a window's overlap must be whole")
    with torch.device(device):
        decoder = AudioVaeDecoder(config)
    decoder.load(weights)
    return decoder.requires_grad_(False).eval()


class AudioVaeEncoder(nn.Module):
    """Mono samples to latents; float32, on the device that it is moved to.

    Raises WeightsError where `config` tells no encoder.
    """

    def __init__(self, config: AudioVae) -> None:
        super().__init__()
        encoder = config.enc_kwargs
        if encoder is None:
            raise WeightsError("the AudioVAE's config.json tells no encoder")
        self._config, self._ratio = encoder, max(1, config.patch_size)
        self._inner = encoder.backbone.with_layers(_AGGREGATOR_LAYERS)
        self.sample_rate_hz, self.samples_per_latent = config.sample_rate, self._ratio * encoder.hop_size
        self.latent_dim, hidden = encoder.latent_dim, encoder.backbone.hidden_size
        sums_up = config.patch_size > 0
        self.max_latents = encoder.backbone.max_position_embeddings // (self._ratio + sums_up)
        """For each there are the inputs of its frames, and its own where they are summed up."""
        self.fc1 = nn.Linear(encoder.input_dim, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, hidden)
        self.encoder = Qwen2Decoder(encoder.backbone.shape)
        self.cls_embed = nn.Parameter(torch.zeros(1, 1, hidden)) if sums_up else None
        self.aggregator = Qwen2Decoder(self._inner.shape) if sums_up else None
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
        (seen,) = step(self.encoder, [KeyValues(self._config.backbone.windows)], [hidden])
        mean, scale = self.fc3(self._summed_up(seen, num_latents)).chunk(2, dim=-1)
        return mean, F.softplus(scale) + _LEAST_SPREAD

    def _summed_up(self, seen: torch.Tensor, num_latents: int) -> torch.Tensor:
        """A row for each latent, of the frames [n, hidden]."""
        if self.aggregator is None or self.cls_embed is None:
            return seen
        patches = F.pad(seen, (0, 0, 0, num_latents * self._ratio - len(seen))).reshape(num_latents, self._ratio, -1)
        inputs = torch.cat([patches, self.cls_embed.expand(num_latents, -1, -1)], dim=1).flatten(0, 1)
        (summed,) = step(self.aggregator, [KeyValues(self._inner.windows)], [inputs])
        return summed[self._ratio :: self._ratio + 1]

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
