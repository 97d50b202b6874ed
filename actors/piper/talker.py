"""Piper's talker: text to latent frames. Not autoregressive: a piece of text becomes all of its frames at once."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actors.piper import PIPER_JOE
from actors.piper.voice import PAUSES, SENTENCE_ENDS, Voice, open_graph
from actors.seeds import request_seed
from actors.stage import ModelStage
from omniflow.actor import Context, Emit, NamedVoice, Stream
from omniflow.errors import InvalidInputError
from omniflow.media import Latents, Segment

if TYPE_CHECKING:
    from actors.piper.g2p import EnglishPhonemes

SLOWEST, FASTEST = 0.25, 4.0
"""Bounds of `speed`, as OpenAI has them."""
ROUNDING = 0.32
"""Frames that rounding up adds to a reply, as a share of the rest: it does not shrink when phonemes do."""
LONGEST_TEXT = 1000
"""Characters that become phonemes in a step: 10 ms for prose, at worst 80 ms."""
LONGEST_PIECE = 160
"""Phonemes in a piece: about 8 s of speech. The encoder's work grows with the square; here it takes 75 ms."""
FIRST_FRAMES, MOST_FRAMES = 32, 128
"""Frames that the flow makes in a step: first what the vocoder needs for its first chunk, twice that, then the most."""
FLOW_CONTEXT = 32
"""Frames that the flow sees to each side of one: 4 couplings of 4 convolutions that reach 2 frames."""
SENTENCE_PAUSE = 16
"""Frames of silence (186 ms) added to a sentence: the voice itself leaves 220 ms to the next one, hardly a breath."""
OPEN_END = 6
"""Frames of silence (70 ms) taken from a piece that ends amid a phrase, where the voice leaves 140 ms."""


class PiperTalker(ModelStage):
    """Speaks segments of US English text, at `Options.speed` (beyond 2 it hardly gets faster).

    Each segment gives one or more `Latents`, the last of them marked; one without a word to say gives none. With
    `Options.seed` the same segments give the same frames, alone and beside others.
    """

    heavy = True
    preload = ("actors.piper.g2p", "gruut", "gruut_lang_en", "normt2s")

    def __init__(self, *, model: str = PIPER_JOE.name) -> None:
        super().__init__(model)
        self._acoustics: Acoustics
        self._phonemes: EnglishPhonemes

    def voices(self) -> Sequence[NamedVoice]:
        """The one voice of the model, by the name of its weights."""
        return (NamedVoice(self._weights.name.rpartition("/")[2].removeprefix("piper-"), "en-US"),)

    async def setup(self) -> None:
        """Load the voice and the dictionary (0.8 s), and run once, which spares the first request 70 ms."""
        self._acoustics = await self.offload(Acoustics, self._weights.path())
        self._phonemes = await self.offload(_load_phonemes)
        prior = await self.offload(self._acoustics.prior, self._phonemes("Ready."), 1.0, np.random.default_rng(0))
        await self.offload(self._acoustics.frames, prior, 0, FIRST_FRAMES)

    async def run(self, segments: Stream[Segment], emit: Emit[Latents], ctx: Context) -> None:
        """See the class. A step keeps a core busy for at most 80 ms."""
        speed = _checked_speed(ctx.options.speed)
        seed = request_seed(ctx.options)
        rng = np.random.default_rng(seed)
        sizes = itertools.chain((FIRST_FRAMES, 2 * FIRST_FRAMES), itertools.repeat(MOST_FRAMES))
        async for segment in segments:
            parts = textwrap.wrap(segment.text, LONGEST_TEXT, replace_whitespace=False, break_on_hyphens=False)
            pieces = [piece for part in parts for piece in pieces_of(await self.offload(self._phonemes, part))]
            for number, piece in enumerate(pieces, 1):
                prior = await self.offload(self._acoustics.prior, piece, speed, rng)
                end = len(prior) if piece[-1] in PAUSES else max(1, len(prior) - round(OPEN_END / speed))
                stop = 0
                while stop < end:
                    start, stop = stop, min(stop + next(sizes), end)
                    frames = await self.offload(self._acoustics.frames, prior, start, stop)
                    if stop == end and piece[-1] in SENTENCE_ENDS:
                        frames = np.concatenate([frames, frames[-1:].repeat(round(SENTENCE_PAUSE / speed), axis=0)])
                    await emit.send(Latents(frames, segment.index, last=stop == end and number == len(pieces)))


class Acoustics:
    """The talker's graphs: what they make of phonemes, without a thought of streams."""

    def __init__(self, folder: Path) -> None:
        self._voice = Voice.load(folder)
        self._encoder = open_graph(folder / "encoder.onnx")
        self._flow = open_graph(folder / "flow.onnx")

    def prior(self, phonemes: str, speed: float, rng: np.random.Generator) -> np.ndarray:
        """A draw from the prior of the frames that `phonemes` last, float32 [num_frames, 192]."""
        ids = self._voice.ids(phonemes)
        inference = self._voice.inference
        inputs = {
            "phonemes": np.array([ids]),
            "num_phonemes": np.array([len(ids)]),
            "scales": np.array([0.0, inference.length_scale * _length(speed), inference.noise_w], np.float32),
            "duration_noise": rng.standard_normal((1, 2, len(ids)), np.float32),
        }
        mean, log_scale = (out[0].T for out in self._encoder.run(["mean", "log_scale"], inputs))
        noise = rng.standard_normal(mean.shape, np.float32) * np.float32(inference.noise_scale)
        return np.ascontiguousarray(mean + noise * np.exp(log_scale))

    def frames(self, prior: np.ndarray, start: int, stop: int) -> np.ndarray:
        """The latent frames from `start` to `stop` of `prior`, float32 [stop - start, 192]; 0.17 ms each."""
        first = max(0, start - FLOW_CONTEXT)
        window = prior[first : stop + FLOW_CONTEXT].T[np.newaxis]
        (latent,) = self._flow.run(["latent"], {"prior": window})
        return np.ascontiguousarray(latent[0].T[start - first : stop - first])


def pieces_of(phonemes: str) -> list[str]:
    """Sentences, and what is longer than `LONGEST_PIECE` cut at a clause, else between words, else anywhere.

    The voice was trained on single sentences: it slurs the end of one that another follows.
    """
    pieces = []
    for sentence in re.split(r"(?<=[.?!]) ", phonemes):
        while len(sentence) > LONGEST_PIECE:
            clause = max(sentence.rfind(f"{mark} ", LONGEST_PIECE // 3, LONGEST_PIECE) + 1 for mark in ",;:")
            at = clause or sentence.rfind(" ", 1, LONGEST_PIECE)
            at = at if at > 0 else LONGEST_PIECE
            pieces.append(sentence[:at])
            sentence = sentence[at:].lstrip()
        pieces.append(sentence)
    return [piece for piece in pieces if piece]


def _length(speed: float) -> float:
    """What to scale durations with, so that a reply lasts 1 / `speed`; below 0.1 every phoneme lasts its one frame."""
    return max(0.1, 1 / speed + ROUNDING * (1 / speed - 1))


def _checked_speed(speed: float) -> float:
    if SLOWEST <= speed <= FASTEST:
        return speed
    raise InvalidInputError(f"speed {speed} is out of range: give {SLOWEST} to {FASTEST}", param="speed")


def _load_phonemes() -> EnglishPhonemes:
    # Imported here: it takes 0.5 s, which only the process that speaks should spend.
    from actors.piper.g2p import EnglishPhonemes

    return EnglishPhonemes()
