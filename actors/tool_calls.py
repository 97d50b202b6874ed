"""Tool calls out of running text: what is around them goes on as text, their arguments go on as they are written.

A call reads `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, with any white space between.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from actors.tool_format import HERMES
from omniflow.media import ToolCallDelta

OPEN, CLOSE = HERMES.begin, HERMES.end
_HEAD = re.compile(rf'{OPEN}\s*{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?={{)')
"""What comes before arguments that can be given on while they are written."""
_USUAL = ' {"name": "", "arguments": {'
"""What may be missing of it."""
_NO_TEXT = re.compile(r'[\s{}\[\],"]*')
"""What models write too much of at the end of a call."""


class Piece(NamedTuple):
    """A stretch `raw` of what the model wrote, and what it is: text to show, a part of a call, or neither (markup)."""

    raw: str
    text: str = ""
    call: ToolCallDelta | None = None


class _Call(msgspec.Struct, frozen=True):
    """A call that is read whole, because it is not written in the usual order."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class ToolCallParser:
    """Takes calls out of the text of one answer; `push` and `end` give its pieces in order.

    What looks like a call and is none is text, at the latest at the end of the answer. Where an answer is cut inside a
    call, what there is of its arguments has been given, and before them nothing: half a call is not to be read out.
    `parallel` false: only the first call is given, the rest is dropped.
    Ids follow from `request_id`, so that a request that is replayed gives the same ones.
    """

    def __init__(self, request_id: str, *, parallel: bool = True) -> None:
        self._request_id = request_id
        self._parallel = parallel
        self._held = ""
        self._next: Callable[[], Piece | None] = self._text
        self._num_calls = 0
        self._has_text = False
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> list[Piece]:
        """What of the text so far is surely text, or surely a call."""
        self._held += text
        pieces = []
        while self._held and (piece := self._next()) is not None:
            self._held = self._held[len(piece.raw) :]
            self._has_text = self._has_text or bool(piece.text)
            pieces.append(piece)
        return pieces

    def end(self) -> list[Piece]:
        """What was held back."""
        held, self._held = self._held, ""
        if not held:
            return []
        if self._next == self._head and (call := _whole(held[len(OPEN) :])) is not None:
            return [Piece(held, call=self._called(*call))]
        raw = held[: len(held) - _begun_call(held)]
        text = raw.rstrip() if len(raw) < len(held) else raw
        if self._next == self._tail:
            text = _NO_TEXT.sub("", text, count=1)
            text = "" if CLOSE.startswith(text) else text
        return [Piece(raw, text=self._shown(text)), Piece(held[len(raw) :])]

    def _text(self) -> Piece | None:
        """Text up to a call; white space before it belongs to nothing."""
        at = self._held.find(OPEN)
        if at == 0:
            self._next = self._head
            return self._head()
        before = self._held[:at] if at > 0 else self._held[: len(self._held) - _overlap(self._held, OPEN)]
        shown = before.rstrip()
        if at > 0:
            return Piece(before, text=self._shown(shown))
        return Piece(shown, text=self._shown(shown)) if shown else None

    def _shown(self, text: str) -> str:
        """`text`, without the space that parts it from a call at the beginning of the answer."""
        return text.lstrip() if self._num_calls and not self._has_text else text

    def _head(self) -> Piece | None:
        """A call up to its arguments, or all of it where it is written in another way."""
        if found := _HEAD.match(self._held):
            self._next = self._arguments
            return Piece(found[0], call=self._called(_string(found[1]), ""))
        body, closed, _ = self._held[len(OPEN) :].partition(CLOSE)
        begun = body.lstrip()
        if begun and not begun.startswith("{"):  # no call, however much of it is here: one may begin in it
            self._next = self._text
            return Piece(OPEN, text=OPEN)
        if not closed:
            return None
        self._next = self._text
        raw = OPEN + body + CLOSE
        call = _whole(body)
        return Piece(raw, text=raw) if call is None else Piece(raw, call=self._called(*call))

    def _arguments(self) -> Piece | None:
        """Arguments, to the brace that ends them."""
        for at, char in enumerate(self._held):
            self._step(char)
            if not self._depth:
                self._next = self._tail
                return self._of_call(self._held[: at + 1])
        return self._of_call(self._held)

    def _step(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = char == "\\"
            self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        elif char in "{}":
            self._depth += 1 if char == "{" else -1

    def _tail(self) -> Piece | None:
        """What comes between the arguments and the end of the call: a brace, or what does not belong there."""
        ends = [at for tag in (CLOSE, OPEN) if (at := self._held.find(tag)) >= 0]
        if not ends:
            return None
        at = min(ends)
        self._next = self._text
        between = self._held[:at]
        raw = between + (CLOSE if self._held.startswith(CLOSE, at) else "")
        return Piece(raw, text="" if _NO_TEXT.fullmatch(between) else between.strip())

    def _called(self, name: str, arguments: str) -> ToolCallDelta | None:
        """The first piece of the next call."""
        index, self._num_calls = self._num_calls, self._num_calls + 1
        if index and not self._parallel:
            return None
        digest = hashlib.blake2b(f"{self._request_id}/{index}".encode(), digest_size=12).hexdigest()
        return ToolCallDelta(index, arguments, f"call_{digest}", name)

    def _of_call(self, raw: str) -> Piece:
        index = self._num_calls - 1
        return Piece(raw, call=None if index and not self._parallel else ToolCallDelta(index, raw))


def _begun_call(text: str) -> int:
    """The length of the beginning of a call at the end of `text`, up to its name; 0 where there is none."""
    if text.startswith(OPEN):
        return len(text) if any(_HEAD.match(text + _USUAL[at:]) for at in range(len(_USUAL))) else 0
    overlap = _overlap(text, OPEN)
    return overlap if "_" in OPEN[:overlap] else 0  # a single "<" may be anything


def _whole(body: str) -> tuple[str, str] | None:
    """Name and arguments of the call that `body` describes; None where it describes none."""
    try:
        call = msgspec.json.decode(body, type=_Call)
        arguments = bytes(call.arguments).decode()
        if arguments.startswith('"'):  # JSON inside a string, as in OpenAI's own messages
            arguments = msgspec.json.decode(arguments, type=str)
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw] | None)
    except (msgspec.DecodeError, RecursionError):
        return None
    return call.name, "{}" if arguments == "null" else arguments


def _string(literal: str) -> str:
    """The text of a JSON string; as it is written where it is none."""
    try:
        return msgspec.json.decode(literal, type=str)
    except msgspec.DecodeError:
        return literal[1:-1]


def _overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` that `tag` begins with."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)
