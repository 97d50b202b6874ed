"""A checkpoint of Ming's thinker with random weights and a tokenizer of bytes, in the hub's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from actors.ming.config import Thinker
from actors.ming.prompt import CONTROLS
from actors.ming.thinker_model import ThinkerModel

SPECIAL = ["<|endoftext|>", "<tool_call>", *(control.content for control in CONTROLS)]
HIDDEN = 64
CONFIG: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "router_type": "MultiRouter",
    "head_dim": 16,
    "rope_theta": 600000.0,
    "rope_scaling": {"type": "video_rope", "mrope_section": [1, 2, 1]},
    "max_position_embeddings": 512,
}


def byte_tokenizer() -> Tokenizer:
    """A token each byte, and one for a line break and the W after it, so that it matters what is tokenized together."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: id for id, letter in enumerate([*letters, "\u010aW"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("\u010a", "W")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    return tokenizer


def write_thinker(folder: Path, seed: int = 0, **changes: object) -> Path:
    """All that `MingMerge`, `MingThinker` and `Detokenize` read."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {**CONFIG, "eos_token_id": tokenizer.token_to_id("<|role_end|>"), **changes}
    (folder / "config.json").write_text(json.dumps({"model_type": "bailingmm_moe_v2_lite", "llm_config": config}))
    model = ThinkerModel(msgspec.convert(config, Thinker)).requires_grad_(False)
    for name, weight in model.state_dict().items():
        sharp = 2.5 if "query_layernorm" in name or "key_layernorm" in name else 1.0  # looks at single inputs
        weight.normal_(mean=sharp * ("norm" in name), std=0.1 if "norm" in name else 0.3)
    save_file(dict(_hub_names(model)), folder / "model.safetensors")
    return folder


def _hub_names(model: ThinkerModel) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, weight in model.state_dict().items():
        name = f"model.{name}".replace(".scores.weight", ".weight")
        if "gate_up_proj" in name:
            for each, half in zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True):
                found.append((name.replace("gate_up_proj", each), half.contiguous()))
        else:
            found.append((name, weight.contiguous()))
    return found
