from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from actors.answer_grammar import answer_grammar
from actors.smollm2 import SMOLLM2_135M_INSTRUCT
from actors.tool_format import HERMES
from omniflow.engine.base import EngineRequest, Sampling
from omniflow.engine.grammar import Grammars
from omniflow.engine.linear import PackedLinear, pack_linears, padded
from omniflow.engine.rows import Span
from omniflow.engine.transformers import TransformersEngine, load_engine
from omniflow.errors import (
    ContextLengthError,
    InvalidInputError,
    OverloadedError,
    ProtocolError,
    StartError,
    WeightsError,
)
from omniflow.media import Options
from tests.engine.odd_values import ODD, assert_refused_or_answered
from tests.engine.tiny import CONTEXT, HIDDEN, SHAPE, VOCAB, drain, ids_of, prompt, request, run, tiny_llama, tiny_qwen2

LLAMA = tiny_llama()
END = 2
"""The token that ends an answer of SmolLM2."""


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that computes by the book; the engine changes the attention of the model it is given."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    return model


def engine_on(model: PreTrainedModel, **options: object) -> TransformersEngine:
    return TransformersEngine(copy.deepcopy(model), **options)


def greedy(model: PreTrainedModel, ids: list[int], count: int, embeds: torch.Tensor | None = None) -> list[int]:
    """The tokens by recomputing everything each time, without any cache."""
    embedding = model.get_input_embeddings()
    inputs = embedding(torch.tensor([ids])) if embeds is None else embeds[None]
    tokens = []
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(inputs_embeds=inputs).logits[0, -1].argmax()))
            inputs = torch.cat([inputs, embedding(torch.tensor([[tokens[-1]]]))], dim=1)
    return tokens


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2])
@pytest.mark.parametrize("length", [1, 7, 64, 65, 150])
def test_greedy_tokens_are_those_of_the_plain_model(build: Callable[[], PreTrainedModel], length: int) -> None:
    model = build()
    expected = greedy(plain(model), prompt(length), 6)
    outputs = run(engine_on(model, chunk=64), [request("a", prompt(length), max_tokens=6)])["a"]
    assert ids_of(outputs) == expected
    assert [output.finish_reason for output in outputs] == [None] * 5 + ["length"]


def test_requests_that_join_and_leave_do_not_change_each_other() -> None:
    model, lengths = plain(LLAMA), [3, 90, 1, 20, 64, 33]
    engine = engine_on(LLAMA, max_running=3, chunk=16)
    tokens: dict[str, list[int]] = {}
    for number, length in enumerate(lengths):
        engine.start(request(str(number), prompt(length, number), max_tokens=3 + 2 * number))
        for output in engine.step():
            tokens.setdefault(output.id, []).extend(output.ids)
    for id, outputs in drain(engine).items():
        tokens.setdefault(id, []).extend(ids_of(outputs))
    for number, length in enumerate(lengths):
        assert tokens[str(number)] == greedy(model, prompt(length, number), 3 + 2 * number)
    assert engine.stats().num_running == engine.stats().kv_tokens_used == 0


def test_bits_are_the_same_alone_and_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the tokens: every logit of every step."""
    requests = [
        request(str(seed), prompt(length, seed), seed=seed, temperature=1.0, max_tokens=6)
        for seed, length in enumerate([5, 40, 1, 70, 2])
    ]
    model = tiny_llama()
    pack_linears(model)
    engine = TransformersEngine(model)
    alone = {each.id: logits_of(engine, [each], monkeypatch)[each.id] for each in requests}
    together = logits_of(engine, requests, monkeypatch)
    for id, logits in together.items():
        assert torch.equal(logits, alone[id])


def logits_of(
    engine: TransformersEngine, requests: list[EngineRequest], monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    seen: dict[str, list[torch.Tensor]] = {}
    sample = engine._sample

    def spy(logits: torch.Tensor, hidden: list[torch.Tensor], spans: list) -> list:
        for row, span in zip(logits, spans, strict=True):
            seen.setdefault(span.row.id, []).append(row.clone())
        return sample(logits, hidden, spans)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_sample", spy)
        run(engine, requests)
    return {id: torch.stack(rows) for id, rows in seen.items()}


def test_packed_linears_compute_what_linears_compute() -> None:
    linear = torch.nn.Linear(48, 30)
    packed = PackedLinear(linear)
    for count in (1, 2, 3, 4, 5, 33):
        x = torch.randn(1, count, 48)
        torch.testing.assert_close(packed(x), linear(x), rtol=1e-5, atol=1e-6)


def test_packed_linears_meet_few_numbers_of_rows_and_rows_do_not_depend_on_them() -> None:
    """Each number of rows that a shape has met keeps 0.5 MB."""
    assert len({padded(count) for count in range(1, 73)}) == 8 + 14 + 1
    for count in range(1, 3000):
        assert count <= padded(count) <= count + max(3, count // 8) if count > 8 else padded(count) == count
    packed = PackedLinear(torch.nn.Linear(48, 30))
    x = torch.randn(300, 48)
    whole = packed(x)
    for count in (9, 10, 33, 67, 131, 259):
        assert torch.equal(packed(x[:count]), whole[:count])


def test_a_long_prompt_does_not_stall_those_that_decode() -> None:
    engine = engine_on(LLAMA, chunk=16)
    engine.start(request("short", prompt(4), max_tokens=50))
    engine.step()
    engine.start(request("long", prompt(160), max_tokens=1))
    steps = []
    while not any(id == "long" for id in (steps[-1] if steps else [])):
        steps.append([output.id for output in engine.step()])
    assert len(steps) == 160 / 16
    assert all("short" in ids for ids in steps)


def test_it_is_known_whether_the_next_step_reads_prompts() -> None:
    engine = engine_on(LLAMA, chunk=16, max_running=2)
    assert not engine.is_reading()
    engine.start(request("a", prompt(4), max_tokens=50))
    assert engine.is_reading()
    engine.step()
    assert not engine.is_reading()
    engine.start(request("b", prompt(33), max_tokens=50))
    engine.start(request("c", prompt(4)))  # waits for a place
    read = []
    for _ in range(5):
        read.append(engine.is_reading())
        engine.step()
    assert read == [True, True, False, False, False]  # the 33rd input is no more than that of one that decodes


def test_a_short_prompt_passes_a_long_one_that_is_being_read() -> None:
    engine = engine_on(LLAMA, chunk=16)
    engine.start(request("long", prompt(200), max_tokens=1))
    engine.step()
    engine.start(request("short", prompt(10), max_tokens=1))
    ended = [output.id for _ in range(3) for output in engine.step()]
    assert ended == ["short"]


def test_stop_token_ends_and_is_not_among_the_ids() -> None:
    expected = greedy(plain(LLAMA), prompt(9), 8)
    stop = expected[5]
    outputs = run(engine_on(LLAMA), [request("a", prompt(9), stop_token_ids=frozenset({stop}))])["a"]
    assert ids_of(outputs) == expected[: expected.index(stop)]
    assert outputs[-1].finish_reason == "stop"


def test_stop_string_across_tokens_ends_the_request() -> None:
    expected = greedy(plain(LLAMA), prompt(9), 8)

    def decode(ids: list[int]) -> str:
        return "".join(f"<{id}>" for id in ids)

    engine = engine_on(LLAMA, decode=decode)
    stop = f"{expected[3]}><{expected[4]}"
    outputs = run(engine, [EngineRequest(id="a", ids=prompt(9), sampling=Sampling(max_tokens=8), stop=(stop,))])["a"]
    assert ids_of(outputs) == expected[:5]
    assert outputs[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "extras", [{}, {"temperature": 2.0, "seed": 1, "presence_penalty": 2.0}], ids=["plain", "drawn"]
)
def test_logprobs_are_those_of_the_plain_model_whatever_was_asked_of_the_draw(extras: dict[str, float]) -> None:
    model, ids = plain(LLAMA), prompt(12)
    asked = request("a", ids, max_tokens=5, top_logprobs=4, logit_bias=((3, 50.0), (4, -50.0)), **extras)
    outputs = run(engine_on(LLAMA), [asked])["a"]
    tokens = ids_of(outputs)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids + tokens])).logits[0], dim=-1)[len(ids) - 1 :]
    for token, logprobs, output in zip(tokens, expected, outputs, strict=False):
        (found,) = output.logprobs
        assert (found.id, found.logprob) == (token, pytest.approx(float(logprobs[token]), abs=1e-4))
        values, top = logprobs.topk(4)
        assert [id for id, _ in found.top] == top.tolist()
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_logprobs_come_only_where_they_are_asked_for() -> None:
    outputs = run(engine_on(LLAMA), [request("a", prompt(5)), request("b", prompt(5), top_logprobs=0)])
    assert all(output.logprobs == () for output in outputs["a"])
    assert [len(output.logprobs[0].top) for output in outputs["b"]] == [0] * 8


def test_a_bias_on_a_token_that_the_model_does_not_have_is_refused() -> None:
    engine = engine_on(LLAMA)
    for token in (-1, VOCAB):
        with pytest.raises(
            InvalidInputError, match=f"the token {token}; this model has those from 0 to {VOCAB - 1}"
        ) as raised:
            engine.start(request("a", prompt(3), logit_bias=((5, 1.0), (token, 1.0))))
        assert raised.value.param == "logit_bias"
    assert len(ids_of(run(engine, [request("a", prompt(3), logit_bias=((VOCAB - 1, 1.0),))])["a"])) == 8


def test_penalties_and_biases_change_their_own_row_only() -> None:
    plain_ones = [request(str(number), prompt(5 + number, number), temperature=1.0, seed=number) for number in range(3)]
    changed = request(
        "x", prompt(9), frequency_penalty=2.0, presence_penalty=2.0, logit_bias=((1, 4.0),), max_tokens=30
    )
    alone = {each.id: run(engine_on(LLAMA), [each])[each.id] for each in [*plain_ones, changed]}
    assert run(engine_on(LLAMA), [plain_ones[0], changed, *plain_ones[1:]]) == alone
    repeated = ids_of(run(engine_on(LLAMA), [request("x", prompt(9), max_tokens=30)])["x"])
    assert len(set(ids_of(alone["x"]))) > len(set(repeated))


def test_embeddings_take_the_place_of_tokens() -> None:
    model, ids = plain(LLAMA), prompt(80)
    rows = torch.randn(3, HIDDEN) * 0.2
    positions = (2, 70, 5)  # in two chunks, and not sorted
    inputs = model.get_input_embeddings()(torch.tensor(ids)).detach()
    inputs[list(positions)] = rows
    engine = engine_on(LLAMA, chunk=64)
    outputs = run(
        engine,
        [EngineRequest(id="a", ids=ids, sampling=Sampling(max_tokens=6), embeds=rows, positions=positions)],
    )["a"]
    assert ids_of(outputs) == greedy(model, ids, 6, inputs)
    assert ids_of(outputs) != greedy(model, ids, 6)


@pytest.mark.parametrize("parts", [[30], [1, 1, 28], [10, 20, 0], [17, 13]])
def test_fed_embeddings_are_a_prompt(parts: list[int]) -> None:
    model, ids = plain(LLAMA), prompt(5)
    rows = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(3)) * 0.2
    engine = engine_on(LLAMA, chunk=8)
    engine.start(EngineRequest(id="a", ids=ids, sampling=Sampling(max_tokens=6), open=True))
    assert drain(engine) == {}
    for number, part in enumerate(torch.split(rows, parts)):
        engine.feed("a", part, done=number == len(parts) - 1)
        if number < len(parts) - 1:
            assert drain(engine) == {}, "it must not speak before it has heard all"
    inputs = torch.cat([model.get_input_embeddings()(torch.tensor(ids)).detach(), rows])
    assert ids_of(drain(engine)["a"]) == greedy(model, ids, 6, inputs)


def test_feed_refuses_what_does_not_fit() -> None:
    engine = engine_on(LLAMA, kv_tokens=100)
    engine.start(EngineRequest(id="a", ids=[], sampling=Sampling(max_tokens=6), open=True))
    with pytest.raises(InvalidInputError, match="at least 1 input"):
        engine.feed("a", torch.zeros(0, HIDDEN), done=True)
    with pytest.raises(ContextLengthError, match="120 tokens; at most 99 fit"):
        engine.feed("a", torch.zeros(120, HIDDEN), done=False)
    with pytest.raises(ProtocolError, match="this model takes"):
        engine.feed("a", torch.zeros(HIDDEN), done=False)
    with pytest.raises(ProtocolError, match="not finite"):
        engine.feed("a", torch.full((1, HIDDEN), torch.inf), done=False)
    engine.step()
    engine.start(request("b", prompt(50), max_tokens=20))
    engine.step()
    with pytest.raises(OverloadedError, match="no room"):
        engine.feed("a", torch.zeros(40, HIDDEN), done=False)
    engine.feed("a", torch.zeros(20, HIDDEN), done=True)
    assert len(ids_of(drain(engine)["a"])) == 6


def test_feed_to_a_closed_request_is_an_error_and_to_an_ended_one_is_ignored() -> None:
    engine = engine_on(LLAMA)
    engine.start(request("a", prompt(3)))
    with pytest.raises(ProtocolError, match="not open"):
        engine.feed("a", torch.zeros(1, HIDDEN), done=True)
    engine.feed("unknown", torch.zeros(1, HIDDEN), done=True)


def test_abort_takes_effect_at_the_next_step() -> None:
    engine = engine_on(LLAMA, max_running=1)
    for id in ("running", "waiting", "third"):
        engine.start(request(id, prompt(4), max_tokens=50))
    engine.step()
    for id in ("running", "waiting", "waiting", "unknown"):
        engine.abort(id)
    outputs = engine.step()
    assert [(output.id, output.finish_reason) for output in outputs] == [
        ("running", "abort"),
        ("waiting", "abort"),
        ("third", None),
    ]
    assert engine.stats().num_running == 1
    assert set(drain(engine)) == {"third"}


def test_bounds_of_the_queue_the_batch_and_the_cache() -> None:
    engine = engine_on(LLAMA, max_running=2, max_waiting=3, kv_tokens=70)
    for number in range(3):
        engine.start(request(str(number), prompt(20), max_tokens=10))
    with pytest.raises(OverloadedError, match="3 generations are waiting already") as raised:
        engine.start(request("late", prompt(20)))
    assert raised.value.retry_after_s == 1.0
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_tokens_used, stats.kv_tokens_total) == (2, 1, 60, 70)
    assert len(drain(engine)) == 3


def test_a_request_waits_until_the_cache_has_room() -> None:
    engine = engine_on(LLAMA, kv_tokens=70)
    engine.start(request("a", prompt(30), max_tokens=10))
    engine.start(request("b", prompt(30), max_tokens=10))
    engine.step()
    assert engine.stats().num_running == 1
    assert {id: len(ids_of(outputs)) for id, outputs in drain(engine).items()} == {"a": 9, "b": 10}


def test_urgent_ones_run_before_others_that_wait() -> None:
    engine = engine_on(LLAMA, max_running=1)
    for id in ("a", "b", "urgent"):
        engine.start(msgspec.structs.replace(request(id, prompt(4), max_tokens=2), urgent=id == "urgent"))
    assert list(drain(engine)) == ["urgent", "a", "b"]


@pytest.mark.parametrize(("length", "fits"), [(CONTEXT - 1, True), (CONTEXT, False), (5000, False)])
def test_a_prompt_that_cannot_fit_is_refused(length: int, fits: bool) -> None:
    engine = engine_on(LLAMA)
    if fits:
        outputs = run(engine, [request("a", prompt(length))])["a"]
        assert (len(ids_of(outputs)), outputs[-1].finish_reason) == (1, "length")
        return
    with pytest.raises(ContextLengthError, match=f"the prompt has {length} tokens; at most {CONTEXT - 1} fit"):
        engine.start(request("a", prompt(length)))
    assert not engine.has_work()


def test_max_tokens_beyond_the_cache_ends_by_length_instead_of_waiting_for_ever() -> None:
    outputs = run(engine_on(LLAMA, kv_tokens=40), [request("a", prompt(10), max_tokens=1000)])["a"]
    assert (len(ids_of(outputs)), outputs[-1].finish_reason) == (30, "length")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"ids": []}, InvalidInputError, "the prompt is empty"),
        ({"stop": ("x",)}, ProtocolError, "`decode`"),
        ({"positions": (1,)}, ProtocolError, "0 embeddings for 1 positions"),
        ({"ids": [5, VOCAB]}, ProtocolError, f"vocabulary of {VOCAB}"),
        ({"ids": [-1]}, ProtocolError, f"vocabulary of {VOCAB}"),
        (
            {"positions": (1,), "embeds": torch.zeros(1, 3)},
            ProtocolError,
            rf"\[1, 3\]; this model takes \[n, {HIDDEN}\]",
        ),
        ({"positions": (3,), "embeds": torch.zeros(1, HIDDEN)}, ProtocolError, "outside of the prompt"),
    ],
)
def test_bad_requests_are_refused(fields: dict[str, object], error: type[Exception], message: str) -> None:
    engine = engine_on(LLAMA)
    with pytest.raises(error, match=message):
        engine.start(EngineRequest(**{"id": "a", "ids": [1, 2, 3], "sampling": Sampling(), **fields}))
    assert not engine.has_work()


def test_an_id_runs_once() -> None:
    engine = engine_on(LLAMA)
    engine.start(request("a", prompt(3)))
    with pytest.raises(ProtocolError, match="runs already"):
        engine.start(request("a", prompt(3)))


@pytest.mark.parametrize("option", ODD)
def test_an_odd_value_is_refused_or_answered_and_the_next_request_works(option: str) -> None:
    assert_refused_or_answered(engine_on(LLAMA, decode=str), option)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_own_request(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [request(id, prompt(5), max_tokens=4, temperature=temperature, seed=3) for id in ("bad", "good")]
    alone = run(engine_on(LLAMA), asked[1:])["good"]
    engine = engine_on(LLAMA)
    forward = engine._forward

    def broken(spans: list[Span]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits, hidden = forward(spans)
        bad = torch.tensor([span.row.id == "bad" for span in spans])
        return logits.masked_fill(bad[:, None], torch.nan), hidden

    monkeypatch.setattr(engine, "_forward", broken)
    outputs = run(engine, asked)
    assert isinstance(outputs["bad"][-1].error, ProtocolError)
    assert ids_of(outputs["good"]) == ids_of(alone)
    assert engine.stats().num_running == 0


def test_other_kinds_of_attention_are_refused() -> None:
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16))
    with pytest.raises(StartError, match=r"this model has \['full_attention', 'sliding_attention'\]"):
        TransformersEngine(model)


def test_a_folder_without_a_model_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=f"{tmp_path} holds no model"):
        load_engine(tmp_path)


def test_broken_and_incomplete_weights_are_errors(tmp_path: Path) -> None:
    LLAMA.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"lacks weights of its model, like model\.layers\.1\.mlp\.up_proj\.weight"):
        load_engine(tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(WeightsError, match="holds no model that transformers can load"):
        load_engine(tmp_path)


def test_a_saved_model_loads(tmp_path: Path) -> None:
    LLAMA.save_pretrained(tmp_path)
    engine = load_engine(tmp_path)
    outputs = run(engine, [request("a", prompt(9))])["a"]
    assert ids_of(outputs) == greedy(plain(LLAMA), prompt(9), 8)
    engine.close()


@pytest.fixture(scope="module")
def smollm2() -> Iterator[TransformersEngine]:
    folder = SMOLLM2_135M_INSTRUCT.fetch()
    engine = load_engine(folder, grammars=Grammars((folder / "tokenizer.json").read_text(), 49152, [END]))
    yield engine
    engine.close()


def test_seeds_give_the_same_tokens_alone_and_in_a_batch_on_the_real_model(smollm2: TransformersEngine) -> None:
    requests = [
        request(str(seed), [1, 9690, 198] + prompt(length, seed), seed=seed, max_tokens=10, **options)
        for seed, (length, options) in enumerate(
            [
                (10, {"temperature": 1.0, "top_logprobs": 3}),
                (35, {"temperature": 0.7, "top_p": 0.9}),
                (2, {"temperature": 1.3, "top_k": 40}),
                (70, {"temperature": 0.0}),
            ]
        )
    ]
    alone = {each.id: run(smollm2, [each])[each.id] for each in requests}
    together = run(smollm2, requests)
    assert {id: ids_of(outputs) for id, outputs in together.items()} == {
        id: ids_of(outputs) for id, outputs in alone.items()
    }
    assert together["0"] == alone["0"], "log-probabilities, too"
    assert run(smollm2, requests[:1])["0"] == alone["0"], "the same seed, the same tokens, again"
    assert VOCAB < max(max(ids_of(outputs)) for outputs in together.values())


TOKENIZER = Tokenizer.from_file(str(SMOLLM2_135M_INSTRUCT.fetch() / "tokenizer.json"))
CAT = {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}}
QUESTIONS: list[tuple[str, dict[str, object]]] = [
    (
        "Anna is 31 and likes green.",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer"},
                "colour": {"enum": ["red", "green"]},
            },
            "required": ["name", "age", "colour"],
            "additionalProperties": False,
        },
    ),
    (
        "Write a table of 2 rows and 3 columns.",
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 3, "maxItems": 3},
            "minItems": 2,
            "maxItems": 2,
        },
    ),
    ("Where is the party?", {"enum": ["Zürich", "東京", '🎉 "here"']}),
    (
        "Two cats, please.",
        {
            "type": "array",
            "items": {"type": "object", "properties": CAT, "required": ["name", "age"], "additionalProperties": False},
            "minItems": 2,
            "maxItems": 2,
        },
    ),
    (
        "When was it?",
        {
            "type": "object",
            "properties": {
                "day": {"type": "string", "format": "date"},
                "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            },
            "required": ["day", "code"],
            "additionalProperties": False,
        },
    ),
    ("Say anything.", {"type": "object", "maxProperties": 1, "additionalProperties": {"type": ["boolean", "null"]}}),
]


def question(id: str, text: str, schema: object, **sampling: object) -> EngineRequest:
    ids = TOKENIZER.encode(f"<|im_start|>user\n{text} Answer in JSON.<|im_end|>\n<|im_start|>assistant\n").ids
    plain = request(id, ids, **{"max_tokens": 100, "stop_token_ids": frozenset([END]), **sampling})
    answer = answer_grammar(Options(json_schema=json.dumps(schema)), HERMES)
    return EngineRequest(id=id, ids=ids, sampling=plain.sampling, grammar=answer.text)


def test_answers_of_the_real_model_follow_their_schemas_in_any_company(smollm2: TransformersEngine) -> None:
    requests = [question(str(number), text, schema) for number, (text, schema) in enumerate(QUESTIONS)]
    answers = run(smollm2, [*requests, request("free", TOKENIZER.encode("Once upon a time").ids, max_tokens=20)])
    for number, (_, schema) in enumerate(QUESTIONS):
        text = TOKENIZER.decode(ids_of(answers[str(number)]))
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
        assert answers[str(number)][-1].finish_reason == "stop"
    assert json.loads(TOKENIZER.decode(ids_of(answers["0"]))) == {"name": "Anna", "age": 31, "colour": "green"}
    (cut,) = run(smollm2, [question("cut", *QUESTIONS[0], max_tokens=6)]).values()
    assert ids_of(cut) == ids_of(answers["0"])[:6]
    assert cut[-1].finish_reason == "length"


def final_hidden(ids: list[int]) -> torch.Tensor:
    """What the head of `tiny_llama` reads, of all inputs."""
    with torch.inference_mode():
        return tiny_llama()(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]


@pytest.mark.parametrize("which", ["last", "all"])
def test_hidden_states_are_the_models_own(which: str) -> None:
    engine = TransformersEngine(tiny_llama(), chunk=16)
    ids = prompt(41, 3)
    asked = msgspec.structs.replace(request("a", ids, max_tokens=5), hidden=which)
    others = [request(str(seed), prompt(9 + seed, seed)) for seed in range(2)]
    outputs = run(engine, [others[0], asked, others[1]])
    given = torch.cat([output.hidden for output in outputs["a"]])
    wanted = final_hidden(ids + ids_of(outputs["a"]))[:-1]
    assert [len(output.hidden) for output in outputs["a"]] == [41 if which == "all" else 1, 1, 1, 1, 1]
    assert (given - wanted[-len(given) :]).abs().max() < 1e-4
    assert all(output.hidden is None for each in others for output in outputs[each.id])
    assert ids_of(outputs["a"]) == ids_of(run(engine, [request("a", ids, max_tokens=5)])["a"])


def test_a_token_that_stops_has_a_hidden_state_too() -> None:
    engine = TransformersEngine(tiny_llama())
    first, second, *_ = ids_of(run(engine, [request("a", prompt(9))])["a"])
    asked = request("a", prompt(9), stop_token_ids=frozenset([second]))
    outputs = run(engine, [msgspec.structs.replace(asked, hidden="last")])["a"]
    assert [output.ids for output in outputs] == [(first,), ()]
    given = torch.cat([output.hidden for output in outputs])
    assert (given - final_hidden([*prompt(9), first])[-2:]).abs().max() < 1e-4
