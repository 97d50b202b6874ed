"""How Ming-flash-omni wants to read a conversation.

    <role>SYSTEM</role>SYSTEM PROMPT

    detailed thinking off<|role_end|><role>HUMAN</role>What is this? <image><imagePatch>...</image>
    <|role_end|><role>ASSISTANT</role>

That is the chat template of its tokenizer_config.json, and how its processor writes media (MIT,
github.com/inclusionAI/Ming, processing_bailingmm2.py). Pieces of a message stand side by side, as they were sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from actors.tokenizer import encode_texts, load_tokenizer
from omniflow.errors import UnsupportedError, WeightsError
from omniflow.media import Prompt, PromptMessage

SYSTEM_PROMPT = "你是一个友好的AI助手。"
"""Where the conversation has none, as the model's own processor has it ("You are a friendly AI assistant.")."""
MODE = "\n\ndetailed thinking off"
"""The end of every system prompt: the model answers at once, without a draft of its thoughts."""


class Control(NamedTuple):
    """A control token, by what it looks like."""

    content: str


class MediaTokens(NamedTuple):
    """What stands around the inputs of a media item, and which token each of them has."""

    begin: Control
    each: Control
    end: Control
    after: str = ""


IMAGE_TOKENS = MediaTokens(Control("<image>"), Control("<imagePatch>"), Control("</image>"), "\n")
CLIP_TOKENS = MediaTokens(Control("<video>"), Control("<framePatch>"), Control("</video>"), "\n")
AUDIO_TOKENS = MediaTokens(Control("<audio>"), Control("<audioPatch>"), Control("</audio>"))
_ROLE, _ROLE_IS, _TURN_ENDS = Control("<role>"), Control("</role>"), Control("<|role_end|>")
CONTROLS = (_ROLE, _ROLE_IS, _TURN_ENDS, *IMAGE_TOKENS[:3], *CLIP_TOKENS[:3], *AUDIO_TOKENS[:3])


def laid_out(prompt: Prompt) -> Iterator[str | Control | int]:
    """Text, control tokens, and the numbers of media items, up to where the answer begins.

    All that systems and developers say becomes the one system prompt that there is, at the start. Raises
    UnsupportedError, naming the message, for what the model knows no way to write.
    """
    system = [_text(at, message) for at, message in enumerate(prompt.messages) if _is_system(message)]
    yield from _begin("SYSTEM")
    yield ("\n\n".join(system) or SYSTEM_PROMPT) + MODE
    yield _TURN_ENDS
    for at, message in enumerate(prompt.messages):
        if _is_system(message):
            continue
        if message.role == "tool" or message.tool_calls:
            raise UnsupportedError(
                f"messages[{at}]: this model knows no tools; leave their calls out", param="messages"
            )
        if message.role == "user":
            yield from _begin("HUMAN")
            yield from message.pieces
        else:
            yield from _begin("ASSISTANT")
            yield _text(at, message)
        yield _TURN_ENDS
    yield from _begin("ASSISTANT")


def _is_system(message: PromptMessage) -> bool:
    return message.role in ("system", "developer")


def _begin(role: str) -> tuple[str | Control, ...]:
    return _ROLE, role, _ROLE_IS


def _text(at: int, message: PromptMessage) -> str:
    if any(isinstance(piece, int) for piece in message.pieces):
        where = f"messages[{at}]"
        raise UnsupportedError(f"{where}: only a user's turn takes audio, images and video", param="messages")
    return "".join(map(str, message.pieces))


class Vocabulary:
    """The tokenizer of a checkpoint: of text, in which nothing is a control token, and of control tokens by name."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._tokenizer.encode_special_tokens = True  # as text, wherever it meets them
        found = {control: self._tokenizer.token_to_id(control.content) for control in CONTROLS}
        missing = [control.content for control, id in found.items() if id is None]
        if missing:
            raise WeightsError(f"{folder}: the tokenizer is not Ming's; it lacks {', '.join(missing)}")
        self._controls = {control: id for control, id in found.items() if id is not None}

    def id_of(self, control: Control) -> int:
        """The number of a control token."""
        return self._controls[control]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text."""
        return encode_texts(self._tokenizer, texts)

    def count(self, texts: Sequence[str]) -> int:
        """How many tokens `texts` have, each by itself."""
        return sum(map(len, self.encode(texts)))
