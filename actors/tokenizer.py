"""The tokenizer of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omniflow.errors import WeightsError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`. Raises WeightsError where its tokenizer.json is missing or broken."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise WeightsError(f"{folder} has no tokenizer.json; give the folder of a checkpoint in Hugging Face's layout")
    try:
        return Tokenizer.from_buffer(file.read_bytes())
    except ValueError as error:
        raise WeightsError(f"{file} is not a tokenizer: {error}") from error


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text, without those that a tokenizer puts around texts."""
    # Tokenizer.encode keeps the GIL (110 ms for 200 KB, the event loop stands still); the batch forms release it.
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
