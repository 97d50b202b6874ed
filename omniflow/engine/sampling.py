"""How a token is drawn from the logits of one row.

Every row is drawn alone, from its own logits in float32 and its own generator, and takes exactly one random number
unless it is greedy: what other requests do in the same step cannot change it.
"""

from __future__ import annotations

import torch

from omniflow.engine.base import Sampling

NUCLEUS = 256
"""Candidates that nearly every nucleus fits in; finding them costs 0.1 ms of 49152, sorting all of them 3.5 ms."""


def generator_for(sampling: Sampling) -> torch.Generator:
    """The generator of one request: the same for the same seed, else unpredictable."""
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


def draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from `logits`, float32 [vocab] on the CPU.

    Order of the filters as in OpenAI-compatible servers: temperature, then top_k, then top_p of what is left.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    probs = torch.softmax(logits / sampling.temperature, dim=-1)
    if sampling.top_k > 0:
        probs, ids = torch.topk(probs, min(sampling.top_k, len(probs)))
        probs = probs / probs.sum()
        return int(ids[_pick(_nucleus(probs, sampling.top_p), generator)])
    if sampling.top_p < 1:
        top, ids = torch.topk(probs, min(NUCLEUS, len(probs)))
        if top.sum() < sampling.top_p:
            top, ids = torch.sort(probs, descending=True, stable=True)
        return int(ids[_pick(_nucleus(top, sampling.top_p), generator)])
    return _pick(probs, generator)


def logprob(logits: torch.Tensor, token: int) -> float:
    """Natural logarithm of the probability that the model itself, before any filter, gives `token`."""
    return float(logits[token] - torch.logsumexp(logits, dim=-1))


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The head of descending `probs` that first reaches `top_p` in sum; at least one."""
    before = torch.cumsum(probs, dim=-1) - probs
    return probs[: max(1, int((before < top_p).sum()))]


def _pick(probs: torch.Tensor, generator: torch.Generator) -> int:
    """An index, drawn in proportion to `probs` (which need not sum to 1) by one uniform number."""
    sums = torch.cumsum(probs, dim=-1, dtype=torch.float64)
    point = torch.rand((), generator=generator, dtype=torch.float64) * sums[-1]
    # Rounding can put the point on the very end, which is beyond the last index.
    return min(int(torch.searchsorted(sums, point, right=True)), len(probs) - 1)
