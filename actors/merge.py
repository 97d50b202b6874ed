"""Writes the prompt of a language model that hears by transcription."""

from __future__ import annotations

from collections.abc import Sequence

from actors.chat_format import ChatFormat
from actors.prompt_length import PromptLength
from actors.stage import ModelStage
from actors.tool_prompt import Turn
from omniflow.actor import Context
from omniflow.errors import ProtocolError, UnsupportedError
from omniflow.media import AudioFeatures, ImageFeatures, Prompt, PromptMessage, TokenPrompt, Tool

NOTHING_HEARD = "(audio in which no words could be understood)"
"""Stands where a transcript is empty, so that the model can say so instead of answering nothing."""


class Merge(ModelStage):
    """Puts transcripts where their audio was, applies the model's chat template, and tokenizes.

    Several pieces of one message are joined by line breaks. Control tokens in what people wrote are plain text to the
    model: only the template writes real ones. Tools go to the template, or into the system's turn where the template
    knows none. Raises ContextLengthError where the prompt does not fit.
    """

    def __init__(self, *, model: str) -> None:
        super().__init__(model)
        self._chat: ChatFormat

    async def setup(self) -> None:
        """Load tokenizer and template (0.2 s). Raises WeightsError where the checkpoint lacks one of them."""
        self._chat = await self.offload(ChatFormat, self._weights.path())
        self._length = PromptLength(self._chat.context, self._chat.count)

    async def run(
        self, prompt: Prompt, audio: AudioFeatures | None, image: ImageFeatures | None, ctx: Context
    ) -> TokenPrompt:
        """`audio_tokens` counts those of the transcripts."""
        if image is not None:
            raise UnsupportedError("this model takes no images; send text or audio", param="messages")
        heard = dict(zip(audio.index, audio.texts, strict=True)) if audio else {}
        heard = {index: text.strip() or NOTHING_HEARD for index, text in heard.items()}
        await self._length.refuse_far_too_long(self.offload, _texts(prompt, heard, ctx.options.tools))
        ids = await self.offload(self._encode, prompt, heard, ctx.options.tools)
        self._length.check(len(ids))
        audio_tokens = await self.offload(self._chat.count, list(heard.values())) if heard else 0
        return TokenPrompt(ids, audio_tokens=audio_tokens)

    def _encode(self, prompt: Prompt, heard: dict[int, str], tools: Sequence[Tool]) -> list[int]:
        return self._chat.encode([_written(message, heard) for message in prompt.messages], tools)


def _texts(prompt: Prompt, heard: dict[int, str], tools: Sequence[Tool]) -> list[str]:
    """All that will be in the prompt, in no special order."""
    pieces = [piece for message in prompt.messages for piece in message.pieces]
    texts = [piece if isinstance(piece, str) else heard.get(piece, "") for piece in pieces]
    texts += [call.arguments for message in prompt.messages for call in message.tool_calls]
    return texts + [tool.description + tool.parameters for tool in tools]


def _written(message: PromptMessage, heard: dict[int, str]) -> Turn:
    texts = []
    for piece in message.pieces:
        if isinstance(piece, int) and piece not in heard:
            raise ProtocolError(f"media {piece} of the prompt was encoded by no stage")
        texts.append(heard[piece] if isinstance(piece, int) else piece)
    role = "system" if message.role == "developer" else message.role  # no model was trained on the newer name
    return Turn(role, "\n".join(text for text in texts if text), message.tool_calls, message.tool_call_id)
