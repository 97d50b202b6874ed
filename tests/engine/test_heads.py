from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3Config, Qwen3Model

from omniflow.engine.base import Sampling
from omniflow.engine.decoder import Decoder, DecoderShape
from omniflow.engine.heads import (
    STATE_SIZE,
    DepthHead,
    FrameHead,
    FrameStep,
    Knobs,
    ParallelHead,
    TokenHead,
    draw,
    frame_noise,
    undelayed,
)
from omniflow.engine.sampling import draw as draw_token
from omniflow.engine.sampling import generator_for

HIDDEN, CODES, VOCAB, FIRST_VOCAB = 32, 4, 20, 22
BEGIN, END = 18, 19
DELAYS = [0, 1, 2, 5]
SHAPE = DecoderShape(HIDDEN, 48, 2, 4, 2, 16, 64)


def knobs(*shape: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Knobs:
    return Knobs(torch.full(shape, temperature), torch.full(shape, top_k), torch.full(shape, top_p))


def qwen3(layers: int = SHAPE.num_hidden_layers) -> Qwen3Model:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=8,
        hidden_size=HIDDEN,
        intermediate_size=SHAPE.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=SHAPE.num_attention_heads,
        num_key_value_heads=SHAPE.num_key_value_heads,
        head_dim=SHAPE.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": SHAPE.rope_theta},
        initializer_range=0.3,
    )
    model = Qwen3Model(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5)
    return model


def depth_head() -> tuple[DepthHead, dict[str, torch.Tensor]]:
    weights = {f"p.model.{name}": weight for name, weight in qwen3().state_dict().items()}
    generator = torch.Generator().manual_seed(4)
    weights["first_head"], weights["first"] = (torch.randn(FIRST_VOCAB, HIDDEN, generator=generator) for _ in range(2))
    for number in range(CODES - 1):
        weights[f"p.lm_head.{number}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
        weights[f"p.model.codec_embedding.{number}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    head = DepthHead(
        SHAPE, num_codes=CODES, vocab_size=VOCAB, first_vocab_size=FIRST_VOCAB, stop_ids=[20], banned_ids=[21]
    )
    head.load(weights, "first_head", "first", "p.")
    return head, weights


def heads() -> list[FrameHead]:
    torch.manual_seed(5)
    return [
        TokenHead(HIDDEN, VOCAB, [END], [BEGIN]),
        ParallelHead(HIDDEN, VOCAB, DELAYS, BEGIN, END),
        depth_head()[0],
    ]


def first_state(batch: int) -> torch.Tensor:
    return torch.zeros(batch, STATE_SIZE, dtype=torch.long)


def step(head: FrameHead, hidden: torch.Tensor, seed: int = 0, **how: float) -> FrameStep:
    batch = len(hidden)
    noise = torch.from_numpy(frame_noise(seed, 0, batch, head.num_codes))
    with torch.inference_mode():
        return head(hidden, noise, knobs(batch, head.num_codes, **how), first_state(batch))


def test_a_decoder_is_qwen3() -> None:
    model, decoder = qwen3(), Decoder(SHAPE)
    decoder.load(model.state_dict(), "")
    inputs = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1))

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    with torch.inference_mode():
        expected = model(inputs_embeds=inputs[None]).last_hidden_state[0]
        assert (decoder(inputs, torch.arange(7), attend) - expected).abs().max() <= 2e-5
    assert expected.abs().max() > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_depth_is_a_decoder_over_the_codes_of_one_step(temperature: float) -> None:
    """The codes drawn are, for each position, those that a whole pass of Qwen3 over all of them gives."""
    head, weights = depth_head()
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
    got = step(head, hidden, temperature=temperature)
    embeddings = [weights["first"], *(weights[f"p.model.codec_embedding.{q}.weight"] for q in range(CODES - 1))]
    embedded = torch.stack([table[got.codes[:, q]] for q, table in enumerate(embeddings)], dim=1)
    with torch.inference_mode():
        outputs = qwen3()(inputs_embeds=torch.cat([hidden[:, None], embedded[:, :-1]], dim=1)).last_hidden_state
    noise = torch.from_numpy(frame_noise(0, 0, 5, CODES))
    matrices = [weights["first_head"], *(weights[f"p.lm_head.{q}.weight"] for q in range(CODES - 1))]
    for number, matrix in enumerate(matrices):
        logits = (hidden if number == 0 else outputs[:, number]) @ matrix.T
        if number == 0:
            logits[:, 21] = -torch.inf
        expected = draw(logits, noise[:, number], knobs(5, temperature=temperature))
        assert torch.equal(got.codes[:, number], expected)
    assert torch.allclose(got.feedback, embedded.sum(dim=1))
    assert torch.equal(got.stopped, got.codes[:, 0] == 20)
    assert len({tuple(row) for row in got.codes.tolist()}) == 5


@pytest.mark.parametrize("head", heads(), ids=lambda head: type(head).__name__)
def test_a_row_gets_the_same_alone_and_in_a_batch(head: FrameHead) -> None:
    hidden = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(6))
    noise = torch.from_numpy(frame_noise(9, 0, 6, head.num_codes))
    state = torch.tensor([[n, 0] for n in range(6)])
    with torch.inference_mode():
        together = head(hidden, noise, knobs(6, head.num_codes), state)
        for row in range(6):
            here = slice(row, row + 1)
            alone = head(hidden[here], noise[here], knobs(1, head.num_codes), state[here])
            assert all(torch.equal(one, many[here]) for one, many in zip(alone, together, strict=True))


@pytest.mark.parametrize("head", heads(), ids=lambda head: type(head).__name__)
def test_no_head_looks_at_a_value(head: FrameHead) -> None:
    """A tensor without values takes it to its end, which is what the capture of a graph needs."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = (
            torch.randn(3, HIDDEN),
            torch.rand(3, head.num_codes),
            knobs(3, head.num_codes),
            first_state(3),
        )
        given = head(mode.from_tensor(inputs[0]), *inputs[1:])
    assert given.codes.shape == (3, head.num_codes)
    assert given.feedback.shape == (3, HIDDEN)
    assert given.stopped.shape == (3,)
    assert given.state.shape == (3, STATE_SIZE)


def test_token_stops_and_never_gives_what_is_banned() -> None:
    head = TokenHead(2, 4, stop_ids=[1], banned_ids=[3])
    head.head.weight.data.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]))
    got = step(head, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), temperature=0.0)
    assert got.codes.tolist() == [[1], [2]]
    assert got.stopped.tolist() == [True, False]
    assert torch.equal(got.feedback, head.embedding.weight[[1, 2]])


def test_delayed_codes_begin_and_end_as_a_staircase() -> None:
    """The first codebook ends at step 4; the others follow at their distance, and what comes after is no speech."""
    head = ParallelHead(HIDDEN, VOCAB, DELAYS, BEGIN, END)
    plain, ending = (head._bias.clone() for _ in range(2))
    plain[0, END], ending[0, :END] = -torch.inf, -torch.inf
    state, rows = first_state(1), []
    for number in range(20):
        head._bias = ending if number == 4 else plain
        noise = torch.from_numpy(frame_noise(0, number, 1, len(DELAYS)))
        with torch.inference_mode():
            given = head(torch.randn(1, HIDDEN), noise, knobs(1, len(DELAYS)), state)
        if given.stopped:
            break
        rows.append(given.codes[0])
        state = given.state
    codes = torch.stack(rows)
    assert len(codes) == 4 + max(DELAYS) + 1
    for q, delay in enumerate(DELAYS):
        column = codes[:, q].tolist()
        assert column[:delay] == [BEGIN] * delay
        assert column[4 + delay :] == [END] * (len(codes) - 4 - delay)
        assert all(code < BEGIN for code in column[delay : 4 + delay])
    frames = undelayed(codes, DELAYS)
    assert frames[-1].tolist() == [END] * len(DELAYS)
    assert (frames[:-1] < BEGIN).all()
    assert len(frames) == 5


def test_noise_is_the_same_wherever_it_begins_and_never_0_or_1() -> None:
    whole = frame_noise(7, 0, 3000, 11)
    assert whole.dtype == np.float32
    assert np.array_equal(frame_noise(7, 2990, 10, 11), whole[2990:])
    assert 0 < whole.min() < 1e-3
    assert 1 - 1e-3 < whole.max() < 1
    assert abs(whole.mean() - 0.5) < 0.01
    assert not np.array_equal(frame_noise(8, 0, 3000, 11), whole)
    assert frame_noise(-1, 0, 1, 1) == frame_noise(2**64 - 1, 0, 1, 1)


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 2.0, "top_k": 9, "top_p": 0.8}]
)
def test_a_draw_has_the_chances_that_a_token_has(how: dict[str, float]) -> None:
    """Against the sampler of tokens, over 4,000 draws."""
    logits = 2 * torch.randn(12, generator=torch.Generator().manual_seed(8))
    noise = torch.from_numpy(frame_noise(1, 0, 4000, 1)[:, 0])
    ids = draw(logits.expand(4000, -1), noise, knobs(4000, **how))
    sampling = Sampling(**{"temperature": 1.0, "seed": 0, **how})
    generator = generator_for(sampling)
    expected = [draw_token(logits, sampling, generator) for _ in range(4000)]
    shares = [torch.bincount(torch.as_tensor(each), minlength=12) / 4000 for each in (ids, expected)]
    assert (shares[0] - shares[1]).abs().max() < 0.035
    assert ((shares[0] > 0) >= (shares[1] > 0.005)).all()
    assert ((shares[1] > 0) >= (shares[0] > 0.005)).all()


def test_rows_are_drawn_each_in_its_own_way() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0]).expand(4, -1)
    ways = Knobs(torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 1, 0, 0]), torch.tensor([1.0, 1.0, 0.1, 1.0]))
    assert draw(logits, torch.full((4,), 1 - 2**-24), ways).tolist() == [1, 1, 1, 0]
