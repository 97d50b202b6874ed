"""Penalties as `Sampling` has them, where SGLang counts the tokens otherwise.

Of a request whose memory it took for others, SGLang would read the tokens again and count none of them. Its repetition
penalty does not look at the prompt, as those of Hugging Face and vLLM do, for which checkpoints recommend a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import omniflow.engine.sglang_environment  # noqa: F401 - before SGLang

# isort: split
from sglang.srt.sampling import penaltylib, sampling_batch_info
from sglang.srt.sampling.penaltylib import repetition_penalty


class Penalties(penaltylib.BatchedPenalizerOrchestrator):  # type: ignore[misc]
    """Those of a new batch, each over all tokens that its request has met."""

    def __init__(self, vocab_size: int, batch: Any, penalizers: Iterable[Any]) -> None:
        # Sums before factors: SGLang's set has no order where nothing overlaps, and this one where something does.
        super().__init__(vocab_size, batch, sorted(penalizers, key=lambda each: each.is_multiplicative))
        if self.is_required:
            for row, req in enumerate(batch.reqs):
                self._count(row, req)

    def _count(self, row: int, req: Any) -> None:
        asked = req.sampling_params
        drawn = torch.tensor(req.output_ids, dtype=torch.int64, device=self.device)
        if asked.frequency_penalty and len(drawn):
            counts = self.penalizers[penaltylib.BatchedFrequencyPenalizer].cumulated_frequency_penalties
            counts[row].index_add_(0, drawn, torch.full(drawn.shape, asked.frequency_penalty, device=self.device))
        if asked.presence_penalty:
            self.penalizers[penaltylib.BatchedPresencePenalizer].cumulated_presence_penalties[row, drawn] = (
                asked.presence_penalty
            )
        if asked.repetition_penalty != 1:
            met = torch.cat([_prompt(req).to(self.device), drawn])
            self.penalizers[penaltylib.BatchedRepetitionPenalizer].cumulated_repetition_penalties[row, met] = (
                asked.repetition_penalty
            )


def _prompt(req: Any) -> torch.Tensor:
    """The tokens of its prompt, without those in whose place embeddings stand."""
    ids = torch.tensor(req.origin_input_ids, dtype=torch.int64)
    if req.positional_embed_overrides is None:
        return ids
    stays = torch.ones(len(ids), dtype=torch.bool)
    stays[req.positional_embed_overrides.positions] = False
    return ids[stays]


def _scale(logits: torch.Tensor, penalties: torch.Tensor) -> None:
    logits.copy_(torch.where(logits < 0, logits * penalties, logits / penalties))


penaltylib.BatchedPenalizerOrchestrator = Penalties
# SGLang's own is compiled when it is first used, which holds up all requests.
repetition_penalty.apply_scaling_penalties = sampling_batch_info.apply_scaling_penalties = _scale
