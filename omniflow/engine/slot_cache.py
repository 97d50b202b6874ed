"""Keys and values of many streams in one allocation that never moves: what a CUDA graph needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from omniflow.engine.decoder import DecoderShape
from omniflow.engine.fused import HAS_TRITON


class Sight(NamedTuple):
    """What the next inputs of some streams see; see `SlotCache.sight`."""

    slots: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    first: int
    windows: Sequence[int | None]
    masks: dict[int | None, torch.Tensor]
    """For each window; empty where a kernel does without."""


class SlotCache:
    """A slot each stream, with room for `positions`; one more slot, `spare`, takes what nobody wants.

    `keys` and `values` are [layers, slots + 1, kv_heads, positions, dim].
    """

    def __init__(
        self, shape: DecoderShape, slots: int, positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spare = slots
        self.positions = positions
        size = (shape.num_hidden_layers, slots + 1, shape.num_key_value_heads, positions, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self._shape = shape
        self._places = torch.arange(positions, device=device)
        self.has_kernel = device.type == "cuda" and HAS_TRITON and _fits(shape.head_dim, dtype)
        """True where attention looks at no more positions than a stream has."""

    def clear(self, slot: int) -> None:
        """Before a new stream: what is masked counts 0 times, which is still no number where the last one left none."""
        self.keys[:, slot].zero_()
        self.values[:, slot].zero_()

    def move(self, source: int, target: int) -> None:
        """Copy the stream in slot `source` to slot `target`."""
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def sight(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        length: int,
        first: int = 0,
        windows: Sequence[int | None] | None = None,
    ) -> Sight:
        """What inputs at `positions` [batch, n], each after the other, of the streams in `slots` [batch] see.

        That is themselves, and what came before from position `first` on, in layers with a window no more than that
        with themselves; no position is `length` or more.
        """
        windows = windows or [None] * self._shape.num_hidden_layers
        masks = {}
        if not self.has_kernel:
            masks = {
                window: self._mask(positions[..., None], first, window, length) for window in dict.fromkeys(windows)
            }
        return Sight(slots, positions, positions[:, 0].contiguous(), first, windows, masks)

    def attend_prompts(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Attention within each of new streams, [batch, n, heads, dim], which are kept in `slots` [batch]."""
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        length = key.shape[2]
        self.keys[layer, :, :, :length].index_copy_(0, slots, key)
        self.values[layer, :, :, :length].index_copy_(0, slots, value)
        attended = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sight: Sight
    ) -> torch.Tensor:
        """Attention of the next inputs [batch, n, heads, dim] over what they see; keeps `key` and `value`."""
        keys, values, window = self.keys[layer], self.values[layer], sight.windows[layer]
        if self.has_kernel:
            from omniflow.engine import kernels

            where = (sight.slots, sight.starts, sight.first, window)
            return kernels.attend_slots(query, key, value, keys, values, *where)
        keys[sight.slots[:, None], :, sight.positions] = key
        values[sight.slots[:, None], :, sight.positions] = value
        mask = sight.masks[window]
        keys, values = (each.index_select(0, sight.slots)[:, :, : mask.shape[-1]] for each in (keys, values))
        batch, count, heads, dim = query.shape
        # Heads that share keys are as good as more inputs; with a mask, no fast kernel knows them otherwise.
        grouped = query.reshape(batch, count, key.shape[2], -1, dim).transpose(1, 2).flatten(2, 3)
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return attended.reshape(batch, key.shape[2], count, -1, dim).transpose(1, 2).reshape(batch, count, heads, dim)

    def _mask(self, own: torch.Tensor, first: int, window: int | None, length: int) -> torch.Tensor:
        """What is added to the scores of inputs at `own` [batch, n, 1]: [batch, 1, n * sharing heads, length]."""
        places = self._places[:length]
        sees = places <= own
        if first:
            sees &= (places >= first) | (places == own)
        if window is not None:
            sees &= places > own - window
        mask = torch.zeros(sees.shape, dtype=self.keys.dtype, device=sees.device).masked_fill_(~sees, -torch.inf)
        repeats = self._shape.num_attention_heads // self._shape.num_key_value_heads
        return mask[:, :, None].expand(-1, -1, repeats, -1).reshape(len(mask), 1, -1, length)


def _fits(head_dim: int, dtype: torch.dtype) -> bool:
    """True where `kernels.attend_slots` can do it: 512 bytes of a head take 153 KB of a block's shared memory, and
    1024 would take 296; on an H200 it has 227.
    """
    return head_dim in (16, 32, 64, 128, 256) and head_dim * dtype.itemsize <= 512
