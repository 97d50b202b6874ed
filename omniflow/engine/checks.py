"""What engines refuse of a request before any of it is computed, in the same words.

ProtocolError is a mistake of whoever drives the engine; InvalidInputError names a field of the user's request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from omniflow.errors import ContextLengthError, InvalidInputError, ProtocolError

if TYPE_CHECKING:
    from omniflow.engine.base import EngineRequest


def check_prompt(request: EngineRequest, *, vocab_size: int, width: int, decodes: bool, knows_kinds: bool) -> None:
    """For engines of text on a model of `vocab_size` tokens whose embeddings are `width` wide.

    Raises InvalidInputError for an empty prompt, an answer of no tokens and what `_check_biases` refuses, ProtocolError
    for all else.
    """
    if not request.ids and not request.open:
        raise InvalidInputError("the prompt is empty: it needs at least 1 token", request_id=request.id)
    refuse_no_answer(request)
    if request.stop and not decodes:
        raise ProtocolError("stop strings need an engine with `decode`", request_id=request.id)
    if request.ids and not 0 <= min(request.ids) <= max(request.ids) < vocab_size:
        raise ProtocolError(f"a token id is outside of the vocabulary of {vocab_size}", request_id=request.id)
    if request.sampling.logit_bias:
        _check_biases(request, vocab_size)
    if request.embeds is not None or request.positions:
        check_embeds(request, width)
    _refuse_before(request)
    if request.places is not None or request.kinds is not None:
        _check_kinds(request, knows_kinds)


def refuse_no_answer(request: EngineRequest) -> None:
    """Raises InvalidInputError for an answer of no tokens."""
    if request.sampling.max_tokens < 1:
        raise InvalidInputError(
            f"max_tokens is {request.sampling.max_tokens}; an answer has 1 token or more",
            request_id=request.id,
            param="max_tokens",
        )


def check_embeds(request: EngineRequest, width: int) -> None:
    """Raises ProtocolError where its embeddings are not as `check_rows` wants them, or not one for each position, each
    at a place of its own in the prompt.
    """
    if request.embeds is not None:
        check_rows(request.id, request.embeds, width)
    num_rows, positions = 0 if request.embeds is None else len(request.embeds), request.positions
    if num_rows != len(positions):
        raise ProtocolError(f"{num_rows} embeddings for {len(positions)} positions", request_id=request.id)
    if any(not 0 <= position < len(request.ids) for position in positions):
        raise ProtocolError("an embedding lies outside of the prompt", request_id=request.id)
    if len(set(positions)) < num_rows:  # a GPU would let any of them win
        raise ProtocolError("two embeddings have one position", request_id=request.id)


def check_rows(request_id: str, rows: torch.Tensor, width: int) -> None:
    """Raises ProtocolError where `rows` are not [n, width], or on the CPU and not all finite."""
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ProtocolError(
            f"embeddings of shape {list(rows.shape)}; this model takes [n, {width}]", request_id=request_id
        )
    if not rows.is_cuda:  # on a GPU the look would wait for whatever makes them
        refuse_not_finite(request_id, rows)


def refuse_not_finite(request_id: str, rows: torch.Tensor) -> None:
    """Raises ProtocolError for `rows` with NaN or infinity: of such no token can be drawn, and all requests fail."""
    # Of 3584 rows of 4096 this takes 2.5 ms, to look at each number 59 ms. A NaN is the least and the greatest.
    if rows.numel() and not torch.stack(rows.aminmax()).isfinite().all():
        raise ProtocolError(
            "embeddings that are not finite: the stage that made them has failed", request_id=request_id
        )


def _check_biases(request: EngineRequest, vocab_size: int) -> None:
    """Raises InvalidInputError where one is on a token that there is not, or that has one already: engines would add
    both, or forget one.
    """
    seen = set[int]()
    for token, _ in request.sampling.logit_bias:
        if not 0 <= token < vocab_size or token in seen:
            why = " twice" if token in seen else f"; this model has those from 0 to {vocab_size - 1}"
            raise InvalidInputError(
                f"logit_bias names the token {token}{why}", request_id=request.id, param="logit_bias"
            )
        seen.add(token)


def _check_kinds(request: EngineRequest, known: bool) -> None:
    """Raises ProtocolError where `places` or `kinds` do not fit the prompt, or its model knows no kinds."""
    length = len(request.ids)
    for name, given, shape in (("places", request.places, (3, length)), ("kinds", request.kinds, (length,))):
        if given is None:
            continue
        if not known or request.open:
            raise ProtocolError(f"{name} need a model of several kinds and a whole prompt", request_id=request.id)
        if given.shape != shape:
            raise ProtocolError(
                f"{name} of shape {list(given.shape)}; this prompt takes {list(shape)}", request_id=request.id
            )


def refuse_kinds(request: EngineRequest) -> None:
    """For engines whose models know one kind of input only. Raises ProtocolError for `places` and `kinds`."""
    _refuse_before(request)
    if request.places is not None or request.kinds is not None:
        raise ProtocolError("places and kinds need a model of several kinds", request_id=request.id)


def refuse_text(request: EngineRequest) -> None:
    """For engines that give frames. Raises ProtocolError where hidden states are asked for, or a grammar."""
    if request.hidden is not None:
        raise ProtocolError("an engine of frames gives no hidden states", request_id=request.id)
    if request.grammar is not None:
        raise ProtocolError("an engine of frames gives no text that a grammar could hold", request_id=request.id)


def _refuse_before(request: EngineRequest) -> None:
    if request.before is not None:
        raise ProtocolError("latents before it need an engine with a flow head", request_id=request.id)


def check_length(request_id: str, length: int, most: int, counted: str = "tokens", param: str = "messages") -> None:
    """Raises ContextLengthError for a prompt of more than `most` inputs, which are called as `counted` says."""
    if length > most:
        raise ContextLengthError(
            f"the prompt has {length} {counted}; at most {most} fit", request_id=request_id, param=param
        )


def refuse_nothing(request_id: str, length: int) -> None:
    """Raises InvalidInputError where a prompt that was fed is whole, and empty."""
    if length == 0:
        raise InvalidInputError("nothing was fed: a generation needs at least 1 input", request_id=request_id)
