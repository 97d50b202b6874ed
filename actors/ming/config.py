"""What of a Ming checkpoint's config.json the speech side reads, by its own names."""

from __future__ import annotations

from pathlib import Path

import msgspec

from omniflow.engine.decoder import DecoderShape
from omniflow.errors import WeightsError


class Qwen2(msgspec.Struct, frozen=True):
    """The sizes of a Qwen2 decoder."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int = 32768
    vocab_size: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
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
            rope_theta=self.rope_theta,
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


class Transformer(msgspec.Struct, frozen=True):
    """The part `aggregator_config`."""

    hidden_size: int
    depth: int
    num_heads: int
    mlp_ratio: float = 4.0


class Dit(Transformer, frozen=True):
    """The part `ditar_config`."""

    patch_size: int = 4
    """Latents per step of the talker."""
    history_patch_size: int = 32
    """Latents before them that the flow sees."""


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
