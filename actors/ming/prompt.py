"""How Ming-flash-omni wants to read a conversation.

    <role>SYSTEM</role>SYSTEM PROMPT

    detailed thinking off<|role_end|><role>HUMAN</role>What is this? <image><imagePatch>...</image>
    <|role_end|><role>ASSISTANT</role>

Of a clip each frame is written like an image, behind the time at which it is:

    <video><0.2 seconds><image><framePatch>...</image><1.2 seconds><image><framePatch>...</image></video>

That is the chat template of its tokenizer_config.json, and how its processor writes media (MIT,
github.com/inclusionAI/Ming, processing_bailingmm2.py). Pieces of a message stand side by side, as they were sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from actors.tokenizer import encode_texts, load_tokenizer
from omniflow.errors import UnsupportedError, WeightsError
from omniflow.media import Prompt, PromptMessage

SYSTEM_PROMPT = "你是一个友好的AI助手。"
"""Where the conversation has none, as the model's own processor has it ("You are a friendly AI assistant.")."""
MODE = "\n\ndetailed thinking off"
"""The end of every system prompt: the model answers at once, without a draft of its thoughts."""
FRAME_STEP = 2
"""Positions from one frame of a clip to the next, whatever time is between them. Two frames of a film are one here."""


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
FRAME_TOKENS = MediaTokens(IMAGE_TOKENS.begin, CLIP_TOKENS.each, IMAGE_TOKENS.end)
"""Of a frame of a clip that is written frame by frame, between those of the clip."""
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


class Grid(msgspec.Struct, frozen=True):
    """An image or a clip of `frames` by `rows` by `columns` inputs, as they are after the vision tower's merging."""

    frames: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """How many inputs it is."""
        return self.frames * self.rows * self.columns


def places(parts: Sequence[int | Grid]) -> np.ndarray:
    """Where the inputs of a prompt of `parts` are in time, height and width: `EngineRequest.places`, int64 [3, n].

    A number stands for as many inputs of text or audio. A text counts up on all three. Each frame of an image or a clip
    stands at one time, its middle on the diagonal that the text goes along, so that its upper and left half lies before
    that time; what follows goes on after the last time.

    So Ming's own code has it (Apache-2.0, github.com/inclusionAI/Ming, modeling_bailing_moe_v2.py: a rope of the type
    video_rope), and SGLang's for its checkpoints. The same prompt with its frames' corners on the diagonal, as Qwen2-VL
    has them, is another to the model.
    """
    start, pieces = 0, [np.empty((3, 0), np.int64)]
    for part in parts:
        if isinstance(part, Grid):
            piece, length = _grid(part), (part.frames - 1) * FRAME_STEP + 1
        else:
            piece, length = np.broadcast_to(np.arange(part), (3, part)), part
        pieces.append(piece + start)
        start += length
    return np.concatenate(pieces, axis=1)


def _grid(grid: Grid) -> np.ndarray:
    time, row, column = np.indices((grid.frames, grid.rows, grid.columns)).reshape(3, -1)
    time *= FRAME_STEP
    return np.stack([time, time + row - (grid.rows - 1) // 2, time + column - (grid.columns - 1) // 2])
