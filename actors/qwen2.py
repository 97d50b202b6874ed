"""Qwen2's decoder, and the keys and values of what a stream has seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from omniflow.engine.decoder import Attend, Decoder, DecoderShape, RMSNorm, attend_last
from omniflow.engine.fused import gated, turn_halves


class _Attention(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.qkv_proj = nn.Linear(shape.hidden_size, (self._heads + 2 * self._kv_heads) * self._dim)
        self.o_proj = nn.Linear(self._heads * self._dim, shape.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, layer: int, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self._dim))
        qk, value = qkv[..., : -self._kv_heads, :], qkv[..., -self._kv_heads :, :]
        qk = turn_halves(qk, cos, sin)
        attended = attend(layer, qk[..., : self._heads, :], qk[..., self._heads :, :], value)
        y: torch.Tensor = self.o_proj(attended.flatten(-2))
        return y


class _Mlp(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(gated(self.gate_up_proj(x)))
        return y


class _Layer(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = _Mlp(shape)

    def forward(
        self, x: torch.Tensor, layer: int, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x), layer, cos, sin, attend)
        x, normed = self.post_attention_layernorm.after(x, attended)
        y: torch.Tensor = x + self.mlp(normed)
        return y


class Qwen2Decoder(Decoder):
    """A decoder of Qwen2's layers."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape, _Layer)


class KeyValues:
    """What one stream through a `Qwen2Decoder` has seen; `windows` says how much each layer sees (None: all).

    A layer that sees all keeps all; one with a window keeps no more than the window. `length` is that of the stream.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.length = 0
        self._windows = windows
        self._stored: list[torch.Tensor | None] = [None] * len(windows)
        """Each [2, kv_heads, capacity, dim], of which the first positions are filled."""
        self._filled = [0] * len(windows)

    @property
    def num_stored(self) -> int:
        """Positions that are kept, of all layers."""
        return sum(self._filled)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of the next inputs, [n, heads, dim], over all that they see; keeps `key` and `value`."""
        stored = self._append(layer, torch.stack([key, value]).transpose(1, 2))
        window = self._windows[layer]
        if window is None or stored.shape[2] <= window:
            return attend_last(query[None], stored[:1], stored[1:])[0]
        count, length = len(query), stored.shape[2]
        mask = torch.ones(count, length, dtype=torch.bool, device=query.device)
        mask = mask.tril(length - count).triu(length - count - window + 1)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1), stored[0], stored[1], attn_mask=mask, enable_gqa=True
        )
        return attended.transpose(0, 1)

    def _append(self, layer: int, new: torch.Tensor) -> torch.Tensor:
        """All [2, kv_heads, length, dim] that the layer's new inputs see, `new` being theirs."""
        window, stored, filled = self._windows[layer], self._stored[layer], self._filled[layer]
        end = filled + new.shape[2]
        if stored is None:
            both, heads, _, dim = new.shape
            stored = new.new_empty(both, heads, end, dim)
        elif end > stored.shape[2]:
            both, heads, _, dim = new.shape
            # Twice what is needed: a stream of n steps copies less than 2n positions in all.
            stored = torch.cat([stored[:, :, :filled], new.new_empty(both, heads, 2 * end - filled, dim)], dim=2)
        stored[:, :, filled:end] = new
        seen = stored[:, :, :end]
        if window is not None and end >= window:
            stored, end = seen[:, :, end - window + 1 :].clone(), window - 1
        self._stored[layer], self._filled[layer] = stored, end
        return seen


def step(decoder: Qwen2Decoder, streams: Sequence[KeyValues], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What `decoder` gives for the next `inputs` [n, hidden] of each of `streams`; n may differ.

    All matrices are one pass over the inputs of all, and attention is called stream by stream: so a stream gives the
    same alone and in any company where a row of a matrix does (`omniflow.engine.linear`).
    """
    sizes, positions = [len(each) for each in inputs], []
    for stream, size in zip(streams, sizes, strict=True):
        positions.append(torch.arange(stream.length, stream.length + size, device=inputs[0].device))
        stream.length += size

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        pieces = zip(streams, *(torch.split(each, sizes) for each in (query, key, value)), strict=True)
        return torch.cat([stream.attend(layer, *own) for stream, *own in pieces])

    return list(torch.split(decoder(torch.cat(list(inputs)), torch.cat(positions), attend), sizes))
