"""Answers of the SGLang engine that are held to a grammar, beside those of the reference engine."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jsonschema
import msgspec
import pytest
import torch

from omniflow.engine.grammar import Grammars
from omniflow.engine.transformers import TransformersEngine
from omniflow.errors import InvalidInputError, ProtocolError
from tests.engine.test_grammar import NO_BLANKS, asked, grammar, text_of
from tests.engine.tiny import (
    BYTES_END,
    BYTES_VOCAB,
    HIDDEN,
    byte_llama,
    byte_tokenizer,
    drain,
    ids_of,
    prompt,
    request,
    run,
)

if TYPE_CHECKING:
    from omniflow.engine.sglang import SGLangEngine

GPU = torch.cuda.is_available()

pytestmark = [
    pytest.mark.gpu if GPU else pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.timeout(300),
]

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    from omniflow.engine.sglang import load_engine

    folder = tmp_path_factory.mktemp("llama")
    byte_llama().save_pretrained(folder)
    grammars = Grammars(byte_tokenizer().to_str(), BYTES_VOCAB, [BYTES_END])
    engine = load_engine(
        folder, grammars=grammars, device="gpu" if GPU else "cpu", dtype="float32", kv_tokens=4096, max_running=4
    )
    yield engine
    engine.close()


def test_answers_follow_their_schema_while_others_run_free(engine: SGLangEngine) -> None:
    requests = [asked(str(number), grammar(SCHEMA), logit_bias=NO_BLANKS, temperature=1.0) for number in range(3)]
    outputs = run(engine, [request("free", prompt(7), max_tokens=30), *requests])
    assert outputs["free"][-1].finish_reason == "length"
    for each in requests:
        assert outputs[each.id][-1].finish_reason == "stop"
        jsonschema.validate(json.loads(text_of(outputs[each.id])), SCHEMA)
    assert engine.stats().kv_tokens_used == 0


def test_whom_sglang_does_not_take_leaves_no_grammar_to_others(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run(engine, [request("free", prompt(7), max_tokens=30)])["free"]
    monkeypatch.setattr(engine._scheduler, "max_queued_requests", 1)
    outputs = run(engine, [request("free", prompt(7), max_tokens=30), asked("held", grammar(SCHEMA))])
    assert isinstance(outputs["held"][-1].error, ProtocolError)
    assert ids_of(outputs["free"])[:8] == ids_of(alone)[:8]


def test_a_greedy_answer_is_that_of_the_reference(engine: SGLangEngine) -> None:
    reference = TransformersEngine(byte_llama(), grammars=Grammars(byte_tokenizer().to_str(), BYTES_VOCAB, [BYTES_END]))
    each = asked("g", grammar(SCHEMA), logit_bias=NO_BLANKS)
    assert text_of(run(engine, [each])["g"]) == text_of(run(reference, [each])["g"])


def test_a_grammar_that_becomes_too_complex_ends_its_own_request_only(engine: SGLangEngine) -> None:
    wide = grammar({"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(600)}})
    outputs = run(engine, [request("free", prompt(3)), asked("wide", wide)])
    assert len(ids_of(outputs["free"])) == 8
    last = outputs["wide"][-1]
    assert last.finish_reason == "abort"
    assert isinstance(last.error, InvalidInputError)
    assert "too complex" in str(last.error)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_grammar_that_cannot_be_followed_is_refused_at_the_start(engine: SGLangEngine, is_open: bool) -> None:
    with pytest.raises(InvalidInputError, match="cannot be followed"):
        engine.start(msgspec.structs.replace(asked("o", "start: ("), open=is_open))
    engine.abort("o")
    assert drain(engine) == {}


def test_what_is_fed_is_held_to_the_grammar(engine: SGLangEngine) -> None:
    engine.start(msgspec.structs.replace(asked("o", grammar(SCHEMA), logit_bias=NO_BLANKS), ids=[], open=True))
    engine.feed("o", torch.zeros(2, HIDDEN), done=True)
    jsonschema.validate(json.loads(text_of(drain(engine)["o"])), SCHEMA)


def test_who_is_fed_what_is_refused_stays_open_until_it_is_aborted(engine: SGLangEngine) -> None:
    """So an abort says the same on a rank that refused it and on one that was not told of its input."""
    engine.start(msgspec.structs.replace(asked("o", grammar(SCHEMA)), ids=[], open=True))
    with pytest.raises(ProtocolError, match="not finite"):
        engine.feed("o", torch.full((2, HIDDEN), torch.inf, device="cuda" if GPU else "cpu"), done=True)
    engine.abort("o")
    assert [output.finish_reason for output in drain(engine)["o"]] == ["abort"]
    assert engine.stats().num_waiting == 0
