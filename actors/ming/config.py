"""What of a Ming checkpoint the speech side reads: its folders, and its config.json by its own names.

Two layouts exist. Ming-omni-tts has all parts in one folder. Ming-flash-omni has a folder `talker`, with the sizes of
the backbone and the tokenizer in `llm/`, and the AudioVAE in `vae/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from omniflow.engine.decoder import DecoderShape
from omniflow.errors import WeightsError

T = TypeVar("T")
_NOR_APART = ", and there is no talker/config.json"
"""As there is beside the config.json of a whole Ming-flash-omni."""


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

    sample_rate: int
    dec_kwargs: VaeDecoder
    enc_kwargs: VaeEncoder | None = None
    patch_size: int = -1
    """Frames of the backbone per latent; -1: one."""

    @staticmethod
    def load(folder: Path) -> AudioVae:
        """That of the checkpoint in `folder`, which may also be the AudioVAE's own. Raises WeightsError."""
        folders = Folders.of(folder)
        part = _read(folders.vae, _WithVae, "no Ming talker's").audio_tokenizer_config
        return part or _read(folders.vae, AudioVae, f"no AudioVAE's{'' if folders.is_apart else _NOR_APART}")


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """The part `aggregator_config`."""

    hidden_size: int = 1152
    depth: int = 28
    num_heads: int = 16
    mlp_ratio: float = 4.0


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


class Talker(msgspec.Struct, frozen=True):
    """config.json of a checkpoint whose backbone is dense."""

    llm_config: Qwen2
    audio_tokenizer_config: AudioVae
    ditar_config: Dit
    aggregator_config: Transformer

    @staticmethod
    def load(folder: Path) -> Talker:
        """That of the checkpoint in `folder`, in either layout. Raises WeightsError where it is missing or no dense
        talker's.
        """
        folders = Folders.of(folder)
        if not folders.is_apart:
            return _read(folders.talker, Talker, f"no Ming talker's{_NOR_APART}")
        own, vae = _read(folders.talker, _FlashTalker, "no Ming talker's"), AudioVae.load(folders.vae)
        if vae.dec_kwargs.latent_dim != own.latent_dim:
            raise WeightsError(
                f"{folders.talker}: the talker's latents have {own.latent_dim} values, and those of its AudioVAE "
                f"{vae.dec_kwargs.latent_dim}"
            )
        dit = Dit(
            **msgspec.structs.asdict(own.flowmodel),
            patch_size=own.patch_size,
            history_patch_size=own.history_patch_size,
        )
        return Talker(_read(folders.llm, Qwen2, "no Qwen2's"), vae, dit, own.aggregator)


class _FlashTalker(msgspec.Struct, frozen=True):
    """config.json of the folder `talker` of Ming-flash-omni."""

    flowmodel: Flow
    aggregator: Transformer
    patch_size: int = 4
    history_patch_size: int = 32
    latent_dim: int = 64


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


def _read(folder: Path, type: type[T], whose: str) -> T:
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=type)
    except (OSError, msgspec.DecodeError) as error:
        raise WeightsError(f"{folder}: config.json is {whose}: {error}") from error
