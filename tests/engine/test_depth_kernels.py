"""The kernels of frame heads give what plain torch gives; where there is no GPU, Triton's interpreter can run them:
`TRITON_INTERPRET=1 pytest tests/engine/test_depth_kernels.py`, in an environment that has Triton.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from omniflow.engine import heads
from omniflow.engine.decoder import DecoderShape, Rotary, attend_last
from omniflow.engine.heads import DepthHead, FrameHead, Knobs, ParallelHead, TokenHead

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="there is no GPU"),
]
SHAPE = DecoderShape(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=32,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_stores_keys_and_values_and_is_causal(dtype: torch.dtype) -> None:
    from omniflow.engine import depth_kernels

    torch.manual_seed(0)
    rotary, norms = Rotary(SHAPE).to(DEVICE), torch.randn(6, 16, device=DEVICE)
    ours, theirs = (torch.full((2, 3, 2, 9, 16), torch.nan, device=DEVICE) for _ in range(2))
    start = 0
    for count in (2, 1, 1):
        qkv = torch.randn(3, count, 8 * 16, device=DEVICE).to(dtype).float()
        cos, sin = (each[start : start + count] for each in (rotary.cos, rotary.sin))
        stored = [each.to(dtype) for each in ours]
        got = depth_kernels.attend(qkv.to(dtype), norms.to(dtype), cos.to(dtype), sin.to(dtype), *stored, start, 1e-6)
        ours = torch.stack(stored).float()
        qk, value = qkv.unflatten(-1, (8, 16)).split([6, 2], dim=-2)
        qk = F.rms_norm(qk, (16,), None, 1e-6) * norms
        qk = qk * cos + qk.roll(8, -1) * sin
        for kept, new in zip(theirs, (qk[..., 4:, :], value), strict=True):
            kept[:, :, start : start + count] = new.transpose(1, 2)
        start += count
        expected = attend_last(qk[..., :4, :], *(each[:, :, :start] for each in theirs)).flatten(-2)
        bound = 1e-5 if dtype == torch.float32 else 0.05
        assert torch.allclose(got.float(), expected, atol=bound)
        assert torch.allclose(ours[..., :start, :], theirs[..., :start, :], atol=bound)


def test_a_draw_is_that_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)

    def rand(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator).to(DEVICE)

    logits = 20 * rand(200, 300) - 10
    logits[:, 5] = logits[:, 9]
    top_k = (60 * rand(200)).long()
    knobs = Knobs(rand(200) * (rand(200) > 0.3), top_k, 0.99 * rand(200) + 0.01)
    noise = rand(200)
    drawn = []
    for has_kernels in (True, False):
        monkeypatch.setattr(heads, "has_kernels", lambda tensor, has=has_kernels: has)
        drawn.append(heads.draw(logits, noise, knobs))
    assert (drawn[0] == drawn[1]).sum() >= 199, "all but a draw that sums of another order decide otherwise"


@pytest.mark.parametrize("kind", ["depth", "parallel", "token"])
def test_heads_give_the_same_codes(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    torch.manual_seed(0)
    made: dict[str, FrameHead] = {
        "depth": DepthHead(SHAPE, num_codes=6, vocab_size=40, first_vocab_size=50, stop_ids=[3], banned_ids=[4]),
        "parallel": ParallelHead(64, 40, [0, 1, 2], 38, 39),
        "token": TokenHead(64, 40, [3]),
    }
    head = made[kind].to(DEVICE)
    for parameter in head.parameters():
        parameter.data.normal_(0, 0.3)
    size = (4, head.num_codes)
    knobs = Knobs(
        torch.full(size, 0.8, device=DEVICE),
        torch.full(size, 20, device=DEVICE),
        torch.full(size, 0.9, device=DEVICE),
    )
    state = torch.zeros(4, heads.STATE_SIZE, dtype=torch.int64, device=DEVICE)
    equal = 0
    for _ in range(10):
        hidden, noise = torch.randn(4, 64, device=DEVICE), torch.rand(size, device=DEVICE)
        steps = []
        for has_kernels in (True, False):
            monkeypatch.setattr(heads, "has_kernels", lambda tensor, has=has_kernels: has)
            with torch.inference_mode():
                steps.append(head(hidden, noise, knobs, state))
        equal += int((steps[0].codes == steps[1].codes).all(dim=1).sum())
        state = steps[1].state
    assert equal >= 38, "of 40 rows, all but a near tie or two"
