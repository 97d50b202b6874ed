"""The two small transformers around a step of the talker: what tells the flow's velocity, and what reads its latents.

Both see all of their inputs at once and have rotary positions that turn neighbouring features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from actors.ming.config import Dit, Transformer
from omniflow.engine.decoder import RMSNorm
from omniflow.engine.flow import FlowNet
from omniflow.engine.fused import attend_turned, gelu_linear

_EPS = 1e-6
_TIME_FEATURES = 256


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.to_qkv = nn.Linear(hidden, 3 * hidden)
        self.to_out = nn.ModuleList([nn.Linear(hidden, hidden)])

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.to_out[0](attend_turned(self.to_qkv(x), cos, sin, self._heads))
        return y


class _Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        # Position 1 was dropout; the checkpoint's names count it.
        self.ff = nn.ModuleList([nn.ModuleList([nn.Linear(hidden, inner)]), nn.Identity(), nn.Linear(inner, hidden)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.ff[0]
        assert isinstance(first, nn.ModuleList)
        y: torch.Tensor = self.ff[2](gelu_linear(x, first[0]))
        return y


class _Block(nn.Module):
    def __init__(self, config: Transformer) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.norm1 = RMSNorm(hidden, _EPS)
        self.attn = _Attention(hidden, config.num_heads)
        self.norm2 = RMSNorm(hidden, _EPS)
        self.mlp = _Mlp(hidden, int(hidden * config.mlp_ratio))

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of an input `x` + `delta`, and so the result: it is added up together with the next norm."""
        x, normed = (x, self.norm1(x)) if delta is None else self.norm1.after(x, delta)
        x, normed = self.norm2.after(x, self.attn(normed, cos, sin))
        return x, self.mlp(normed)


def _through(blocks: nn.ModuleList, x: torch.Tensor, rotary: _Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    delta = None
    for block in blocks:
        x, delta = block(x, delta, rotary.cos, rotary.sin)
    assert delta is not None
    return x, delta


class _FinalLayer(nn.Module):
    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.norm_final = RMSNorm(hidden, _EPS)
        self.linear = nn.Linear(hidden, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.norm_final(x))
        return y


class _Rotary(nn.Module):
    """Tables [length, 1, 1, head_dim] of positions 0 to length - 1."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        inverse = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = (torch.arange(length, dtype=torch.float32)[:, None] * inverse).repeat_interleave(2, dim=-1)
        self.register_buffer("cos", angles.cos()[:, None, None], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None, None], persistent=False)


class _TimeEmbedder(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(_TIME_FEATURES, hidden), nn.SiLU(), nn.Linear(hidden, hidden))

    def forward(self, time: float, like: torch.Tensor) -> torch.Tensor:
        """[hidden], of the type and on the device of `like`; its angles, up to 1000, are float32 in any case."""
        half = _TIME_FEATURES // 2
        frequencies = torch.exp(torch.arange(half, device=like.device) * (-math.log(10000) / (half - 1)))
        angles = 1000 * time * frequencies
        y: torch.Tensor = self.time_mlp(torch.cat([angles.sin(), angles.cos()]).to(like.dtype))
        return y


class DitNet(FlowNet):
    """Velocity over [condition + time, the latents before, the latents that are being made]."""

    def __init__(self, config: Dit, latent_dim: int, cond_dim: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.patch, self.history, self.latent_dim = config.patch_size, config.history, latent_dim
        self.t_embedder = _TimeEmbedder(hidden)
        self.x_embedder = nn.Linear(latent_dim, hidden)
        self.c_embedder = nn.ModuleDict({"cond_embedder": nn.Linear(cond_dim, hidden)})
        self._rotary = _Rotary(1 + self.history + self.patch, hidden // config.num_heads)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.final_layer = _FinalLayer(hidden, latent_dim)
        self._remembered: dict[float, torch.Tensor] = {}

    def remember(self, times: Sequence[float]) -> None:
        """See `FlowNet.remember`. Ten embeddings of times are 80 small kernels of a step."""
        like = self.x_embedder.weight
        self._remembered = {time: self.t_embedder(time, like) for time in times}

    def condition(self, hidden: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        """See `FlowNet.condition`: [batch, 1 + history, hidden]."""
        return torch.cat([self.c_embedder["cond_embedder"](hidden)[:, None], self.x_embedder(history)], dim=1)

    def forward(self, x: torch.Tensor, time: float, condition: torch.Tensor) -> torch.Tensor:
        """See `FlowNet.forward`."""
        embedded = self._remembered.get(time)
        first = condition[:, :1] + (self.t_embedder(time, condition) if embedded is None else embedded)
        inputs = torch.cat([first, condition[:, 1:], self.x_embedder(x)], dim=1)
        y, delta = _through(self.blocks, inputs, self._rotary)
        velocity: torch.Tensor = self.final_layer(y[:, -self.patch :] + delta[:, -self.patch :])
        return velocity


class Aggregator(nn.Module):
    """Latents [batch, patch, latent_dim] to an input of the backbone [batch, output_dim]."""

    def __init__(self, config: Transformer, patch: int, latent_dim: int, output_dim: int) -> None:
        super().__init__()
        self.word_embedder = nn.Embedding(1, config.hidden_size)
        self.x_embedder = nn.Linear(latent_dim, config.hidden_size)
        self._rotary = _Rotary(1 + patch, config.hidden_size // config.num_heads)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.final_layer = _FinalLayer(config.hidden_size, output_dim)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """See the class."""
        embedded = self.x_embedder(latents)
        x = torch.cat([self.word_embedder.weight.expand(len(latents), 1, -1), embedded], dim=1)
        y, delta = _through(self.blocks, x, self._rotary)
        summary: torch.Tensor = self.final_layer(y[:, 0] + delta[:, 0])
        return summary
