"""Loads the tiny talker: a frame model for any engine, the codebooks, the phonemes' ids and how codes are drawn."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from torch import nn

from omniflow.engine.decoder import DecoderShape
from omniflow.engine.frames import FrameModel
from omniflow.engine.heads import DepthHead
from omniflow.errors import WeightsError


class Talker(DecoderShape, frozen=True):
    """The part `talker_config`: the backbone, and its two vocabularies."""

    text_vocab_size: int = 0
    vocab_size: int = 0
    codec_bos_id: int = 0
    codec_eos_token_id: int = 0


class Predictor(DecoderShape, frozen=True):
    """The part `code_predictor_config`."""

    vocab_size: int = 0
    num_code_groups: int = 0


class Codec(msgspec.Struct, frozen=True):
    """The part `codec`."""

    num_codebooks: int
    frames_per_step: int
    sample_rate: int
    samples_per_frame: int


class Phonemes(msgspec.Struct, frozen=True):
    """The part `phonemes`."""

    begin: str
    end: str
    table: dict[str, int]


class Draw(msgspec.Struct, frozen=True):
    """The part `sampling`."""

    temperature: float
    top_k: int
    top_p: float
    predictor_temperature: float
    predictor_top_k: int
    predictor_top_p: float
    max_steps: int
    max_steps_base: int
    max_steps_per_phoneme_id: int


class Config(msgspec.Struct, frozen=True):
    """config.json."""

    talker_config: Talker
    code_predictor_config: Predictor
    codec: Codec
    phonemes: Phonemes
    sampling: Draw

    @staticmethod
    def load(folder: Path) -> Config:
        """Read `folder/config.json`. Raises WeightsError where it is missing or broken."""
        try:
            return msgspec.json.decode((folder / "config.json").read_bytes(), type=Config)
        except (OSError, msgspec.DecodeError) as error:
            raise WeightsError(f"{folder}: config.json is no tiny talker's: {error}") from error

    @property
    def begin_id(self) -> int:
        """Ends a prompt: ids of phonemes and then, behind them, ids of codes are one vocabulary."""
        return self.talker_config.text_vocab_size + self.talker_config.codec_bos_id


def load_model(folder: Path) -> FrameModel:
    """The model in `folder`, float32 on the CPU. Raises WeightsError where a file or a weight is missing or broken."""
    config = Config.load(folder)
    talker, predictor = config.talker_config, config.code_predictor_config
    head = DepthHead(
        predictor,
        num_codes=predictor.num_code_groups,
        vocab_size=predictor.vocab_size,
        first_vocab_size=talker.vocab_size,
        stop_ids=[talker.codec_eos_token_id],
        banned_ids=[talker.codec_bos_id],
    )
    embedding = nn.Embedding(talker.text_vocab_size + talker.vocab_size, talker.hidden_size)
    model = FrameModel(talker, embedding, head)
    try:
        weights = _weights(folder)
        texts, codes = weights["model.text_embedding.weight"], weights["model.codec_embedding.weight"]
        embedding.weight.data.copy_(torch.cat([texts, codes]))
        model.decoder.load(weights, "model.")
        head.load(weights, "codec_head.weight", "model.codec_embedding.weight", "code_predictor.")
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise WeightsError(f"{folder} does not hold the weights of a tiny talker: {error}") from error
    return model.requires_grad_(False).eval()


def load_codebooks(folder: Path) -> np.ndarray:
    """float32 [num_codebooks, codebook_size, latent_dim]: a frame is the sum of one row of each."""
    try:
        return load_arrays(folder / "codebooks.safetensors")["codebooks"]
    except (OSError, SafetensorError, KeyError) as error:
        raise WeightsError(f"{folder} does not hold the codebooks of a tiny talker: {error}") from error


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    parts = sorted(folder.glob("talker-*.safetensors"))
    return {name: tensor for part in parts for name, tensor in load_file(part).items()}
