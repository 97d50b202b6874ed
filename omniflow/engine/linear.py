"""A linear layer for CPUs whose result for a row does not depend on the other rows.

torch's own float32 path (MKL) sums in another order for 1, for 2 to 3 and for 4 and more rows, so a request in a batch
would see other logits than alone (by 5e-5), enough to flip a token that is nearly as likely as another. oneDNN with the
weight packed once sums alike for any number of rows (for some shapes, from 2 on), and reads memory better: its step of
4 rows costs about what MKL's of 1 does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

LEAST_ROWS = 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1
"""Fewer rows are padded, for speed: with AVX-512, 1 to 3 rows take 15 to 35 % longer than 4. With matrices of 0.5 to
2.5 MB, as a small talker has, it is the other way: 1 row takes 9 to 14 % less than 4."""


def padded(count: int) -> int:
    """How many rows `count` of them are computed as: all numbers up to 8, then multiples of 4, then 8 to a doubling.

    oneDNN and torch keep 0.5 MB for each number of rows that a shape of weights has met, 1024 of them: prompts of all
    lengths filled 300 MB of a process. Of 9 to 64 rows it costs 8 % of the time in the middle, 31 % for 9; a number
    that is new costs 0.6 ms.
    """
    step = max(4, 1 << max(0, count.bit_length() - 4)) if count > 8 else 1
    return -(-count // step) * step


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` in inference: x [..., in_features] to [..., out_features], float32 on the CPU."""

    def __init__(self, linear: nn.Linear, least_rows: int = LEAST_ROWS) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # The layout that oneDNN likes best for few rows; it serves any number of them.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 4)
        self._least_rows = least_rows
        probe = torch.sin(torch.arange(4.0 * self.in_features)).reshape(4, self.in_features)
        if not torch.equal(self(probe[:1]), self(probe)[:1]):
            self._least_rows = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        count = len(rows)
        wanted = max(self._least_rows, padded(count))
        if count < wanted:
            # One row repeated costs nothing; a copy into a larger matrix costs 4 % of a step in all.
            rows = rows.expand(wanted, -1) if count == 1 else F.pad(rows, (0, 0, 0, wanted - count))
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return y[:count].reshape(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, least_rows: int = LEAST_ROWS) -> None:
    """Replace every `nn.Linear` in `model`, in place, where this machine and torch can; leave others as they are."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.weight.device.type == "cpu" and child.weight.dtype == torch.float32:
                module.add_module(name, PackedLinear(child, least_rows))
