"""Ming's audio encoder as an actor: clips in, inputs of the thinker out; clips of several requests pass together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actors.encoding import DtypeName, MediaEncoder, digest_of, placed, run_through
from actors.mel import FFT_SIZE, HOP, SAMPLE_RATE_HZ, checked_seconds, log_mel, mel_filters
from omniflow.actor import Count, batched
from omniflow.errors import InvalidInputError
from omniflow.media import AudioFeatures, Waveforms

if TYPE_CHECKING:
    from actors.ming.audio_tower import AudioTower

MAX_BATCH = 8
"""Requests whose clips may pass together."""
MAX_FRAMES = 12_000
"""Mel frames of 10 ms in one pass, but for a longer clip, which goes alone: the memory of a pass is bounded by it."""


class MingAudioEncoder(MediaEncoder[np.ndarray, np.ndarray, np.ndarray]):
    """Hears with the audio tower of a Ming-flash-omni checkpoint: fills `AudioFeatures.rows`, one for each 40 ms.

    Clips are heard whole, as Ming's processor has them; one of less than 12.6 ms is followed by silence up to 25 ms.
    A clip has the same rows, within 1e-5 on a CPU, alone and beside others. Up to `decoders` clips are made ready at
    the same time, each on a core; the rows of recent ones are kept, up to `cache_mb`. `dtype` auto is bfloat16 on a
    GPU and float32 on a CPU.

    Raises InvalidInputError for a conversation of more than `max_seconds`, and for a clip that is longer than the
    tower has positions for (300 s).
    """

    preload = ("torch", "safetensors.torch", "actors.ming.audio_tower")
    most = MAX_FRAMES

    def __init__(
        self,
        *,
        model: str,
        device: str = "cpu",
        dtype: DtypeName = "auto",
        threads: int = 1,
        decoders: Count = 4,
        max_seconds: float = 600,
        cache_mb: int = 256,
    ) -> None:
        super().__init__(model, device, dtype, threads, decoders, cache_mb)
        self._max_seconds = max_seconds
        self._tower: AudioTower
        self._filters: np.ndarray
        self._max_frames: int

    async def setup(self) -> None:
        """Load the tower, and run it once. Raises WeightsError where it cannot be loaded."""
        await self.offload(self._load, self._weights.path())
        await run_through(self.offload, self.layers([await self.ready(np.zeros(SAMPLE_RATE_HZ, np.float32))]))

    @batched(max_size=MAX_BATCH)
    async def run(self, audio: list[Waveforms]) -> list[AudioFeatures]:
        """See the class."""
        heard_s = [self._checked_seconds(request) for request in audio]
        rows = await self.encoded([request.samples for request in audio])
        return [
            AudioFeatures(
                index=request.index,
                audio_s=seconds,
                rows=await self.joined(own),
                num_rows=tuple(len(each) for each in own),
            )
            for request, seconds, own in zip(audio, heard_s, rows, strict=True)
        ]

    def digest(self, item: np.ndarray) -> bytes:
        return digest_of(np.ascontiguousarray(item).data)

    async def ready(self, item: np.ndarray) -> np.ndarray:
        """Its mel frames [n_mels, frames]."""
        return await self.decode(self._mel, item)

    def size(self, ready: np.ndarray) -> int:
        return int(ready.shape[1])

    def layers(self, batch: Sequence[np.ndarray]) -> Iterator[list[np.ndarray] | None]:
        return self._tower.rows(batch)

    def num_bytes(self, made: np.ndarray) -> int:
        return made.nbytes

    def _mel(self, clip: np.ndarray) -> np.ndarray:
        if len(clip) <= FFT_SIZE // 2:  # it is mirrored at its ends, by as much
            clip = np.pad(clip, (0, FFT_SIZE - len(clip)))
        return log_mel(clip, self._filters)

    def _checked_seconds(self, request: Waveforms) -> float:
        seconds = checked_seconds(request, self._max_seconds)
        for number, clip in enumerate(request.samples):
            if len(clip) // HOP > self._max_frames:
                where = request.where[number] if request.where else f"audio clip {number + 1}"
                raise InvalidInputError(
                    f"{where} lasts {len(clip) / SAMPLE_RATE_HZ:.1f} s; this model takes at most "
                    f"{self._max_frames * HOP / SAMPLE_RATE_HZ:g} s in one clip",
                    param="messages",
                )
        return seconds

    def _load(self, folder: Path) -> None:
        # Imports torch, so not at the top: a graph is checked and explained without it.
        import torch

        from actors.ming.audio_tower import load_audio_tower

        torch.set_num_threads(self._threads)
        tower = load_audio_tower(folder)
        self._filters = mel_filters(tower.sizes.n_mels)
        self._max_frames = 2 * tower.sizes.n_ctx
        self._tower = placed(tower, self._device, self._dtype)
