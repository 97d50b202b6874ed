"""What the two actors of a Piper voice share: its configuration and how its graphs are run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import onnxruntime

NUM_CHANNELS = 192
"""Width of a latent frame, in every Piper voice of medium quality."""
SAMPLES_PER_FRAME = 256
SENTENCE_ENDS = ".?!"
PAUSES = SENTENCE_ENDS + ",;:"
"""The marks among the phonemes that the voice knows as pauses."""


class Audio(msgspec.Struct, frozen=True):
    """The part `audio` of voice.json."""

    sample_rate: int


class Inference(msgspec.Struct, frozen=True):
    """The part `inference` of voice.json: how much noise the voice wants, and how long a phoneme lasts."""

    noise_scale: float
    length_scale: float
    noise_w: float


class Voice(msgspec.Struct, frozen=True):
    """A voice's configuration, as Piper writes it."""

    audio: Audio
    inference: Inference
    phoneme_id_map: dict[str, list[int]]

    @staticmethod
    def load(folder: Path) -> Voice:
        """Read `folder/voice.json`."""
        return msgspec.json.decode((folder / "voice.json").read_bytes(), type=Voice)

    def ids(self, phonemes: str) -> list[int]:
        """What the encoder takes: each phoneme followed by a blank, between begin and end; unknown ones are dropped."""
        begin, blank, end = (self.phoneme_id_map[mark] for mark in "^_$")
        inner = [[*self.phoneme_id_map[p], *blank] for p in phonemes if p in self.phoneme_id_map]
        return [*begin, *blank, *(number for pair in inner for number in pair), *end]


def open_graph(path: Path) -> onnxruntime.InferenceSession:
    """A graph ready to run on one core: stages share the machine, and threads that spin would starve the others."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
