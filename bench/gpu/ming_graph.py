"""A Ming talker of the real sizes with random weights, and the speech graph around it: for `bench.gpu.ming`.

Sizes: the backbone, the flow and the aggregator as in the public configurations of the talker of Ming-flash-omni
(Qwen2 of 0.5B, 28 layers of 1024 and of 1152). Those of the AudioVAE's decoder are in no public source that was at
hand; they are taken to be the backbone's: 24 layers of 896, 0.36 G parameters.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from actors.ming import script
from actors.ming.speaking import MingTalker
from actors.ming.tensors import Shapes, talker_shapes, vae_shapes
from actors.ming.vocoder import MingVocoder
from actors.segmenter import Segmenter
from omniflow import Graph

_QWEN2 = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
}
LLM = _QWEN2 | {"vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True}
TALKER = {
    "latent_dim": 64,
    "patch_size": 4,
    "history_patch_size": 32,
    "flowmodel": {"hidden_size": 1024, "depth": 28, "num_heads": 16, "mlp_ratio": 4.0},
    "aggregator": {"hidden_size": 1152, "depth": 28, "num_heads": 16, "mlp_ratio": 4.0},
}
_BACKBONE = _QWEN2 | {"vocab_size": 1, "max_position_embeddings": 8192, "rope_theta": 1e4}
VAE: dict[str, Any] = {
    "sample_rate": 44100,
    "patch_size": 4,
    "enc_kwargs": {"backbone": _BACKBONE, "latent_dim": 64, "input_dim": 882, "hop_size": 882},
    "dec_kwargs": {"backbone": _BACKBONE, "latent_dim": 64, "output_dim": 882},
}

TEXTS = (
    "The old boat drifts past the garden. Children wave at it from the bridge near home.",
    "In the morning the bakers open early. Bread and coffee smell along the whole street.",
    "Nobody had read the letter for years. It was found behind a shelf in the old school.",
    "The train to the coast leaves at noon. Take a seat on the left to look over the sea.",
)
"""Of 82 to 84 letters in two sentences: 6 s at 14 letters a second."""


def write_talker(folder: Path, device: str = "cuda") -> None:
    """Write the checkpoint: 16 bits, in the layout of Ming-flash-omni's talker. Its stop head never stops."""
    for part, content in ((".", TALKER), ("llm", LLM), ("vae", VAE)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "config.json").write_text(json.dumps(content))
    _tokenizer().save(str(folder / "llm" / "tokenizer.json"))
    generator = torch.Generator(device).manual_seed(0)
    weights = _random(talker_shapes(TALKER, LLM), generator)
    weights["stop_head.weight"].zero_()
    weights["stop_head.bias"] = torch.tensor([30.0, 0.0])
    save_file(weights, folder / "model.safetensors")
    shapes = {name: shape for name, shape in vae_shapes(VAE).items() if name.startswith("decoder.")}
    weights = _random(shapes, generator)
    weights["decoder.head.out.weight"] *= 0.7
    bias = weights["decoder.head.out.bias"]
    bias[: len(bias) // 2] += torch.linspace(3.6, -3, len(bias) // 2)  # low sounds are louder than high ones
    save_file(weights, folder / "vae" / "model.safetensors")


def _random(shapes: Shapes, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Normal, each matrix scaled so that what it makes is as large as what it is given."""
    found = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator, device=generator.device)
        if name.endswith("istft.window"):
            continue  # its size tells it
        if name.endswith("bias"):
            drawn *= 0.1
        elif len(shape) == 1:
            drawn = 1 + 0.1 * drawn
        else:
            drawn *= 0.3 if "embed_tokens" in name or "word_embedder" in name else shape[-1] ** -0.5
        found[name] = drawn.bfloat16().cpu()
    return found


def _tokenizer() -> Tokenizer:
    """A token each word and mark, as many as a real one takes, about."""
    marks = ["<|im_start|>", "<|im_end|>", "<audio>", "<|vision_start|>", "<|vision_pad|>", "<|vision_end|>"]
    words = itertools.chain.from_iterable(
        re.findall(r"\w+|[^\w\s]+", each) for each in (*TEXTS, *script.BEFORE, *script.AFTER, *script.SPEAKER, "Ready.")
    )
    vocab = {word: id for id, word in enumerate(dict.fromkeys(["<unk>", *marks, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(marks)
    return tokenizer


class PacedTalker(MingTalker):
    """Each segment lasts as long as its text takes to say at 14 letters a second: random weights never stop."""

    async def setup(self) -> None:
        script.SLOWEST, script.SPARE_S = 1.0, 0.0
        await super().setup()


class LightVocoder(MingVocoder):
    """In the talker's process."""

    heavy = False


def speech(
    folder: Path, *, max_running: int, fused: bool = True, together: bool = False, device: str = "gpu", **dtypes: str
) -> Graph:
    """Text to speech; with `together` the vocoder is in the process of the talker. `dtypes` of talker and vocoder."""
    graph = Graph("ming_speech")
    segment = graph.stage("segment", Segmenter, near="talker")
    talker = graph.stage(
        "talker",
        PacedTalker,
        model=str(folder),
        device=device,
        max_running=max_running,
        kv_tokens=512 * max_running,
        normalise=False,
        dtype=dtypes.get("talker", "auto"),
    )
    own: dict[str, Any] = {"near": "talker"} if together else {}
    vocoder = graph.stage(
        "vocoder",
        LightVocoder if together else MingVocoder,
        model=str(folder),
        device=device,
        max_together=2 * max_running,
        dtype=dtypes.get("vocoder", "auto"),
        **own,
    )
    graph.stream(segment, talker, bound=8)
    graph.stream(talker, vocoder, bound=8)
    graph.input(speech=segment)
    graph.output(audio=vocoder)
    return graph
