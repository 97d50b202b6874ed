"""A tiny Ming checkpoint that can be spoken to: the reference's, whose sound is heard, with room and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers

from tests.actors.ming.reference import CHECKPOINT

SPECIAL = ["<|im_start|>", "<|im_end|>", "<audio>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,:;!?'-<|>_"


def tiny_tokenizer() -> Tokenizer:
    """A token each letter, whatever its case, and each special mark."""
    vocab = {each: id for id, each in enumerate(["<unk>", *SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write_checkpoint(folder: Path) -> Path:
    """All that `MingTalker` and `MingVocoder` read. A step is 36 ms of sound; segments last up to 9 s."""
    for file in CHECKPOINT.glob("*.safetensors"):
        (folder / file.name).symlink_to(file)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config["llm_config"]["max_position_embeddings"] = 1024
    config["audio_tokenizer_config"]["dec_kwargs"]["backbone"]["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
