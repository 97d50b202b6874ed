"""The kernels against plain torch on the CPU. They need a GPU, and Triton."""

from __future__ import annotations

import pytest
import torch

from actors.ming.dit import _Rotary
from omniflow.engine import fused
from omniflow.engine.decoder import DecoderShape
from omniflow.engine.slot_cache import SlotCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and fused.HAS_TRITON), reason="needs a GPU, and Triton"),
]
KINDS = [pytest.param(torch.float32, 2e-6, id="float32"), pytest.param(torch.bfloat16, 1e-2, id="bfloat16")]


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def near(got: torch.Tensor, want: torch.Tensor, kind: torch.dtype, tolerance: float) -> bool:
    assert got.is_cuda and got.dtype == kind and got.shape == want.shape
    return bool((got.cpu().float() - want).norm() <= tolerance * want.norm())


@pytest.mark.parametrize(("kind", "tolerance"), KINDS)
@pytest.mark.parametrize("size", [48, 1024, 1152])
def test_a_sum_and_its_norm(kind: torch.dtype, tolerance: float, size: int, random: torch.Generator) -> None:
    x, delta = torch.randn(2, 37, 5, size, generator=random).to(kind)
    weight = torch.randn(size, generator=random).to(kind)
    got = fused.add_norm(x.cuda(), delta.cuda(), weight.cuda(), 1e-6)
    want = fused.add_norm(x.float(), delta.float(), weight.float(), 1e-6)
    assert all(near(*each, kind, tolerance) for each in zip(got, want, strict=True))


@pytest.mark.parametrize(("kind", "tolerance"), KINDS)
@pytest.mark.parametrize(("heads", "hidden", "length"), [(4, 48, 37), (16, 1024, 37), (16, 1152, 5)])
def test_attention_with_turned_neighbours(
    kind: torch.dtype, tolerance: float, heads: int, hidden: int, length: int, random: torch.Generator
) -> None:
    qkv, rotary = torch.randn(6, length, 3 * hidden, generator=random).to(kind), _Rotary(length, hidden // heads)
    cos, sin = rotary.cos.to(kind), rotary.sin.to(kind)
    got = fused.attend_turned(qkv.cuda(), cos.cuda(), sin.cuda(), heads)
    assert near(got, fused.attend_turned(qkv.float(), cos.float(), sin.float(), heads), kind, tolerance)


@pytest.mark.parametrize(("kind", "tolerance"), KINDS)
def test_gates_gelu_and_turned_halves(kind: torch.dtype, tolerance: float, random: torch.Generator) -> None:
    both = torch.randn(3, 1, 2 * 4864, generator=random).to(kind)
    assert near(fused.gated(both.cuda()), fused.gated(both.float()), kind, tolerance)
    linear = torch.nn.Linear(64, 96).to(kind).requires_grad_(False)
    x = torch.randn(5, 7, 64, generator=random).to(kind)
    want = fused.gelu_linear(x.float(), linear.float())  # bfloat16's is by another way
    assert near(fused.gelu_linear(x.cuda(), linear.cuda().to(kind)), want, kind, tolerance)
    heads = torch.randn(2, 5, 18, 64, generator=random).to(kind)
    cos, sin = torch.randn(2, 2, 5, 1, 64, generator=random).to(kind)
    want = fused.turn_halves(heads[..., :16, :].float(), cos.float(), sin.float())
    assert near(fused.turn_halves(heads.cuda()[..., :16, :], cos.cuda(), sin.cuda()), want, kind, tolerance)


@pytest.mark.parametrize(("kind", "tolerance"), KINDS)
@pytest.mark.parametrize(
    ("count", "first", "window", "starts"),
    [
        (1, 0, None, [5, 70, 200, 0]),
        (18, 2, None, [0, 16, 150, 4]),
        (18, 2, 40, [0, 16, 150, 64]),
        (18, 0, 3, [0, 1, 2, 130]),
    ],
)
def test_attention_over_slots(
    kind: torch.dtype,
    tolerance: float,
    count: int,
    first: int,
    window: int | None,
    starts: list[int],
    random: torch.Generator,
) -> None:
    shape = DecoderShape(14 * 64, 100, 1, 14, 2, 64, 512)
    held = torch.randn(2, 1, 7, 2, 240, 64, generator=random).to(kind)
    qk, value = (torch.randn(4, count, size, 64, generator=random).to(kind) for size in (16, 18))
    slots, positions = torch.tensor([3, 1, 0, 5]), torch.tensor(starts)[:, None] + torch.arange(count)
    found = []
    for device, own in (("cuda", kind), ("cpu", torch.float32)):
        cache = SlotCache(shape, 6, 240, dtype=own, device=torch.device(device))
        assert cache.has_kernel == (device == "cuda")
        cache.keys.copy_(held[0])
        cache.values.copy_(held[1])
        sight = cache.sight(slots.to(device), positions.to(device), length=240, first=first, windows=[window])
        q, v = qk.to(device, own), value.to(device, own)
        attended = cache.attend(0, q[..., :14, :], q[..., 14:, :], v[..., 16:, :], sight)
        found.append((attended, cache.keys, cache.values))
    assert all(near(got, want, kind, tolerance) for got, want in zip(*found, strict=True))
