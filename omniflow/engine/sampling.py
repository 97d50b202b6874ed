"""How a token is drawn from the logits of one row.

Every row is drawn alone, from its own logits in float32 and its own generator, and takes exactly one random number
unless it is greedy: what other requests do in the same step cannot change it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from omniflow.engine.base import EngineRequest, Sampling
from omniflow.errors import ProtocolError
from omniflow.media import TokenLogprob

GREEDY = 1e-6
"""A temperature below it is 0, as SGLang has it: logits that are divided by less are infinite."""
LEAST_TOP_P = 1e-6
"""Of far less float32 makes 0, of which no kernel can draw. The likeliest of a million tokens has as much."""
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

    Order of the filters as in OpenAI-compatible servers: temperature, then top_k, then top_p of what is left. Raises
    ProtocolError where the likeliest is not finite: of such logits no token can be drawn.
    """
    if not logits.max().isfinite():
        raise ProtocolError("the model gave logits that are not finite")
    if sampling.temperature < GREEDY:
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


class Sampler:
    """Draws the tokens of one request, one after the other, each under the penalties for those before it.

    `prompt` are the tokens that it has read. A request that asks for neither biases, penalties nor a mask costs what
    `draw` costs, and gets the same bits.
    """

    def __init__(self, sampling: Sampling, prompt: Iterable[int] = ()) -> None:
        self._sampling = sampling
        self._generator = generator_for(sampling)
        self._biased = torch.tensor([token for token, _ in sampling.logit_bias], dtype=torch.long)
        self._bias = torch.tensor([bias for _, bias in sampling.logit_bias], dtype=torch.float32)
        self._penalized = bool(sampling.frequency_penalty or sampling.presence_penalty)
        self._counts: Counter[int] = Counter()
        self._repetition = sampling.repetition_penalty
        self._met = torch.tensor(sorted(set(prompt)) if self._repetition != 1 else [], dtype=torch.long)
        """Tokens that were there before, each once: of the prompt, and of what was generated."""

    def next(self, logits: torch.Tensor, allowed: torch.Tensor | None = None) -> int:
        """The next token from `logits`, float32 [vocab] on the CPU, which stay as they are.

        `allowed`, bool [vocab], has at least one token that may be drawn; None: all of them.
        """
        token = draw(self._changed(logits, allowed), self._sampling, self._generator)
        if self._penalized:
            self._counts[token] += 1
        if self._repetition != 1 and token not in self._met:
            self._met = torch.cat([self._met, torch.tensor([token])])
        return token

    def _changed(self, logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        if self._counts:
            tokens = torch.tensor(list(self._counts))
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            loss = counts * self._sampling.frequency_penalty + self._sampling.presence_penalty
            logits = logits.index_add(0, tokens, loss, alpha=-1)
        if len(self._met):
            found = logits[self._met]
            less = torch.where(found < 0, found * self._repetition, found / self._repetition)
            logits = logits.index_copy(0, self._met, less)
        if len(self._biased):
            logits = logits.index_add(0, self._biased, self._bias)
        return logits if allowed is None else torch.where(allowed, logits, -torch.inf)


def tokens_of(request: EngineRequest) -> Iterator[int]:
    """The tokens of its prompt, without those in whose place embeddings stand."""
    embedded = set(request.positions)
    yield from (token for place, token in enumerate(request.ids) if place not in embedded)


def token_logprob(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    """How likely the model itself, before any filter, finds `token`, and which `num_top` tokens it finds likeliest."""
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = torch.topk(logprobs, min(num_top, len(logprobs)))
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The head of descending `probs` that first reaches `top_p` in sum; at least one."""
    before = torch.cumsum(probs, dim=-1) - probs
    return probs[: max(1, int((before < top_p).sum()))]


def _pick(probs: torch.Tensor, generator: torch.Generator) -> int:
    """An index, drawn in proportion to `probs` (which need not sum to 1) by one uniform number."""
    sums = torch.cumsum(probs, dim=-1, dtype=torch.float64)
    point = torch.rand((), generator=generator, dtype=torch.float64) * sums[-1]
    index = int(torch.searchsorted(sums, point, right=True))
    # Rounding can put the point on the very end: that is the last index whose probability is not 0.
    return index if index < len(probs) else int(torch.searchsorted(sums, sums[-1]))
