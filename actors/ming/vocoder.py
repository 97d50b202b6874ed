"""Ming's vocoder: latents to sound by the AudioVAE; the streams of all requests step together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from actors.batched_vocoder import BatchedVocoder
from omniflow.actor import Count

if TYPE_CHECKING:
    from actors.streaming_decoder import BatchedDecoder


class MingVocoder(BatchedVocoder):
    """Makes sound of the latents of a Ming checkpoint's talker, mono, at the rate of its AudioVAE (44.1 kHz; 16 kHz
    of the preview); see `BatchedVocoder`. The samples of a request are the same alone and beside others, within 1e-6.

    On a GPU a step is one CUDA graph, over slots for `max_together` segments of up to `longest_s` seconds; further ones
    wait. There `dtype` auto is float32 with products of TF32, whose noise is 55 dB below the sound; that of bfloat16 is
    34 dB below. Spectra and sound are float32 in any case.
    """

    preload = ("torch", "actors.ming.audio_vae")

    def __init__(
        self,
        *,
        model: str,
        device: str = "cpu",
        threads: int = 1,
        max_together: Count = 32,
        longest_s: float = 40.0,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    ) -> None:
        super().__init__(model, device, threads, max_together)
        self._longest_s = longest_s
        self._dtype = dtype

    def load_decoder(self, folder: Path) -> BatchedDecoder[Any]:
        # Imports torch, so not at the top: a graph is checked and explained without it.
        import torch

        from actors.checkpoint import read_tensors
        from actors.ming.audio_slots import AudioSlots
        from actors.ming.audio_vae import load_audio_vae
        from actors.ming.config import AudioVae, Folders
        from omniflow.engine.linear import pack_linears

        torch.set_num_threads(self._threads)
        weights = read_tensors(Folders.of(folder).vae)
        decoder = load_audio_vae(AudioVae.load(folder), weights, self._device)
        if self._device == "cpu":
            pack_linears(decoder)
            return decoder
        positions = math.ceil(self._longest_s * decoder.sample_rate_hz / decoder.hop)
        torch.set_float32_matmul_precision("high" if self._dtype == "auto" else "highest")
        dtype = torch.bfloat16 if self._dtype == "bfloat16" else torch.float32
        return AudioSlots(decoder, slots=self._max_together, positions=positions, dtype=dtype)
