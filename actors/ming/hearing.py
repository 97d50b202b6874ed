"""Ming's audio encoder as an actor: clips in, inputs of the thinker out; clips of several requests pass together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from actors.encoding import Recent, bounded, digest_of, placed, run_through
from actors.mel import FFT_SIZE, HOP, SAMPLE_RATE_HZ, log_mel, mel_filters
from actors.stage import ModelStage
from omniflow.actor import batched
from omniflow.errors import InvalidInputError, ProtocolError
from omniflow.media import AudioFeatures, Waveforms

if TYPE_CHECKING:
    from actors.ming.audio_tower import AudioTower

MAX_BATCH = 8
"""Requests whose clips may pass together."""
MAX_FRAMES = 12_000
"""Mel frames of 10 ms in one pass, but for a longer clip, which goes alone: the memory of a pass is bounded by it."""


class MingAudioEncoder(ModelStage):
    """Hears with the audio tower of a Ming-flash-omni checkpoint: fills `AudioFeatures.rows`, one for each 40 ms.

    Clips are heard whole, as Ming's processor has them; one of less than 12.6 ms is followed by silence up to 25 ms.
    A clip has the same rows, within 1e-5 on a CPU, alone and beside others. The rows of recent clips are kept, up to
    `cache_mb`. `dtype` auto is bfloat16 on a GPU and float32 on a CPU.

    Raises InvalidInputError for a conversation of more than `max_seconds`, and for a clip that is longer than the
    tower has positions for (300 s).
    """

    heavy = True
    preload = ("torch", "safetensors.torch", "actors.ming.audio_tower")

    def __init__(
        self,
        *,
        model: str,
        device: str = "cpu",
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        threads: int = 1,
        max_seconds: float = 600,
        cache_mb: int = 256,
    ) -> None:
        super().__init__(model, device, threads)
        self._dtype = dtype
        self._max_seconds = max_seconds
        self._rows: Recent[np.ndarray] = Recent(cache_mb * 10**6, lambda rows: rows.nbytes)
        self._tower: AudioTower
        self._filters: np.ndarray
        self._max_frames: int

    async def setup(self) -> None:
        """Load the tower, and run it once. Raises WeightsError where it cannot be loaded."""
        await self.offload(self._load, self._weights.path())
        silence = await self.offload(self._mel, np.zeros(SAMPLE_RATE_HZ, np.float32))
        await run_through(self, self._tower.rows([silence]))

    @batched(max_size=MAX_BATCH)
    async def run(self, audio: list[Waveforms]) -> list[AudioFeatures]:
        """See the class."""
        heard_s = [self._checked_seconds(request) for request in audio]
        digests = [await self.offload(_digests, request) for request in audio]
        clips = {
            digest: clip
            for request, known_as in zip(audio, digests, strict=True)
            for digest, clip in zip(known_as, request.samples, strict=True)
        }
        rows = await self._rows_of(clips)
        return [
            AudioFeatures(
                index=request.index,
                audio_s=seconds,
                rows=np.concatenate([rows[digest] for digest in known_as]),
                num_rows=tuple(len(rows[digest]) for digest in known_as),
            )
            for request, seconds, known_as in zip(audio, heard_s, digests, strict=True)
        ]

    async def _rows_of(self, clips: dict[bytes, np.ndarray]) -> dict[bytes, np.ndarray]:
        known = {digest: self._rows.get(digest) for digest in clips}
        found = {digest: rows for digest, rows in known.items() if rows is not None}
        missing = {digest: len(clip) // HOP for digest, clip in clips.items() if digest not in found}
        for batch in bounded(missing, MAX_FRAMES):
            mels = [await self.offload(self._mel, clips[digest]) for digest in batch]
            for digest, rows in zip(batch, await run_through(self, self._tower.rows(mels)), strict=True):
                found[digest] = rows
                self._rows.keep(digest, rows)
        return found

    def _mel(self, clip: np.ndarray) -> np.ndarray:
        if len(clip) <= FFT_SIZE // 2:  # it is mirrored at its ends, by as much
            clip = np.pad(clip, (0, FFT_SIZE - len(clip)))
        return log_mel(clip, self._filters)

    def _checked_seconds(self, request: Waveforms) -> float:
        if request.sample_rate_hz != SAMPLE_RATE_HZ:
            raise ProtocolError(f"audio arrived at {request.sample_rate_hz} Hz, not at {SAMPLE_RATE_HZ} Hz")
        seconds = sum(map(len, request.samples)) / SAMPLE_RATE_HZ
        if seconds > self._max_seconds:
            raise _invalid(
                f"the conversation holds {seconds:.1f} s of audio; this model takes at most {self._max_seconds:g} s"
            )
        for number, clip in enumerate(request.samples):
            if len(clip) // HOP > self._max_frames:
                where = request.where[number] if request.where else f"audio clip {number + 1}"
                raise _invalid(
                    f"{where} lasts {len(clip) / SAMPLE_RATE_HZ:.1f} s; this model takes at most "
                    f"{self._max_frames * HOP / SAMPLE_RATE_HZ:g} s in one clip"
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


def _digests(request: Waveforms) -> list[bytes]:
    return [digest_of(np.ascontiguousarray(clip).data) for clip in request.samples]


def _invalid(message: str) -> InvalidInputError:
    return InvalidInputError(message, param="messages")
