"""What models for SGLang have in common that know several kinds of input, at places in time, height and width.

SGLang numbers the inputs of a request from 0 and knows no kinds. The places of a batch that reads prompts are told
before it runs; of an answer only the shift from number to place is kept, by the request's row in SGLang's pools, at an
address that never changes: so a step that decodes needs nothing but its rows, also within a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from omniflow.engine.places import Places


class PlacedModel(nn.Module):
    """Base of such models. `num_rows` is how many rows SGLang's pools have, row 0 included, which pads batches."""

    shifts: torch.Tensor

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.register_buffer("shifts", torch.zeros(num_rows, dtype=torch.int64), persistent=False)
        self._read: tuple[torch.Tensor, torch.Tensor] | None = None

    def read(self, spans: Sequence[tuple[int, Places, int, int]]) -> list[torch.Tensor]:
        """The next batch reads, end to end, inputs [start, end) of each (row, places, start, end).

        Returns the tensors on the device that it will use.
        """
        device = self.shifts.device
        rows = torch.tensor([row for row, _, _, _ in spans])
        shifts = torch.tensor([places.shift for _, places, _, _ in spans])
        self.shifts.index_copy_(0, rows.to(device), shifts.to(device))
        self._read = None
        if all(places.plain for _, places, _, _ in spans):
            return []
        places = torch.cat([places.places(start, end) for _, places, start, end in spans], dim=1)
        kinds = torch.cat([places.kinds(start, end) for _, places, start, end in spans])
        self._read = (places.to(device), kinds.to(device))
        return list(self._read)

    @property
    def is_plain(self) -> bool:
        """True where all inputs that the next batch reads are of kind 0, each at its own position."""
        return self._read is None

    def located(self, positions: torch.Tensor, forward_batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Places int64 [3, n] and kinds [n] of the inputs of a batch that SGLang runs; None: all are of kind 0."""
        if forward_batch.forward_mode.is_decode():
            positions = positions + self.shifts[forward_batch.req_pool_indices]
        elif self._read is not None:
            return self._read
        return positions.expand(3, -1), None
