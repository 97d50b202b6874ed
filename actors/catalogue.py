"""Every set of weights that is fetched from the package index, by the name that people use for it."""

from __future__ import annotations

from actors.piper import PIPER_JOE
from actors.smollm2 import SMOLLM2_135M_INSTRUCT
from actors.whisper import WHISPER_TINY_EN
from omniflow.weights import PackagedWeights

PACKAGED: dict[str, PackagedWeights] = {each.name: each for each in (SMOLLM2_135M_INSTRUCT, PIPER_JOE, WHISPER_TINY_EN)}
"""What `resolve` accepts beside `hf:owner/repo` and paths."""
