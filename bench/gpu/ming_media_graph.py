"""A whole Ming checkpoint with random weights at the real sizes, and the chat graph on it: for `bench.gpu.ming_media`.

Both towers are whole (audio 32 layers of 1280, vision 27 of 1152, projectors to 4096), as are talker and vocoder
(`bench.gpu.ming_graph`). The thinker has the real widths and as many of its 32 layers as are asked for; its weights are
made up on the GPU, and are not in the checkpoint.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from actors.detokenize import Detokenize
from actors.ming.config import Audio, Vision
from actors.ming.hearing import MingAudioEncoder
from actors.ming.merging import MingMerge
from actors.ming.seeing import MingImageEncoder
from actors.ming.speaking import MingTalker
from actors.ming.tensors import model_shapes
from actors.ming.thinking import MingThinker
from actors.ming.tiny import THINKER_CONTROLS, tokenizer_of
from actors.ming.vocoder import MingVocoder
from actors.preprocess import Preprocess
from actors.segmenter import Segmenter
from bench.gpu.ming_graph import PacedTalker, write_talker
from bench.gpu.ming_thinker import CONFIG
from graphs.ming_omni import graph
from omniflow import Budget, absent, bind
from omniflow.engine.base import Engine
from omniflow.topology import Binding

TOWERS = ("vision.", "audio.", "linear_proj")
WORDS_A_SENTENCE = 10
KV_TOKENS = 65536


def write_media(folder: Path, layers: int, device: str) -> None:
    """Write the checkpoint, 16 bits, in the layout of Ming-flash-omni: all but the thinker's weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = wide_tokenizer(CONFIG["vocab_size"])
    config: dict[str, Any] = {
        "architectures": ["BailingMM2NativeForConditionalGeneration"],
        "model_type": "bailingmm_moe_v2_lite",
        "mlp_depth": 2,
        "torch_dtype": "bfloat16",
        "llm_config": CONFIG | {"num_hidden_layers": layers},
        "vision_config": msgspec.to_builtins(Vision()),
        "audio_config": msgspec.to_builtins(Audio()),
    }
    end = {"eos_token_id": tokenizer.token_to_id("<|role_end|>")}
    for name, content in (("config", config), ("generation_config", end), ("preprocessor_config", {})):
        (folder / f"{name}.json").write_text(json.dumps(content))
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(dict(_towers(config, device)), folder / "model.safetensors")
    write_talker(folder / "talker", device)


def _towers(config: dict[str, Any], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Each matrix so large that what it makes is as large as what it is given; norms near 1."""
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in model_shapes(config).items():
        if not name.startswith(TOWERS) or name == "audio.positional_embedding":
            continue
        drawn = torch.randn(shape, generator=generator, device=device)
        if name.endswith("bias"):
            drawn *= 0.1
        elif len(shape) == 1:
            drawn = 1 + 0.1 * drawn
        else:
            drawn *= 0.3 if "pos_embed" in name else math.prod(shape[1:]) ** -0.5
        yield name, drawn.bfloat16().cpu()


def wide_tokenizer(size: int) -> Tokenizer:
    """A tokenizer of `size` tokens that are words of some letters, every tenth with a stop: answers are sentences."""
    content = json.loads(tokenizer_of(()).to_str())
    vocab = content["model"]["vocab"]
    for number in range(size):
        if len(vocab) == size - len(THINKER_CONTROLS):
            break
        vocab.setdefault("Ġ" + _letters(number) + ("" if number % WORDS_A_SENTENCE else "."), len(vocab))
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(THINKER_CONTROLS)
    assert tokenizer.get_vocab_size() == size
    return tokenizer


def _letters(number: int) -> str:
    letters = ""
    for _ in range(4):
        number, rest = divmod(number, 26)
        letters += chr(ord("a") + rest)
    return letters


class RandomMingThinker(MingThinker):
    """On SGLang, with weights that are made up where the GPU is."""

    def load_engine(self, folder: Path) -> Engine:
        self._sglang["load_format"] = "dummy"
        engine: Any = super().load_engine(folder)
        for name, weight in engine._scheduler.model.named_parameters():
            # SGLang's own random numbers are so small, and so alike, that all tokens go to the same experts.
            torch.manual_seed(zlib.crc32(name.encode()))
            weight.data.fill_(1.0) if "norm" in name else weight.data.normal_(std=0.02)
        return engine  # type: ignore[no-any-return]


def places_on(num_gpus: int) -> dict[str, str]:
    """Which GPU thinks, perceives and speaks: one for all, the thinker alone on the first of two, or one each."""
    if num_gpus == 0:
        return dict.fromkeys(("thinks", "perceives", "speaks"), "cpu")
    return {"thinks": "gpu:0", "perceives": f"gpu:{min(1, num_gpus - 1)}", "speaks": f"gpu:{min(2, num_gpus - 1)}"}


def declare(profile: str, folder: Path, num_gpus: int, max_running: int) -> None:
    """Declare a profile of the graph of Ming-Omni for the checkpoint in `folder`; with no GPU for one that is whole."""
    where, model = places_on(num_gpus), {"model": str(folder)}
    not_measured = absent("this is not measured here")
    stages: dict[str, Any] = {
        "preprocess": bind(Preprocess, max_videos=4),
        "merge": bind(MingMerge, **model),
        "thinker": _thinker(folder, where["thinks"], max_running),
        "detokenize": bind(Detokenize, **model),
        "segment": bind(Segmenter),
        **dict.fromkeys(("painter", "transcribe", "voice"), not_measured),
    }
    # Wide: what is measured here is time. All of it is 73 GB of one GPU with 4 layers of the thinker.
    ears, eyes = Budget(weights="1.4 GB", workspace="6 GB"), Budget(weights="1.3 GB", workspace="10 GB")
    stages["audio_encoder"] = bind(MingAudioEncoder, device=where["perceives"], memory=ears, **model)
    stages["image_encoder"] = bind(MingImageEncoder, device=where["perceives"], memory=eyes, **model)
    stages["talker"] = bind(
        PacedTalker if num_gpus else MingTalker,
        device=where["speaks"],
        max_running=max_running,
        kv_tokens=1024 * max_running,
        normalise=False,
        memory=Budget(weights="2.6 GB", workspace="6 GB", kv_tokens=1024 * max_running, kv_bytes_per_token=12288),
        **model,
    )
    # Weights of 32 bits, and 1.6 GB of keys and values for 32 slots of 40 s.
    sounds = Budget(weights="1.5 GB", workspace="5 GB")
    stages["vocoder"] = bind(MingVocoder, device=where["speaks"], max_together=2 * max_running, memory=sounds, **model)
    graph.profile(profile, "random weights at the real sizes", **stages)


def _thinker(folder: Path, device: str, max_running: int) -> Binding:
    if device == "cpu":
        return bind(MingThinker, model=str(folder), max_running=max_running)
    config = json.loads((folder / "config.json").read_text())
    shapes = model_shapes(config)
    size = 2 * sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("model."))
    llm = config["llm_config"]
    kept = 2 * 2 * llm["num_hidden_layers"] * llm["num_key_value_heads"] * llm["head_dim"]
    memory = Budget(
        weights=size,
        workspace="16 GB",
        kv_tokens=KV_TOKENS,
        kv_bytes_per_token=kept,
        heads=llm["num_attention_heads"],
        kv_heads=llm["num_key_value_heads"],
    )
    return bind(
        RandomMingThinker,
        model=str(folder),
        device=device,
        engine="sglang",
        dtype="bfloat16",
        max_tokens=2048,
        temperature=0.4,
        kv_tokens=KV_TOKENS,
        max_running=max_running,
        max_waiting=256,
        memory=memory,
    )
