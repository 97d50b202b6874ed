"""Turns a llama-architecture GGUF with a byte-level BPE into the layout of a Hugging Face checkpoint.

Written are config.json, generation_config.json, model.safetensors (float32), tokenizer.json, tokenizer_config.json and
chat_template.jinja. transformers can read a GGUF itself but not save what it has read, and needs a minute for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3
"""The GGUF token type of tokens that are never written as text."""

TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF names inside `blk.<layer>.` and their Hugging Face names inside `model.layers.<layer>.`."""


def convert(source: Path, target: Path) -> None:
    """Read `source/model.gguf` and write the checkpoint into the folder `target`."""
    reader = gguf.GGUFReader(source / "model.gguf")
    config = _config(reader)
    tokenizer = _tokenizer(reader)
    tokens = {key: tokenizer.id_to_token(config[f"{key}_id"]) for key in ("bos_token", "eos_token", "pad_token")}
    template = _value(reader, "tokenizer.chat_template")
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id")})
    _write_json(
        target / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config["max_position_embeddings"], **tokens},
    )
    (target / "chat_template.jinja").write_text(template)
    tokenizer.save(str(target / "tokenizer.json"))
    save_file(_tensors(reader, config), target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def _config(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _value(reader, "llama.vocab_size"),
        "hidden_size": _value(reader, "llama.embedding_length"),
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "num_attention_heads": _value(reader, "llama.attention.head_count"),
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv"),
        "max_position_embeddings": _value(reader, "llama.context_length"),
        "rms_norm_eps": round(_value(reader, "llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": _value(reader, "llama.rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _tensors(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, np.ndarray]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        name = tensor.name.split(".")
        if name[0] == "blk":
            if name[2] in heads:
                values = _unpermuted(values, heads[name[2]])
            tensors[f"model.layers.{name[1]}.{TENSORS[name[2]]}.weight"] = np.ascontiguousarray(values)
        else:
            whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
            tensors[f"{whole[name[0]]}.weight"] = values
    return tensors


def _unpermuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order of GGUF, which interleaves the halves of each head for its rotary embedding."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """The byte-level BPE of SmolLM2: digits stand alone, control tokens are matched before anything else."""
    if (kind := _value(reader, "tokenizer.ggml.pre")) != "smollm":
        raise ValueError(f"pre-tokenizer {kind!r} is not known here; this conversion is for 'smollm'")
    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _value(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
