"""A tiny checkpoint: the same files for a seed, in the layout of the hub, and any text can be written with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from actors.ming import MING_TINY
from actors.ming.tiny import LLM, THINKER_CONTROLS, WORDS, tokenizer_of, write_checkpoint


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_a_seed_gives_the_same_files(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, seed)
    one = files(tmp_path / "one")
    assert one == files(tmp_path / "again")
    other = files(tmp_path / "other")
    assert one.keys() == other.keys()
    differing = {name for name in one if one[name] != other[name]}
    assert differing == {name for name in one if name.endswith(".safetensors")}


def test_the_layout_is_that_of_the_hub(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, llm={**LLM, "num_hidden_layers": 2, "num_experts": 12})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.model.layers.1.mlp.experts.11.up_proj.weight" in index
    for name in set(index.values()):
        with safe_open(tmp_path / name, "np") as shard:
            assert set(shard.keys()) == {tensor for tensor, file in index.items() if file == name}
    for name in ("talker/llm/tokenizer.json", "talker/vae/config.json", "talker/campplus.onnx", "tokenizer.json"):
        assert (tmp_path / name).is_file()
    voices = json.loads((tmp_path / "talker/data/voice_name.json").read_text())
    assert all((tmp_path / "talker" / each["prompt_wav_path"]).is_file() for each in voices.values())


@pytest.mark.parametrize("text", ["Hello, world.", " the boat", "你好，世界", "🙂\n\t\0", "<role>HUMAN</role>"])
def test_any_text_can_be_written(text: str) -> None:
    tokenizer = tokenizer_of(THINKER_CONTROLS)
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.token_to_id(control) for control in THINKER_CONTROLS} & set(ids)


def test_a_word_is_one_token() -> None:
    tokenizer = tokenizer_of(THINKER_CONTROLS)
    sentence = "".join(f" {word}" for word in WORDS)
    assert tokenizer.encode(sentence).tokens == [f"Ġ{word}" for word in WORDS]


def test_it_is_a_set_of_weights_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIFLOW_CACHE", str(tmp_path))
    folder = MING_TINY.fetch()
    assert (folder / "config.json").is_file() and MING_TINY.state().status == "present"
    with safe_open(folder / "talker" / "vae" / "model.safetensors", "np") as vae:
        assert np.isfinite(vae.get_tensor("decoder.head.out.weight")).all()
