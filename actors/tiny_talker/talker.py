"""The tiny talker as an actor: phonemes of a sentence in, the latent frames of Piper's "joe" out."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actors.ar_talker import ArTalker, Prompt, Script
from actors.piper.talker import LONGEST_TEXT, SENTENCE_PAUSE, pieces_of
from actors.piper.voice import PAUSES, SENTENCE_ENDS
from omniflow.actor import NamedVoice
from omniflow.engine.base import Sampling

if TYPE_CHECKING:
    from omniflow.engine.frames import FrameModel

OPEN_END = "."
"""Stands behind a piece that ends amid a phrase: the model has seen none. Of 98 fragments of 4 words, Whisper mistook
25 % of the words without a mark (some were said twice), 14 % with a comma, 12 % with this."""
DROPPED_STEPS = 2
"""Steps (93 ms) left out at such an end, where the model leaves 128 to 232 ms of silence."""


class TinyTalker(ArTalker):
    """Speaks US English in one voice; see `ArTalker`. Its frames are for `actors.piper.vocoder.PiperVocoder`."""

    preload = ("torch", "actors.tiny_talker.model", "actors.piper.g2p", "gruut", "gruut_lang_en", "normt2s")

    def voices(self) -> Sequence[NamedVoice]:
        """The one that it was made from."""
        return (NamedVoice("joe", "en-US"),)

    def load_script(self, folder: Path) -> Script:
        return TinyTalkerScript(folder)


class TinyTalkerScript(Script):
    """What the tiny talker says of itself in its config.json, and how it is spoken to.

    `phonemes` makes eSpeak's IPA of text; without one, that is `actors.piper.g2p`.
    """

    def __init__(self, folder: Path, phonemes: Callable[[str], str] | None = None) -> None:
        # Imported here: torch and the dictionary take 3 s, which only the process that speaks should spend.
        from actors.tiny_talker.model import Config, load_codebooks

        self._folder = folder
        self._config = Config.load(folder)
        self._codebooks = load_codebooks(folder)
        self._phonemes = _english() if phonemes is None else phonemes
        self.num_codes = self._config.code_predictor_config.num_code_groups
        draw = self._config.sampling
        self.sampling = Sampling(temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p)
        self.later_codes = Sampling(
            temperature=draw.predictor_temperature, top_k=draw.predictor_top_k, top_p=draw.predictor_top_p
        )

    def prompts(self, text: str) -> list[Prompt]:
        """One for each sentence, or piece of a long one; a step of 80 ms at most."""
        parts = textwrap.wrap(text, LONGEST_TEXT, replace_whitespace=False, break_on_hyphens=False)
        return [self.prompt(piece) for part in parts for piece in pieces_of(self._phonemes(part))]

    def prompt(self, phonemes: str) -> Prompt:
        """That of one piece."""
        is_open = phonemes[-1] not in PAUSES
        ids = self.ids(phonemes + OPEN_END if is_open else phonemes)
        draw = self._config.sampling
        return Prompt(
            ids=[*ids, self._config.begin_id],
            max_steps=min(draw.max_steps, draw.max_steps_base + draw.max_steps_per_phoneme_id * len(ids)),
            dropped_steps=DROPPED_STEPS if is_open else 0,
            pause_frames=SENTENCE_PAUSE if phonemes[-1] in SENTENCE_ENDS else 0,
        )

    def ids(self, phonemes: str) -> list[int]:
        """Between begin and end; what the table does not know is dropped."""
        table = self._config.phonemes.table
        inner = [table[mark] for mark in unicodedata.normalize("NFD", phonemes) if mark in table]
        return [table[self._config.phonemes.begin], *inner, table[self._config.phonemes.end]]

    def frames(self, codes: np.ndarray) -> np.ndarray:
        """Latent frames [4 * num_steps, 192]: each the sum of one row of each codebook."""
        count = self._config.codec.num_codebooks
        by_frame = codes.reshape(-1, count)
        rows = [self._codebooks[level, by_frame[:, level]] for level in range(count)]
        return np.ascontiguousarray(np.sum(rows, axis=0, dtype=np.float32))

    def load_model(self) -> FrameModel:
        from actors.tiny_talker.model import load_model

        return load_model(self._folder)


def _english() -> Callable[[str], str]:
    from actors.piper.g2p import EnglishPhonemes

    return EnglishPhonemes()
