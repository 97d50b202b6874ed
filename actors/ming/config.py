"""What of a Ming checkpoint's config.json the speech side reads, by its own names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from omniflow.engine.decoder import DecoderShape
from omniflow.errors import WeightsError


class Rope(msgspec.Struct, frozen=True):
    """The part `rope_parameters`, which transformers 5 writes instead of `rope_theta`."""

    rope_theta: float = 10000.0
    rope_type: Literal["default"] = "default"


class Qwen2(msgspec.Struct, frozen=True):
    """The sizes of a Qwen2 decoder; other activations and scaled positions are refused."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int = 32768
    vocab_size: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_parameters: Rope = Rope()
    rope_scaling: None = None
    hidden_act: Literal["silu"] = "silu"
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28

    @property
    def shape(self) -> DecoderShape:
        """The same, as the engine's decoders take it."""
        return DecoderShape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.hidden_size // self.num_attention_heads,
            max_position_embeddings=self.max_position_embeddings,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_parameters.rope_theta if self.rope_theta is None else self.rope_theta,
        )

    @property
    def windows(self) -> list[int | None]:
        """How many positions each layer sees, its own included; None: all."""
        window = self.sliding_window if self.use_sliding_window else None
        return [window if layer >= self.max_window_layers else None for layer in range(self.num_hidden_layers)]


class VaeDecoder(msgspec.Struct, frozen=True):
    """The part `dec_kwargs` of the AudioVAE."""

    backbone: Qwen2
    latent_dim: int
    output_dim: int
    """Samples per frame of the backbone."""


class AudioVae(msgspec.Struct, frozen=True):
    """The part `audio_tokenizer_config`, and the config.json of an AudioVAE of its own folder."""

    sample_rate: int
    dec_kwargs: VaeDecoder
    patch_size: int = -1
    """Frames of the backbone per latent; -1: one."""


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """The part `aggregator_config`."""

    hidden_size: int = 1152
    depth: int = 28
    num_heads: int = 16
    mlp_ratio: float = 4.0


class Dit(Transformer, frozen=True, kw_only=True):
    """The part `ditar_config`."""

    hidden_size: int = 1024
    patch_size: int
    """Latents per step of the talker."""
    history_patch_size: int | None = None
    """Latents before them that the flow sees; None: as many as `patch_size`."""

    @property
    def history(self) -> int:
        """`history_patch_size`, or what stands for it."""
        return self.patch_size if self.history_patch_size is None else self.history_patch_size


class Talker(msgspec.Struct, frozen=True):
    """config.json of a checkpoint whose backbone is dense."""

    llm_config: Qwen2
    audio_tokenizer_config: AudioVae
    ditar_config: Dit
    aggregator_config: Transformer

    @staticmethod
    def load(folder: Path) -> Talker:
        """Read `folder/config.json`. Raises WeightsError where it is missing or no dense talker's."""
        try:
            return msgspec.json.decode((folder / "config.json").read_bytes(), type=Talker)
        except (OSError, msgspec.DecodeError) as error:
            raise WeightsError(f"{folder}: config.json is no Ming talker's: {error}") from error
