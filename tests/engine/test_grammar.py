from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from omniflow.engine.base import EngineOutput, EngineRequest
from omniflow.engine.grammar import MAX_READY, MAX_READY_CHARS, Grammars, check_grammar
from omniflow.engine.linear import pack_linears
from omniflow.engine.transformers import TransformersEngine
from omniflow.errors import InvalidInputError, StartError, UnsupportedError
from tests.engine.tiny import (
    BYTES_END,
    BYTES_VOCAB,
    byte_llama,
    byte_tokenizer,
    drain,
    ids_of,
    prompt,
    request,
    run,
    tiny_llama,
)

END = torch.tensor([BYTES_END])
LLAMA = byte_llama()
TOKENIZER = byte_tokenizer()
NO_BLANKS = tuple((ord(blank), -100.0) for blank in " \n\r\t")
"""A random model likes blanks as much as anything else."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER.to_str(), BYTES_VOCAB, [BYTES_END])


def engine_with(grammars: Grammars) -> TransformersEngine:
    model = copy.deepcopy(LLAMA)
    pack_linears(model)  # the same bits in any company
    return TransformersEngine(model, grammars=grammars)


def grammar(schema: object) -> str:
    return f"%llguidance {{}}\nstart: %json {json.dumps(schema)}\n"


def asked(id: str, text: str, **sampling: object) -> EngineRequest:
    plain = request(id, prompt(4), **{"stop_token_ids": frozenset([BYTES_END]), "max_tokens": 200, **sampling})
    return EngineRequest(id=plain.id, ids=plain.ids, sampling=plain.sampling, grammar=text)


def text_of(outputs: list[EngineOutput]) -> str:
    return bytes(ids_of(outputs)).decode()


def allowed(grammars: Grammars, text: str, so_far: str) -> set[int]:
    matcher = grammars.matcher(text)
    for byte in so_far.encode():
        assert matcher.allowed(END)[byte]
        matcher.advance(byte)
    return set(matcher.allowed(END).nonzero().flatten().tolist())


def test_only_what_the_grammar_lets_follow_is_allowed(grammars: Grammars) -> None:
    text = '%llguidance {}\nstart: "ab" | "ac" "d"?\n'
    assert allowed(grammars, text, "") == {ord("a")}
    assert allowed(grammars, text, "a") == {ord("b"), ord("c")}
    assert allowed(grammars, text, "ac") == {ord("d"), BYTES_END}
    assert allowed(grammars, text, "ab") == {BYTES_END}
    assert allowed(grammars, grammar({"type": "integer"}), "12") == {*b"0123456789", BYTES_END}


def test_the_end_is_known_and_is_that_of_the_request(grammars: Grammars) -> None:
    matcher = grammars.matcher('%llguidance {}\nstart: "a"\n')
    other = torch.tensor([3, BYTES_VOCAB - 1])
    assert matcher.allowed(other).nonzero().flatten().tolist() == [ord("a")]
    assert not matcher.ended
    matcher.advance(ord("a"))
    assert matcher.ended
    assert matcher.allowed(other).nonzero().flatten().tolist() == other.tolist()


def test_answers_do_not_share_where_they_stand(grammars: Grammars) -> None:
    text = '%llguidance {}\nstart: "abc"\n'
    first, second = grammars.matcher(text), grammars.matcher(text)
    first.advance(ord("a"))
    assert second.allowed(END).nonzero().flatten().tolist() == [ord("a")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("start: (", "Expected"),
        ("%llguidance {}\nstart: nothing\n", "unknown name"),
        (grammar({"not": {}}), 'Unimplemented keys: \\["not"\\]'),
        (grammar({"type": "string", "format": "colour"}), "Unknown format: colour"),
        (grammar({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (grammar({"oneOf": [{"minimum": 1}, {"maximum": 3}]}), "oneOf constraints are not supported.$"),
        (grammar({"enum": []}), "anyOf is empty"),
        (grammar({"anyOf": [{"type": "array", "minItems": n} for n in range(2000)]}), "grammar size .* too big"),
    ],
)
def test_a_grammar_that_cannot_be_followed_says_why_in_a_line(grammars: Grammars, text: str, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason) as raised:
        grammars.compile(text, "response_format")
    assert raised.value.param == "response_format"
    assert "\n" not in str(raised.value)
    assert text not in grammars
    assert len(grammars.matcher('%llguidance {}\nstart: "a"\n').allowed(END)) == BYTES_VOCAB


def test_a_grammar_is_checked_without_a_tokenizer() -> None:
    check_grammar(grammar({"type": "object"}), "the schema", "tools")
    with pytest.raises(
        InvalidInputError, match=r'^the schema cannot be followed: Unimplemented keys: \["if"\]$'
    ) as raised:
        check_grammar(grammar({"if": {}}), "the schema", "tools")
    assert raised.value.param == "tools"


def test_so_many_grammars_stay_ready_and_no_more() -> None:
    grammars = Grammars(TOKENIZER.to_str(), BYTES_VOCAB, [BYTES_END])
    texts = [f'%llguidance {{}}\nstart: "{number}"\n' for number in range(MAX_READY + 3)]
    for text in texts:
        grammars.compile(text)
        grammars.compile(texts[0])  # is used all the time, so it stays
    assert [text in grammars for text in texts] == [True, *[False] * 3, *[True] * (MAX_READY - 1)]
    assert grammars.matcher(texts[1]).allowed(END).nonzero().flatten().tolist() == [ord("1")]


def test_large_grammars_make_room_for_each_other() -> None:
    grammars = Grammars(TOKENIZER.to_str(), BYTES_VOCAB, [BYTES_END])
    size = MAX_READY_CHARS // 3
    texts = [f"%llguidance {{}}\nstart: {letter!r}\n# {'x' * size}\n".replace("'", '"') for letter in "abc"]
    for text in texts:
        grammars.compile(text)
    assert [text in grammars for text in texts] == [False, True, True]
    alone = f'%llguidance {{}}\nstart: "a"\n# {"x" * MAX_READY_CHARS}\n'
    grammars.compile(alone)
    assert alone not in grammars
    assert grammars.matcher(alone).allowed(END).nonzero().flatten().tolist() == [ord("a")]


def test_threads_may_compile_the_same_grammar(grammars: Grammars) -> None:
    text = grammar({"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(50)}})
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(grammars.compile, [text] * 8))
        masks = list(threads.map(lambda _: grammars.matcher(text).allowed(END), range(8)))
    assert all(torch.equal(mask, masks[0]) for mask in masks)


def test_a_tokenizer_without_bytes_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(StartError, match="cannot use this tokenizer"):
        Grammars(words.to_str(), 2, [1])


def test_grammars_of_another_vocabulary_are_refused(grammars: Grammars) -> None:
    with pytest.raises(StartError, match=f"the model has 97 tokens, the grammars are for one of {BYTES_VOCAB}"):
        TransformersEngine(tiny_llama(), grammars=grammars)


def test_an_engine_without_grammars_refuses_them() -> None:
    engine = TransformersEngine(copy.deepcopy(LLAMA))
    with pytest.raises(UnsupportedError, match="without grammars"):
        engine.start(asked("a", grammar({})))
    assert not engine.has_work()


def test_the_end_of_the_grammar_ends_the_answer_and_is_told_with_its_last_token(grammars: Grammars) -> None:
    outputs = run(engine_with(grammars), [asked("a", grammar({"const": "ab"}))])["a"]
    assert text_of(outputs) == '"ab"'
    assert [output.finish_reason for output in outputs] == [None, None, None, "stop"]


@pytest.mark.parametrize(("max_tokens", "reason"), [(3, "length"), (4, "stop"), (5, "stop")])
def test_an_answer_that_is_cut_ends_by_length(grammars: Grammars, max_tokens: int, reason: str) -> None:
    outputs = run(engine_with(grammars), [asked("a", grammar({"const": "ab"}), max_tokens=max_tokens)])["a"]
    assert (text_of(outputs), outputs[-1].finish_reason) == ('"ab"'[:max_tokens], reason)


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, object]:
    """Schemas whose answers are short, so that all of them end."""
    kind = draw(st.sampled_from(["bool", "integer", "enum", "string", *(["array", "object"] * 2 if depth else [])]))
    if kind == "bool":
        return {"type": ["boolean", "null"]}
    if kind == "integer":
        low = draw(st.integers(-50, 50))
        return {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(0, 20))}
    if kind == "enum":
        return {"enum": draw(st.lists(st.text(max_size=4) | st.integers() | st.booleans(), min_size=1, max_size=3))}
    if kind == "string":
        return {"type": "string", "maxLength": draw(st.integers(0, 4))}
    if kind == "array":
        low = draw(st.integers(0, 2))
        return {"type": "array", "items": draw(schemas(depth - 1)), "minItems": low, "maxItems": low + 1}
    names = draw(st.lists(st.text(max_size=3), max_size=3, unique=True))
    return {
        "type": "object",
        "properties": {name: draw(schemas(depth - 1)) for name in names},
        "required": [name for name in names if draw(st.booleans())],
        "additionalProperties": False,
    }


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chosen=st.lists(schemas(), min_size=6, max_size=6), seed=st.integers(0, 1000))
def test_what_a_random_model_says_follows_its_schema(chosen: list[dict[str, object]], seed: int) -> None:
    grammars = Grammars(TOKENIZER.to_str(), BYTES_VOCAB, [BYTES_END])
    requests = [
        asked(str(number), grammar(schema), logit_bias=NO_BLANKS, temperature=float(number % 2), seed=seed + number)
        for number, schema in enumerate(chosen)
    ]
    answers = run(engine_with(grammars), requests)
    for number, schema in enumerate(chosen):
        assert answers[str(number)][-1].finish_reason == "stop"
        jsonschema.validate(json.loads(text_of(answers[str(number)])), schema)


def test_company_changes_nothing(grammars: Grammars) -> None:
    person = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
    held = [
        asked("greedy", grammar(person), max_tokens=40),
        asked("drawn", grammar(person), max_tokens=40, temperature=1.0, top_p=0.9, seed=7, top_logprobs=2),
        asked("list", grammar({"type": "array", "items": {"type": "integer"}}), temperature=2.0, seed=8, max_tokens=40),
    ]
    free = [request(str(number), prompt(6, number), temperature=1.0, seed=number, max_tokens=20) for number in range(3)]
    alone = {each.id: run(engine_with(grammars), [each])[each.id] for each in [*held, *free]}
    assert run(engine_with(grammars), [free[0], *held, *free[1:]]) == alone


def test_a_grammar_that_becomes_too_complex_ends_its_own_request_only(grammars: Grammars) -> None:
    wide = grammar({"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(600)}})
    grammars.compile(wide, "response_format")
    engine = engine_with(grammars)
    outputs = run(engine, [request("free", prompt(3)), asked("wide", wide)])
    assert len(ids_of(outputs["free"])) == 8
    last = outputs["wide"][-1]
    assert last.finish_reason == "abort"
    assert isinstance(last.error, InvalidInputError)
    assert last.error.param == "response_format"
    assert "too complex" in str(last.error)
    assert engine.stats().num_running == engine.stats().kv_tokens_used == 0


def test_an_aborted_answer_leaves_the_batch(grammars: Grammars) -> None:
    engine = engine_with(grammars)
    engine.start(asked("a", grammar({"type": "string"})))
    engine.start(asked("b", grammar({"const": "ab"})))
    engine.step()
    engine.abort("a")
    outputs = drain(engine)
    assert outputs["a"] == [EngineOutput("a", (), "abort")]
    assert outputs["b"][-1].finish_reason == "stop"


def test_logprobs_are_those_before_the_mask(grammars: Grammars) -> None:
    outputs = run(engine_with(grammars), [asked("a", grammar({"const": "ab"}), top_logprobs=1)])["a"]
    assert any(output.logprobs[0].top[0][0] != output.ids[0] for output in outputs)
    assert all(output.logprobs[0].logprob <= output.logprobs[0].top[0][1] for output in outputs)
