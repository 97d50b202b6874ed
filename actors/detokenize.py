"""Tokens to text, as they come: no delta splits a character, and a stop string is never seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from actors.catalogue import PACKAGED
from actors.roles import DetokenizeRole
from actors.tokenizer import load_tokenizer
from omniflow.actor import Context, Emit, Stream
from omniflow.media import TextDelta, Tokens
from omniflow.weights import Weights, resolve

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
"""What tokenizers write for bytes that are no character, or not yet."""


class TextOfTokens:
    """Decodes a growing list of ids; joined, the pieces are the decoding of the whole list, without special tokens.

    Only the newest ids are decoded again: those that the text given out last came from, because what a token looks like
    can depend on the one before it (a first token loses its space), and those after them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_settled = 0
        """So many of `_ids` are given out as text and end on a character's end."""
        self._num_sent = 0
        """Characters of the decoding of `_ids` that are given out."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete. What may still become part of a character is held back."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        whole = text.rstrip(REPLACEMENT)
        delta = whole[self._num_sent :]
        if delta and len(whole) == len(text):
            self._ids = self._ids[self._num_settled :]
            self._num_settled = len(self._ids)
            self._num_sent = len(self._tokenizer.decode(self._ids))
        else:
            self._num_sent = max(self._num_sent, len(whole))
        return delta

    def end(self) -> str:
        """The rest: bytes that never became a character, as replacement characters."""
        return self._tokenizer.decode(self._ids)[self._num_sent :]


class StopFilter:
    """Lets text through up to the first stop string; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False
        """True once a stop string was found; nothing comes after it."""

    def push(self, text: str) -> str:
        """What of the text so far is surely not part of a stop string."""
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def end(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class Detokenize(DetokenizeRole):
    """Text of the tokens of `model`, without special tokens, up to the first of the request's stop strings."""

    def __init__(self, *, model: str = "smollm2-135m-instruct") -> None:
        self._weights = resolve(model, PACKAGED)

    def weights(self) -> Sequence[Weights]:
        return (self._weights,)

    async def setup(self) -> None:
        """Raises WeightsError where the model has no tokenizer.json."""
        self._tokenizer = await self.offload(load_tokenizer, self._weights.path())

    async def run(self, tokens: Stream[Tokens], emit: Emit[TextDelta], ctx: Context) -> None:
        text = TextOfTokens(self._tokenizer)
        stop = StopFilter(ctx.options.stop)
        async for item in tokens:
            await _send(emit, stop.push(text.push(item.ids)))
            if stop.stopped:
                return
        await _send(emit, stop.push(text.end()))
        if not stop.stopped:
            await _send(emit, stop.end())


async def _send(emit: Emit[TextDelta], text: str) -> None:
    if text:
        await emit.send(TextDelta(text))
