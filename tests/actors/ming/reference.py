"""The tiny checkpoint and what the reference implementation made of it: see fixtures/README.md."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from safetensors.torch import load_file

from actors.checkpoint import read_tensors
from actors.ming.config import Talker

FIXTURES = Path(__file__).with_name("fixtures")
CHECKPOINT = FIXTURES / "tiny_ming"
CONFIG = Talker.load(CHECKPOINT)


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    return read_tensors(CHECKPOINT)


@functools.cache
def expected() -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / "expected.safetensors")


@functools.cache
def voice() -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / "voice.safetensors")


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    assert got.shape == wanted.shape
    return float((got - wanted).abs().max() / wanted.abs().max())
