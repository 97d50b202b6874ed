"""What stands between the matrices of small transformers, in few kernels where there is a GPU.

A step of a flow talker is a few thousand calls that each do a few microseconds of work; there, a kernel less is worth
more than its arithmetic. Everything here also exists as plain torch, which is what runs on CPUs, and where Triton is
not installed (it comes with torch for GPUs).
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import nn

HAS_TRITON = importlib.util.find_spec("triton") is not None


def has_kernels(tensor: torch.Tensor) -> bool:
    """True where what is done with `tensor` can be done by kernels of Triton."""
    return tensor.is_cuda and HAS_TRITON


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` + `delta`, both [..., size], and that over its root mean square, times `weight` [size]."""
    if has_kernels(x):
        from omniflow.engine import kernels

        return kernels.add_norm(x, delta, weight, eps)
    x = x + delta
    return x, F.rms_norm(x, weight.shape, weight, eps)


def attend_turned(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    """Attention of all inputs over all, [batch, length, hidden], with rotary positions that turn neighbours.

    `qkv` [batch, length, 3 * hidden] are queries, keys and values; `cos` and `sin` [length, 1, 1, head_dim]. For a few
    dozen inputs.
    """
    if has_kernels(qkv):
        from omniflow.engine import kernels

        return kernels.attend_turned(qkv, cos, sin, heads)
    batch, length, _ = qkv.shape
    qkv = qkv.reshape(batch, length, 3, heads, -1)
    qk, value = qkv[:, :, :2], qkv[:, :, 2]
    turned = torch.stack([-qk[..., 1::2], qk[..., ::2]], dim=-1).flatten(-2)
    query, key = (qk * cos + turned * sin).transpose(1, 3).unbind(2)
    attended = F.scaled_dot_product_attention(query, key, value.transpose(1, 2))
    return attended.transpose(1, 2).reshape(batch, length, -1)


def turn_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` [..., heads, dim] turned to its positions, whose `cos` and `sin` [..., 1, dim] are those of `Rotary`."""
    if has_kernels(x):
        from omniflow.engine import kernels

        return kernels.turn_halves(x, cos, sin)
    return turned_halves(x, cos, sin)


def turned_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`turn_halves` in plain torch, which rounds otherwise than the kernel."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def gelu_linear(x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    """GELU (by tanh) of `linear`, an `nn.Linear` or what stands in for it."""
    if x.is_cuda and x.dtype != torch.float32 and isinstance(linear, nn.Linear):
        # cuBLAS does both in one call; its GELU is the one by tanh, to 4 digits.
        y: torch.Tensor = torch._addmm_activation(linear.bias, x.flatten(0, -2), linear.weight.T, use_gelu=True)
        return y.reshape(*x.shape[:-1], -1)
    return F.gelu(linear(x), approximate="tanh")


def gated(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of `both` [..., 2 * size], which has the gates first."""
    if has_kernels(both):
        from omniflow.engine import kernels

        return kernels.gated(both)
    return gated_up(both)


def gated_up(both: torch.Tensor) -> torch.Tensor:
    """`gated` in plain torch, which rounds otherwise than the kernel."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up
