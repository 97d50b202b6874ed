"""Decoders of a few thousand random weights, and a way to run an engine to its end."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from omniflow.engine.base import Engine, EngineOutput, EngineRequest, Sampling

VOCAB = 97
HIDDEN = 64
CONTEXT = 256
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,  # large enough that the next token depends on the whole prompt
}


def tiny_llama() -> PreTrainedModel:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def tiny_qwen2() -> PreTrainedModel:
    torch.manual_seed(2)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()


BYTES_VOCAB = 300
BYTES_END = 256
"""Of `byte_tokenizer`: 256 bytes, then an end token; ids from 257 on are those that models have and tokenizers lack."""


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = {bytes_of(letter): letter for letter in letters}
    tokenizer = Tokenizer(models.BPE({by_byte[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def bytes_of(letter: str) -> int:
    """The byte that byte-level tokenizers write as `letter`: itself where it can be seen, else 256 and on, in order."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return ord(letter) if ord(letter) in seen else unseen[ord(letter) - 256]


def byte_llama() -> PreTrainedModel:
    """For `byte_tokenizer`."""
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": BYTES_VOCAB})).eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(id: str, ids: list[int], **sampling: object) -> EngineRequest:
    return EngineRequest(id=id, ids=ids, sampling=Sampling(**{"max_tokens": 8, **sampling}))


def drain(engine: Engine, max_steps: int = 1000) -> dict[str, list[EngineOutput]]:
    """Step until there is no work; the outputs of each request."""
    outputs: dict[str, list[EngineOutput]] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            return outputs
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
    raise AssertionError(f"the engine still has work after {max_steps} steps")


def run(engine: Engine, requests: Iterable[EngineRequest]) -> dict[str, list[EngineOutput]]:
    for each in requests:
        engine.start(each)
    return drain(engine)


def ids_of(outputs: list[EngineOutput]) -> list[int]:
    return [id for output in outputs for id in output.ids]
