"""What of a Ming checkpoint is read: where its parts lie, and its JSON files, by their own names.

Two layouts exist. Ming-omni-tts has all parts in one folder. Ming-flash-omni has the thinker and its towers in one, and
beside their config.json a folder `talker`, with the sizes of the backbone and the tokenizer in `llm/`, and the AudioVAE
in `vae/`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from actors.checkpoint import read_config
from omniflow.errors import WeightsError

if TYPE_CHECKING:
    from omniflow.engine.decoder import DecoderShape

T = TypeVar("T")
TEXT, IMAGE, AUDIO = range(3)
"""The kinds of inputs, as `EngineRequest.kinds` gives them; a clip's are IMAGE."""
_NOR_APART = ", and there is no talker/config.json"
"""As there is beside the config.json of a whole Ming-flash-omni."""


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
        return _read(folder, _WithThinker, "is no Ming thinker's").llm_config


class _WithThinker(msgspec.Struct, frozen=True):
    llm_config: Thinker


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
    """The part `vision_config`, as Qwen3-VL has it, or Qwen2.5-VL (`is_windowed`), as Ming-flash-omni-preview."""

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
    hidden_act: Literal["gelu_pytorch_tanh", "silu"] = "gelu_pytorch_tanh"
    model_type: Literal["qwen3_moe_vit", "qwen2_5_vit"] = "qwen3_moe_vit"
    window_size: int = 112
    """Pixels of a side of a window, where there are windows."""
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    """Layers that see whole frames nevertheless."""

    def __post_init__(self) -> None:
        if (self.hidden_act == "silu") != self.is_windowed:
            raise ValueError(f"a {self.model_type} with hidden_act {self.hidden_act} is not one of Ming's")
        if self.is_windowed and self.window_size < self.cell:
            raise ValueError(f"window_size {self.window_size} is less than the {self.cell} pixels of one input")
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of 4 * num_heads {self.num_heads}")
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings {self.num_position_embeddings} is not a square")

    @property
    def is_windowed(self) -> bool:
        """True for the kind of Qwen2.5-VL."""
        return self.model_type == "qwen2_5_vit"

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
        return _read(folder, AudioConfig, "has no audio tower of Ming's")


class VisionConfig(msgspec.Struct, frozen=True):
    """What the vision tower is made of."""

    llm_config: _Llm
    vision_config: Vision
    mlp_depth: int = 1

    @staticmethod
    def load(folder: Path) -> VisionConfig:
        """Read `folder/config.json`. Raises WeightsError where it is missing or describes no such tower."""
        return _read(folder, VisionConfig, "has no vision tower of Ming's")


class _Eyes(msgspec.Struct, frozen=True):
    model_type: str = "qwen3_moe_vit"


class _WithEyes(msgspec.Struct, frozen=True):
    vision_config: _Eyes = _Eyes()


def tells_times(folder: Path) -> bool:
    """Whether frames of clips are written as images, each behind its time: as its processor says, or else by all but
    the preview's. Raises WeightsError.
    """
    told = Pixels.load(folder).use_interleaved_frame_timestamp
    if told is not None:
        return told
    return _read(folder, _WithEyes, "is no Ming's").vision_config.model_type != "qwen2_5_vit"


class Pixels(msgspec.Struct, frozen=True):
    """preprocessor_config.json: how large and how bright images are shown, and how clips are written; by default as the
    processor of Ming-flash-omni-2.0 does it.
    """

    min_pixels: int = 64 * 64
    max_pixels: int = 1280 * 32 * 32
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    use_interleaved_frame_timestamp: bool | None = None
    """See `tells_times`."""

    @staticmethod
    def load(folder: Path) -> Pixels:
        """Read `folder/preprocessor_config.json`, where there is one. Raises WeightsError where it is broken."""
        path = folder / "preprocessor_config.json"
        return read_config(path, Pixels, "says nothing of images") if path.exists() else Pixels()


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
        # Imports torch, so not at the top: a graph is checked and explained without it.
        from omniflow.engine.decoder import DecoderShape

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

    def with_layers(self, count: int) -> Qwen2:
        """The same with so many layers."""
        return msgspec.structs.replace(self, num_hidden_layers=count)

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


class VaeEncoder(msgspec.Struct, frozen=True):
    """The part `enc_kwargs` of the AudioVAE."""

    backbone: Qwen2
    latent_dim: int
    input_dim: int
    """Samples that a frame of the backbone sees, the first `hop_size` of which the next one does not."""
    hop_size: int = 320


class AudioVae(msgspec.Struct, frozen=True):
    """The part `audio_tokenizer_config`, and the config.json of an AudioVAE of its own folder."""

    dec_kwargs: VaeDecoder
    enc_kwargs: VaeEncoder | None = None
    sample_rate: int = 16000
    """By default what the programs of the authors take it for; the preview's file does not tell it."""
    patch_size: int = -1
    """Frames of the backbone per latent; -1: one, which nothing sums up. Only the preview has no more."""
    semantic_module_kwargs: Any = None
    """A branch for understanding. With patches it makes no sound; without, a sound that is not made here."""

    def __post_init__(self) -> None:
        if self.patch_size < 1 and self.semantic_module_kwargs is not None:
            raise ValueError("it has a semantic module and no patches: what that adds to its sound is not built here")

    @staticmethod
    def load(folder: Path) -> AudioVae:
        """That of the checkpoint in `folder`, which may also be the AudioVAE's own. Raises WeightsError."""
        folders = Folders.of(folder)
        part = _read(folders.vae, _WithVae, "is no Ming talker's").audio_tokenizer_config
        return part or read_config(
            folders.vae / "config.json", AudioVae, f"is no AudioVAE's{'' if folders.is_apart else _NOR_APART}"
        )


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """The part `aggregator_config`."""

    hidden_size: int = 1152
    depth: int = 28
    num_heads: int = 16
    mlp_ratio: float = 4.0
    pe_attn_head: None = None
    """All heads turn with the position; other numbers are refused."""


class Flow(Transformer, frozen=True, kw_only=True):
    """The part `flowmodel`."""

    hidden_size: int = 1024


class Dit(Flow, frozen=True, kw_only=True):
    """The part `ditar_config`."""

    patch_size: int
    """Latents per step of the talker."""
    history_patch_size: int | None = None
    """Latents before them that the flow sees; None: as many as `patch_size`."""

    @property
    def history(self) -> int:
        """`history_patch_size`, or what stands for it."""
        return self.patch_size if self.history_patch_size is None else self.history_patch_size


class Manner(msgspec.Struct, frozen=True):
    """How a talker is run, where the programs of the authors differ from release to release."""

    solver_steps: int = 10
    """Of the flow, in a step of the talker."""
    guidance: float = 2.0
    """By the rule "beyond" of `omniflow.engine.flow`."""
    min_steps: int = 4
    """Before it has taken so many, a segment does not end."""
    in_chat: bool = True
    """A text stands in a chat, which tells by an embedding who speaks. The preview's stands alone: only the sound and
    the words of a recording tell how it is to be spoken."""


class Talker(msgspec.Struct, frozen=True):
    """config.json of a checkpoint whose backbone is dense."""

    llm_config: Qwen2
    audio_tokenizer_config: AudioVae
    ditar_config: Dit
    aggregator_config: Transformer
    manner: Manner = Manner()
    """No part of the file: `load` knows it."""

    @staticmethod
    def load(folder: Path) -> Talker:
        """That of the checkpoint in `folder`, in either layout. Raises WeightsError where it is missing or no dense
        talker's.
        """
        folders = Folders.of(folder)
        if not folders.is_apart:
            return _read(folders.talker, Talker, f"is no Ming talker's{_NOR_APART}")
        own, vae = (
            _read(folders.talker, _FlashTalker, "is no Ming talker's"),
            AudioVae.load(folders.vae),
        )
        if vae.dec_kwargs.latent_dim != own.latent_dim:
            raise WeightsError(
                f"{folders.talker}: the talker's latents have {own.latent_dim} values, and those of its AudioVAE "
                f"{vae.dec_kwargs.latent_dim}"
            )
        is_preview = vae.patch_size < 1
        dit = Dit(
            **msgspec.structs.asdict(own.flowmodel),
            patch_size=own.patch_size,
            history_patch_size=None if is_preview else own.history_patch_size,
        )
        manner = Manner(solver_steps=own.steps)
        if is_preview:
            manner = Manner(own.steps, own.cfg_strength, min_steps=11, in_chat=False)
        return Talker(_read(folders.llm, Qwen2, "is no Qwen2's"), vae, dit, own.aggregator, manner)


class _FlashTalker(msgspec.Struct, frozen=True):
    """config.json of the folder `talker` of Ming-flash-omni."""

    flowmodel: Flow
    aggregator: Transformer
    patch_size: int = 4
    history_patch_size: int = 32
    """Of the preview's there is no such one: its flow sees the patch before."""
    latent_dim: int = 64
    steps: int = 10
    cfg_strength: float = 2.0
    """The preview's program goes by it; that of 2.0 has 2 in any case."""


class _WithVae(msgspec.Struct, frozen=True):
    audio_tokenizer_config: AudioVae | None = None


class Folders(msgspec.Struct, frozen=True):
    """Where the parts of a checkpoint lie."""

    talker: Path
    """Its config.json, its weights, and what belongs to voices."""
    llm: Path
    """The tokenizer, and the sizes of the backbone where `talker` does not tell them."""
    vae: Path

    @property
    def is_apart(self) -> bool:
        """True for the layout of Ming-flash-omni."""
        return self.llm != self.talker

    @staticmethod
    def of(folder: Path) -> Folders:
        """Those of the checkpoint in `folder`: of the talker, or of the whole model."""
        if (folder / "talker" / "config.json").is_file():
            folder = folder / "talker"
        llm = folder / "llm"
        return Folders(folder, llm, folder / "vae") if llm.is_dir() else Folders(folder, folder, folder)


def _read(folder: Path, type: type[T], lacking: str) -> T:
    return read_config(folder / "config.json", type, lacking)
