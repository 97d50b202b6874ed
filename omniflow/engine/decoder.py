"""Decoder layers as Qwen3 has them (RMSNorm on queries and keys, rotary positions, SwiGLU), in few calls.

For small models that are stepped many times a second the calls cost more than the arithmetic, so query, key and value
come out of one matrix, and so do gate and up. Attention is the caller's: a layer knows nothing of caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from omniflow.engine.fused import add_norm, gated_up, turned_halves

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query [..., heads, dim], key [..., kv_heads, dim], value as key) -> [..., heads, dim]."""


class DecoderShape(msgspec.Struct, frozen=True):
    """The sizes of a decoder, by the names that Hugging Face's configurations use."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


def attend_last(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last n positions over all: `query` [batch, n, heads, dim], and so the result.

    `keys` and `values` are [batch, kv_heads, length, dim].
    """
    batch, count, heads, dim = query.shape
    length = keys.shape[2]
    if count == 1:  # the heads that share keys are as good as several positions without a mask, and that is one call
        grouped = query.reshape(batch, keys.shape[1], -1, dim)
        return F.scaled_dot_product_attention(grouped, keys, values).reshape(batch, 1, heads, dim)
    mask = None
    if count < length:
        mask = torch.ones(count, length, dtype=torch.bool, device=query.device).tril(length - count)
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, mask, is_causal=mask is None, enable_gqa=True
    )
    return attended.transpose(1, 2)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)

    def after(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` + `delta`, and that normed."""
        return add_norm(x, delta, self.weight, self._eps)


class DecoderLayer(nn.Module):
    """One layer: x [..., hidden] to [..., hidden]."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
        self._heads, self._kv_heads, self._dim = shape.num_attention_heads, shape.num_key_value_heads, dim
        self._eps = shape.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.qkv_proj = nn.Linear(hidden, (self._heads + 2 * self._kv_heads) * dim, bias=False)
        self.qk_norm = nn.Parameter(torch.ones(self._heads + self._kv_heads, dim), requires_grad=False)
        """The norms' weights of each query head, then of each key head."""
        self.o_proj = nn.Linear(self._heads * dim, hidden, bias=False)
        self.post_attention_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(
        self, x: torch.Tensor, layer: int, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """`cos` and `sin` [..., 1, dim] are those of each input's position; see `Rotary`."""
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (-1, self._dim))
        qk, value = qkv[..., : -self._kv_heads, :], qkv[..., -self._kv_heads :, :]
        qk = F.rms_norm(qk, (self._dim,), None, self._eps) * self.qk_norm
        qk = turned_halves(qk, cos, sin)
        attended = attend(layer, qk[..., : self._heads, :], qk[..., self._heads :, :], value)
        x = x + self.o_proj(attended.flatten(-2))
        y: torch.Tensor = x + self.down_proj(gated_up(self.gate_up_proj(self.post_attention_layernorm(x))))
        return y

    def load(self, weights: Mapping[str, torch.Tensor], prefix: str) -> None:
        """Take the weights of one Hugging Face Qwen3 layer, whose names begin with `prefix`. Raises KeyError."""

        def stacked(*names: str) -> torch.Tensor:
            return torch.cat([weights[f"{prefix}{name}.weight"] for name in names])

        attention = "self_attn."
        self.qkv_proj.weight.data.copy_(stacked(*(f"{attention}{name}_proj" for name in "qkv")))
        self.o_proj.weight.data.copy_(weights[f"{prefix}{attention}o_proj.weight"])
        self.qk_norm.data[: self._heads] = weights[f"{prefix}{attention}q_norm.weight"]
        self.qk_norm.data[self._heads :] = weights[f"{prefix}{attention}k_norm.weight"]
        self.gate_up_proj.weight.data.copy_(stacked("mlp.gate_proj", "mlp.up_proj"))
        self.down_proj.weight.data.copy_(weights[f"{prefix}mlp.down_proj.weight"])
        self.input_layernorm.weight.data.copy_(weights[f"{prefix}input_layernorm.weight"])
        self.post_attention_layernorm.weight.data.copy_(weights[f"{prefix}post_attention_layernorm.weight"])


class Rotary(nn.Module):
    """Tables of rotary positions: `cos` and `sin` [max_positions, 1, dim].

    The sign of the half-turned part is in `sin`, so that x * cos + roll(x, dim / 2) * sin turns x.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        dim = shape.head_dim
        inverse = 1.0 / shape.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = torch.arange(shape.max_position_embeddings, dtype=torch.float32)[:, None] * inverse
        self.register_buffer("cos", torch.cat([angles.cos(), angles.cos()], -1)[:, None], persistent=False)
        self.register_buffer("sin", torch.cat([-angles.sin(), angles.sin()], -1)[:, None], persistent=False)


class Decoder(nn.Module):
    """A stack of layers and the last norm: inputs [..., hidden] at `positions` [...] to outputs [..., hidden].

    `layer` makes one of the layers; what it makes is called as a `DecoderLayer` is.
    """

    def __init__(self, shape: DecoderShape, layer: Callable[[DecoderShape], nn.Module] = DecoderLayer) -> None:
        super().__init__()
        self.rotary = Rotary(shape)
        self.layers = nn.ModuleList(layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | slice, attend: Attend) -> torch.Tensor:
        cos, sin = self.rotary.cos[positions], self.rotary.sin[positions]
        for number, layer in enumerate(self.layers):
            x = layer(x, number, cos, sin, attend)
        normed: torch.Tensor = self.norm(x)
        return normed

    def load(self, weights: Mapping[str, torch.Tensor], prefix: str) -> None:
        """Take the weights of a Hugging Face Qwen3 model, whose names begin with `prefix`. Raises KeyError."""
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            layer.load(weights, f"{prefix}layers.{number}.")
        self.norm.weight.data.copy_(weights[f"{prefix}norm.weight"])
