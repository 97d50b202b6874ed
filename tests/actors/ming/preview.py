"""A tiny talker of Ming-flash-omni-preview, and what the program of its authors made of it: see fixtures/README.md."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from safetensors.torch import load_file

from actors.ming.tiny import TALKER, VAE
from tests.actors.ming.reference import FIXTURES

CHECKPOINT = FIXTURES / "tiny_preview"
SAID = "a low voice"
"""In the recording of the voice; with it or without one `TEXT` is spoken."""
TEXT = "say it now."

TINY_TALKER = {name: each for name, each in TALKER.items() if name != "history_patch_size"} | {"patch_size": 10}
_FRAME = {"input_dim": 320, "hop_size": 320}
TINY_VAE: dict[str, Any] = {
    "model_type": "audio_vae",
    "enc_kwargs": VAE["enc_kwargs"] | _FRAME,
    "dec_kwargs": VAE["dec_kwargs"] | {"output_dim": 320},
    "semantic_module_kwargs": None,
}
"""The config.json of a talker and an AudioVAE of the preview's kind, for `actors.ming.tiny.write_checkpoint`: 16 kHz, a
step is 0.2 s. Its released sizes are not known here."""


@functools.cache
def expected() -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / "preview.safetensors")


def write_voices(folder: Path) -> None:
    """What the repository of the preview has of voices, with the recording that its program heard."""
    listed = {"DB30": {"prompt_wav_path": "data/spks/prompt.wav", "prompt_text": SAID}}
    (folder / "data" / "spks").mkdir(parents=True)
    (folder / "data" / "voice_name.json").write_text(json.dumps(listed))
    samples = expected()["encoder.samples"].numpy()
    soundfile.write(folder / "data" / "spks" / "prompt.wav", samples, 16000, "FLOAT")


def link_checkpoint(folder: Path) -> Path:
    """The fixture, without voices."""
    (folder / "talker").symlink_to(CHECKPOINT / "talker")
    return folder


def first_noise(steps: torch.Tensor, shape: tuple[int, int, int]) -> np.ndarray:
    """The start of each step's flow, [n, *shape]; the rest is never heard at temperature 0."""
    noise = np.zeros((len(steps), *shape), np.float32)
    noise[:, 0] = steps.numpy()
    return noise
