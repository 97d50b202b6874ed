from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniflow.engine.base import Sampling
from omniflow.engine.sampling import NUCLEUS, draw, generator_for, logprob

PROBS = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = PROBS.log()


def drawn(logits: torch.Tensor, count: int = 2000, **sampling: float) -> Counter[int]:
    options = Sampling(seed=0, **{"temperature": 1.0, **sampling})
    generator = generator_for(options)
    return Counter(draw(logits, options, generator) for _ in range(count))


def test_greedy_takes_the_most_likely() -> None:
    assert set(drawn(LOGITS, 5, temperature=0.0)) == {1}


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


def test_logprob_is_that_of_the_model() -> None:
    assert logprob(LOGITS + 3, 3) == pytest.approx(float(PROBS[3].log()), abs=1e-5)
