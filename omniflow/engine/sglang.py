"""The AR engine for GPUs: SGLang's scheduler in this process, stepped by its owner. One engine a process.

The same protocol and the same answers as `engine/transformers.py`. SGLang does the batching, the KV cache and the CUDA
graphs; what is here keeps requests apart where SGLang would not:

- its requests have names of one length, because it aborts every request whose name begins as asked;
- prompts with embeddings carry a hash of these in their cache key, because its prefix cache sees token ids alone;
- stop strings are looked for here, so that it needs no tokenizer.
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

import omniflow.engine.sglang_environment  # noqa: F401 - before SGLang

# isort: split
from sglang.srt.sampling.sampling_params import SamplingParams

from omniflow.engine.base import EngineOutput, EngineRequest
from omniflow.engine.checks import check_length, check_prompt, check_rows, refuse_not_finite, refuse_nothing
from omniflow.engine.content import content_key
from omniflow.engine.places import places_of
from omniflow.engine.ranks import ALONE, Ranks
from omniflow.engine.sampling import LEAST_TOP_P
from omniflow.engine.sglang_grammar import Held
from omniflow.engine.sglang_outbox import Aside, Progress
from omniflow.engine.sglang_scheduler import SteppedScheduler
from omniflow.engine.sglang_settings import server_settings
from omniflow.engine.sglang_start import build, close
from omniflow.engine.stats import EngineStats
from omniflow.engine.stops import Decode, StopStrings
from omniflow.engine.streams import in_order
from omniflow.errors import (
    OverloadedError,
    ProtocolError,
    RequestError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from omniflow.engine.grammar import Grammars

Finish = Literal["stop", "length", "abort"]


class Running:
    """What this side remembers of one request that SGLang has."""

    def __init__(self, request: EngineRequest, rid: str, held: Held | None, decode: Decode | None) -> None:
        self.request = request
        self.rid = rid
        self.held = held
        self.is_plain = held is None and not request.stop
        """SGLang itself sees its end, so its tokens are not looked at one by one before."""
        self.stops = StopStrings(request.stop, decode) if request.stop else None
        self.aborted = False


class _Open:
    """A request whose input is still fed: SGLang takes whole prompts, so it waits here."""

    def __init__(self, request: EngineRequest, held: Held | None) -> None:
        self.request = request
        self.held = held
        self.rows: list[torch.Tensor] = []

    def whole(self) -> EngineRequest:
        """The request with all that was fed; a 0 stands where an embedding takes the place of a token."""
        request = self.request
        with in_order(request.embeds, *self.rows):
            fed = torch.cat(self.rows)
            embeds = fed if request.embeds is None else torch.cat([request.embeds.to(fed), fed])
        start = len(request.ids)
        positions = request.positions + tuple(range(start, start + len(fed)))
        ids = request.ids + [0] * len(fed)
        return msgspec.structs.replace(request, ids=ids, embeds=embeds, positions=positions, open=False)


class SGLangEngine:
    """`Engine` on a scheduler that `load_engine` has built.

    `decode` turns ids into text and is needed for `stop` strings, `grammars` for requests with a grammar. A seed needs
    `deterministic`, except where nothing is drawn (`temperature` 0). Of `top_p`, SGLang counts the whole vocabulary,
    also where `top_k` has left less; its logprobs are those after biases, penalties and masks.
    """

    def __init__(
        self,
        scheduler: SteppedScheduler,
        *,
        decode: Decode | None = None,
        grammars: Grammars | None = None,
        max_waiting: int = 64,
        deterministic: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._decode = decode
        self._grammars = grammars
        self._max_waiting = max_waiting
        self._deterministic = deterministic
        self._vocab_size: int = scheduler.model_config.vocab_size
        self._dtype: torch.dtype = scheduler.model_config.dtype
        self._hidden_size: int = scheduler.model_config.hidden_size
        self._limit: int = scheduler.max_req_input_len - 1
        """Tokens that a prompt can have."""
        self._running: dict[str, Running] = {}
        """By request id, those that SGLang has and whose end was not told yet."""
        self._ids: dict[str, str] = {}
        """Request ids by SGLang's names."""
        self._open: dict[str, _Open] = {}
        self._aborted: list[str] = []
        self._names = itertools.count()

    def start(self, request: EngineRequest) -> None:
        """Queue `request`. Raises ContextLengthError if it can never fit, OverloadedError if the queue is full."""
        if request.embeds is not None:
            request = msgspec.structs.replace(request, embeds=self._as_the_model_has(request.embeds))
        self._check(request)
        if self._num_waiting() >= self._max_waiting:
            raise OverloadedError(
                f"{self._max_waiting} generations are waiting already", request_id=request.id, retry_after_s=1.0
            )
        held = self._held(request)
        if request.open:
            self._open[request.id] = _Open(request, held)
        else:
            self._submit(request, held)

    def feed(self, request_id: str, rows: torch.Tensor, done: bool) -> None:
        """Append input embeddings [n, hidden]; `done` lets it generate. A request that has ended is ignored.

        Nothing is computed before `done`: SGLang takes whole prompts.
        """
        waiting = self._open.get(request_id)
        if waiting is None:
            if self._is_known(request_id):
                raise ProtocolError(f"request {request_id} is not open for more input", request_id=request_id)
            return
        rows = self._as_the_model_has(rows)
        check_rows(request_id, rows, self._hidden_size)
        waiting.rows.append(rows)
        length = len(waiting.request.ids) + sum(map(len, waiting.rows))
        check_length(request_id, length, self._limit)
        if done:
            refuse_nothing(request_id, length)
            # Where this refuses it, it stays open until it is aborted, as on every rank.
            self._submit(waiting.whole(), waiting.held)
            del self._open[request_id]

    def step(self) -> list[EngineOutput]:
        """Run one batch. On a GPU it returns what the batch before it gave."""
        outputs = [EngineOutput(request_id, (), "abort") for request_id in self._aborted]
        self._aborted.clear()
        if self._ids or self._scheduler.has_work():  # where it has some of ours, it need not look through its queues
            for progress in self._scheduler.step():
                outputs += self._output(progress)
        return outputs

    def abort(self, request_id: str) -> None:
        """Drop a request at the next step; unknown ids are ignored."""
        if self._open.pop(request_id, None) is not None:
            self._aborted.append(request_id)
        elif request_id in self._running:
            self._running[request_id].aborted = True
            self._scheduler.abort(self._running[request_id].rid)

    def has_work(self) -> bool:
        """True while `step` would do something; an open request that waits for input is no work."""
        return bool(self._aborted or self._ids) or self._scheduler.has_work()

    def is_reading(self) -> bool:
        """True where the next `step` waits for prompts that the device reads now; without overlap (CPUs) never."""
        return self._scheduler.is_reading()

    def stats(self) -> EngineStats:
        """Counts for metrics and admission; tokens that only the prefix cache holds count as free."""
        scheduler = self._scheduler
        running = len(self._running) - scheduler.num_waiting()
        return EngineStats(running, self._num_waiting(), scheduler.kv_tokens_used(), scheduler.kv_tokens())

    def close(self) -> None:
        """Drop all requests and the model."""
        for each in (self._running, self._ids, self._open, self._aborted):
            each.clear()
        del self._scheduler
        close()

    def _num_waiting(self) -> int:
        return self._scheduler.num_waiting() + len(self._open)

    def _is_known(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._open

    def _as_the_model_has(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` in its dtype, in which less is finite. Half as much to hash, too: 29 MB of 3584 of 4096 take 16 ms."""
        with in_order(rows):
            return rows.detach().to(self._dtype)

    def _submit(self, request: EngineRequest, held: Held | None) -> None:
        """`request` is whole; what a look at its embeddings refuses is refused here."""
        if request.embeds is not None and request.embeds.is_cuda:
            with in_order(request.embeds):
                refuse_not_finite(request.id, request.embeds)  # waits for them, as their hash would
        self._hand_over(request, held)

    def _hand_over(self, request: EngineRequest, held: Held | None) -> None:
        """Let SGLang have it. Raises nothing: engines that queue do this in a step, whose errors are all requests'."""
        running = Running(request, f"{next(self._names):016x}", held, self._decode)
        aside = self._aside(request, running)
        # A prompt whose hidden states are all asked for must be computed: it shares no cache entry with any other.
        key = running.rid if request.hidden == "all" else content_key(request, aside.places)
        self._scheduler.submit(running.rid, request, self._way(request), aside, key)
        self._running[request.id] = running
        self._ids[running.rid] = request.id

    def _aside(self, request: EngineRequest, running: Running) -> Aside:
        return Aside(
            places_of(request),
            next_hidden={"all": 0, "last": len(request.ids) - 1, None: None}[request.hidden],
            may_wait=running.is_plain and request.hidden is None,
            grammar=running.held,
        )

    def _held(self, request: EngineRequest) -> Held | None:
        if request.grammar is None:
            return None
        if self._grammars is None:
            raise UnsupportedError("this engine was started without grammars", request_id=request.id)
        return Held(self._grammars.matcher(request.grammar), request.sampling.stop_token_ids)

    def _way(self, request: EngineRequest) -> SamplingParams:
        sampling = request.sampling
        return SamplingParams(
            max_new_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=max(sampling.top_p, LEAST_TOP_P),
            # Where nobody in a batch filters, SGLang draws by another rule, so a seed would not hold in company.
            top_k=sampling.top_k or (self._vocab_size if self._deterministic else -1),
            stop_token_ids=set(sampling.stop_token_ids),
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias={str(token): bias for token, bias in sampling.logit_bias} or None,
            sampling_seed=self._seed(request),
        )

    def _seed(self, request: EngineRequest) -> int | None:
        """As 64 bits with a sign. Where all is deterministic SGLang would give 42 to every request that has none."""
        seed = request.sampling.seed
        if seed is None and self._deterministic:  # the same on all ranks
            seed = int.from_bytes(hashlib.sha256(request.id.encode()).digest()[:8], "little")
        return None if seed is None else (seed + 2**63) % 2**64 - 2**63

    def _output(self, progress: Progress) -> list[EngineOutput]:
        """What `progress` means; nothing where the request's end was told already."""
        request_id = self._ids.get(progress.rid)
        if request_id is None:
            return []
        running = self._running[request_id]
        ids: list[int] = progress.ids
        reason: Finish | None = None
        if progress.finish is not None or not running.is_plain:
            ids, reason = self._new_ids(running, progress)
        if reason is not None:
            self._forget(running)
            if progress.finish is None:
                self._scheduler.abort(running.rid)
        if not ids and reason is None:
            return []
        error = error_of(running, progress) if reason == "abort" else None
        logprobs = tuple(progress.logprobs[: len(ids)])
        return [EngineOutput(request_id, tuple(ids), reason, logprobs, error=error, hidden=progress.hidden)]

    def _new_ids(self, running: Running, progress: Progress) -> tuple[list[int], Finish | None]:
        """The tokens that count of those that were drawn, and the finish reason where they end the request."""
        ids: list[int] = []
        if running.held is not None and running.held.error is not None:
            return ids, "abort"
        for token in progress.ids:
            if token in running.request.sampling.stop_token_ids:
                return ids, "stop"
            ids.append(token)
            if running.stops is not None and running.stops.completed_by(token):
                return ids, "stop"
        if running.held is not None and running.held.ended:
            return ids, "stop"
        if progress.finish is None:
            return ids, None
        return ids, finish_reason(progress.finish)

    def _forget(self, running: Running) -> None:
        del self._running[running.request.id]
        del self._ids[running.rid]

    def _check(self, request: EngineRequest) -> None:
        if self._is_known(request.id) or request.id in self._aborted:
            raise ProtocolError(f"request {request.id} runs already", request_id=request.id)
        check_prompt(
            request,
            vocab_size=self._vocab_size,
            width=self._hidden_size,
            decodes=self._decode is not None,
            knows_kinds=self._scheduler.knows_kinds,
        )
        check_length(request.id, len(request.ids), self._limit)
        self._check_seed(request)

    def _check_seed(self, request: EngineRequest) -> None:
        """SGLang ignores a seed in silence unless all of it is deterministic."""
        if request.sampling.seed is not None and request.sampling.temperature > 0 and not self._deterministic:
            raise UnsupportedError(
                "a seed needs deterministic=true of this stage, on a GPU; leave it out, or send temperature 0",
                request_id=request.id,
                param="seed",
            )


def error_of(running: Running, progress: Progress) -> RequestError | None:
    """Why a request was ended that nobody has aborted."""
    if running.held is not None and running.held.error is not None:
        return running.held.error
    if running.aborted or progress.finish is None:
        return None
    return ProtocolError(f"SGLang ended the request: {progress.finish.get('message')}", request_id=running.request.id)


def finish_reason(finish: dict[str, Any]) -> Finish:
    """SGLang's reason in our words; that a request met one of its stop tokens is seen from its tokens."""
    return "abort" if finish["type"] == "abort" else "length"


def load_engine(
    folder: Path,
    *,
    decode: Decode | None = None,
    grammars: Grammars | None = None,
    device: str = "gpu",
    threads: int = 1,
    max_running: int = 8,
    max_waiting: int = 64,
    kv_tokens: int = 16384,
    dtype: str = "auto",
    deterministic: bool = False,
    gather_s: float = 0.0,
    prompt_graphs: bool = True,
    ranks: Ranks = ALONE,
    **more: Any,
) -> SGLangEngine:
    """An engine on the checkpoint in `folder`; call it in the thread that will call `step`.

    `device` is cpu, gpu or cuda, or gpu:1 for one by number; `dtype` auto is the checkpoint's. `kv_tokens` are reserved
    in full, whatever else is on the GPU; StartError where they do not fit. `deterministic` makes a request draw the
    same tokens for a seed alone and in any batch; GPU only. Tokens that come within `gather_s` of each other are one
    output, with many requests within twice as long (`sglang_outbox.MANY`); those of several ranks do not wait. A GPU
    reads short prompts as CUDA graphs (`sglang_settings.PROMPT_GRAPHS`), unless `prompt_graphs` is false: for a model
    that makes tensors for a batch outside of SGLang's. `more` are settings of SGLang's `ServerArgs`.
    """
    torch.set_num_threads(threads)
    settings = server_settings(device, max_running, kv_tokens, deterministic, prompt_graphs=prompt_graphs)
    settings |= {"dtype": dtype, "model_path": str(folder)}
    scheduler = build(SteppedScheduler, settings | more, ranks)
    # Each rank would decide by its own clock what waits, and what ranks tell is compared step by step.
    scheduler.outbox.gather_s = gather_s if ranks.size == 1 else 0.0
    return SGLangEngine(
        scheduler, decode=decode, grammars=grammars, max_waiting=max_waiting, deterministic=deterministic
    )
