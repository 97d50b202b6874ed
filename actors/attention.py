"""Attention over several sequences that lie one behind the other, each for itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F


def attend_apart(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[sum(lengths), heads, dim] each, and so the result: an input sees all of its own sequence and nothing else.

    Neighbours of one length, as the frames of a clip are, go in one call. Nothing is padded, so that a sequence costs
    and gives the same in any company.
    """
    parts, start = [], 0
    for length, alike in itertools.groupby(lengths):
        stop = start + length * len(list(alike))
        q, k, v = (
            each[start:stop].reshape(-1, length, *each.shape[1:]).transpose(1, 2) for each in (query, key, value)
        )
        parts.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
        start = stop
    return torch.cat(parts) if len(parts) > 1 else parts[0]
