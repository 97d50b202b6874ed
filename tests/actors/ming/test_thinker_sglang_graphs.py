"""Ming's thinker on SGLang with prompts read as CUDA graphs; on a CPU as SGLang's runner would read them.

Each test says how many batches were read by a graph: text alone is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from actors.ming.config import AUDIO
from actors.ming.thinker_model import load_thinker
from omniflow.engine.base import EngineOutput, EngineRequest
from omniflow.engine.transformers import TransformersEngine
from tests.actors.ming.test_thinker_sglang import APART, REQUESTS, assert_same, text
from tests.actors.ming.thinker_folder import write_thinker
from tests.engine.prompt_graphs import graphs_of, read_by
from tests.engine.tiny import run

if TYPE_CHECKING:
    from omniflow.engine.sglang import SGLangEngine

GPU = torch.cuda.is_available()

pytestmark = [
    pytest.mark.gpu if GPU else pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("ming"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> TransformersEngine:
    return TransformersEngine(load_thinker(folder), media=True)


@pytest.fixture(scope="module")
def captured(folder: Path) -> Iterator[tuple[SGLangEngine, Any]]:
    """An engine, and its runner of graphs."""
    from actors.ming.thinker_sglang import load_sglang_thinker

    engine = load_sglang_thinker(
        folder,
        device="gpu" if GPU else "cpu",
        dtype="float32",
        kv_tokens=1024,
        max_running=6,
        max_waiting=32,
        chunked_prefill_size=64,
        prompt_graphs=True,
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield engine, graphs_of(engine, [4, 8, 16, 32, 48, 64], monkeypatch)
    engine.close()


@pytest.fixture
def engine(captured: tuple[SGLangEngine, Any]) -> SGLangEngine:
    return captured[0]


@pytest.fixture
def replayed(captured: tuple[SGLangEngine, Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the inputs of each batch that is read by a graph."""
    return read_by(captured[1], monkeypatch)


def assert_near(ours: list[EngineOutput], theirs: list[EngineOutput], prompt: int) -> None:
    """The same tokens, and hidden states of the prompt."""
    assert_same(ours, theirs)
    mine, wanted = (torch.cat([each.hidden for each in given if each.hidden is not None]) for given in (ours, theirs))
    assert len(mine) == len(wanted) >= prompt
    assert (mine.cpu() - wanted)[:prompt].abs().max() < APART


READ = {"text 5": [5], "text 70": [64, 6], "text 33": [33]}
"""The chunks of each that are a graph: one input would be padded to 4."""


@pytest.mark.parametrize("each", REQUESTS, ids=lambda each: each.id)
def test_a_request_alone_gets_the_numbers_of_the_reference(
    engine: SGLangEngine, reference: TransformersEngine, replayed: list[int], each: EngineRequest
) -> None:
    asked = [msgspec.structs.replace(each, hidden="all")]
    assert_near(run(engine, asked)[each.id], run(reference, asked)[each.id], len(each.ids))
    assert replayed == READ.get(each.id, [])


def test_texts_that_come_together_are_one_graph(
    engine: SGLangEngine, reference: TransformersEngine, replayed: list[int]
) -> None:
    asked = [msgspec.structs.replace(text(f"t{length}", length, length), hidden="all") for length in (3, 21, 9, 17)]
    ours, theirs = run(engine, asked), run(reference, asked)
    for each in asked:
        assert_near(ours[each.id], theirs[each.id], len(each.ids))
    assert replayed == [50]


def test_what_follows_a_known_beginning_is_a_graph(
    engine: SGLangEngine, reference: TransformersEngine, replayed: list[int]
) -> None:
    first = text("first", 40, 91)
    longer = text("longer", 60, 91)
    assert longer.ids[:40] == first.ids
    for each in (first, longer):
        assert_same(run(engine, [each])[each.id], run(reference, [each])[each.id])
    assert replayed == [40, 20]


def test_kinds_without_rows_are_no_graph(
    engine: SGLangEngine, reference: TransformersEngine, replayed: list[int]
) -> None:
    asked = msgspec.structs.replace(text("k", 20, 5), kinds=torch.full((20,), AUDIO, dtype=torch.uint8), hidden="all")
    assert_near(run(engine, [asked])["k"], run(reference, [asked])["k"], 20)
    assert not replayed


def test_requests_that_join_and_leave_get_the_tokens_of_the_reference(
    engine: SGLangEngine, reference: TransformersEngine, replayed: list[int]
) -> None:
    todo = [*REQUESTS, *(msgspec.structs.replace(each, id=f"{each.id} again") for each in REQUESTS[::-1])]
    asked, ours = list(todo), dict[str, list[EngineOutput]]()
    while todo or engine.has_work():
        if todo:
            engine.start(todo.pop(0))
        for output in engine.step():
            ours.setdefault(output.id, []).append(output)
    theirs = run(reference, asked)
    for each in asked:
        assert_same(ours[each.id], theirs[each.id])
    assert replayed


def test_texts_that_have_to_make_room_are_read_anew_by_graphs(
    engine: SGLangEngine, reference: TransformersEngine, replayed: list[int]
) -> None:
    asked = [text(f"r{seed}", 40, 50 + seed, 200) for seed in range(6)]
    ours, theirs = run(engine, asked), run(reference, asked)
    for each in asked:
        assert_same(ours[each.id], theirs[each.id])
    assert sum(replayed) > 6 * 40


@pytest.mark.skipif(not GPU, reason="there is no GPU")
def test_an_answer_to_an_image_is_decoded_by_graphs(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine._scheduler.tp_worker.model_runner.decode_cuda_graph_runner
    decoded, execute = [], runner.execute

    def counted(batch: Any, **more: Any) -> Any:
        decoded.append(batch.batch_size)
        return execute(batch, **more)

    monkeypatch.setattr(runner, "execute", counted)
    (image,) = (each for each in REQUESTS if each.id == "image")
    run(engine, [image])
    assert len(decoded) >= image.sampling.max_tokens - 1
