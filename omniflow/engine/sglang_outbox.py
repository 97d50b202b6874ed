"""What SGLang's scheduler would send to other processes, as a list: the progress of each request, batch by batch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

import omniflow.engine.sglang_environment  # noqa: F401 - before SGLang

# isort: split
from sglang.srt.managers.io_struct import AbortReq

from omniflow.engine.places import PLAIN, Places
from omniflow.engine.sglang_grammar import Held
from omniflow.media import TokenLogprob

if TYPE_CHECKING:
    from omniflow.engine.heads import Knobs


class Progress(msgspec.Struct, frozen=True):
    """What a batch gave one request: its new tokens, and why it ended (None: it goes on)."""

    rid: str
    ids: list[int]
    finish: dict[str, Any] | None
    logprobs: list[TokenLogprob]
    frames: torch.Tensor | None = None
    """int64 [1, num_codes], where the model makes frames."""
    hidden: torch.Tensor | None = None
    """[n, hidden] of the inputs that were computed since its last, where they are asked for."""


MANY = 16
"""Requests whose tokens wait twice `Outbox.gather_s`. Whoever reads them holds Python's lock: of 64 requests 0.3 ms,
which each 5 ms was 6 % of the steps' time; of one up to 0.1 ms, which each 5 ms was up to 2.7 %.
"""


class Entrance(NamedTuple):
    """What a model of frames must know of a request once it has a row."""

    noise: torch.Tensor
    knobs: Knobs


class Aside:
    """What SGLang does not carry of a request: its `places`, and which input's hidden state is told next (None: none).

    `hidden` are those that are computed and not told.
    """

    def __init__(
        self,
        places: Places = PLAIN,
        next_hidden: int | None = None,
        may_wait: bool = False,
        grammar: Held | None = None,
    ) -> None:
        self.places = places
        self.next_hidden = next_hidden
        self.may_wait = may_wait
        """Its tokens may be told some at a time: nobody decides by each of them whether it goes on."""
        self.grammar = grammar
        self.entrance: Entrance | None = None
        self.hidden: list[torch.Tensor] = []

    def told(self) -> torch.Tensor | None:
        """The hidden states to tell now."""
        if not self.hidden:
            return None
        (hidden, *later), self.hidden = self.hidden, []
        if later:
            hidden = torch.cat([hidden, *later])
        if hidden.is_cuda:
            # Whoever reads them does so in the default stream, which waits for no other.
            hidden.record_stream(torch.cuda.default_stream(hidden.device))
            if later:
                torch.cuda.current_stream().synchronize()
        return hidden


class Outbox:
    """Takes the place of SGLang's streamer and of its sockets: holds what the last batch gave."""

    def __init__(self) -> None:
        self.progress: list[Progress] = []
        self.asides: dict[str, Aside] = {}
        """By request, until its end is told."""
        self.frames: torch.Tensor | None = None
        """Those of the batch whose results come next, int64 [batch, num_codes]."""
        self.gather_s = 0.0
        """How long tokens may wait for later ones, those of `MANY` requests twice as long; the first and the last of a
        request do not, and none does while prompts are read: `tell`.
        """
        self._gave = 0.0
        """When tokens that may wait were told."""

    def stream_output(self, reqs: list[Any], return_logprob: bool, skip_req: Any = None) -> None:
        """Called by SGLang with the requests of a batch whose results are in. `skip_req` still reads its prompt."""
        now = time.monotonic()
        gather_s = 2 * self.gather_s if len(reqs) >= MANY else self.gather_s
        waits = self.frames is None and now - self._gave < gather_s
        for place, req in enumerate(reqs):
            finished, start = req.finished(), req.send_token_offset
            # With overlap a request is in one batch more after its last: `finished_output` says that it was told.
            if req is skip_req or (finished and req.finished_output):
                continue
            aside = self.asides[req.rid]
            if aside.may_wait and start and not finished:
                if waits:
                    continue
                self._gave = now  # not where only others are told: those who wait would wait on
            if start == len(req.output_ids) and not finished:
                continue  # it was taken back while this batch ran: its token is not counted, and drawn anew
            self._tell(req, None if self.frames is None else self.frames[place : place + 1])
            if finished:
                req.finished_output = True
                del self.asides[req.rid]

    def tell(self, reqs: list[Any]) -> None:
        """Those of their tokens that wait, now."""
        for req in reqs:
            if req.send_token_offset < len(req.output_ids) and not req.finished():
                self._gave = time.monotonic()
                self._tell(req)

    def _tell(self, req: Any, frames: torch.Tensor | None = None) -> None:
        """All that was not told."""
        ids = req.output_ids if req.finished_len is None else req.output_ids[: req.finished_len]
        start, req.send_token_offset = req.send_token_offset, len(ids)
        finish = req.finished_reason.to_json() if req.finished() else None
        logprobs = _logprobs(req, start, len(ids)) if req.return_logprob else []
        hidden = self.asides[req.rid].told()
        self.progress.append(Progress(req.rid, ids[start:].tolist(), finish, logprobs, frames, hidden))

    def send_output(self, output: object, recv_obj: Any = None) -> None:
        """Called by SGLang for a request that it drops before it ran."""
        if isinstance(output, AbortReq):
            self.asides.pop(output.rid, None)
            self.progress.append(Progress(output.rid, [], output.finished_reason or {"type": "abort"}, []))


def _logprobs(req: Any, start: int, end: int) -> list[TokenLogprob]:
    found, span = req.logprob, slice(start, end)
    ids, values = found.output_token_logprobs_idx[span], found.output_token_logprobs_val[span]
    if not found.top_logprobs_num:
        return [TokenLogprob(*each) for each in zip(ids, values, strict=True)]
    top = zip(found.output_top_logprobs_idx[span], found.output_top_logprobs_val[span], strict=True)
    likeliest = (tuple(zip(*each, strict=True)) for each in top)
    return [TokenLogprob(*each) for each in zip(ids, values, likeliest, strict=True)]


def spans(batch: Any) -> list[tuple[int, int]]:
    """Of each request of a batch that reads prompts: which of its inputs are computed."""
    return [(start, start + size) for start, size in zip(batch.prefix_lens, batch.extend_lens, strict=True)]


def taken(hidden: torch.Tensor, batch: Any, asides: list[Aside | None]) -> list[tuple[Aside, torch.Tensor]]:
    """Copies of those of [n, hidden] that are asked for: a CUDA graph's next step writes over its own."""
    reads = batch.forward_mode.is_extend()
    if not reads:
        hidden = hidden.clone()
    found, offset = [], 0
    for aside, (start, end) in zip(asides, spans(batch) if reads else [(0, 1)] * len(asides), strict=True):
        if aside is not None and aside.next_hidden is not None:
            first = max(aside.next_hidden, start) if reads else start
            if first < end:
                rows = hidden[offset + first - start : offset + end - start]
                found.append((aside, rows.clone() if reads else rows))
                aside.next_hidden = end if reads else aside.next_hidden + 1
        offset += end - start
    return found
