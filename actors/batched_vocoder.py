"""A vocoder whose decoder carries a state: what waits of the streams of all requests is decoded in one step."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from actors.roles import VocoderRole
from actors.stage import ModelStage
from actors.streaming_decoder import BatchedDecoder
from actors.threads import ungrouped
from omniflow.actor import Context, Emit, Stream
from omniflow.errors import ContextLengthError, ProtocolError
from omniflow.media import AudioChunk, Latents

_COMPANY_S = 0.001
"""On a GPU, where a step of many takes little longer than one of one, it waits for those that the talker's step brings
with it: they come within a millisecond.
"""


class BatchedVocoder(ModelStage, VocoderRole, ABC):
    """Makes sound of latents with a `BatchedDecoder`, which a model adds.

    Each message gives what is certain by now; segments follow each other, each from an empty state. What waits when a
    step begins is decoded in it, of up to `max_together` requests. Of a request whose listener is slow no more than one
    segment is decoded ahead. On a GPU so many segments are under way at a time; further ones wait.
    """

    heavy = True

    def __init__(self, model: str, device: str, threads: int, max_together: int) -> None:
        super().__init__(model, device, threads)
        self._max_together = max_together
        self._places = anyio.CapacityLimiter(math.inf if self._device == "cpu" else max_together)
        """Of segments under way."""
        self._waiting: dict[_Call, None] = {}
        self._lock = threading.Lock()
        self._decoder: BatchedDecoder[Any]

    @abstractmethod
    def load_decoder(self, folder: Path) -> BatchedDecoder[Any]:
        """The decoder of the checkpoint in `folder`, on its device; called in a thread. Raises WeightsError."""

    async def setup(self) -> None:
        """Load the decoder, and run it once. Raises WeightsError where it cannot be loaded."""
        self._decoder = await self.offload(self.load_decoder, self._weights.path())
        state = self._decoder.init()
        await self._decode(state, np.zeros((4, self._decoder.latent_dim), np.float32), True)
        self._decoder.end(state)

    async def run(self, latents: Stream[Latents], emit: Emit[AudioChunk], ctx: Context) -> None:
        """See the class. Raises ContextLengthError for a segment that is longer than the decoder can decode."""
        async for part in latents:
            # A place is given back once the segment is decoded: who listens slowly does not keep it from others.
            decoded, heard = anyio.create_memory_object_stream[AudioChunk](self._decoder.max_latents)
            with ungrouped():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_send_all, heard, emit)
                    async with decoded, self._places:
                        await self._segment(part, latents, decoded)

    async def _segment(
        self, part: Latents | None, rest: Stream[Latents], decoded: MemoryObjectSendStream[AudioChunk]
    ) -> None:
        """The sound of a segment that begins with `part`."""
        decoder = self._decoder
        state = decoder.init()
        try:
            while part is not None:
                samples = await self._decode(state, part.frames, part.last)
                if len(samples):
                    await decoded.send(AudioChunk(samples.clip(-1, 1), decoder.sample_rate_hz, decoder.channels))
                if part.last:
                    return
                part = await anext(rest, None)
        finally:
            decoder.end(state)
        raise ProtocolError("the latents ended amid a segment: its last `Latents` is not marked as such")

    async def _decode(self, state: Any, frames: np.ndarray, last: bool) -> np.ndarray:
        decoder = self._decoder
        if frames.ndim != 2 or frames.shape[1] != decoder.latent_dim:
            raise ProtocolError(f"latents of shape {list(frames.shape)}; this vocoder takes [n, {decoder.latent_dim}]")
        # Asked here, too: in a step it would be refused together with those of others.
        if state.num_latents + len(frames) > decoder.max_latents:
            raise ContextLengthError(f"a segment of more than {decoder.max_latents} latents: give shorter segments")
        call = _Call(state, frames, last)
        with self._lock:
            self._waiting[call] = None
        try:
            if self._device != "cpu" and self._places.borrowed_tokens > 1:
                await anyio.sleep(_COMPANY_S)
            return await self.offload(self._step, call)
        finally:
            with self._lock:
                self._waiting.pop(call, None)

    def _step(self, own: _Call) -> np.ndarray:
        """The sound of `own`, which a step for another may have made already."""
        if own.samples is None:
            with self._lock:
                others = [call for call in self._waiting if call is not own][: self._max_together - 1]
                calls = [own, *others]
                for call in calls:
                    self._waiting.pop(call, None)
            sounds = self._decoder.step_together(
                [call.state for call in calls], [call.frames for call in calls], [call.last for call in calls]
            )
            for call, samples in zip(calls, sounds, strict=True):
                call.samples = samples
            return sounds[0]
        return own.samples


async def _send_all(heard: MemoryObjectReceiveStream[AudioChunk], emit: Emit[AudioChunk]) -> None:
    async with heard:
        async for chunk in heard:
            await emit.send(chunk)


class _Call:
    """The next latents of one stream, and in the end their sound."""

    def __init__(self, state: Any, frames: np.ndarray, last: bool) -> None:
        self.state, self.frames, self.last = state, frames, last
        self.samples: np.ndarray | None = None
