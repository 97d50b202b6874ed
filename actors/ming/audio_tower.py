"""Ming's audio tower: Whisper's encoder over whole clips, and the projector into the thinker.

The names of modules are those of weights in a checkpoint: `audio.*` and `linear_proj_audio.*`. By inclusionAI, MIT.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from actors.attention import attend_apart
from actors.checkpoint import built, read_tensors
from actors.encoding import on_host
from actors.ming.config import Audio, AudioConfig, Whisper

AUDIO_PREFIXES = ("audio.", "linear_proj_audio.")


class AudioTower(nn.Module):
    """Mel frames to inputs of the thinker, four frames (40 ms) each."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.sizes = config.audio_config.whisper_encoder_config
        self.audio = _Encoder(self.sizes)
        self.linear_proj_audio = _projector(config)
        self._normalise = config.audio_config.norm_query_embeds

    @torch.inference_mode()
    def rows(self, mels: Sequence[np.ndarray]) -> Iterator[list[np.ndarray] | None]:
        """Gives None after each layer, and in the end the rows float32 [num_rows(frames), hidden] of each clip.

        `mels` are float32 [n_mels, frames], of 1 to `2 * n_ctx` frames. A clip has the same rows in any company.
        """
        clips = [self.audio.inputs(torch.from_numpy(mel)) for mel in mels]
        lengths = [len(clip) for clip in clips]
        x = torch.cat(clips)
        for block in self.audio.blocks:
            x = block(x, lengths)
            yield None
        conv, _, *rest = self.linear_proj_audio
        heard = [convolved(clip, cast("nn.Conv1d", conv)) for clip in self.audio.ln_post(x).split(lengths)]
        rows = nn.Sequential(*rest)(torch.cat(heard)).float().split([len(each) for each in heard])
        yield [on_host(F.normalize(each, dim=-1) if self._normalise else each) for each in rows]


def num_rows(config: Audio, frames: int) -> int:
    """How many inputs of the thinker a clip of so many mel frames is."""
    positions = (frames - 1) // 2 + 1
    return (positions + 2 * (config.ds_kernel_size // 2) - config.ds_kernel_size) // config.ds_stride + 1


class _Encoder(nn.Module):
    def __init__(self, sizes: Whisper) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(sizes.n_mels, sizes.n_state, 3, padding=1)
        self.conv2 = nn.Conv1d(sizes.n_state, sizes.n_state, 3, stride=2, padding=1)
        self.register_buffer("positional_embedding", sinusoids(sizes.n_ctx, sizes.n_state))
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.n_layer))
        self.ln_post = nn.LayerNorm(sizes.n_state)

    positional_embedding: torch.Tensor

    def inputs(self, mel: torch.Tensor) -> torch.Tensor:
        x = F.gelu(convolved(mel.to(self.conv1.weight).T, self.conv1))
        x = F.gelu(convolved(x, self.conv2))
        return x + self.positional_embedding[: len(x)]


class _Attention(nn.Module):
    def __init__(self, sizes: Whisper) -> None:
        super().__init__()
        self.query = nn.Linear(sizes.n_state, sizes.n_state)
        self.key = nn.Linear(sizes.n_state, sizes.n_state, bias=False)
        self.value = nn.Linear(sizes.n_state, sizes.n_state)
        self.out = nn.Linear(sizes.n_state, sizes.n_state)
        self._heads = sizes.n_head

    def forward(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        query, key, value = (each(x).view(len(x), self._heads, -1) for each in (self.query, self.key, self.value))
        attended: torch.Tensor = self.out(attend_apart(query, key, value, lengths).flatten(1))
        return attended


class _Block(nn.Module):
    def __init__(self, sizes: Whisper) -> None:
        super().__init__()
        self.attn = _Attention(sizes)
        self.attn_ln = nn.LayerNorm(sizes.n_state)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.n_state, 4 * sizes.n_state), nn.GELU(), nn.Linear(4 * sizes.n_state, sizes.n_state)
        )
        self.mlp_ln = nn.LayerNorm(sizes.n_state)

    def forward(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        x = x + self.attn(self.attn_ln(x), lengths)
        y: torch.Tensor = x + self.mlp(self.mlp_ln(x))
        return y


def convolved(x: torch.Tensor, conv: nn.Conv1d) -> torch.Tensor:
    """What `conv` makes of `x` [inputs, channels], as one product of matrices: [outputs, channels].

    On a GPU cuDNN would make a plan for each new length of a clip, and round float32 to TF32.
    """
    (kernel,), (stride,), padding = conv.kernel_size, conv.stride, conv.padding[0]
    windows = F.pad(x, (0, 0, int(padding), int(padding))).unfold(0, kernel, stride)
    return F.linear(windows.flatten(1), conv.weight.flatten(1), conv.bias)


def _projector(config: AudioConfig) -> nn.Sequential:
    """A convolution that halves the rate, and linear layers. The second has no weights: it is there for the names."""
    audio, hidden = config.audio_config, config.llm_config.hidden_size
    kernel, state = audio.ds_kernel_size, audio.whisper_encoder_config.n_state
    layers: list[nn.Module] = [nn.Conv1d(state, hidden, kernel, audio.ds_stride, kernel // 2), nn.Identity()]
    for _ in range(1, config.mlp_depth):
        layers += [nn.GELU(), nn.Linear(hidden, hidden)]
    return nn.Sequential(*layers)


def sinusoids(count: int, size: int) -> torch.Tensor:
    """Whisper's positions [count, size]: sines and cosines whose periods grow from 2 pi to 20000 pi."""
    # In float32, as Whisper's authors do it: at the position 15000 an ulp is an angle of 0.001.
    inverse = torch.exp(torch.arange(size // 2, dtype=torch.float32) * -(math.log(10000) / max(1, size // 2 - 1)))
    angles = torch.arange(count, dtype=torch.float32)[:, None] * inverse
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def load_audio_tower(folder: Path) -> AudioTower:
    """The tower of the checkpoint in `folder`, as it is stored, on the CPU. Raises WeightsError."""
    config = AudioConfig.load(folder)
    weights = read_tensors(folder, AUDIO_PREFIXES)
    sizes = config.audio_config.whisper_encoder_config
    weights.setdefault("audio.positional_embedding", sinusoids(sizes.n_ctx, sizes.n_state))
    return built(lambda: AudioTower(config), weights, "the audio tower")
