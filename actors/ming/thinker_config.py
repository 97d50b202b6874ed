"""What of a Ming-flash-omni checkpoint's config.json the thinker reads (BailingMoeV2), by its own names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from omniflow.errors import WeightsError

TEXT, IMAGE, AUDIO = range(3)
"""The kinds of inputs, as `EngineRequest.kinds` gives them; a clip's are IMAGE."""


class VideoRope(msgspec.Struct, frozen=True):
    """The part `rope_scaling`: how many frequencies turn with time, height and width. Other kinds are refused."""

    mrope_section: tuple[int, int, int] = (8, 12, 12)
    rope_type: Literal["video_rope"] | None = None
    type: Literal["video_rope"] | None = None
    """The older name of `rope_type`."""

    def __post_init__(self) -> None:
        if self.rope_type is None and self.type is None:
            raise ValueError("rope_scaling has no rope_type")


class Thinker(msgspec.Struct, frozen=True):
    """The part `llm_config`. Biases in linear layers, tied embeddings, windows and other activations are refused."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the first layers, which are dense."""
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    n_group: int = 8
    topk_group: int = 4
    """Of the `n_group` groups of experts, how many a token may use."""
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 0
    router_type: Literal["topN", "MultiRouter"] = "topN"
    """MultiRouter: images and audio have a gate of their own in each layer."""
    head_dim: int | None = None
    partial_rotary_factor: float = 0.5
    rope_theta: float = 10000.0
    rope_scaling: VideoRope | None = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 16384
    hidden_act: Literal["silu"] = "silu"
    use_qkv_bias: Literal[False] = False
    use_bias: Literal[False] = False
    norm_head: Literal[False] = False
    tie_word_embeddings: Literal[False] = False
    use_sliding_window: Literal[False] = False
    score_function: Literal["sigmoid"] = "sigmoid"

    def __post_init__(self) -> None:
        size, others = divmod(self.num_experts, self.n_group)
        if others or size < 2:  # a group is as good as its best two
            raise ValueError(f"{self.num_experts} experts do not make {self.n_group} groups")
        if self.topk_group > self.n_group or self.num_experts_per_tok > self.topk_group * size:
            raise ValueError(
                f"{self.topk_group} of {self.n_group} groups of {size} experts do not hold the "
                f"{self.num_experts_per_tok} that an input takes"
            )
        if self.rope_scaling and sum(self.rope_scaling.mrope_section) != self.rotary_dim // 2:
            raise ValueError(f"mrope_section has to sum to {self.rotary_dim // 2}, half of what is turned of a head")

    @property
    def dim(self) -> int:
        """Of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """How much of a head turns with the position."""
        return int(self.dim * self.partial_rotary_factor)

    @staticmethod
    def load(folder: Path) -> Thinker:
        """Read `folder/config.json`. Raises WeightsError where it is missing or no thinker's."""
        try:
            return msgspec.json.decode((folder / "config.json").read_bytes(), type=_Config).llm_config
        except (OSError, msgspec.DecodeError) as error:
            raise WeightsError(f"{folder}: config.json is no Ming thinker's: {error}") from error


class _Config(msgspec.Struct, frozen=True):
    llm_config: Thinker
