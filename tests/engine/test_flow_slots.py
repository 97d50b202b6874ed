from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.ming.talker import TalkerModel, load_talker
from omniflow.engine.base import EngineOutput
from omniflow.engine.flow import FlowKnobs, flow_noise
from omniflow.engine.flow_engine import FlowEngine
from omniflow.engine.flow_slots import SlottedFlow
from omniflow.errors import ContextLengthError, ProtocolError
from tests.actors.ming.reference import CONFIG, weights
from tests.engine.test_flow_engine import asked, latents_of, rest_of

PROMPTS = [[3, 14, 15, 9, 26], [5, 35], list(range(40)), [7] * 70, [8, 9, 7], [1], [2, 3]]


@pytest.fixture(scope="module")
def model() -> TalkerModel:
    model = load_talker(CONFIG, weights())
    with torch.no_grad():
        model.get_parameter("head.stop.bias").add_(torch.tensor([30.0, 0.0]))  # speech goes on until it is cut
    return model


def noise_of(model: TalkerModel, seeds: list[int], step: int) -> torch.Tensor:
    return torch.cat([torch.from_numpy(flow_noise(seed, step, 1, model.head.noise_shape)) for seed in seeds])


def knobs(rows: list[int]) -> FlowKnobs:
    """Each row its own."""
    return FlowKnobs(torch.tensor([2.0 + 0.1 * row for row in rows]), torch.tensor([0.1 * row for row in rows]))


def served(model: TalkerModel, slots: int, overlap: bool = False) -> dict[str, torch.Tensor]:
    """Seven requests, some at once and some later, of which one is dropped."""
    runner: Any = SlottedFlow(model, slots=slots, positions=128) if slots else model
    engine: FlowEngine[Any] = FlowEngine(
        runner, guidance=2.0, sigma=0.25, max_running=slots or 4, kv_tokens=2048, overlap=overlap
    )
    outputs: list[EngineOutput] = []
    for number, ids in enumerate(PROMPTS):
        engine.start(asked(str(number), ids, steps=2 + (3 * number) % 7, seed=number))
        if number in (2, 4):
            outputs += engine.step()
        if number == 3:
            engine.abort("1")
    outputs += rest_of(engine)
    assert not engine.stats().num_running
    return {str(number): latents_of(outputs, str(number)) for number in range(len(PROMPTS)) if number != 1}


def test_streams_in_slots_are_the_plain_ones_however_they_come_and_go(model: TalkerModel) -> None:
    plain, slotted, overlapped = served(model, 0), served(model, 4), served(model, 4, overlap=True)
    for id, latents in plain.items():
        assert latents.abs().max() > 0.1
        assert (slotted[id] - latents).abs().max() <= 1e-5
        assert (overlapped[id] - latents).abs().max() <= 1e-5


def test_with_overlap_a_step_is_told_once_the_next_has_begun(model: TalkerModel) -> None:
    engine = FlowEngine(model, guidance=2.0, sigma=0.25, overlap=True)
    engine.start(asked("a", steps=2))
    engine.start(asked("b", steps=3))
    told = []
    while engine.has_work():
        told.append([(each.id, each.finish_reason) for each in engine.step()])
        if len(told) == 2:
            engine.abort("b")
    assert told == [[], [("a", None), ("b", None)], [("a", "length"), ("b", None), ("b", "abort")]]


def test_all_that_a_step_gives_is_in_the_order_of_its_streams(model: TalkerModel) -> None:
    """The second of three leaves, so the third takes its slot, and another joins."""
    runner = SlottedFlow(model, slots=4, positions=64)
    before = [None, None, torch.randn(5, 8, generator=torch.Generator().manual_seed(1)), None]
    plain, slotted = [model.init(each) for each in before], [runner.init(each) for each in before]
    inputs = [model.embedding(torch.tensor(ids)) for ids in PROMPTS[:2] + PROMPTS[4:6]]
    fed = list(inputs)
    for step, there in enumerate([[0, 1, 2], [2, 1, 0], [2, 3, 0], [0, 2, 3]]):
        if step == 2:
            runner.end(slotted[1])
        noise = noise_of(model, there, step)
        want = model.step([plain[n] for n in there], [fed[n] for n in there], noise, knobs(there))
        got = runner.step([slotted[n] for n in there], [fed[n] for n in there], noise, knobs(there))
        for name in ("latents", "feedback", "stopped"):
            one, other = (each._asdict()[name].float() for each in (got, want))
            assert (one - other).abs().max() <= 1e-5, name
        assert torch.equal(got.state.step, want.state.step)
        assert (got.state.history - want.state.history).abs().max() <= 1e-5
        for row, number in enumerate(there):
            fed[number] = want.feedback[row : row + 1]


def test_what_is_no_number_stays_with_its_request(model: TalkerModel) -> None:
    """The next one in the same slot has a number everywhere."""
    runner = SlottedFlow(model, slots=2, positions=64)
    first, second = runner.init(), runner.init()
    prompt = model.embedding(torch.tensor(PROMPTS[0]))
    noise = noise_of(model, [1], 0)
    assert runner.step([first], [prompt * torch.nan], noise, knobs([0])).latents.isnan().all()
    runner.end(first)
    got = runner.step([second], [prompt], noise, knobs([0]))
    want = model.step([model.init()], [prompt], noise, knobs([0]))
    assert (got.latents - want.latents).abs().max() <= 1e-5


def test_what_does_not_fit_a_slot_is_refused(model: TalkerModel) -> None:
    runner = SlottedFlow(model, slots=1, positions=4)
    assert runner.max_positions == 4
    stream, row = runner.init(), torch.zeros(1, 32)
    with pytest.raises(ContextLengthError, match="5 inputs in one stream; a slot has room for 4"):
        runner.step([stream], [row.expand(5, -1)], noise_of(model, [1], 0), knobs([0]))
    runner.step([stream], [row.expand(4, -1)], noise_of(model, [1], 0), knobs([0]))
    with pytest.raises(ContextLengthError):
        runner.step([stream], [row], noise_of(model, [1], 0), knobs([0]))
    with pytest.raises(ProtocolError, match="2 streams step, 1 have slots, and 1 are to join"):
        runner.step([stream, runner.init()], [row] * 2, noise_of(model, [1, 2], 0), knobs([0, 1]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_on_a_gpu_are_the_plain_steps_of_a_cpu(model: TalkerModel) -> None:
    on_gpu = load_talker(CONFIG, weights(), "cuda")
    on_gpu.head.stop.load_state_dict(model.head.stop.state_dict())
    plain, captured = served(model, 0), served(on_gpu, 4, overlap=True)
    for id, latents in plain.items():
        assert (captured[id] - latents).abs().max() <= 1e-4
