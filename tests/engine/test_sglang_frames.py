"""Frame models on SGLang against the reference engine: the same heads, the same noise, the same codes.

On a GPU a step is one CUDA graph; on a CPU it runs through the shim. SGLang is no requirement of the tests: they skip
where it cannot be imported.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from torch import nn

from omniflow.engine.base import Engine, EngineOutput, EngineRequest, Sampling
from omniflow.engine.decoder import DecoderShape
from omniflow.engine.frames import FrameEngine, FrameModel
from omniflow.engine.heads import DepthHead, FrameHead, ParallelHead, TokenHead
from omniflow.errors import ProtocolError

if TYPE_CHECKING:
    from omniflow.engine.sglang_frames import SGLangFrameEngine

GPU = torch.cuda.is_available()

pytestmark = [
    pytest.mark.gpu if GPU else pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.timeout(300),
]

HIDDEN = 64
PROMPT_IDS = 50
SHAPE = DecoderShape(
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
)
DEPTH = DecoderShape(
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=16,
)


def head_of(kind: str) -> FrameHead:
    if kind == "token":
        return TokenHead(HIDDEN, 50, [49])
    if kind == "parallel":
        return ParallelHead(HIDDEN, 42, [0, 1, 2, 3], 40, 41)
    return DepthHead(DEPTH, num_codes=5, vocab_size=40, first_vocab_size=42, stop_ids=[40], banned_ids=[41])


def frame_model(kind: str) -> FrameModel:
    torch.manual_seed(0)
    model = FrameModel(SHAPE, nn.Embedding(PROMPT_IDS, HIDDEN), head_of(kind)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "norm" not in name:
            nn.init.normal_(parameter, std=1.0 if "embedding" in name else 0.15)
    return model


@pytest.fixture(scope="module", params=["token", "parallel", "depth"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[SGLangFrameEngine, FrameEngine]]:
    from omniflow.engine.sglang_frames import load_frame_engine

    model = frame_model(request.param)
    engine = load_frame_engine(
        copy.deepcopy(model), device="gpu" if GPU else "cpu", max_running=4, kv_tokens=1000, max_steps=128
    )
    yield engine, FrameEngine(model, max_running=4)
    engine.close()


def ask(id: str, *, temperature: float = 0.9, max_tokens: int = 40, seed: int = 0, length: int = 7) -> EngineRequest:
    ids = [(5 * seed + 3 * number) % PROMPT_IDS for number in range(length)]
    sampling = Sampling(temperature=temperature, top_k=20, top_p=0.9, seed=seed, max_tokens=max_tokens)
    return EngineRequest(id=id, ids=ids, sampling=sampling)


def run(engine: Engine, requests: list[EngineRequest], every: int = 3) -> dict[str, list[EngineOutput]]:
    """Start one request `every` few steps, and step until all have ended."""
    outputs: dict[str, list[EngineOutput]] = {}
    todo, step = list(requests), 0
    while todo or engine.has_work():
        if todo and step % every == 0:
            engine.start(todo.pop(0))
        step += 1
        for output in engine.step():
            outputs.setdefault(output.id, []).append(output)
    return outputs


def frames_of(outputs: list[EngineOutput]) -> torch.Tensor:
    return torch.cat([output.frames.cpu() for output in outputs if output.frames is not None])


def assert_same(ours: list[EngineOutput], theirs: list[EngineOutput]) -> None:
    """Equal codes: all on a CPU; on a GPU, which sums in another order, those of the first 4 steps."""
    mine, right = frames_of(ours), frames_of(theirs)
    if not GPU:
        assert torch.equal(mine, right)
        assert ours[-1].finish_reason == theirs[-1].finish_reason
        return
    count = min(4, len(right))
    assert torch.equal(mine[:count], right[:count])


def test_requests_that_join_and_leave_get_the_codes_of_the_reference(
    engines: tuple[SGLangFrameEngine, FrameEngine],
) -> None:
    engine, reference = engines
    requests = [
        ask(str(number), seed=number, temperature=0.9 * (number % 2), length=3 + 4 * number) for number in range(9)
    ]
    ours, theirs = run(engine, requests), run(reference, requests)
    for each in requests:
        assert_same(ours[each.id], theirs[each.id])
    assert {output.ids for outputs in ours.values() for output in outputs} == {()}
    assert engine.stats().num_running == engine.stats().num_waiting == engine.stats().kv_tokens_used == 0


def test_embeddings_stand_where_they_are_put(engines: tuple[SGLangFrameEngine, FrameEngine]) -> None:
    engine, reference = engines
    for seed in (1, 2):
        rows = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(seed))
        asked = EngineRequest(
            id="e",
            ids=[0] * 6,
            embeds=rows,
            positions=tuple(range(6)),
            sampling=Sampling(temperature=0.9, seed=seed, max_tokens=20),
        )
        assert_same(run(engine, [asked])["e"], run(reference, [asked])["e"])


@pytest.mark.parametrize("fed", [False, True])
def test_embeddings_that_are_not_finite_are_refused_before_a_step(
    engines: tuple[SGLangFrameEngine, FrameEngine], monkeypatch: pytest.MonkeyPatch, fed: bool
) -> None:
    """A step's errors are those of all requests."""
    engine, _ = engines
    monkeypatch.setattr(engine, "_dtype", torch.float16)
    rows = torch.full((1, HIDDEN), 1e5, device="cuda" if GPU else "cpu")
    asked = EngineRequest(id="h", ids=[1], sampling=Sampling(max_tokens=2), open=fed)
    if fed:
        engine.start(asked)
    with pytest.raises(ProtocolError, match="not finite"):
        if fed:
            engine.feed("h", rows, done=True)
        else:
            engine.start(msgspec.structs.replace(asked, embeds=rows, positions=(0,)))
    engine.abort("h")
    monkeypatch.undo()
    outputs = run(engine, [ask("next", max_tokens=2)])
    assert [output.finish_reason for output in outputs.get("h", [])] == ["abort"] * fed
    assert len(frames_of(outputs["next"])) == 2


def test_a_seed_gives_the_same_codes_alone_and_in_company(engines: tuple[SGLangFrameEngine, FrameEngine]) -> None:
    engine, _ = engines
    alone = frames_of(run(engine, [ask("a", seed=3)])["a"])
    company = run(engine, [ask("x", seed=1, length=30), ask("a", seed=3), ask("y", seed=2, length=90)], every=2)
    again = frames_of(company["a"])
    count = min(4, len(alone)) if GPU else len(alone)  # in other batches a GPU sums in another order
    assert torch.equal(again[:count], alone[:count])
    other = frames_of(run(engine, [ask("a", seed=4)])["a"])
    assert other.shape != alone.shape or not torch.equal(other, alone)


def test_frames_are_on_the_device_and_the_last_step_is_counted(
    engines: tuple[SGLangFrameEngine, FrameEngine],
) -> None:
    engine, _ = engines
    outputs = run(engine, [ask("n", max_tokens=2, seed=11)])["n"]
    assert all(output.frames is None or output.frames.is_cuda == GPU for output in outputs)
    assert len(frames_of(outputs)) == 2
    assert outputs[-1].finish_reason == "length"


def test_requests_wait_for_room_and_may_leave_at_any_time(engines: tuple[SGLangFrameEngine, FrameEngine]) -> None:
    engine, reference = engines
    for number in range(7):  # four run, by max_running
        engine.start(ask(str(number), seed=number, max_tokens=60))
    first = engine.step()
    assert engine.stats().num_running == 4
    assert engine.stats().num_waiting == 3
    engine.abort("1")
    engine.abort("6")
    outputs = run(engine, [])
    assert outputs["1"][-1].finish_reason == outputs["6"][-1].finish_reason == "abort"
    theirs = run(reference, [ask(str(number), seed=number, max_tokens=60) for number in (0, 2, 3, 4, 5)])
    for id, each in theirs.items():
        assert_same([*(output for output in first if output.id == id), *outputs[id]], each)


def test_an_abort_that_nobody_asked_for_is_an_error(engines: tuple[SGLangFrameEngine, FrameEngine]) -> None:
    """Else half of a sentence would be spoken as a whole one."""
    engine, _ = engines
    for id in ("a", "b"):
        engine.start(ask(id, max_tokens=60, seed=2))
    engine.step()
    engine.abort("a")
    engine._scheduler.abort(engine._running["b"].rid)
    outputs = run(engine, [])
    assert (outputs["a"][-1].finish_reason, outputs["a"][-1].error) == ("abort", None)
    assert isinstance(outputs["b"][-1].error, ProtocolError)


def test_kv_is_promised_before_a_request_runs(engines: tuple[SGLangFrameEngine, FrameEngine]) -> None:
    engine, _ = engines
    for number in range(4):  # each may come to hold 256 of 1000
        engine.start(ask(str(number), seed=number, length=200, max_tokens=120))
    engine.step()
    assert engine.stats().num_running == 3
    assert engine.stats().kv_tokens_used == 3 * 256
    assert len(run(engine, [])) == 4
