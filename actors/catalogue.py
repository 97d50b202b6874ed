"""Every set of weights that has a name of its own, by the name that people use for it."""

from __future__ import annotations

from actors.ming import MING_TINY
from actors.piper import PIPER_JOE
from actors.smollm2 import SMOLLM2_135M_INSTRUCT
from actors.tiny_talker import TINY_TALKER
from actors.whisper import WHISPER_TINY_EN
from omniflow.weights import NamedWeights

PACKAGED: dict[str, NamedWeights] = {
    each.name: each for each in (SMOLLM2_135M_INSTRUCT, PIPER_JOE, WHISPER_TINY_EN, TINY_TALKER, MING_TINY)
}
"""What `resolve` accepts beside `hf:owner/repo` and paths."""
