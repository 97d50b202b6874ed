"""Writes the prompt of a language model that hears by transcription."""

from __future__ import annotations

from collections.abc import Sequence

from actors.catalogue import PACKAGED
from actors.chat_format import RESERVED_TOKENS, ChatFormat
from actors.tool_prompt import Turn
from omniflow.actor import Actor, Context
from omniflow.errors import ContextLengthError, ProtocolError, UnsupportedError
from omniflow.media import AudioFeatures, ImageFeatures, Prompt, PromptMessage, TokenPrompt, Tool
from omniflow.weights import Weights, resolve

NOTHING_HEARD = "(audio in which no words could be understood)"
"""Stands where a transcript is empty, so that the model can say so instead of answering nothing."""
STEP_CHARS = 1 << 17
"""Characters tokenized in one step: 128 Ki take 70 ms."""
TOKENS_OF_A_CUT = 16
"""More tokens than a cut through a word can make."""


class Merge(Actor):
    """Puts transcripts where their audio was, applies the model's chat template, and tokenizes.

    Several pieces of one message are joined by line breaks. Control tokens in what people wrote are plain text to the
    model: only the template writes real ones. Tools go to the template, or into the system's turn where the template
    knows none. Raises ContextLengthError where the prompt does not fit.
    """

    def __init__(self, *, model: str) -> None:
        self._weights = resolve(model, PACKAGED)
        self._chat: ChatFormat

    def weights(self) -> Sequence[Weights]:
        """The checkpoint whose tokenizer, template and context length are used."""
        return (self._weights,)

    async def setup(self) -> None:
        """Load tokenizer and template (0.2 s)."""
        self._chat = await self.offload(ChatFormat, self._weights.path())

    async def run(
        self, prompt: Prompt, audio: AudioFeatures | None, image: ImageFeatures | None, ctx: Context
    ) -> TokenPrompt:
        """`audio_tokens` counts those of the transcripts."""
        if image is not None:
            raise UnsupportedError("this model takes no images; send text or audio", param="messages")
        heard = dict(zip(audio.index, audio.texts, strict=True)) if audio else {}
        heard = {index: text.strip() or NOTHING_HEARD for index, text in heard.items()}
        await self._refuse_far_too_long(_texts(prompt, heard, ctx.options.tools))
        ids = await self.offload(self._encode, prompt, heard, ctx.options.tools)
        if len(ids) > self._chat.max_tokens:
            raise self._too_long(f"{len(ids)}")
        audio_tokens = await self.offload(self._chat.count, list(heard.values())) if heard else 0
        return TokenPrompt(ids, audio_tokens=audio_tokens)

    def _encode(self, prompt: Prompt, heard: dict[int, str], tools: Sequence[Tool]) -> list[int]:
        return self._chat.encode([_written(message, heard) for message in prompt.messages], tools)

    async def _refuse_far_too_long(self, texts: list[str]) -> None:
        """Count step by step, so that megabytes do not hold up the prompts of others before they are refused."""
        whole = "\n".join(texts)  # the template writes more than a line break between two of them
        at_least = 0
        for start in range(0, len(whole) if len(whole) > STEP_CHARS else 0, STEP_CHARS):
            at_least += await self.offload(self._chat.count, [whole[start : start + STEP_CHARS]]) - TOKENS_OF_A_CUT
            if at_least > self._chat.max_tokens:
                raise self._too_long(f"more than {at_least}")

    def _too_long(self, num_tokens: str) -> ContextLengthError:
        limit = self._chat.max_tokens
        return ContextLengthError(
            f"this model's maximum context length is {limit + RESERVED_TOKENS} tokens, of which a prompt may take "
            f"{limit}; the messages resulted in {num_tokens} tokens. Reduce the length of the messages.",
            param="messages",
        )


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
