"""An autoregressive talker: text becomes prompts, and a frame engine makes what they sound like, step by step.

A model adds a `Script`: which prompts a text is, and which frames the vocoder takes for the codes of a step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import anyio
import msgspec
import numpy as np

from actors.roles import TalkerRole
from actors.seeds import part_seed, request_seed
from actors.stage import GATHER_S, EngineStage
from omniflow.actor import Context, Count, Emit, Stream
from omniflow.engine.base import Engine, EngineOutput, EngineRequest, Sampling
from omniflow.engine.loop import EngineLoop
from omniflow.errors import InvalidInputError
from omniflow.media import Latents, Segment

if TYPE_CHECKING:
    from omniflow.engine.frames import FrameModel

SLOWEST, FASTEST = 0.5, 2.0
"""Bounds of `speed`: frames are repeated or left out, which beyond them is not understood well."""
FIRST_STEPS = 7
"""Steps in the first message of a request: 28 frames of a model that makes 4 a step, of which a vocoder makes sound."""
MOST_STEPS = 16
"""Steps in the later messages of an utterance."""


EngineName = Literal["reference", "sglang"]


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


class ArTalker(EngineStage, TalkerRole, ABC):
    """Speaks segments of text with a frame engine; the requests of all callers step together.

    Each segment gives one or more `Latents`, the last of them marked; one without a word gives none. With
    `Options.seed` the same segments give the same frames, alone and beside others. `Options.speed` repeats frames or
    leaves some out. `max_running` utterances step together, the first of each request before others that wait;
    `max_waiting` wait for it, then OverloadedError (429). `engine` "sglang" steps under CUDA graphs, in a process of
    its own.

    Once a request is heard, its next utterance begins beside the one that is being said, where there is room.
    """

    cpu_engine = "reference"

    def __init__(
        self,
        *,
        model: str,
        device: str = "cpu",
        threads: int = 1,
        max_running: Count = 8,
        max_waiting: Count = 64,
        engine: EngineName = "reference",
    ) -> None:
        super().__init__(model, device, threads)
        self._engine = engine
        self._limits = {"max_running": max_running, "max_waiting": max_waiting}
        self._script: Script
        self._loop = EngineLoop(self._build, gather_s=GATHER_S if engine == "sglang" else 0.0)

    @abstractmethod
    def load_script(self, folder: Path) -> Script:
        """What the model in `folder` adds; called once, in a thread of its own."""

    async def setup(self) -> None:
        """Load the model, and say a word. Raises WeightsError where it cannot be loaded."""
        self._script = await self.offload(self.load_script, self._weights.path())
        await self._loop.setup()
        for number, prompt in enumerate(await self.offload(self._script.prompts, "Ready.")):
            request = EngineRequest(id=f"setup {number}", ids=prompt.ids, sampling=self._script.sampling)
            async with self._loop.generate(request) as outputs:
                await anext(outputs)

    async def run(self, segments: Stream[Segment], emit: Emit[Latents], ctx: Context) -> None:
        """See the class. Raises InvalidInputError where `speed` is out of range."""
        speech = _Speech(segments, ctx)
        async with contextlib.AsyncExitStack() as ahead:
            following = await self._begin(speech, ahead, wait=True)
            while following is not None:
                utterance, following = following, None
                async with ahead.pop_all():
                    async for output in utterance.outputs:
                        latents = utterance.add(output)
                        if latents is not None:
                            await emit.send(latents)
                            if following is None and self._has_room():
                                following = await self._begin(speech, ahead, wait=False)
                await emit.send(utterance.rest())
                following = following or await self._begin(speech, ahead, wait=True)

    async def _begin(self, speech: _Speech, ahead: contextlib.AsyncExitStack, wait: bool) -> _Utterance | None:
        """Begin the next utterance, which ends with `ahead`; None where there is none, or not `wait` and none yet."""
        while not speech.lines:
            segment = await speech.read(wait)
            if segment is None:
                return None
            speech.add(segment, await self.offload(self._script.prompts, segment.text))
        line = speech.lines.popleft()
        sampling = msgspec.structs.replace(self._script.sampling, seed=line.seed, max_tokens=line.prompt.max_steps)
        request = EngineRequest(
            id=line.id,
            ids=line.prompt.ids,
            sampling=sampling,
            later_codes=self._script.later_codes,
            urgent=line.is_first,
        )
        outputs = await ahead.enter_async_context(self._loop.generate(request))
        return _Utterance(self._script, line, outputs, speech.speed)

    def _has_room(self) -> bool:
        """True where the next utterance may begin early: a step of two takes hardly longer than one of one, but where
        others speak it would take their turn.
        """
        return 2 * self._loop.stats.num_running <= self._limits["max_running"]

    def _build(self) -> Engine:
        # Imports torch, so not at the top: a graph is checked and explained without it.
        model = self._script.load_model()
        if self._engine == "sglang":
            from omniflow.engine.sglang_frames import load_frame_engine

            return load_frame_engine(model, device=self._device, threads=self._threads, **self._limits)
        import torch

        from omniflow.engine.frames import FrameEngine

        torch.set_num_threads(self._threads)
        return FrameEngine(model.to(self._device), **self._limits)


class _Line(NamedTuple):
    """What is to be said next."""

    prompt: Prompt
    id: str
    seed: int
    segment: int
    is_first: bool
    """Of the request."""
    is_last: bool
    """Of the segment."""


class _Speech:
    """One request: what of its text is here, and what its utterances share."""

    def __init__(self, segments: Stream[Segment], ctx: Context) -> None:
        self.speed = _checked_speed(ctx.options.speed)
        self.lines: deque[_Line] = deque()
        self._segments = segments
        self._run_id = ctx.run_id
        self._seed = request_seed(ctx.options)
        self._numbers = itertools.count()

    async def read(self, wait: bool) -> Segment | None:
        """The next segment; None after the last, or not `wait` and none is here."""
        # `Stream` loses nothing when a receive is cancelled: an item is taken out after the last wait.
        with anyio.CancelScope(deadline=math.inf if wait else -math.inf):
            return await anext(self._segments, None)
        return None

    def add(self, segment: Segment, prompts: Sequence[Prompt]) -> None:
        """The utterances of `segment`. Each has a seed of its own: no two say their words with the same noise."""
        for prompt, number in zip(prompts, self._numbers, strict=False):
            seed = part_seed(self._seed, number)
            id = f"{self._run_id}-{number:06}"
            self.lines.append(_Line(prompt, id, seed, segment.index, number == 0, prompt is prompts[-1]))


class _Utterance:
    """The codes of one utterance on their way to frames. Some are kept back, since they are dropped if it ends."""

    def __init__(self, script: Script, line: _Line, outputs: AsyncIterator[EngineOutput], speed: float) -> None:
        self.outputs = outputs
        self._script, self._line, self._speed = script, line, speed
        # The first steps of all are sent at once: to keep some back would cost their time. What is kept back depends
        # on nothing but the utterance: the same seed gives the same frames. Each utterance begins with a half message,
        # because the one before it may be heard to its end by then.
        first = (FIRST_STEPS,) if line.is_first else ()
        self._sizes = itertools.chain((*first, MOST_STEPS // 2), itertools.repeat(MOST_STEPS))
        self._size, self._kept_back = next(self._sizes), 0 if line.is_first else line.prompt.dropped_steps
        self._held: list[np.ndarray] = []
        self._num_frames = 0
        self._last = script.frames(np.zeros((0, script.num_codes), np.int64))

    def add(self, output: EngineOutput) -> Latents | None:
        """Take the codes of a step; frames where enough for a message have come."""
        self._held += [] if output.frames is None else list(output.frames.cpu().numpy())
        if len(self._held) < self._size + self._kept_back:
            return None
        ready, self._held = self._held[: self._size], self._held[self._size :]
        self._size, self._kept_back = next(self._sizes), self._line.prompt.dropped_steps
        return Latents(self._stretched(ready), self._line.segment, last=False)

    def rest(self) -> Latents:
        """The last frames, of which there may be none, and a pause."""
        frames = self._stretched(self._held[: max(0, len(self._held) - self._line.prompt.dropped_steps)])
        pause = self._last.repeat(round(self._line.prompt.pause_frames / self._speed), axis=0)
        return Latents(np.concatenate([frames, pause]), self._line.segment, self._line.is_last)

    def _stretched(self, steps: list[np.ndarray]) -> np.ndarray:
        frames = self._script.frames(np.array(steps, np.int64).reshape(len(steps), self._script.num_codes))
        start, self._num_frames = self._num_frames, self._num_frames + len(frames)
        self._last = frames[-1:] if len(frames) else self._last
        return stretched(frames, start, self._speed)


def stretched(frames: np.ndarray, start: int, speed: float) -> np.ndarray:
    """`frames`, which begin at `start` of an utterance, repeated or left out so that it lasts 1 / `speed`.

    Pitch and timbre are in the frames, so they stay; any chunks of an utterance together give the same.
    """
    first, stop = (math.ceil(at / speed - 0.5) for at in (start, start + len(frames)))
    index = np.floor((np.arange(first, stop) + 0.5) * speed).astype(int) - start
    kept: np.ndarray = frames[index.clip(0, max(0, len(frames) - 1))]
    return kept


def _checked_speed(speed: float) -> float:
    if SLOWEST <= speed <= FASTEST:
        return speed
    raise InvalidInputError(f"speed {speed} is out of range: give {SLOWEST} to {FASTEST}", param="speed")
