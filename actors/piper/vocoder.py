"""Piper's vocoder: latent frames to sound, by the HiFi-GAN inside the voice; streamed, and the same in any chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import soxr
from msgspec import Meta

from actors.piper import PIPER_JOE
from actors.piper.voice import NUM_CHANNELS, SAMPLES_PER_FRAME, Voice, open_graph
from actors.stage import ModelStage
from actors.streaming_decoder import Window, WindowedDecoder
from omniflow.actor import Emit, Stream
from omniflow.errors import ProtocolError
from omniflow.media import AudioChunk, Latents

FIRST_FRAMES, MOST_FRAMES = 16, 64
"""Frames in the first chunk of a reply (186 ms of sound) and in the later ones (743 ms). The second of a reply, and the
first of each later segment, for which a player may be waiting, are half of that."""


class PiperDecoder(WindowedDecoder):
    """The decoder of a Piper voice: 86 frames a second. A frame costs 0.9 ms of a core."""

    num_features = NUM_CHANNELS
    samples_per_frame = SAMPLES_PER_FRAME
    channels = 1
    holdback = 10
    """With 9 the samples are 6e-4 off, with 10 they are 1e-6 off."""

    def __init__(self, folder: Path) -> None:
        self.sample_rate_hz = Voice.load(folder).audio.sample_rate
        self._graph = open_graph(folder / "decoder.onnx")

    def decode(self, frames: np.ndarray) -> np.ndarray:
        """See `WindowedDecoder.decode`."""
        (samples,) = self._graph.run(["samples"], {"latent": frames.T[np.newaxis]})
        return np.asarray(samples, np.float32).ravel()


class PiperVocoder(ModelStage):
    """Makes sound of latent frames, mono, at `sample_rate_hz`; segments follow each other without a gap or a seam.

    Chunks are small at first and grow. Their samples do not depend on how the frames arrive.
    """

    heavy = True

    def __init__(
        self, *, model: str = PIPER_JOE.name, sample_rate_hz: Annotated[int, Meta(ge=8000, le=192000)] = 24000
    ) -> None:
        super().__init__(model)
        self._sample_rate_hz = sample_rate_hz
        self._decoder: PiperDecoder

    async def setup(self) -> None:
        """Load the decoder, and run it once."""
        self._decoder = await self.offload(PiperDecoder, self._weights.path())
        await self.offload(self._decoder.decode, np.zeros((FIRST_FRAMES, NUM_CHANNELS), np.float32))

    async def run(self, latents: Stream[Latents], emit: Emit[AudioChunk]) -> None:
        """See the class. A step keeps a core busy for at most 75 ms, so that first chunks of others get their turn."""
        decoder, out_hz = self._decoder, self._sample_rate_hz
        resampler = soxr.ResampleStream(decoder.sample_rate_hz, out_hz, decoder.channels, dtype="float32")
        size, following = FIRST_FRAMES + decoder.holdback, MOST_FRAMES // 2
        state = decoder.init()
        waiting = np.zeros((0, decoder.num_features), np.float32)
        is_whole = True
        async for part in latents:
            waiting = np.concatenate([waiting, part.frames])
            is_whole = part.last
            while part.last or len(waiting) >= size:
                frames, waiting = waiting[:size], waiting[size:]
                last = part.last and len(waiting) == 0
                samples = await self.offload(_sound, decoder, state, frames, last, resampler)
                if len(samples):
                    await emit.send(AudioChunk(samples, out_hz, decoder.channels))
                size, following = following, MOST_FRAMES
                if last:
                    size, state = MOST_FRAMES // 2, decoder.init()
                    break
        if not is_whole:
            raise ProtocolError("the frames ended amid a segment: its last `Latents` is not marked as such")
        rest = resampler.resample_chunk(np.zeros(0, np.float32), last=True)
        if len(rest):
            await emit.send(AudioChunk(_playable(rest), out_hz, decoder.channels))


def _sound(
    decoder: PiperDecoder, state: Window, frames: np.ndarray, last: bool, resampler: soxr.ResampleStream
) -> np.ndarray:
    return _playable(resampler.resample_chunk(decoder.step(state, frames, last)))


def _playable(samples: np.ndarray) -> np.ndarray:
    """Resampling overshoots where the sound is loudest."""
    return samples.clip(-1, 1)
