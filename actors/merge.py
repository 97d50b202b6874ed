"""Writes the prompt of a language model that hears by transcription."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from actors.catalogue import PACKAGED
from omniflow.actor import Actor
from omniflow.errors import ContextLengthError, InvalidInputError, ProtocolError, UnsupportedError, WeightsError
from omniflow.media import AudioFeatures, ImageFeatures, Prompt, TokenPrompt
from omniflow.weights import Weights, resolve

if TYPE_CHECKING:
    import jinja2
    import tokenizers

NOTHING_HEARD = "(audio in which no words could be understood)"
"""Stands where a transcript is empty, so that the model can say so instead of answering nothing."""
RESERVED_TOKENS = 16
"""Room that a prompt must leave for the answer."""
STEP_CHARS = 1 << 17
"""Characters tokenized in one step: 128 Ki take 70 ms."""
TOKENS_OF_A_CUT = 16
"""More tokens than a cut through a word can make."""
ROLES = {"developer": "system", "tool": "user"}
"""Roles that small models were not trained on, and what comes closest."""


class Merge(Actor):
    """Puts transcripts where their audio was, applies the model's chat template, and tokenizes.

    Several pieces of one message are joined by line breaks. Control tokens in what people wrote are plain text to the
    model: only the template writes real ones. Raises ContextLengthError where the prompt does not fit.
    """

    def __init__(self, *, model: str) -> None:
        self._weights = resolve(model, PACKAGED)
        self._chat: _ChatFormat

    def weights(self) -> Sequence[Weights]:
        """The checkpoint whose tokenizer, template and context length are used."""
        return (self._weights,)

    async def setup(self) -> None:
        """Load tokenizer and template (0.2 s)."""
        self._chat = await self.offload(_ChatFormat, self._weights.path())

    async def run(self, prompt: Prompt, audio: AudioFeatures | None, image: ImageFeatures | None) -> TokenPrompt:
        """`audio_tokens` counts those of the transcripts."""
        if image is not None:
            raise UnsupportedError("this model takes no images; send text or audio", param="messages")
        heard = dict(zip(audio.index, audio.texts, strict=True)) if audio else {}
        heard = {index: text.strip() or NOTHING_HEARD for index, text in heard.items()}
        messages = [_written(role, pieces, heard) for role, pieces in prompt.messages]
        await self._refuse_far_too_long([text for _, text in messages])
        ids = await self.offload(self._chat.encode, messages)
        if len(ids) > self._chat.max_tokens:
            raise self._too_long(f"{len(ids)}")
        audio_tokens = await self.offload(self._chat.count, list(heard.values())) if heard else 0
        return TokenPrompt(ids, audio_tokens=audio_tokens)

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


class _ChatFormat:
    """How one model wants to read a conversation: its chat template, its tokenizer, and its limit."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        config = msgspec.json.decode((folder / "config.json").read_bytes())
        self.max_tokens: int = config.get("text_config", config)["max_position_embeddings"] - RESERVED_TOKENS
        self._names = _token_names(folder)
        self._template = _template(folder)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.encode_special_tokens = True  # as text, wherever it meets them
        known = self._tokenizer.get_added_tokens_decoder()
        self._control = {token.content: id for id, token in known.items() if token.special}
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def encode(self, messages: list[tuple[str, str]]) -> list[int]:
        """Token ids of (role, text) pairs as the template arranges them, up to where the answer begins."""
        texts, controls = self._between_controls(messages)
        encoded = _encode(self._tokenizer, texts)
        ids = list(encoded[0])
        for control, text_ids in zip(controls, encoded[1:], strict=True):
            ids += [control, *text_ids]
        return ids

    def _between_controls(self, messages: list[tuple[str, str]]) -> tuple[list[str], list[int]]:
        """The texts before, between and after the control tokens that the template wrote, and these tokens."""
        texts, controls = [""], list[int]()
        for number, part in enumerate(re.split("\ue000(\\d+)\ue001", self._render([role for role, _ in messages]))):
            if number % 2:  # what people wrote, at its mark
                texts[-1] += messages[int(part)][1]
                continue
            for piece in self._control_pattern.split(part):
                if piece in self._control:
                    controls.append(self._control[piece])
                    texts.append("")
                else:
                    texts[-1] += piece
        return texts, controls

    def _render(self, roles: list[str]) -> str:
        """The conversation with private-use marks instead of its texts, so that no text can pass for the template's."""
        import jinja2

        messages = [{"role": role, "content": f"\ue000{number}\ue001"} for number, role in enumerate(roles)]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        except jinja2.TemplateError as error:
            raise InvalidInputError(f"the model's chat template refuses this: {error}", param="messages") from error

    def count(self, texts: list[str]) -> int:
        """How many tokens `texts` have, each by itself."""
        return sum(map(len, _encode(self._tokenizer, texts)))


def _encode(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    # Tokenizer.encode keeps the GIL (110 ms for 200 KB, the event loop stands still); the batch forms release it.
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _template(folder: Path) -> jinja2.Template:
    import jinja2.sandbox

    def refuse(reason: str) -> None:
        raise jinja2.TemplateError(reason)

    file = folder / "chat_template.jinja"
    if not file.exists():
        raise WeightsError(f"{folder} has no chat_template.jinja; a model that chats needs one")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # What templates may call, by the convention of Hugging Face transformers.
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(file.read_text())


def _token_names(folder: Path) -> dict[str, str]:
    """`bos_token` and its like, which templates may use."""
    config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
    return {name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str)}


def _written(role: str, pieces: tuple[str | int, ...], heard: dict[int, str]) -> tuple[str, str]:
    texts = []
    for piece in pieces:
        if isinstance(piece, int) and piece not in heard:
            raise ProtocolError(f"media {piece} of the prompt was encoded by no stage")
        texts.append(heard[piece] if isinstance(piece, int) else piece)
    text = "\n".join(text for text in texts if text)
    return ROLES.get(role, role), f"Result of a tool: {text}" if role == "tool" else text
