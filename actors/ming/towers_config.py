"""What of a Ming-flash-omni checkpoint the towers read, by its own names: config.json and preprocessor_config.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from omniflow.errors import WeightsError

T = TypeVar("T")


class Whisper(msgspec.Struct, frozen=True):
    """The part `whisper_encoder_config` of `audio_config`."""

    n_mels: int = 128
    n_ctx: int = 15000
    """Positions: each is two frames of 10 ms."""
    n_state: int = 1280
    n_head: int = 20
    n_layer: int = 32

    def __post_init__(self) -> None:
        if self.n_state % self.n_head or self.n_state % 2:
            raise ValueError(f"n_state {self.n_state} is not even, or not a multiple of n_head {self.n_head}")


class Audio(msgspec.Struct, frozen=True):
    """The part `audio_config`: the encoder, and how its projector halves the rate once more."""

    whisper_encoder_config: Whisper = Whisper()
    ds_kernel_size: int = 3
    ds_stride: int = 2
    norm_query_embeds: bool = True


class Vision(msgspec.Struct, frozen=True):
    """The part `vision_config`, as Qwen3-VL has it. Ming-flash-omni-preview has another kind, which is refused."""

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    in_channels: Literal[3] = 3
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    model_type: Literal["qwen3_moe_vit"] = "qwen3_moe_vit"

    def __post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of 4 * num_heads {self.num_heads}")
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings {self.num_position_embeddings} is not a square")

    @property
    def patch_dim(self) -> int:
        """Values of one patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def cell(self) -> int:
        """Pixels that one input of the thinker is wide and high."""
        return self.patch_size * self.spatial_merge_size


class _Llm(msgspec.Struct, frozen=True):
    hidden_size: int


class AudioConfig(msgspec.Struct, frozen=True):
    """What the audio tower is made of."""

    llm_config: _Llm
    audio_config: Audio
    mlp_depth: int = 1
    """Linear layers of a projector, its convolution among them."""

    @staticmethod
    def load(folder: Path) -> AudioConfig:
        """Read `folder/config.json`. Raises WeightsError where it is missing or describes no such tower."""
        return _read(folder / "config.json", AudioConfig, "has no audio tower of Ming's")


class VisionConfig(msgspec.Struct, frozen=True):
    """What the vision tower is made of."""

    llm_config: _Llm
    vision_config: Vision
    mlp_depth: int = 1

    @staticmethod
    def load(folder: Path) -> VisionConfig:
        """Read `folder/config.json`. Raises WeightsError where it is missing or describes no such tower."""
        return _read(folder / "config.json", VisionConfig, "has no vision tower of Ming's")


class Pixels(msgspec.Struct, frozen=True):
    """preprocessor_config.json: how large images are shown, and how bright; by default as Ming's processor does."""

    min_pixels: int = 64 * 64
    max_pixels: int = 1280 * 32 * 32
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @staticmethod
    def load(folder: Path) -> Pixels:
        """Read `folder/preprocessor_config.json`, where there is one. Raises WeightsError where it is broken."""
        path = folder / "preprocessor_config.json"
        return _read(path, Pixels, "says nothing of images") if path.exists() else Pixels()


def _read(path: Path, type: type[T], lacking: str) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type)
    except (OSError, msgspec.DecodeError) as error:
        raise WeightsError(f"{path.parent}: {path.name} {lacking}: {error}") from error
