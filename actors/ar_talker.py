"""An autoregressive talker: text becomes prompts, and a frame engine makes what they sound like, step by step.

A model adds a `Script`: which prompts a text is, and which frames the vocoder takes for the codes of a step.
"""

from __future__ import annotations

import itertools
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from actors.catalogue import PACKAGED
from actors.roles import TalkerRole
from omniflow.actor import Context, Emit, Stream
from omniflow.engine.base import Engine, EngineRequest, Sampling
from omniflow.engine.loop import EngineLoop
from omniflow.errors import InvalidInputError
from omniflow.media import Latents, Segment
from omniflow.weights import Weights, resolve

if TYPE_CHECKING:
    from omniflow.engine.frames import FrameModel

SLOWEST, FASTEST = 0.5, 2.0
"""Bounds of `speed`: frames are repeated or left out, which beyond them is not understood well."""
FIRST_STEPS = 7
"""Steps in the first message of a request: 28 frames of a model that makes 4 a step, of which a vocoder makes sound."""
MOST_STEPS = 16
"""Steps in the later ones, by doubling."""


class Prompt(msgspec.Struct, frozen=True):
    """One utterance: what the engine starts from, and what to do with the silence at its end."""

    ids: list[int]
    max_steps: int
    dropped_steps: int = 0
    """Steps of silence that are left out at its end, where speech goes on."""
    pause_frames: int = 0
    """Frames of silence that follow it, where the voice leaves too little."""


class Script(ABC):
    """What a model adds; used by one thread at a time."""

    sampling: Sampling
    """How the first code of a step is drawn."""
    later_codes: Sampling
    """How the others are."""
    num_codes: int
    """Codes of a step."""
    held_steps: int
    """Steps that are kept back until the next are there: the most that a prompt drops at its end."""

    @abstractmethod
    def prompts(self, text: str) -> list[Prompt]:
        """The utterances of `text`, each short enough for the model; none where it has no word."""

    @abstractmethod
    def frames(self, codes: np.ndarray) -> np.ndarray:
        """What the vocoder takes, float32 [num_frames, channels], for codes int64 [num_steps, num_codes]; any number of
        steps, none included.
        """

    @abstractmethod
    def load_model(self) -> FrameModel:
        """The weights; called in the engine's thread."""


class ArTalker(TalkerRole, ABC):
    """Speaks segments of text with a frame engine; the requests of all callers step together.

    Each segment gives one or more `Latents`, the last of them marked; one without a word gives none. With
    `Options.seed` the same segments give the same frames, alone and beside others. `Options.speed` repeats frames or
    leaves some out. `max_running` utterances step together, `max_waiting` wait for it, then OverloadedError (429).
    """

    heavy = True

    def __init__(
        self, *, model: str, device: str = "cpu", threads: int = 1, max_running: int = 8, max_waiting: int = 64
    ) -> None:
        self._weights = resolve(model, PACKAGED)
        self._device = device
        self._threads = threads
        self._limits = {"max_running": max_running, "max_waiting": max_waiting}
        self._script: Script
        self._loop = EngineLoop(self._build)

    @abstractmethod
    def load_script(self, folder: Path) -> Script:
        """What the model in `folder` adds; called once, in a thread of its own."""

    def weights(self) -> Sequence[Weights]:
        return (self._weights,)

    async def setup(self) -> None:
        """Load the model, and say a word. Raises WeightsError where it cannot be loaded."""
        self._script = await self.offload(self.load_script, self._weights.path())
        await self._loop.setup()
        for prompt in await self.offload(self._script.prompts, "Ready."):
            async with self._loop.generate(self._request(prompt, "setup", seed=0)) as outputs:
                await anext(outputs)

    def busy_s(self) -> float:
        return max(super().busy_s(), self._loop.busy_s())

    async def close(self) -> None:
        await self._loop.close()

    async def run(self, segments: Stream[Segment], emit: Emit[Latents], ctx: Context) -> None:
        """See the class. Raises InvalidInputError where `speed` is out of range."""
        speed = _checked_speed(ctx.options.speed)
        seed = secrets.randbits(64) if ctx.options.seed is None else ctx.options.seed % 2**64
        sizes = itertools.chain((FIRST_STEPS, MOST_STEPS // 2), itertools.repeat(MOST_STEPS))
        numbers = itertools.count()
        async for segment in segments:
            prompts = await self.offload(self._script.prompts, segment.text)
            for prompt, number in zip(prompts, numbers, strict=False):
                request = self._request(prompt, f"{ctx.run_id}-{number:06}", _seed_of(seed, number))
                utterance = _Utterance(self._script, prompt, speed, sizes)
                async with self._loop.generate(request) as outputs:
                    async for output in outputs:
                        frames = None if output.frames is None else utterance.add(output.frames.cpu().numpy())
                        if frames is not None:
                            await emit.send(Latents(frames, segment.index, last=False))
                await emit.send(Latents(utterance.rest(), segment.index, last=prompt is prompts[-1]))

    def _request(self, prompt: Prompt, id: str, seed: int) -> EngineRequest:
        sampling = msgspec.structs.replace(self._script.sampling, seed=seed, max_tokens=prompt.max_steps)
        return EngineRequest(id=id, ids=prompt.ids, sampling=sampling, later_codes=self._script.later_codes)

    def _build(self) -> Engine:
        # Imports torch, so not at the top: a graph is checked and explained without it.
        import torch

        from omniflow.engine.frames import FrameEngine

        torch.set_num_threads(self._threads)
        return FrameEngine(self._script.load_model().to(self._device), **self._limits)


class _Utterance:
    """The codes of one utterance on their way to frames. Some are kept back until it is known that more follow."""

    def __init__(self, script: Script, prompt: Prompt, speed: float, sizes: Iterator[int]) -> None:
        self._script, self._prompt, self._speed, self._sizes = script, prompt, speed, sizes
        self._size = next(sizes)
        self._held: list[np.ndarray] = []
        self._num_frames = 0

    def add(self, codes: np.ndarray) -> np.ndarray | None:
        """Take some steps of codes; frames where enough for a message have come."""
        self._held += list(codes)
        if len(self._held) < self._size + self._script.held_steps:
            return None
        ready, self._held = self._held[: self._size], self._held[self._size :]
        self._size = next(self._sizes)
        return self._stretched(self._script.frames(np.stack(ready)))

    def rest(self) -> np.ndarray:
        """The last frames; there may be none."""
        kept = self._held[: len(self._held) - self._prompt.dropped_steps]
        codes = np.stack(kept) if kept else np.zeros((0, self._script.num_codes), np.int64)
        frames = self._stretched(self._script.frames(codes))
        return np.concatenate([frames, frames[-1:].repeat(round(self._prompt.pause_frames / self._speed), axis=0)])

    def _stretched(self, frames: np.ndarray) -> np.ndarray:
        start = self._num_frames
        self._num_frames += len(frames)
        return stretched(frames, start, self._speed)


def stretched(frames: np.ndarray, start: int, speed: float) -> np.ndarray:
    """`frames`, which begin at `start` of an utterance, repeated or left out so that it lasts 1 / `speed`.

    Pitch and timbre are in the frames, so they stay; any chunks of an utterance together give the same.
    """
    first, stop = (math.ceil(at / speed - 0.5) for at in (start, start + len(frames)))
    index = np.floor((np.arange(first, stop) + 0.5) * speed).astype(int) - start
    kept: np.ndarray = frames[index.clip(0, max(0, len(frames) - 1))]
    return kept


def _seed_of(seed: int, number: int) -> int:
    """Of utterance `number` of a request: no two say their words with the same noise."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])


def _checked_speed(speed: float) -> float:
    if SLOWEST <= speed <= FASTEST:
        return speed
    raise InvalidInputError(f"speed {speed} is out of range: give {SLOWEST} to {FASTEST}", param="speed")
