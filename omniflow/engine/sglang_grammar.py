"""Grammars of answers, as SGLang asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

import omniflow.engine.sglang_environment  # noqa: F401 - before SGLang

# isort: split
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject

from omniflow.errors import RequestError

if TYPE_CHECKING:
    from omniflow.engine.grammar import Matcher


class Held(BaseGrammarObject):  # type: ignore[misc]
    """The grammar that one answer is held to: masks are bool [batch, vocab], True for what may not come."""

    def __init__(self, matcher: Matcher, end_ids: frozenset[int]) -> None:
        super().__init__()
        self._matcher = matcher
        self._end_ids = end_ids
        self._ends = torch.tensor(sorted(end_ids), dtype=torch.int64)
        self.error: RequestError | None = None
        """Why the answer cannot go on."""

    @property
    def ended(self) -> bool:
        """True where nothing may follow but the end."""
        return self._matcher.ended

    def accept_token(self, token: int) -> None:
        if token not in self._end_ids and not self._matcher.ended:
            with self._told():
                self._matcher.advance(token)
        if self.error is not None:
            raise ValueError("the answer cannot go on")  # SGLang then ends this request, and only it

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> torch.Tensor:
        return torch.zeros(batch_size, vocab_size, dtype=torch.bool)

    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
        if self._matcher.ended:
            vocab_mask[idx] = True
            vocab_mask[idx, self._ends] = False
            return
        with self._told():
            vocab_mask[idx] = ~self._matcher.allowed(self._ends)

    @staticmethod
    def move_vocab_mask(vocab_mask: torch.Tensor, device: Any) -> torch.Tensor:
        return vocab_mask.to(device, non_blocking=True)

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        logits.masked_fill_(vocab_mask, -torch.inf)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """An error of this request is told by its end: here it would break the engine."""
        try:
            yield
        except RequestError as error:
            self.error = error.with_traceback(None)
