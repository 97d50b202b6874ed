"""Keys and values of many streams in one allocation that never moves: what a CUDA graph needs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from omniflow.engine.decoder import DecoderShape


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
        self._places = torch.arange(positions, device=device)

    def clear(self, slot: int) -> None:
        """Before a new stream: what is masked counts 0 times, which is still no number where the last one left none."""
        self.keys[:, slot].zero_()
        self.values[:, slot].zero_()

    def move(self, source: int, target: int) -> None:
        """Copy the stream in slot `source` to slot `target`."""
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def mask(self, positions: torch.Tensor, first: int, window: int | None, repeats: int, length: int) -> torch.Tensor:
        """What is added to the scores of inputs at `positions` [batch, n]: [batch, 1, n * repeats, length].

        Each sees itself, and what came before from position `first` on, no more than `window` with itself.
        """
        places, own = self._places[:length], positions[..., None]
        sees = places <= own
        if first:
            sees &= (places >= first) | (places == own)
        if window is not None:
            sees &= places > own - window
        mask = torch.zeros(sees.shape, dtype=self.keys.dtype, device=sees.device).masked_fill_(~sees, -torch.inf)
        return mask[:, :, None].expand(-1, -1, repeats, -1).reshape(len(mask), 1, -1, length)

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
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        slots: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        first_slots: bool = False,
    ) -> torch.Tensor:
        """Attention of the next inputs [batch, n, heads, dim] of the streams in `slots` [batch], at `positions`
        [batch, n], with the `mask` of these, over as many positions as it has; keeps `key` and `value`.

        With `first_slots`, `slots` are those from 0 on, and nothing is copied.
        """
        batch, count, heads, dim = query.shape
        length, groups = mask.shape[-1], key.shape[2]
        stored = (self.keys[layer], self.values[layer])
        for each, new in zip(stored, (key, value), strict=True):
            each[slots[:, None], :, positions] = new
        keys, values = (
            (each[:batch] if first_slots else each.index_select(0, slots))[:, :, :length] for each in stored
        )
        # Heads that share keys are as good as more inputs; with a mask, no fast kernel knows them otherwise.
        grouped = query.reshape(batch, count, groups, -1, dim).permute(0, 2, 1, 3, 4).reshape(batch, groups, -1, dim)
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return attended.reshape(batch, groups, count, -1, dim).permute(0, 2, 1, 3, 4).reshape(batch, count, heads, dim)
