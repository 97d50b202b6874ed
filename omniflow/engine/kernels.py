"""The kernels of `fused.py` and of `slot_cache.py`, in Triton.

Sums, products and exponentials are float32; what is stored has the type of the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def add_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fused.add_norm`."""
    x, delta = x.contiguous(), delta.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    _add_norm[(x.numel() // size,)](x, delta, weight, total, normed, size, eps, triton.next_power_of_2(size))
    return total, normed


def attend_turned(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    """See `fused.attend_turned`."""
    batch, length, width = qkv.shape
    hidden = width // 3
    dim = hidden // heads
    qkv, out = qkv.contiguous(), qkv.new_empty(batch, length, hidden)
    # A product of tiles has 16 rows at least.
    sizes = (max(16, triton.next_power_of_2(length)), dim, max(16, triton.next_power_of_2(dim)))
    _attend_turned[(batch, heads)](qkv, cos, sin, out, length, hidden, dim**-0.5, *sizes, _precision(qkv.dtype))
    return out


def gated(both: torch.Tensor) -> torch.Tensor:
    """See `fused.gated`."""
    both = both.contiguous()
    size = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], size)
    _gated[(out.numel() // size, triton.cdiv(size, _BLOCK))](both, out, size, _BLOCK)
    return out


def turn_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `fused.turn_halves`. `x` is whole within each input: a slice of its heads will do."""
    heads, dim = x.shape[-2:]
    out = x.new_empty(x.shape)
    cos, sin = cos.contiguous(), sin.contiguous()
    sizes = (triton.next_power_of_2(heads), triton.next_power_of_2(dim // 2))
    _turn_halves[(out.numel() // (heads * dim),)](
        x, cos, sin, out, x.stride(-3), cos.numel() // dim, heads, dim, *sizes
    )
    return out


def attend_slots(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    first: int,
    window: int | None,
) -> torch.Tensor:
    """Attention of the next inputs [batch, n, heads, dim] of streams, from positions `starts` [batch] on, over what is
    in their `slots` of `keys` and `values` [slots, groups, positions, dim], and over themselves; keeps `key` and
    `value`.
    """
    batch, count, heads, dim = query.shape
    groups, room = key.shape[2], keys.shape[2]
    each = heads // groups
    out = query.new_empty(batch, count, heads, dim)
    rows = min(_MOST_ROWS, max(16, triton.next_power_of_2(count * each)))
    grid = (batch, groups, triton.cdiv(count * each, rows))
    strides = (query.stride(1), key.stride(1), value.stride(1))
    bounds = (count, room, first, room if window is None else window, dim**-0.5)
    sizes = (groups, each, dim, rows, max(16, triton.next_power_of_2(count)), _SEEN, _precision(query.dtype))
    _attend_slots[grid](query, key, value, keys, values, slots, starts, out, *strides, *bounds, *sizes)
    return out


_BLOCK = 1024
_MOST_ROWS = 32
_SEEN = 64
"""Positions that are looked at together."""


def _precision(dtype: torch.dtype) -> str:
    """Of the products of tiles: as those of torch."""
    is_exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "ieee" if is_exact else "tf32"


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    kind = total.dtype.element_ty
    both = tl.load(x + row + at, inside, 0).to(tl.float32) + tl.load(delta + row + at, inside, 0).to(tl.float32)
    both = both.to(kind)
    tl.store(total + row + at, both, inside)
    both = both.to(tl.float32)
    scale = tl.rsqrt(tl.sum(both * both) / size + eps)
    scaled = both * scale * tl.load(weight + at, inside, 0).to(tl.float32)
    tl.store(normed + row + at, scaled.to(kind), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_turned(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    length: tl.tensor,
    hidden: tl.tensor,
    scale: tl.tensor,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One head of one batch row, all in registers. Whole rows are loaded: single features take four times as long."""
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = out.dtype.element_ty
    rows, features = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (features < DIM)[None, :]
    turns = rows[:, None] * DIM + features[None, :]
    c, _ = tl.split(tl.reshape(tl.load(cos + turns, inside, 0).to(tl.float32), (ROWS, WIDTH // 2, 2)))
    s, _ = tl.split(tl.reshape(tl.load(sin + turns, inside, 0).to(tl.float32), (ROWS, WIDTH // 2, 2)))
    at = qkv + batch * length * 3 * hidden + head * DIM + rows[:, None] * (3 * hidden) + features[None, :]
    query = _turned(tl.load(at, inside, 0), c, s, ROWS, WIDTH)
    key = _turned(tl.load(at + hidden, inside, 0), c, s, ROWS, WIDTH)
    value = tl.load(at + 2 * hidden, inside, 0)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    scores = tl.where((rows < length)[None, :], scores * scale, float("-inf"))
    scores = tl.exp(scores - tl.max(scores, 1)[:, None])
    shares = (scores / tl.sum(scores, 1)[:, None]).to(kind)
    attended = tl.dot(shares, value, input_precision=PRECISION).to(kind)
    to = out + batch * length * hidden + head * DIM + rows[:, None] * hidden + features[None, :]
    tl.store(to, attended, inside)


@triton.jit  # type: ignore[untyped-decorator]
def _turned(x: tl.tensor, c: tl.tensor, s: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Neighbouring features turned by the angles of `c` and `s` [ROWS, WIDTH / 2]."""
    x0, x1 = tl.split(tl.reshape(x.to(tl.float32), (ROWS, WIDTH // 2, 2)))
    turned = tl.join((x0 * c - x1 * s).to(x.dtype), (x1 * c + x0 * s).to(x.dtype))
    return tl.reshape(turned, (ROWS, WIDTH))


@triton.jit  # type: ignore[untyped-decorator]
def _gated(both: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(both + row * 2 * size + at, inside, 0).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + at, inside, 0).to(tl.float32)
    # As torch does it: the gate is rounded to the type before it is multiplied.
    kind = out.dtype.element_ty
    opened = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + row * size + at, (opened * up).to(kind), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _turn_halves(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    num_turns: tl.tensor,
    heads: tl.tensor,
    dim: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    half = dim // 2
    head, at = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    inside = (head < heads)[:, None] & (at < half)[None, :]
    turn = (row % num_turns) * dim + at
    c0, s0 = tl.load(cos + turn, at < half, 0).to(tl.float32), tl.load(sin + turn, at < half, 0).to(tl.float32)
    c1 = tl.load(cos + turn + half, at < half, 0).to(tl.float32)
    s1 = tl.load(sin + turn + half, at < half, 0).to(tl.float32)
    own = head[:, None] * dim + at[None, :]
    x0 = tl.load(x + row * stride + own, inside, 0).to(tl.float32)
    x1 = tl.load(x + row * stride + own + half, inside, 0).to(tl.float32)
    kind = out.dtype.element_ty
    to = out + row * heads * dim + own
    tl.store(to, (x0 * c0[None, :] + x1 * s0[None, :]).to(kind), inside)
    tl.store(to + half, (x1 * c1[None, :] + x0 * s1[None, :]).to(kind), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_slots(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    count: tl.tensor,
    room: tl.tensor,
    first: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    NEW: tl.constexpr,
    SEEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Some rows, a row being an input and one of the heads that share keys: over the slot, then over the inputs."""
    batch, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, start = tl.load(slots + batch), tl.load(starts + batch)
    kind = out.dtype.element_ty
    rows, dims = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    own, head = rows // EACH, group * EACH + rows % EACH
    is_row = (own < count)[:, None]
    place = (start + own)[:, None]
    asked = tl.load(query + (batch * count + own)[:, None] * query_stride + head[:, None] * DIM + dims, is_row, 0)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    stored = (slot * GROUPS + group) * room * DIM
    low = tl.maximum(start - window + 1, 0) // SEEN * SEEN
    for begin in range(low, start, SEEN):
        seen = begin + tl.arange(0, SEEN)
        at = stored + seen[:, None] * DIM + dims
        held = tl.load(keys + at, (seen < start)[:, None], 0)
        given = tl.load(values + at, (seen < start)[:, None], 0)
        sees = (seen < start) & (seen >= first) & (seen > place - window)
        scores = tl.dot(asked, tl.trans(held), input_precision=PRECISION) * scale
        scores = tl.where(sees, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shares, less = tl.exp(scores - level[:, None]), tl.exp(most - level)
        total = total * less + tl.sum(shares, 1)
        sums = sums * less[:, None] + tl.dot(shares.to(kind), given, input_precision=PRECISION)
        most = higher
    new = tl.arange(0, NEW)
    is_new, places = (new < count)[:, None], start + new
    held = tl.load(key + (batch * count + new)[:, None] * key_stride + group * DIM + dims, is_new, 0)
    given = tl.load(value + (batch * count + new)[:, None] * value_stride + group * DIM + dims, is_new, 0)
    at = stored + places[:, None] * DIM + dims
    is_kept = is_new & (places < room)[:, None] & (tl.program_id(2) == 0)
    tl.store(keys + at, held, is_kept)
    tl.store(values + at, given, is_kept)
    sees = (new <= own[:, None]) & ((places >= first) | (new == own[:, None])) & (places > place - window)
    scores = tl.dot(asked, tl.trans(held), input_precision=PRECISION) * scale
    scores = tl.where(sees, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    shares, less = tl.exp(scores - higher[:, None]), tl.exp(most - higher)
    total = total * less + tl.sum(shares, 1)
    sums = sums * less[:, None] + tl.dot(shares.to(kind), given, input_precision=PRECISION)
    to = out + (batch * count + own)[:, None] * (GROUPS * EACH * DIM) + head[:, None] * DIM + dims
    tl.store(to, (sums / total[:, None]).to(kind), is_row)
