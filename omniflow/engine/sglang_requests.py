"""What SGLang's scheduler is told of requests, in its own words."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch

import omniflow.engine.sglang_environment  # noqa: F401 - before SGLang

# isort: split
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from omniflow.engine.places import PLAIN, Places
from omniflow.engine.sglang_grammar import Held
from omniflow.engine.sglang_outbox import Aside
from omniflow.engine.sglang_scheduler import SteppedScheduler


class Way(NamedTuple):
    """How the tokens of one request are drawn, by the names of SGLang's `SamplingParams`."""

    max_new_tokens: int
    stop_token_ids: set[int] | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None


def submit(
    scheduler: SteppedScheduler,
    rid: str,
    ids: list[int],
    way: Way,
    *,
    embeds: torch.Tensor | None = None,
    positions: tuple[int, ...] = (),
    extra_key: str | None = None,
    top_logprobs: int | None = None,
    held: Held | None = None,
    places: Places = PLAIN,
    next_hidden: int | None = None,
    may_wait: bool = False,
) -> None:
    """Queue a request.

    `embeds` take the place of token embeddings at `positions`; `extra_key` keeps it apart in the prefix cache.
    `next_hidden` is the first input whose hidden state is asked for; see `Aside` for `may_wait`.
    """
    sampling = SamplingParams(**way._asdict())
    sampling.normalize(None)
    request = TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=top_logprobs is not None,
        logprob_start_len=-1,
        top_logprobs_num=top_logprobs or 0,
        token_ids_logprob=None,
        stream=True,
        positional_embed_overrides=None if embeds is None else PositionalEmbeds(embeds, list(positions)),
        extra_key=extra_key,
    )
    scheduler.outbox.asides[rid] = Aside(places, next_hidden, may_wait, held)
    scheduler.process_input_requests([request])


def abort(scheduler: SteppedScheduler, rid: str) -> None:
    """Let the request end at its next step. SGLang also aborts every request whose name begins with `rid`."""
    scheduler.process_input_requests([AbortReq(rid=rid)])
