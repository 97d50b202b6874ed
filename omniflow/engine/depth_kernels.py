"""Kernels of the frame heads, in Triton: what stands between the matrices of a depth head's small decoder, and a draw.

A step of speech has some 15 passes of 5 layers one after the other. Without these it is 2,000 kernels of 3 us each, of
which the matrices are 300. Arithmetic is float32; what is stored has its inputs' type. A row does not depend on others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def attend(
    qkv: torch.Tensor,
    norms: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    eps: float,
) -> torch.Tensor:
    """Causal attention of the inputs at `start` and on over all so far; their keys and values are stored.

    `qkv` [batch, count, (heads + 2 * kv_heads) * dim]; `norms` [heads + kv_heads, dim] are the weights of the norms of
    queries and keys; `cos` and `sin` [count, 1, dim] as `Rotary` has them; `keys` and `values` [batch, kv_heads,
    length, dim]. Gives [batch, count, heads * dim]. `dim` is a power of 2.
    """
    batch, count, _ = qkv.shape
    kv_heads, length, dim = keys.shape[1:]
    heads = norms.shape[0] - kv_heads
    qkv = qkv.contiguous()
    out = qkv.new_empty(batch, count, heads * dim)
    sizes = (heads, kv_heads, heads // kv_heads, dim, triton.next_power_of_2(length))
    _attend[(batch, kv_heads)](
        qkv, norms, cos, sin, keys, values, out, start, eps, dim**-0.5, length, count, *sizes, num_warps=4
    )
    return out


def draw_ordered(
    ordered: torch.Tensor,
    ids: torch.Tensor,
    noise: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """One of `ids` int64 [rows, vocab] from each row of `ordered` float32, both likeliest first; int64 [rows].

    The others are those of `heads._Ways`, [rows] each, and need not lie close together.
    """
    rows, vocab = ordered.shape
    found = torch.empty(rows, dtype=torch.int64, device=ordered.device)
    strides = (noise.stride(0), temperature.stride(0), top_k.stride(0), top_p.stride(0))
    _draw[(rows,)](
        ordered,
        ids,
        noise,
        temperature,
        top_k,
        top_p,
        found,
        vocab,
        *strides,
        triton.next_power_of_2(vocab),
        num_warps=8,
    )
    return found


@triton.jit(do_not_specialize=["start"])  # type: ignore[untyped-decorator]
def _attend(
    qkv: tl.tensor,
    norms: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    start: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    length: tl.tensor,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    LENGTH: tl.constexpr,
) -> None:
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, DIM)
    other = (at + DIM // 2) % DIM
    width = (HEADS + 2 * KV_HEADS) * DIM
    stored = (row * KV_HEADS + kv_head) * length * DIM
    for place in tl.static_range(COUNT):
        source = qkv + (row * COUNT + place) * width
        head = HEADS + kv_head
        key = _turned(
            source + head * DIM, norms + head * DIM, cos + place * DIM, sin + place * DIM, at, other, eps, DIM
        )
        tl.store(keys + stored + (start + place) * DIM + at, key)
        value = tl.load(source + (HEADS + KV_HEADS + kv_head) * DIM + at)
        tl.store(values + stored + (start + place) * DIM + at, value)
    tl.debug_barrier()  # what was stored is read by other threads
    places = tl.arange(0, LENGTH)
    tile = stored + places[:, None] * DIM + at[None, :]
    there = places < start + COUNT
    all_keys = tl.load(keys + tile, mask=there[:, None], other=0.0).to(tl.float32)
    all_values = tl.load(values + tile, mask=there[:, None], other=0.0).to(tl.float32)
    for place in tl.static_range(COUNT):
        for member in tl.static_range(GROUP):
            head = kv_head * GROUP + member
            source = qkv + (row * COUNT + place) * width + head * DIM
            query = _turned(source, norms + head * DIM, cos + place * DIM, sin + place * DIM, at, other, eps, DIM)
            scores = tl.sum(all_keys * query[None, :], axis=1) * scale
            scores = tl.where(places <= start + place, scores, float("-inf"))
            weights = tl.exp(scores - tl.max(scores, axis=0))
            attended = tl.sum(all_values * weights[:, None], axis=0) / tl.sum(weights, axis=0)
            tl.store(out + (row * COUNT + place) * HEADS * DIM + head * DIM + at, attended)


@triton.jit  # type: ignore[untyped-decorator]
def _turned(
    source: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    at: tl.tensor,
    other: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
) -> tl.tensor:
    """A head's query or key, normed and turned."""
    one, two = tl.load(source + at).to(tl.float32), tl.load(source + other).to(tl.float32)
    norm = 1.0 / tl.sqrt(tl.sum(one * one, axis=0) / DIM + eps)
    one = one * norm * tl.load(weight + at).to(tl.float32)
    two = two * norm * tl.load(weight + other).to(tl.float32)
    return one * tl.load(cos + at).to(tl.float32) + two * tl.load(sin + at).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _draw(
    ordered: tl.tensor,
    ids: tl.tensor,
    noise: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    found: tl.tensor,
    vocab: tl.tensor,
    noise_stride: tl.tensor,
    temperature_stride: tl.tensor,
    top_k_stride: tl.tensor,
    top_p_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, BLOCK)
    kept = (rank < vocab) & (rank < tl.load(top_k + row * top_k_stride))
    logits = tl.load(ordered + row * vocab + rank, mask=rank < vocab, other=float("-inf"))
    logits = tl.where(kept, logits / tl.load(temperature + row * temperature_stride), float("-inf"))
    raised = tl.exp(logits - tl.max(logits, axis=0))
    probs = raised / tl.sum(raised, axis=0)
    before = tl.cumsum(probs, axis=0) - probs
    probs = tl.where(before < tl.load(top_p + row * top_p_stride), probs, 0.0)
    sums = tl.cumsum(probs, axis=0)
    total = tl.sum(tl.where(rank == vocab - 1, sums, 0.0), axis=0)
    passed = (sums <= tl.load(noise + row * noise_stride) * total) & (rank < vocab)
    index = tl.sum(passed.to(tl.int32), axis=0)
    tl.store(found + row, tl.load(ids + row * vocab + index))
