"""The bodies that POST /v1/chat/completions answers with, whole and in chunks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from omniflow.media import Generated, TextLogprob, ToolCall, ToolCallDelta

FinishReason = Literal["stop", "length", "tool_calls"]
LEAST_LOGPROB = -9999.0
"""OpenAI's number for what is as good as impossible; JSON has no infinity."""


class PromptDetails(Struct, frozen=True):
    """What the prompt was made of."""

    audio_tokens: int
    text_tokens: int
    image_tokens: int
    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    """What the answer was made of. Speech is made from text, and takes no tokens of its own."""

    text_tokens: int
    audio_tokens: int = 0
    reasoning_tokens: int = 0


class Usage(Struct, frozen=True):
    """Token counts of a whole request: the prompt once, the answers of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage_of(choices: Collection[Generated]) -> Usage | None:
    """The token counts of a request; None where the graph does not count."""
    if not choices:
        return None
    first = next(iter(choices))
    prompt, completion = first.prompt_tokens, sum(each.completion_tokens for each in choices)
    text = prompt - first.audio_tokens - first.image_tokens
    details = PromptDetails(first.audio_tokens, text, first.image_tokens, first.cached_tokens)
    return Usage(prompt, completion, prompt + completion, details, CompletionDetails(completion))


def finish_reason(generated: Generated | None, has_calls: bool) -> FinishReason:
    """Why a choice ended. One that was cut off was so, whatever is in it."""
    if generated is not None and generated.finish_reason == "length":
        return "length"
    return "tool_calls" if has_calls else "stop"


class TopLogprob(Struct, frozen=True):
    """A token that might have come; `bytes` are numbers from 0 to 255."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    """A token that came, and the likeliest in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(Struct, frozen=True):
    """Log-probabilities of the tokens of a text."""

    content: list[TokenLogprob]
    refusal: None = None


def logprobs_of(named: Sequence[TextLogprob]) -> Logprobs:
    """Log-probabilities as clients read them."""
    return Logprobs(
        [
            TokenLogprob(
                each.token,
                _told(each.logprob),
                list(each.data),
                [TopLogprob(token, _told(value), list(data)) for token, data, value in each.top],
            )
            for each in named
        ]
    )


def _told(logprob: float) -> float:
    """What is less is a token that was masked: minus infinity, or the least number that an engine can write."""
    return max(LEAST_LOGPROB, logprob)


class CalledFunction(Struct, frozen=True):
    """`arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class AnswerToolCall(Struct, frozen=True):
    """A call that the caller is asked to make."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class CallJoiner:
    """The calls of one answer, put together from their pieces."""

    def __init__(self) -> None:
        self._heads: list[tuple[str, str]] = []
        self._arguments: list[list[str]] = []

    def __bool__(self) -> bool:
        return bool(self._heads)

    def push(self, delta: ToolCallDelta) -> None:
        """The next piece of call `delta.index`; calls begin in order."""
        if delta.index == len(self._heads):
            self._heads.append((delta.id or "", delta.name or ""))
            self._arguments.append([])
        self._arguments[delta.index].append(delta.arguments)

    def calls(self) -> tuple[ToolCall, ...]:
        """All calls so far."""
        pairs = zip(self._heads, self._arguments, strict=True)
        return tuple(ToolCall(id, name, "".join(pieces)) for (id, name), pieces in pairs)


class SpokenAnswer(Struct, frozen=True):
    """`data` is base64 of the file."""

    id: str
    data: str
    transcript: str
    expires_at: int


class AnswerMessage(Struct, frozen=True):
    """A spoken answer has its text in `audio.transcript`, and `content` null; so has one that is nothing but calls."""

    content: str | None
    audio: SpokenAnswer | UnsetType = UNSET
    tool_calls: tuple[AnswerToolCall, ...] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Choice(Struct, frozen=True):
    """One answer."""

    message: AnswerMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: Logprobs | None = None


class Completion(Struct, frozen=True):
    """A whole reply."""

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage | None
    object: Literal["chat.completion"] = "chat.completion"


class DeltaAudio(Struct, frozen=True, omit_defaults=True):
    """Clients join the strings and add the numbers, so `id` and `expires_at` are sent once each."""

    id: str | None = None
    transcript: str | None = None
    data: str | None = None
    expires_at: int | None = None


class DeltaFunction(Struct, frozen=True, omit_defaults=True):
    """Clients join the arguments; the name comes once."""

    name: str | None = None
    arguments: str | UnsetType = UNSET


class DeltaToolCall(Struct, frozen=True, omit_defaults=True):
    """A piece of call `index`; its id and type come once, with its name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunction | None = None


def delta_of(delta: ToolCallDelta) -> DeltaToolCall:
    """A piece of a call as clients read it."""
    function = DeltaFunction(delta.name, delta.arguments)
    return DeltaToolCall(delta.index, delta.id, "function" if delta.id is not None else None, function)


class Delta(Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    audio: DeltaAudio | None = None
    tool_calls: tuple[DeltaToolCall, ...] | None = None


class ChunkChoice(Struct, frozen=True):
    """A piece of one answer; `finish_reason` is null until its end."""

    delta: Delta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: Logprobs | None = None


class Chunk(Struct, frozen=True):
    """`usage` is left out unless it was asked for; then it is null on all chunks but the last."""

    id: str
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | None | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
