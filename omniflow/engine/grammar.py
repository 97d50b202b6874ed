"""Grammars: what an answer may be, as text, and where an answer stands in one.

The text is llguidance's dialect of Lark, which may hold JSON schemas. It knows nothing of a tokenizer, so that it is
the same for every engine that has llguidance:

    %llguidance {}
    start: %json {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

`Grammars` makes such a text ready for the tokenizer of a model; a `Matcher` says which tokens may come next.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from omniflow.errors import InvalidInputError, ProtocolError, StartError

LIMITS = LLParserLimits(
    max_grammar_size=20_000,
    step_max_items=10_000,
    step_lexer_fuel=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""Of one grammar, in llguidance's units: 0.3 s to compile and 20 ms a token at most; a usual schema takes 1 ms and
0.02 ms."""
MAX_READY = 32
"""Compiled grammars that are kept: one of usual size takes 40 KB."""
MAX_READY_CHARS = 1 << 18
"""Of their texts: a large one of 50,000 characters takes 14 MB."""
MAX_REASON = 300
"""Characters of a reason: llguidance may repeat a whole pattern."""
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_ADVICE = re.compile(r" Enable 'coerce_one_of'.*")


class Grammars:
    """The grammars of one model, whose `tokenizer` is given as the text of its tokenizer.json.

    `num_tokens` is the size of the model's vocabulary. Any thread may call. Raises StartError for a tokenizer that
    llguidance cannot use: it needs to know the bytes of each token.
    """

    def __init__(self, tokenizer: str, num_tokens: int, end_ids: Iterable[int]) -> None:
        self.num_tokens = num_tokens
        self._end_ids = sorted(end_ids)
        try:
            self._tokenizer = LLTokenizer(tokenizer, n_vocab=num_tokens, eos_token=self._end_ids)
        except ValueError as error:
            raise StartError(f"grammars cannot use this tokenizer: {_reason(str(error))}") from error
        self._ready: OrderedDict[str, _Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, text: object) -> bool:
        """True where `text` is ready."""
        with self._lock:
            return text in self._ready

    def compile(self, text: str, param: str | None = None) -> None:
        """Make `text` ready, so that `matcher` takes 10 µs. Call it where it holds up nobody; see `LIMITS`.

        Raises InvalidInputError for a grammar that is wrong, empty or too large. This and later errors of the grammar
        name `param`, the field of the request that it came from.
        """
        self._compiled(text, param)

    def matcher(self, text: str) -> Matcher:
        """For one answer. Compiles where `text` is not ready, and raises as `compile` does."""
        compiled = self._compiled(text, None)
        # A copy: what one answer makes a lexer remember must not reach another.
        return Matcher(compiled.matcher.deep_copy(), self.num_tokens, self._end_ids, compiled.param)

    def _compiled(self, text: str, param: str | None) -> _Compiled:
        with self._lock:
            found = self._ready.get(text)
            if found is not None:
                self._ready.move_to_end(text)
                return found
        matcher = LLMatcher(self._tokenizer, text, limits=LIMITS, log_level=0)
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # some grammars compile, but let nothing begin
        if first.is_error():
            raise InvalidInputError(f"this grammar cannot be followed: {_reason(first.get_error())}", param=param)
        compiled = _Compiled(matcher, param)
        with self._lock:
            self._ready[text] = compiled
            while len(self._ready) > MAX_READY or sum(map(len, self._ready)) > MAX_READY_CHARS:
                self._ready.popitem(last=False)
        return compiled


class _Compiled(NamedTuple):
    matcher: LLMatcher
    param: str | None


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher, num_tokens: int, end_ids: list[int], param: str | None) -> None:
        self._matcher = matcher
        self._param = param
        self._num_tokens = num_tokens
        self._ends = torch.tensor(end_ids)

    @property
    def ended(self) -> bool:
        """True where nothing may follow but the end."""
        return self._matcher.is_stopped()

    def allowed(self, end_ids: torch.Tensor) -> torch.Tensor:
        """Which tokens may come next, bool [num_tokens]; those of `end_ids` where the answer may be over.

        Raises InvalidInputError where the grammar turns out too complex for one step.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        if not bits.any():
            raise ProtocolError("no token of this model can continue the answer as its grammar wants it")
        allowed = torch.from_numpy(np.unpackbits(bits, count=self._num_tokens, bitorder="little")).view(torch.bool)
        allowed[self._ends] = False
        allowed[end_ids] = self._matcher.is_accepting()
        return allowed

    def advance(self, token: int) -> None:
        """`token`, one of those that `allowed` gave and not an end, was chosen."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidInputError(
                f"the grammar of this answer is too complex to go on: {_reason(self._matcher.get_error())}",
                param=self._param,
            )


def check_grammar(text: str, what: str, param: str) -> None:
    """Raise InvalidInputError with `param` where `text`, `what` in the message, is no grammar that can be followed.

    Needs no tokenizer, so not all is seen that `Grammars.compile` sees.
    """
    failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS)
    if failed:
        raise InvalidInputError(f"{what} cannot be followed: {_reason(messages[0])}", param=param)


def _reason(error: str) -> str:
    """llguidance's message in one line, without places in a text that its reader has not written."""
    lines = _PLACE.sub("", error.strip().partition("\n   1 |")[0]).splitlines()
    causes = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]  # of a `pattern`
    return _ADVICE.sub("", " ".join([lines[0], *causes]))[:MAX_REASON]
