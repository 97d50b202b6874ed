"""How long a prompt may be, and the refusal of what is longer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from omniflow.errors import ContextLengthError

RESERVED_TOKENS = 16
"""Room that a prompt must leave for the answer."""
STEP_CHARS = 1 << 17
"""Characters tokenized in one step: 128 Ki take 70 ms."""
TOKENS_OF_A_CUT = 16
"""More tokens than a cut through a word can make."""


class PromptLength:
    """What of a context of `context` tokens a prompt may take. `count` tells the tokens of texts."""

    def __init__(self, context: int, count: Callable[[list[str]], int]) -> None:
        self._context = context
        self._limit = context - RESERVED_TOKENS
        self._count = count

    def check(self, num_tokens: int, num_media: int = 0) -> None:
        """Raises ContextLengthError where so many are too many; `num_media` of them stand for media."""
        if num_tokens > self._limit:
            raise self._too_long(f"{num_tokens}", num_media)

    async def refuse_far_too_long(
        self, offload: Callable[..., Awaitable[int]], texts: Sequence[str], num_media: int = 0
    ) -> None:
        """Count step by step, so that megabytes do not hold up the prompts of others before they are refused.

        At least a token stands between two of the `texts`. Raises ContextLengthError as `check` does, for what is
        surely too long.
        """
        whole = "\n".join(texts)
        at_least = num_media
        if at_least > self._limit:
            raise self._too_long(f"more than {at_least}", num_media)
        for start in range(0, len(whole) if len(whole) > STEP_CHARS else 0, STEP_CHARS):
            at_least += await offload(self._count, [whole[start : start + STEP_CHARS]]) - TOKENS_OF_A_CUT
            if at_least > self._limit:
                raise self._too_long(f"more than {at_least}", num_media)

    def _too_long(self, num_tokens: str, num_media: int) -> ContextLengthError:
        media = f", {num_media} of them for media" if num_media else ""
        return ContextLengthError(
            f"this model's maximum context length is {self._context} tokens, of which a prompt may take "
            f"{self._limit}; the messages resulted in {num_tokens} tokens{media}. Reduce the length of the messages.",
            param="messages",
        )
