from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import jsonschema
import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from actors.thinker import Thinker, end_token_ids, recommended_penalty
from omniflow.engine.base import EngineRequest
from omniflow.engine.ranks import Ranks
from omniflow.errors import (
    ConfigError,
    ContextLengthError,
    InvalidInputError,
    OverloadedError,
    StartError,
    UnsupportedError,
    WeightsError,
)
from omniflow.media import Generated, HiddenStates, TokenPrompt, Tokens, Tool
from tests.doubles import ListEmit, context
from tests.engine.tiny import BYTES_END, CONTEXT, HIDDEN, VOCAB, byte_llama, byte_tokenizer, prompt, tiny_llama
from tests.waiting import HANGS_S

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "sex": {"enum": ["m", "f", "ä"]}},
    "required": ["name", "sex"],
    "additionalProperties": False,
}
NO_BLANKS = tuple((ord(blank), -100.0) for blank in " \n")

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights whose token i is written `<i>`."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB - 1]}))
    tokenizer = Tokenizer(models.WordLevel({f"<{id}>": id for id in range(VOCAB)}, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights whose token i is byte i."""
    folder = tmp_path_factory.mktemp("bytes")
    byte_llama().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": BYTES_END}))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@asynccontextmanager
async def started(folder: Path, **settings: object) -> AsyncIterator[Thinker]:
    thinker = Thinker(model=str(folder), **settings)
    await thinker.setup()
    try:
        yield thinker
    finally:
        await thinker.close()


UNREAD: ListEmit[HiddenStates] = ListEmit(wanted=False)
"""Hidden states that nobody reads."""


async def think(thinker: Thinker, ids: list[int], **options: object) -> tuple[list[int], Generated]:
    emit: ListEmit[Tokens] = ListEmit()
    generated = await thinker.run(TokenPrompt(ids), emit, UNREAD, context(**options))
    return [id for tokens in emit.items for id in tokens.ids], generated


async def test_who_reads_hidden_states_gets_those_of_all_inputs(folder: Path) -> None:
    options = {"temperature": 1.0, "seed": 11, "max_tokens": 5}
    hidden: ListEmit[HiddenStates] = ListEmit()
    async with started(folder) as thinker:
        emit: ListEmit[Tokens] = ListEmit()
        await thinker.run(TokenPrompt(prompt(7)), emit, hidden, context(**options))
        tokens = [id for each in emit.items for id in each.ids]
        assert tokens == (await think(thinker, prompt(7), **options))[0]
        again: ListEmit[HiddenStates] = ListEmit()
        whole = [*prompt(7), *tokens[:-1]]
        await thinker.run(TokenPrompt(whole), ListEmit(), again, context(max_tokens=1))
    rows = np.concatenate([each.rows for each in hidden.items])
    assert rows.shape == (7 + 5 - 1, HIDDEN) and rows.dtype == np.float32
    np.testing.assert_allclose(rows, np.concatenate([each.rows for each in again.items]), atol=1e-5)


@pytest.mark.parametrize("tp", [3, 8])
async def test_heads_that_gpus_cannot_share(folder: Path, tp: int) -> None:
    """Each rank says so before it loads anything: the plan knows only what its graph has told it."""
    thinker = Thinker(model=str(folder), engine="sglang", device="gpu")
    thinker.ranks = Ranks(0, tp)
    with pytest.raises(StartError, match=f"tp={tp} does not divide its 4 attention heads \\(2 of keys .*; 1, 2, 4 do"):
        await thinker.setup()
    with pytest.raises(StartError, match=f"tp={tp}"):
        thinker.follow()


async def test_tokens_come_one_by_one_and_the_end_says_how_many(folder: Path) -> None:
    emit: ListEmit[Tokens] = ListEmit()
    async with started(folder) as thinker:
        generated = await thinker.run(
            TokenPrompt(prompt(7), audio_tokens=3), emit, UNREAD, context(max_tokens=5, temperature=0.0)
        )
    assert [len(tokens.ids) for tokens in emit.items] == [1] * 5
    assert generated == Generated("length", 7, 5, audio_tokens=3)


async def test_settings_are_the_defaults_and_options_override_them(folder: Path) -> None:
    async with started(folder, max_tokens=3, temperature=0.0) as thinker:
        greedy, generated = await think(thinker, prompt(7))
        assert generated.completion_tokens == 3
        same, _ = await think(thinker, prompt(7), max_tokens=6)
        assert same[:3] == greedy
        assert len(same) == 6
        drawn = [(await think(thinker, prompt(7), temperature=5.0, top_p=1.0, seed=seed))[0] for seed in range(3)]
        assert len({tuple(tokens) for tokens in drawn}) > 1


async def test_a_seed_gives_the_same_tokens_in_company(folder: Path) -> None:
    options = {"temperature": 1.0, "seed": 11, "max_tokens": 12}
    async with started(folder) as thinker:
        alone, _ = await think(thinker, prompt(9), **options)
        together: list[int] = []

        async def other(number: int) -> None:
            emit: ListEmit[Tokens] = ListEmit()
            ctx = context(temperature=1.0, max_tokens=20)
            await thinker.run(TokenPrompt(prompt(number + 1)), emit, UNREAD, ctx)

        async def same() -> None:
            together.extend((await think(thinker, prompt(9), **options))[0])

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(other, number)
            tasks.start_soon(same)
        assert together == alone


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_deterministic_engine_is_told_another_seed_for_each_request_that_has_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Any other is told none: SGLang refuses a seed that it does not draw by."""
    async with started(folder, deterministic=deterministic) as thinker:
        seeds, generate = [], thinker._loop.generate

        def seen(request: EngineRequest) -> object:
            seeds.append(request.sampling.seed)
            return generate(request)

        monkeypatch.setattr(thinker._loop, "generate", seen)
        for options in ({}, {}, {"seed": 7}):
            await think(thinker, prompt(3), max_tokens=1, **options)
    first, second, given = seeds
    assert len({first, second, None}) == (3 if deterministic else 1)
    assert given == 7


async def test_the_end_token_and_stop_strings_end_with_stop(folder: Path) -> None:
    async with started(folder, temperature=0.0) as thinker:
        tokens, _ = await think(thinker, prompt(7), max_tokens=8)
        cut, generated = await think(thinker, prompt(7), max_tokens=8, stop=(f"<{tokens[3]}>",))
        assert cut == tokens[: tokens.index(tokens[3]) + 1]
        assert generated.finish_reason == "stop"
        thinker._defaults = msgspec.structs.replace(thinker._defaults, stop_token_ids=frozenset({tokens[2]}))
        cut, generated = await think(thinker, prompt(7), max_tokens=8)
        assert cut == tokens[: tokens.index(tokens[2])]
        assert generated.finish_reason == "stop"


async def test_rows_take_the_place_of_tokens(folder: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(2, HIDDEN), scale=0.2).astype(np.float32)
    rows.flags.writeable = False
    emits: list[ListEmit[Tokens]] = [ListEmit(), ListEmit()]
    async with started(folder, temperature=0.0) as thinker:
        await thinker.run(TokenPrompt(prompt(7)), emits[0], UNREAD, context(max_tokens=8))
        await thinker.run(TokenPrompt(prompt(7), rows, (1, 6)), emits[1], UNREAD, context(max_tokens=8))
    assert emits[0].items != emits[1].items


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("temperature", -0.1, "from 0 to 5"),
        ("temperature", 5.1, "from 0 to 5"),
        ("temperature", math.nan, "from 0 to 5"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("top_k", -1, "from 0 .no limit. to 2147483647"),
        ("top_k", 2**31, "from 0 .no limit. to 2147483647"),
        ("max_tokens", 0, "from 1 to 2147483647"),
        ("max_tokens", 2**31, "from 1 to 2147483647"),
        ("seed", 2**64, "a 64-bit integer"),
        ("frequency_penalty", -2.1, "from -2 to 2"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("presence_penalty", math.nan, "from -2 to 2"),
        ("repetition_penalty", 0.0, "from 0.01 to 100"),
        ("repetition_penalty", math.nan, "from 0.01 to 100"),
        ("logit_bias", ((1, 100.5),), "at most 1024 tokens, each with a number from -100 to 100"),
        ("logit_bias", ((1, 1.0),) * 1025, "at most 1024 tokens, each with a number from -100 to 100"),
        ("top_logprobs", 21, "from 0 to 20"),
        ("top_logprobs", -1, "from 0 to 20"),
        ("stop", ("",), "at most 16 strings, none empty"),
        ("stop", ("x",) * 17, "at most 16 strings, none empty"),
        ("stop", ("x", "\ud800"), "text, without halves"),
    ],
)
async def test_bad_options_name_the_field_and_what_would_pass(
    folder: Path, option: str, value: object, wanted: str
) -> None:
    thinker = Thinker(model=str(folder))
    with pytest.raises(InvalidInputError, match=f"{option} must be {wanted}") as raised:
        await think(thinker, [1], **{option: value})
    assert raised.value.param == option


async def test_logprobs_come_with_their_tokens(folder: Path) -> None:
    emit: ListEmit[Tokens] = ListEmit()
    async with started(folder, temperature=0.0) as thinker:
        await thinker.run(TokenPrompt(prompt(7)), emit, UNREAD, context(max_tokens=4, top_logprobs=3))
    for tokens in emit.items:
        (found,) = tokens.logprobs
        assert (found.id,) == tokens.ids
        assert found.top[0] == (found.id, found.logprob)
        assert len(found.top) == 3


async def test_penalties_and_biases_reach_the_engine(folder: Path) -> None:
    async with started(folder, temperature=0.0, max_tokens=30) as thinker:
        assert (await think(thinker, prompt(7), logit_bias=((5, 100.0),)))[0] == [5] * 30
        once, _ = await think(thinker, prompt(7), presence_penalty=2.0, frequency_penalty=2.0, logit_bias=((5, 9.0),))
        assert 0 < once.count(5) < 30
        with pytest.raises(InvalidInputError, match=f"those from 0 to {VOCAB - 1}") as raised:
            await think(thinker, prompt(7), logit_bias=((VOCAB, 1.0),))
        assert raised.value.param == "logit_bias"


async def test_the_repetition_penalty_is_that_of_the_request_the_stage_or_the_checkpoint(folder: Path) -> None:
    config = folder / "generation_config.json"
    plain = json.loads(config.read_text())
    answers = []
    for recommended, of_stage, of_request in ((None, None, None), (1.5, None, None), (1.5, 1.0, None), (1.0, 3.0, 1.5)):
        config.write_text(json.dumps(plain | {"repetition_penalty": recommended}))
        async with started(folder, temperature=0.0, repetition_penalty=of_stage) as thinker:
            answers.append(await think(thinker, prompt(9), max_tokens=30, repetition_penalty=of_request))
    config.write_text(json.dumps(plain))
    without, checkpoint, stage, request = (tokens for tokens, _ in answers)
    assert without == stage and checkpoint == request and without != checkpoint
    assert len(set(checkpoint)) > len(set(without))


def test_a_broken_repetition_penalty_of_a_checkpoint_names_its_file(tmp_path: Path) -> None:
    assert recommended_penalty(tmp_path) == 1.0
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": "high"}')
    with pytest.raises(WeightsError, match=r"generation_config\.json is broken: repetition_penalty"):
        recommended_penalty(tmp_path)


async def say(thinker: Thinker, seed: int = 0, **options: object) -> tuple[str, Generated]:
    asked = {"temperature": 1.0, "top_p": 1.0, "seed": seed, "max_tokens": 200, "logit_bias": NO_BLANKS, **options}
    tokens, generated = await think(thinker, prompt(5), **asked)
    return bytes(tokens).decode(errors="replace"), generated


async def test_an_answer_follows_its_schema_in_any_company(byte_folder: Path) -> None:
    answers: dict[int, tuple[str, Generated]] = {}

    async def ask(thinker: Thinker, seed: int) -> None:
        answers[seed] = await say(thinker, seed, json_schema=json.dumps(PERSON))

    async with started(byte_folder) as thinker:
        async with anyio.create_task_group() as tasks:
            for seed in range(6):
                tasks.start_soon(ask, thinker, seed)
        for text, generated in answers.values():
            jsonschema.validate(json.loads(text), PERSON)
            assert generated.finish_reason == "stop"
        assert await say(thinker, 3, json_schema=json.dumps(PERSON)) == answers[3]
        cut, generated = await say(thinker, 3, json_schema=json.dumps(PERSON), max_tokens=6)
        assert (cut, generated.finish_reason) == (answers[3][0][:6], "length")


async def test_a_required_call_is_one(byte_folder: Path) -> None:
    tools = (Tool("a", parameters=json.dumps(PERSON)), Tool("b", parameters=json.dumps(PERSON), strict=True))
    async with started(byte_folder) as thinker:
        text, _ = await say(thinker, tools=tools, tool_choice="required", tool_name="b")
    begin, call, end = text.split("\n")
    assert (begin, end) == ("<tool_call>", "</tool_call>")
    assert json.loads(call)["name"] == "b"
    jsonschema.validate(json.loads(call)["arguments"], PERSON)


async def test_a_schema_that_cannot_be_followed_ends_its_request_only(byte_folder: Path) -> None:
    wide = {"type": "object", "properties": {f"p{number}": {} for number in range(600)}}
    async with started(byte_folder) as thinker:
        for schema, message in [({"not": {}}, "Unimplemented keys: ..not"), (wide, "too complex to go on")]:
            with pytest.raises(InvalidInputError, match=message) as raised:
                await say(thinker, json_schema=json.dumps(schema))
            assert raised.value.param == "response_format"
        assert (await say(thinker, json_schema=json.dumps({"const": 1})))[0] == "1"
        assert thinker._loop.stats.num_running == 0


async def test_a_model_whose_tokens_are_no_bytes_cannot_be_held_to_a_schema(folder: Path) -> None:
    async with started(folder) as thinker:
        with pytest.raises(UnsupportedError, match="cannot be held to a schema") as raised:
            await think(thinker, prompt(3), json_schema="{}")
        assert raised.value.param == "response_format"
        with pytest.raises(UnsupportedError) as raised:
            await think(thinker, prompt(3), tools=(Tool("a"),), tool_choice="required")
        assert raised.value.param == "tools"
        assert (await think(thinker, prompt(3), tools=(Tool("a"),), max_tokens=1))[1].completion_tokens == 1


async def test_refusals_of_the_engine_end_the_request_only(folder: Path) -> None:
    async with started(folder, max_running=1, max_waiting=1) as thinker:
        with pytest.raises(ContextLengthError, match=f"at most {CONTEXT - 1} fit"):
            await think(thinker, prompt(CONTEXT))
        refused = 0

        async def ask(number: int) -> None:
            nonlocal refused
            ctx = context(max_tokens=30)
            try:
                await thinker.run(TokenPrompt(prompt(3)), ListEmit(), UNREAD, ctx)
            except OverloadedError:
                refused += 1

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(ask, number)
        assert 0 < refused < 6
        assert (await think(thinker, prompt(3), max_tokens=2, temperature=0.0))[1].completion_tokens == 2


async def test_sglang_has_its_process_for_itself_on_a_gpu() -> None:
    assert Thinker.wants_process({"engine": "sglang"})
    assert not Thinker.wants_process({})
    refused = "engine='sglang' is for GPUs; set device='gpu', or engine='transformers'"
    assert Thinker.refuses_cpu({"engine": "sglang"}) == refused
    assert Thinker.refuses_cpu({}) is None


async def test_a_dtype_that_the_engine_does_not_compute_in() -> None:
    """It would be taken, and the answers would be those of float32, at half the speed that was asked for."""
    with pytest.raises(ConfigError, match="dtype='bfloat16' is for engine='sglang'"):
        Thinker(model="smollm2-135m-instruct", dtype="bfloat16")
    Thinker(model="smollm2-135m-instruct", dtype="bfloat16", engine="sglang")
    Thinker(model="smollm2-135m-instruct", dtype="float32")


@pytest.mark.parametrize("installed", [True, False])
async def test_sglang_has_to_be_installed(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr("actors.stage.lacks_cuda", lambda device: None)
    why = "engine='sglang' needs SGLang, which is not installed here: `pip install 'omniflow[sglang]'` (docs/gpu.md)"
    assert Thinker.lacks({"engine": "sglang"}, "gpu") == (None if installed else why)
    assert Thinker.lacks({}, "gpu") is None


async def test_a_cancelled_run_leaves_the_batch(folder: Path) -> None:
    async with started(folder) as thinker:
        thinker._defaults = msgspec.structs.replace(thinker._defaults, stop_token_ids=frozenset())
        emit: ListEmit[Tokens] = ListEmit()
        with anyio.move_on_after(0.02) as scope:
            await thinker.run(TokenPrompt(prompt(3)), emit, UNREAD, context(max_tokens=250, temperature=5.0))
        assert scope.cancelled_caught
        ctx = context(max_tokens=1)
        await thinker.run(TokenPrompt(prompt(3)), ListEmit(), UNREAD, ctx)
        assert thinker.engine_stats().num_running == 0 < thinker.engine_stats().kv_tokens_total


async def test_a_cancelled_run_with_a_grammar_leaves_the_batch(byte_folder: Path) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 1000})
    emit: ListEmit[Tokens] = ListEmit()
    async with started(byte_folder) as thinker:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                thinker.run, TokenPrompt(prompt(3)), emit, UNREAD, context(json_schema=schema, max_tokens=250)
            )
            with anyio.fail_after(HANGS_S):
                while not emit.items:
                    await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        await think(thinker, prompt(3), max_tokens=1)
        assert thinker._loop.stats.num_running == 0


def test_end_tokens_come_from_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="names an eos_token_id"):
        end_token_ids(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert end_token_ids(tmp_path) == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert end_token_ids(tmp_path) == {2, 3}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(WeightsError, match="is broken"):
        end_token_ids(tmp_path)


def test_end_tokens_of_a_model_of_parts(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    names = tmp_path / "tokenizer_config.json"
    for token in ("<end>", {"content": "<end>"}):
        names.write_text(json.dumps({"eos_token": token}))
        assert end_token_ids(tmp_path) == {BYTES_END}
    names.write_text(json.dumps({"eos_token": "<nothing>"}))
    with pytest.raises(WeightsError, match="nor tokenizer_config.json an eos_token"):
        end_token_ids(tmp_path)
    for part in ("llm_config", "text_config"):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None, part: {"eos_token_id": 5}}))
        assert end_token_ids(tmp_path) == {5}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": 5}}))
    assert end_token_ids(tmp_path) == {7}


async def test_the_real_model_knows_the_capital_of_france() -> None:
    thinker = Thinker(model="smollm2-135m-instruct", temperature=0.0, max_tokens=16)
    folder = thinker.weights()[0].fetch()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    await thinker.setup()
    try:
        tokens, generated = await think(thinker, tokenizer.encode(text).ids)
    finally:
        await thinker.close()
    assert "Paris" in tokenizer.decode(tokens)
    assert generated.finish_reason == "stop"
