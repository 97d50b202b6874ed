from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniflow.engine.base import Sampling
from omniflow.engine.sampling import NUCLEUS, Sampler, draw, generator_for, token_logprob
from omniflow.errors import ProtocolError

PROBS = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = PROBS.log()


def drawn(logits: torch.Tensor, count: int = 2000, **sampling: float) -> Counter[int]:
    options = Sampling(seed=0, **{"temperature": 1.0, **sampling})
    generator = generator_for(options)
    return Counter(draw(logits, options, generator) for _ in range(count))


def test_greedy_takes_the_most_likely() -> None:
    assert set(drawn(LOGITS, 5, temperature=0.0)) == {1}


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 2}])
@pytest.mark.parametrize("temperature", [1e-38, 1e-6])
def test_a_temperature_next_to_0_is_greedy(temperature: float, filters: dict[str, float]) -> None:
    assert set(drawn(torch.tensor([-9.0, 50.0, 49.9, 1.0]), 5, temperature=temperature, **filters)) == {1}


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_logits_that_are_not_finite_nothing_is_drawn(temperature: float, broken: float) -> None:
    logits = torch.tensor([0.0, broken, 1.0])
    for each in (logits, torch.full((3,), -torch.inf)):
        with pytest.raises(ProtocolError, match="not finite"):
            drawn(each, 1, temperature=temperature)


def test_frequencies_are_the_probabilities() -> None:
    counts = drawn(LOGITS)
    for token, probability in enumerate(PROBS):
        assert counts[token] / 2000 == pytest.approx(float(probability), abs=0.04)


def test_temperature_sharpens_and_flattens() -> None:
    assert drawn(LOGITS, temperature=0.3)[1] > drawn(LOGITS)[1] > drawn(LOGITS, temperature=3.0)[1]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.01}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 0.7}, {1, 3, 4}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # 0.4 of the 0.65 that top_k leaves is 0.62
    ],
)
def test_filters_keep_the_head_of_the_distribution(filters: dict[str, float], kept: set[int]) -> None:
    assert set(drawn(LOGITS, **filters)) == kept


def test_a_nucleus_wider_than_the_shortcut() -> None:
    flat = torch.zeros(4 * NUCLEUS)
    seen = set(drawn(flat, 3000, top_p=0.5))
    assert NUCLEUS < len(seen) <= 2 * NUCLEUS + 1


def test_the_same_seed_draws_the_same_and_another_seed_does_not() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(5))

    def tokens(seed: int | None) -> list[int]:
        options = Sampling(temperature=1.0, seed=seed)
        generator = generator_for(options)
        return [draw(logits, options, generator) for _ in range(20)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(None) != tokens(None)


@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.01, 5),
    top_p=st.floats(0.001, 1),
    top_k=st.integers(0, 20),
    size=st.integers(1, 20),
)
def test_one_random_number_a_token_and_always_a_token(
    seed: int, temperature: float, top_p: float, top_k: int, size: int
) -> None:
    """So a draw never shifts those that follow, whatever the filters are."""
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    options = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    generator, reference = generator_for(options), generator_for(options)
    assert 0 <= draw(logits, options, generator) < size
    torch.rand((), generator=reference, dtype=torch.float64)
    assert torch.equal(generator.get_state(), reference.get_state())


def test_a_point_on_the_very_end_is_the_last_token_that_may_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(1.0, dtype=torch.float64))
    logits = torch.tensor([0.0, 1.0, -torch.inf, -torch.inf])
    assert draw(logits, Sampling(temperature=1.0), generator_for(Sampling())) == 1


def by_the_book(
    logits: torch.Tensor, generated: list[int], sampling: Sampling, prompt: tuple[int, ...] = ()
) -> torch.Tensor:
    """OpenAI's definition, token by token: mu[j] - c[j] * frequency - (c[j] > 0) * presence; then CTRL's (Keskar et
    al. 2019) with the sign that Hugging Face has put right; then the bias.
    """
    changed, bias = [], dict(sampling.logit_bias)
    for j, mu in enumerate(logits):
        penalized = float(mu) - generated.count(j) * sampling.frequency_penalty
        penalized -= (j in generated) * sampling.presence_penalty
        if j in (*prompt, *generated):
            penalized *= sampling.repetition_penalty ** (1 if penalized < 0 else -1)
        changed.append(penalized + bias.get(j, 0.0))
    return torch.tensor(changed)


@given(
    seed=st.integers(0, 2**32),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
    repetition=st.just(1.0) | st.floats(0.1, 10),
    prompt=st.lists(st.integers(0, 11), max_size=8).map(tuple),
    bias=st.dictionaries(st.integers(0, 11), st.floats(-100, 100)),
)
def test_penalties_and_biases_are_those_of_the_book(
    seed: int, frequency: float, presence: float, repetition: float, prompt: tuple[int, ...], bias: dict[int, float]
) -> None:
    randoms = torch.Generator().manual_seed(seed)
    sampling = Sampling(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
    )
    sampler, generated = Sampler(sampling, prompt), list[int]()
    for _ in range(12):
        logits = torch.randn(12, generator=randoms) * 3
        before = logits.clone()
        expected = by_the_book(logits, generated, sampling, prompt)
        token = sampler.next(logits)
        assert float(expected[token]) == pytest.approx(float(expected.max()), abs=1e-3)
        assert torch.equal(logits, before)
        generated.append(token)


def test_a_sampler_without_extras_draws_the_same_bits() -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=4)
    sampler, generator = Sampler(sampling), generator_for(sampling)
    randoms = torch.Generator().manual_seed(1)
    for _ in range(50):
        logits = torch.randn(200, generator=randoms)
        assert sampler.next(logits) == draw(logits, sampling, generator)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "top_p": 0.3}]
)
def test_a_mask_is_never_broken_and_its_only_token_is_drawn(sampling: dict[str, float]) -> None:
    sampler = Sampler(Sampling(seed=0, logit_bias=((7, 100.0),), **sampling))
    allowed = torch.zeros(50, dtype=torch.bool)
    allowed[[3, 20, 31]] = True
    for _ in range(100):
        assert sampler.next(torch.randn(50), allowed) in (3, 20, 31)
    only = torch.zeros(50, dtype=torch.bool)
    only[49] = True
    assert sampler.next(torch.full((50,), 5.0), only) == 49


def test_biases_of_100_force_and_forbid() -> None:
    logits = torch.randn(50)
    wanted = Sampler(Sampling(temperature=1.0, logit_bias=((9, 100.0),)))
    assert {wanted.next(logits) for _ in range(50)} == {9}
    likeliest = int(logits.argmax())
    unwanted = Sampler(Sampling(temperature=1.0, logit_bias=((likeliest, -100.0),)))
    assert likeliest not in {unwanted.next(logits) for _ in range(200)}


def test_logprobs_are_those_of_the_model() -> None:
    found = token_logprob(LOGITS + 3, 3, 2)
    assert found.id == 3
    assert found.logprob == pytest.approx(float(PROBS[3].log()), abs=1e-5)
    assert [token for token, _ in found.top] == [1, 3]
    assert [value for _, value in found.top] == pytest.approx([float(PROBS[1].log()), float(PROBS[3].log())], abs=1e-5)
    assert token_logprob(LOGITS, 0, 0).top == ()
    assert len(token_logprob(LOGITS, 0, 20).top) == len(LOGITS)
