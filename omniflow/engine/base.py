"""The protocol of an autoregressive engine: the same actor drives every implementation.

    start(request)      queue a request; it joins the running batch at the next step boundary
    feed(id, rows, done) more input embeddings for a request that was started open-ended
    step() -> outputs   one step of the whole batch; an output says what a request has produced since its last
    abort(id)           the request leaves at the next step boundary; unknown ids are ignored

An engine belongs to one thread: `loop.EngineLoop` calls it and hands its outputs to asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from omniflow.engine.stats import EngineStats
from omniflow.errors import RequestError
from omniflow.media import TokenLogprob

if TYPE_CHECKING:
    import torch


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep the whole vocabulary.

    With a `seed` a request draws the same tokens alone and in any batch.

    The penalties, then `logit_bias` (token, what is added to its logit), change the logits before the temperature does.
    A token that was generated n times loses n * `frequency_penalty`, and `presence_penalty` once. What is then above 0
    is divided by `repetition_penalty`, what is below 0 is multiplied by it, where the token was generated or stands in
    the prompt; 1 leaves all as it is. With `top_logprobs` n, outputs have `logprobs`, each with the n likeliest tokens
    in its place.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 256
    stop_token_ids: frozenset[int] = frozenset()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `embeds` [num_rows, hidden] take the place of the token embeddings at `positions`.

    Where the model knows more than one kind of input, `places` int64 [3, len(ids)] are the inputs' positions in time,
    height and width, and `kinds` uint8 [len(ids)] says which of the model's kinds each is. Without `places` the
    positions count up from 0; the answer's go on, on all three axes, after the last time. Its tokens are of the kind 0,
    and so is all without `kinds`.

    An `open` request does not generate until `feed(..., done=True)`. Where the engine has a frame head (`heads.py`),
    `sampling` draws the first code of each step and says when to end; `later_codes` draws the others, None: alike.
    """

    id: str
    ids: list[int]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    embeds: torch.Tensor | None = None
    positions: tuple[int, ...] = ()
    open: bool = False
    later_codes: Sampling | None = None
    places: torch.Tensor | None = None
    kinds: torch.Tensor | None = None
    grammar: str | None = None
    """The text of the answer follows this grammar (`grammar.py`), and is whole unless it is cut by `max_tokens`."""
    hidden: Literal["last", "all"] | None = None
    """Which hidden states its outputs have: of the input that each token is drawn from, or of the prompt's others too.
    A prompt that asks for all is computed anew, whatever the engine has of it."""
    before: torch.Tensor | None = None
    """For a flow head: latents float32 [n, latent_dim] of sound that comes before what it is to make. Their feedback
    follows the prompt, as if it had made them."""
    urgent: bool = False
    """Someone waits for its first output in silence: an engine may let it run before others that wait."""


class EngineOutput(msgspec.Struct, frozen=True):
    """What one step gave one request. The stop token is not among `ids`. After a `finish_reason` nothing follows.

    An engine with a frame head gives `frames` int64 [num_steps, num_codes], on the engine's device, and no `ids`; the
    step that ends is not among them, and with the last output they may be None. One with a flow head gives `frames`
    float32 [num_latents, latent_dim] on the CPU with each output but that of an abort.

    `hidden` [n, hidden], on the engine's device, are hidden states where the request asked for them: after the model's
    last norm, as its logits are made of them, in the order of the inputs that they are of. A token that is drawn, one
    that stops too, comes with that of the input before it; 'all' puts the prompt's others before the first.

    `logprobs` are those of `ids` where the request asked for them, by the model's own distribution: before temperature,
    biases, penalties and masks. A request that cannot go on has an `error`, with finish_reason 'abort'.
    """

    id: str
    ids: tuple[int, ...]
    finish_reason: Literal["stop", "length", "abort"] | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    frames: torch.Tensor | None = None
    error: RequestError | None = None
    hidden: torch.Tensor | None = None


class Engine(Protocol):
    """See the module's docstring. Not thread-safe; nothing of it blocks but `step`."""

    def start(self, request: EngineRequest) -> None:
        """Queue `request`. Raises ContextLengthError if it can never fit, OverloadedError if the queue is full."""

    def feed(self, request_id: str, rows: torch.Tensor, done: bool) -> None:
        """Append input embeddings [n, hidden] to a request started with `open=True`; `done` lets it generate."""

    def step(self) -> list[EngineOutput]:
        """Run one step of the batch (admit, prefill or decode, sample). Returns nothing where there is no work."""
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request at the next step boundary; its last output has finish_reason 'abort'."""

    def has_work(self) -> bool:
        """True while `step` would do something."""
        ...

    def is_reading(self) -> bool:
        """True where the next `step` reads prompts, or waits for those that a GPU reads: it may take 100 times as long
        as one that goes on with answers.
        """
        ...

    def stats(self) -> EngineStats:
        """Counts for metrics and admission."""
        ...

    def close(self) -> None:
        """Free the model and the caches."""
