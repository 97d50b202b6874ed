"""How Ming's talker is spoken to: what stands around a text, and the voice that it is to be said with."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actors.flow_talker import FlowPrompt
from actors.ming.voices import Voice
from actors.normalise import SpokenText
from actors.segmenter import LETTERS_PER_S
from actors.speaker import SPEAKER_DIM
from actors.tokenizer import load_tokenizer
from omniflow.errors import ContextLengthError, WeightsError

if TYPE_CHECKING:
    import torch

BEFORE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
    "<|im_start|>user\n",
    "Please generate speech based on the following description.\n",
    " Text input:\n",
)
AFTER = ("<|im_end|>\n", "<|im_start|>assistant\n", "<audio>")
"""What stands around a text that is to be spoken; the model was trained with each piece tokenized by itself."""
SLOWEST, SPARE_S = 2.0, 2.0
"""A segment is cut once it lasts twice as long as its text takes to say, and 2 s: it has missed its end."""
SPEAKER = ("  speaker_1:", "<|vision_start|>", "<|vision_pad|>", "<|vision_end|>\n")
"""What tells the model who speaks: an embedding takes the place of the third piece."""
_VOICES = 64
"""Of so many recordings it is kept what is said in them."""
ALONE: tuple[str, ...] = ("<|endoftext|>",)
"""What stands behind a text where nothing else stands around it, as in the preview."""


class MingScript:
    """How the talker of the checkpoint in `folder` is spoken to; used by one thread at a time.

    With `normalise` figures become words before the talker sees them. Raises WeightsError where its config.json or its
    tokenizer.json is missing or is no dense talker's.
    """

    def __init__(self, folder: Path, normalise: bool = True) -> None:
        # Imports torch, so not at the top: a graph is checked and explained without it.
        from actors.checkpoint import read_tensors
        from actors.ming.config import Folders, Talker

        config, folders = Talker.load(folder), Folders.of(folder)
        self._tokenizer = load_tokenizer(folders.llm)
        in_chat = config.manner.in_chat
        before, after, who = (BEFORE, AFTER, SPEAKER) if in_chat else ((), ALONE, ())
        self._before, self._after, self._who = self._ids(before), self._ids(after), self._ids(who)
        self._front = len(self._ids(before[:3]))
        """Inputs before those that tell who speaks."""
        self._who_at = self._front + len(self._ids(who[:2]))
        mark = SPEAKER[2] if in_chat else ALONE[0]
        if len(self._ids([mark])) != 1:
            raise WeightsError(f"the tokenizer.json in {folders.llm} knows no {mark}: it is no Ming talker's")
        self.speaker_dim = SPEAKER_DIM if in_chat else 0
        """Of an embedding of a voice; 0: it is told none."""
        self._tokenizer.encode_special_tokens = True  # as text, wherever a user writes them
        vae, patch = config.audio_tokenizer_config, config.ditar_config.patch_size
        ratio = max(1, vae.patch_size)
        self.latent_dim, self.patch = vae.dec_kwargs.latent_dim, patch
        self._step_s = patch * ratio * vae.dec_kwargs.output_dim / vae.sample_rate
        self._most_steps = vae.dec_kwargs.backbone.max_position_embeddings // ratio // patch
        self._head = {name: each.float() for name, each in read_tensors(folders.talker, ("spk_head.",)).items()}
        self._spoken = SpokenText() if normalise else None
        self._said_in = functools.lru_cache(maxsize=_VOICES)(self._written_out)
        """What is said in a recording: the same for each segment, and 1 s of work for 4,096 Chinese figures."""

    def prompt(self, text: str, voice: Voice | None = None, said: str = "") -> FlowPrompt | None:
        """What says `text` after `said`, as `voice`. None where `text` has no word.

        Raises ContextLengthError where it takes longer than the AudioVAE can say.
        """
        from actors.cutting import size_of

        text = self._written_out(text, said).strip()
        if not any(map(str.isalnum, text)):
            return None
        expected_s = size_of(text) / LETTERS_PER_S
        if expected_s > self._most_steps * self._step_s:
            raise ContextLengthError(
                f"{len(text)} characters take about {expected_s:.0f} s to say; a segment of this talker lasts at most "
                f"{self._most_steps * self._step_s:.0f} s: give shorter ones",
                param="input",
            )
        most_steps = min(math.ceil((SLOWEST * expected_s + SPARE_S) / self._step_s), self._most_steps)
        if voice is None:
            return FlowPrompt([*self._before, *self._ids([text]), *self._after], most_steps)
        return self._as_voice(text, voice, most_steps)

    def _as_voice(self, text: str, voice: Voice, most_steps: int) -> FlowPrompt:
        """What is said in the recording goes before `text`, and its sound before that of `text`."""
        who, before = voice.embedding, voice.before
        heard = [self._said_in(voice.text)] if before is not None else []
        told = self._who if who is not None else []
        beginning = [*self._before[: self._front], *told, *self._before[self._front :]]
        ids = [*beginning, *self._ids([*heard, text]), *self._after]
        if who is None:
            return FlowPrompt(ids, most_steps, before=before)
        return FlowPrompt(ids, most_steps, self._row(who), (self._who_at,), before)

    def _row(self, who: np.ndarray) -> torch.Tensor:
        import torch

        row: torch.Tensor = self._head["spk_head.weight"] @ torch.from_numpy(who) + self._head["spk_head.bias"]
        return row[None]

    def _written_out(self, text: str, said: str = "") -> str:
        return text if self._spoken is None else self._spoken(text, said)

    def _ids(self, pieces: Sequence[str]) -> list[int]:
        return [id for each in pieces for id in self._tokenizer.encode(each, add_special_tokens=False).ids]
