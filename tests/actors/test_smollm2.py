from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.smollm2 import SMOLLM2_135M_INSTRUCT
from actors.smollm2.convert import convert

BYTES = list(tokenizers.pre_tokenizers.ByteLevel.alphabet())
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return SMOLLM2_135M_INSTRUCT.fetch()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def tiny_llama(tie: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(CONTROL) + len(BYTES) + 1,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=64,
            rope_theta=1e5,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tie,
        )
    ).eval()


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{'output' if x == 'o' else x}" for x in "qkvo"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def write_gguf(model: Any, path: Path, pre: str = "smollm") -> None:
    """As llama.cpp's own converter writes it, with the rows of q and k permuted."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*CONTROL, *BYTES, "ab"])
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(BYTES) + 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        inner, _, weight = name.removeprefix("model.layers.").partition(".")
        weight = weight.removesuffix(".weight")
        if name.startswith("model.layers."):
            if weight in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if "q_proj" in weight else config.num_key_value_heads
                rows = len(data)
                data = data.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(data.shape)
            writer.add_tensor(f"blk.{inner}.{GGUF_NAMES[weight]}.weight", np.ascontiguousarray(data))
        elif not (name == "lm_head.weight" and config.tie_word_embeddings):
            whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            writer.add_tensor(f"{whole[name.removesuffix('.weight')]}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tie", [True, False])
def test_converted_model_computes_what_the_original_does(tmp_path: Path, tie: bool) -> None:
    from transformers import AutoModelForCausalLM

    original = tiny_llama(tie)
    write_gguf(original, tmp_path / "model.gguf")
    target = tmp_path / "target"
    target.mkdir()
    convert(tmp_path, target)
    converted = AutoModelForCausalLM.from_pretrained(target).eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, original(ids).logits)
    assert converted.config.tie_word_embeddings is tie
    assert converted.generation_config.eos_token_id == 2
    assert (target / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert tokenizers.Tokenizer.from_file(str(target / "tokenizer.json")).encode("abc<|im_end|>").tokens == [
        "ab", "c", "<|im_end|>",
    ]  # fmt: skip


def test_gguf_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_gguf(tiny_llama(True), tmp_path / "model.gguf", pre="llama-bpe")
    with pytest.raises(ValueError, match="pre-tokenizer 'llama-bpe' is not known here"):
        convert(tmp_path, tmp_path)


def test_capital_of_france(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    torch.set_num_threads(threads)
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


# Ids that transformers' own reader of the GGUF gives; it leaves digits out of account, so the texts have none.
TRANSFORMERS_IDS = {
    "Hello, world!": [19556, 28, 905, 17],
    "naïve café": [3546, 46494, 37366],
    "東京タワー": [30679, 126, 16736, 122, 10391, 140, 11100, 124, 35130],
    "def f(x):\n    return x\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 198],
    "🙂": [10813, 38887],
    "<|im_start|>user\n": [1, 4093, 198],
}


def test_tokens_are_those_of_the_model(tokenizer: tokenizers.Tokenizer) -> None:
    assert {text: tokenizer.encode(text).ids for text in TRANSFORMERS_IDS} == TRANSFORMERS_IDS


def test_digits_stand_alone(tokenizer: tokenizers.Tokenizer) -> None:
    assert tokenizer.encode("In 1984, 3.5").tokens == ["In", "Ġ", "1", "9", "8", "4", ",", "Ġ", "3", ".", "5"]


# The vocabulary has no tokens for six control characters, nor for the unassigned planes above U+3FFFF.
KNOWN = st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d")


@given(st.text(KNOWN))
def test_text_survives_tokens(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@given(st.text(st.characters(categories=["Nd"]), min_size=1, max_size=12))
def test_no_token_spans_two_digits(tokenizer: tokenizers.Tokenizer, digits: str) -> None:
    starts = Counter(start for start, _ in tokenizer.encode(digits).offsets)
    assert set(starts) == set(range(len(digits)))
