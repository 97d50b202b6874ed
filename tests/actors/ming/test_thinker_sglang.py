"""Ming's thinker on SGLang against the reference engine, tiny: on a GPU, or on a CPU through the shim."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.ming.config import AUDIO, IMAGE, Thinker
from actors.ming.prompt import Grid, places
from actors.ming.thinker_model import load_thinker
from omniflow.engine.base import EngineOutput, EngineRequest, Sampling
from omniflow.engine.transformers import TransformersEngine
from omniflow.errors import ProtocolError, WeightsError
from tests.actors.ming.test_sglang_loading import parameters
from tests.actors.ming.thinker_folder import CONFIG, HIDDEN, write_thinker
from tests.engine.tiny import ids_of, run

if TYPE_CHECKING:
    from omniflow.engine.sglang import SGLangEngine

GPU = torch.cuda.is_available()
MARGIN = 0.05 if GPU else 1e-3
"""Where two tokens are as near as this (logprob), other arithmetic may choose the other."""
APART = 0.02 if GPU else 2e-4
"""Of logprobs and hidden states, from the reference's."""

pytestmark = [
    pytest.mark.gpu if GPU else pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("ming"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[SGLangEngine]:
    from actors.ming.thinker_sglang import load_sglang_thinker

    engine = load_sglang_thinker(
        folder,
        device="gpu" if GPU else "cpu",
        dtype="float32",
        kv_tokens=1024,
        max_running=6,
        max_waiting=16,
        chunked_prefill_size=64,
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> TransformersEngine:
    return TransformersEngine(load_thinker(folder), media=True)


def ids(length: int, seed: int) -> list[int]:
    return torch.randint(0, CONFIG["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def text(id: str, length: int, seed: int, tokens: int = 8, **more: Any) -> EngineRequest:
    return EngineRequest(id=id, ids=ids(length, seed), sampling=Sampling(max_tokens=tokens, top_logprobs=2), **more)


PARTS: dict[str, list[int | Grid]] = {
    "image": [7, Grid(1, 4, 6), 12],
    "long image": [40, Grid(1, 9, 9), 30],  # read in 3 chunks, the image in all of them
    "clip": [5, Grid(3, 2, 4), 9],
    "two": [3, Grid(1, 2, 2), 6, Grid(1, 5, 3), 1],
}


def seen(id: str, parts: list[int | Grid], seed: int, tokens: int = 8) -> EngineRequest:
    """A prompt with rows of its own, and of the kind IMAGE, where its grids are."""
    where = torch.from_numpy(places(parts))
    kinds = torch.cat([torch.full((p if isinstance(p, int) else p.size,), isinstance(p, Grid)) for p in parts])
    at = tuple(kinds.nonzero().flatten().tolist())
    rows = torch.randn(len(at), HIDDEN, generator=torch.Generator().manual_seed(seed))
    return text(
        id, len(kinds), seed, tokens, embeds=rows, positions=at, places=where, kinds=kinds.to(torch.uint8) * IMAGE
    )


def heard(id: str, seed: int, length: int = 40, tokens: int = 8) -> EngineRequest:
    """Rows of audio stand in a text, places as a text has them."""
    kinds = torch.zeros(length, dtype=torch.uint8)
    kinds[6:25] = AUDIO
    rows = torch.randn(19, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return text(id, length, seed, tokens, embeds=rows, positions=tuple(range(6, 25)), kinds=kinds)


def assert_same(ours: list[EngineOutput], theirs: list[EngineOutput]) -> None:
    """Equal tokens up to the first near tie, and logprobs near the reference's up to there."""
    assert len(ids_of(ours)) == len(ids_of(theirs))
    mine, wanted = ([each for output in given for each in output.logprobs] for given in (ours, theirs))
    for number, (our, their) in enumerate(zip(mine, wanted, strict=True)):
        (_, first), (_, second) = their.top
        if first - second < MARGIN:
            return
        assert our.id == their.id, f"token {number}"
        assert abs(our.logprob - their.logprob) < APART
    assert ours[-1].finish_reason == theirs[-1].finish_reason


REQUESTS = [
    *(text(f"text {length}", length, length, 4 + length % 7) for length in (1, 5, 70, 33)),
    *(seen(name, parts, seed, 5 + 2 * seed) for seed, (name, parts) in enumerate(PARTS.items())),
    *(heard(f"audio {seed}", seed) for seed in range(2)),
]


@pytest.mark.parametrize("each", REQUESTS, ids=lambda each: each.id)
def test_a_request_alone_gets_the_tokens_of_the_reference(
    engine: SGLangEngine, reference: TransformersEngine, each: EngineRequest
) -> None:
    assert_same(run(engine, [each])[each.id], run(reference, [each])[each.id])


def test_logprobs_are_the_models_own_whatever_the_temperature(
    engine: SGLangEngine, reference: TransformersEngine
) -> None:
    warm = EngineRequest(id="a", ids=ids(9, 3), sampling=Sampling(max_tokens=1, temperature=3.0, top_logprobs=2))
    (ours,), (theirs,) = (run(each, [warm])["a"][0].logprobs for each in (engine, reference))
    assert [id for id, _ in ours.top] == [id for id, _ in theirs.top]
    assert all(abs(one[1] - two[1]) < APART for one, two in zip(ours.top, theirs.top, strict=True))


def test_requests_that_join_and_leave_get_the_tokens_of_the_reference(
    engine: SGLangEngine, reference: TransformersEngine
) -> None:
    ours: dict[str, list[EngineOutput]] = {}
    todo = [*REQUESTS, *(msgspec.structs.replace(each, id=f"{each.id} again") for each in REQUESTS[::-1])]
    asked = list(todo)
    while todo or engine.has_work():
        if todo:
            engine.start(todo.pop(0))
        for output in engine.step():
            ours.setdefault(output.id, []).append(output)
    theirs = run(reference, asked)
    for each in asked:
        assert_same(ours[each.id], theirs[each.id])
    assert engine.stats().num_running == engine.stats().kv_tokens_used == 0


def test_the_prefix_cache_never_serves_other_places_or_kinds(
    engine: SGLangEngine, reference: TransformersEngine
) -> None:
    whole = seen("c", PARTS["two"], 9)
    moved, kinds = whole.places, whole.kinds
    assert moved is not None and kinds is not None
    without = msgspec.structs.replace(whole, embeds=None, positions=())
    for changes in (
        {},
        {"kinds": kinds * AUDIO},
        {"places": None},
        {"places": None, "kinds": None},
        {"places": moved + 3 * kinds},
        {},
    ):
        for each in (whole, without):
            asked = msgspec.structs.replace(each, **changes)
            assert_same(run(engine, [asked])["c"], run(reference, [asked])["c"])


def test_what_says_no_more_than_its_tokens_shares_the_prefix_cache(engine: SGLangEngine) -> None:
    plain = text("a", 50, 77)
    said = msgspec.structs.replace(
        plain, places=torch.from_numpy(places([50])), kinds=torch.zeros(50, dtype=torch.uint8)
    )
    computed = []
    read = engine._scheduler.model.read
    engine._scheduler.model.read = lambda spans: (
        computed.extend(end - start for *_, start, end in spans),
        read(spans),
    )[1]
    try:
        assert ids_of(run(engine, [plain])["a"]) == ids_of(run(engine, [said])["a"])
    finally:
        del engine._scheduler.model.read
    assert computed == [50, 1]


def test_a_request_that_has_to_make_room_goes_on_where_it_was(
    engine: SGLangEngine, reference: TransformersEngine
) -> None:
    """SGLang takes the cache of one away where 1024 tokens are too few for all, and reads it anew, answer and all."""
    asked = [seen(f"r{seed}", [5, Grid(1, 5, 5), 10], seed, 200) for seed in range(6)]
    asked = [msgspec.structs.replace(each, hidden="last") for each in asked]
    retracted = []
    take = engine._scheduler._add_request_to_queue
    engine._scheduler._add_request_to_queue = lambda req, is_retracted=False: (
        retracted.append(req.rid) if is_retracted else None,
        take(req, is_retracted),
    )
    try:
        ours = run(engine, asked)
    finally:
        del engine._scheduler._add_request_to_queue
    theirs = run(reference, asked)
    assert retracted
    for each in asked:
        assert_same(ours[each.id], theirs[each.id])
        assert sum(len(output.hidden) for output in ours[each.id]) == 200


@pytest.mark.parametrize("which", ["last", "all"])
def test_hidden_states_are_those_of_the_reference(
    engine: SGLangEngine, reference: TransformersEngine, which: Any
) -> None:
    asked = [msgspec.structs.replace(each, hidden=which) for each in (REQUESTS[5], REQUESTS[2], REQUESTS[8])]
    ours, theirs = run(engine, asked), run(reference, asked)
    for each in asked:
        mine, wanted = (torch.cat([output.hidden for output in given[each.id]]).cpu() for given in (ours, theirs))
        first = len(each.ids) if which == "all" else 1
        assert len(mine) == len(wanted) == first + each.sampling.max_tokens - 1
        assert (mine - wanted)[:first].abs().max() < APART


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_while_a_prompt_is_read(engine: SGLangEngine, reference: TransformersEngine, steps: int) -> None:
    long, other = (seen(id, PARTS["long image"], 3) for id in ("long", "other"))  # read in 3 chunks
    engine.start(msgspec.structs.replace(long, hidden="all"))
    outputs = [output for _ in range(steps) for output in engine.step()]
    engine.abort("long")
    found = run(engine, [other])
    assert [*outputs, *found["long"]][-1].finish_reason == "abort"
    assert_same(found["other"], run(reference, [other])["other"])
    assert not engine._scheduler.outbox.asides
    assert engine.stats().kv_tokens_used == 0


def test_places_that_do_not_fit_are_refused_and_the_next_request_runs(engine: SGLangEngine) -> None:
    whole = seen("p", PARTS["image"], 1)
    assert whole.places is not None
    with pytest.raises(ProtocolError, match=r"places of shape \[3, 42\]; this prompt takes \[3, 43\]"):
        engine.start(msgspec.structs.replace(whole, places=whole.places[:, 1:]))
    assert ids_of(run(engine, [whole])["p"])


@pytest.mark.parametrize(
    ("lost", "extra", "message"),
    [
        ("model.model.layers.1.mlp.audio_gate.expert_bias", None, "not all of model.layers.1.mlp.audio_gate.expert"),
        ("model.model.layers.2.mlp.experts.3.up_proj.weight", None, "not all of model.layers.2.mlp.experts.w13_weight"),
        (None, "model.model.layers.3.mlp.gate.weight", "no place for the checkpoint's model.model.layers.3.mlp.gate"),
    ],
)
def test_what_is_missing_or_left_over_is_named(
    engine: SGLangEngine, folder: Path, lost: str | None, extra: str | None, message: str
) -> None:
    from actors.ming.sglang_model.loading import load_checkpoint

    weights = load_file(folder / "model.safetensors") | {"vision.patch_embed.proj.weight": torch.ones(2)}
    if lost:
        del weights[lost]
    if extra:
        weights[extra] = torch.ones(8, HIDDEN)
    with pytest.raises(WeightsError, match=message):
        load_checkpoint(engine._scheduler.model, weights.items(), 8)


def test_lings_names_are_taken_too(engine: SGLangEngine, folder: Path) -> None:
    from actors.ming.sglang_model.loading import load_checkpoint

    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    weights = load_file(folder / "model.safetensors")
    for old, new in names.items():
        weights = {name.replace(f".{new}.", f".{old}."): tensor for name, tensor in weights.items()}
    load_checkpoint(engine._scheduler.model, weights.items(), 8)
    known = [name for name, _ in engine._scheduler.model.named_parameters()]
    assert sorted(known) == sorted(parameters(msgspec.convert(CONFIG, Thinker)))


def test_sglang_is_shown_a_decoder_of_the_usual_names(folder: Path, tmp_path: Path) -> None:
    from actors.ming.thinker_sglang import show_thinker

    save_file({"x": torch.ones(1)}, tmp_path / "model-00001-of-00001.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = tmp_path / "shown"
    shown.mkdir()
    show_thinker(tmp_path, shown, 9)
    seen_config = json.loads((shown / "config.json").read_text())
    assert seen_config["torch_dtype"] == "float16"
    assert seen_config["thinker"]["num_experts"] == CONFIG["num_experts"]
    assert {file.name for file in shown.iterdir()} == {"config.json", "model-00001-of-00001.safetensors"}
