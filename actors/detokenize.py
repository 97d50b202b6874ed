"""Tokens to text, as they come: no delta splits a character, and a stop string is never seen."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from actors.roles import DetokenizeRole
from actors.stage import ModelStage
from actors.tokenizer import load_tokenizer
from actors.tool_calls import Piece, ToolCallParser
from omniflow.actor import Context, Emit, Stream
from omniflow.media import TextDelta, TextLogprob, TokenLogprob, Tokens, ToolCallDelta

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
        # The one that is whole first, however the text came: another may begin earlier and end later.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
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


class TokenNames:
    """What single tokens are: their bytes, which may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
        self.special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        decoder = tokenizer.decoder
        self._byte_level = decoder is not None and decoder.decode(["a", "\u0120"]) == "a "

    def bytes_of(self, id: int) -> bytes:
        """The bytes that token `id` stands for; empty where there is no such token."""
        if id in self._added:
            return self._added[id].encode()
        token = self._tokenizer.id_to_token(id) or ""
        if self._byte_level:
            return bytes(_BYTES.get(char, 63) for char in token)
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)])
        return token.replace("\u2581", " ").encode()

    def named(self, logprob: TokenLogprob) -> TextLogprob:
        """`logprob` for people."""
        data = self.bytes_of(logprob.id)
        top = [(self.bytes_of(id), value) for id, value in logprob.top]
        return TextLogprob(_name(data), data, logprob.logprob, tuple((_name(data), data, value) for data, value in top))


def _name(data: bytes) -> str:
    return data.decode(errors="replace")


def _byte_level_alphabet() -> dict[str, int]:
    """How byte-level tokenizers write bytes: those that can be read as themselves, the others from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_level_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class LogprobsOfText:
    """Gives each piece of text the log-probabilities of the tokens that begin in it."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._waiting: deque[tuple[int, TextLogprob]] = deque()
        self._num_pushed = self._num_taken = 0

    def push(self, logprobs: Iterable[TokenLogprob]) -> None:
        """More tokens; special ones are no text."""
        for logprob in logprobs:
            if logprob.id not in self._names.special:
                named = self._names.named(logprob)
                self._waiting.append((self._num_pushed, named))
                self._num_pushed += len(named.data)

    def take(self, text: str) -> tuple[TextLogprob, ...]:
        """Those of the next piece of the answer."""
        self._num_taken += len(text.encode())
        taken = []
        while self._waiting and self._waiting[0][0] < self._num_taken:
            taken.append(self._waiting.popleft()[1])
        return tuple(taken)

    def rest(self) -> tuple[TextLogprob, ...]:
        """Those that begin in no text: a decoder may drop a space."""
        rest = tuple(named for _, named in self._waiting)
        self._waiting.clear()
        return rest


class Detokenize(ModelStage, DetokenizeRole):
    """Text of the tokens of `model`, without special tokens, up to the first of the request's stop strings.

    Where a request has tools, the calls in it are no text: they leave by a port of their own.
    """

    def __init__(self, *, model: str = "smollm2-135m-instruct") -> None:
        super().__init__(model)

    async def setup(self) -> None:
        """Raises WeightsError where the model has no tokenizer.json."""
        self._tokenizer = await self.offload(load_tokenizer, self._weights.path())
        self._names = TokenNames(self._tokenizer)

    async def run(
        self, tokens: Stream[Tokens], text: Emit[TextDelta], tool_calls: Emit[ToolCallDelta], ctx: Context
    ) -> None:
        decoded = TextOfTokens(self._tokenizer)
        stop = StopFilter(ctx.options.stop)
        answer = _Answer(ctx, LogprobsOfText(self._names), text, tool_calls)
        async for item in tokens:
            answer.logprobs.push(item.logprobs)
            await answer.push(stop.push(decoded.push(item.ids)))
            if stop.stopped:
                break
        else:
            await answer.push(stop.push(decoded.end()))
            if not stop.stopped:
                await answer.push(stop.end())
        await answer.end(cut=stop.stopped)


class _Answer:
    """The way out of one answer's text, in which calls are looked for if there are tools."""

    def __init__(
        self, ctx: Context, logprobs: LogprobsOfText, text: Emit[TextDelta], tool_calls: Emit[ToolCallDelta]
    ) -> None:
        options = ctx.options
        self.logprobs = logprobs
        self._text = text
        self._tool_calls = tool_calls
        self._parser = ToolCallParser(ctx.request_id, parallel=options.parallel_tool_calls) if options.tools else None

    async def push(self, text: str) -> None:
        if text:  # with nothing, the log-probabilities of what is held back would go nowhere
            await self._send([Piece(text, text)] if self._parser is None else self._parser.push(text))

    async def end(self, cut: bool) -> None:
        await self._send([] if self._parser is None else self._parser.end())
        if not cut and (rest := self.logprobs.rest()):
            await self._text.send(TextDelta("", rest))

    async def _send(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            logprobs = self.logprobs.take(piece.raw)
            if piece.text:
                await self._text.send(TextDelta(piece.text, logprobs))
            if piece.call is not None:
                await self._tool_calls.send(piece.call)
