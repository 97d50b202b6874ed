from __future__ import annotations

import msgspec
import pytest
import torch

from actors.ming.talker import TalkerModel, load_talker
from actors.qwen2_flow import FlowStream
from omniflow.engine.base import Engine, EngineOutput, EngineRequest, Sampling
from omniflow.engine.flow import FlowKnobs, flow_noise
from omniflow.engine.flow_engine import FlowEngine
from omniflow.engine.linear import pack_linears
from omniflow.engine.stats import EngineStats
from omniflow.errors import ContextLengthError, InvalidInputError, OverloadedError, ProtocolError
from tests.actors.ming.reference import CONFIG, apart, voice, weights

PROMPTS = {"a": [3, 14, 15, 9, 26], "b": [5, 35], "c": [8, 9, 7, 9, 3, 2, 3, 8]}


@pytest.fixture(scope="module")
def model() -> TalkerModel:
    model = load_talker(CONFIG, weights())
    with torch.no_grad():
        model.get_parameter("head.stop.bias").add_(torch.tensor([30.0, 0.0]))  # speech goes on until it is cut
    pack_linears(model, least_rows=1)
    return model


def engine_on(model: TalkerModel, **limits: int) -> FlowEngine[FlowStream]:
    return FlowEngine(model, guidance=2.0, sigma=0.25, **limits)


def asked(
    id: str, ids: list[int] | None = None, *, steps: int = 3, urgent: bool = False, seed: int = 7
) -> EngineRequest:
    sampling = Sampling(temperature=0.5, seed=seed, max_tokens=steps)
    return EngineRequest(id=id, ids=PROMPTS["a"] if ids is None else ids, sampling=sampling, urgent=urgent)


def rest_of(engine: Engine) -> list[EngineOutput]:
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def latents_of(outputs: list[EngineOutput], id: str) -> torch.Tensor:
    return torch.cat([each.frames for each in outputs if each.id == id and each.frames is not None])


def test_it_is_the_models_steps_with_the_noise_of_the_seed(model: TalkerModel) -> None:
    engine = engine_on(model)
    assert not engine.has_work() and engine.step() == []
    engine.start(asked("a"))
    outputs = rest_of(engine)
    assert [each.finish_reason for each in outputs] == [None, None, "length"]
    stream, inputs, knobs = model.init(), model.embedding(torch.tensor(PROMPTS["a"])), (2.0, 0.25 * 0.5**0.5)
    for number, output in enumerate(outputs):
        noise = torch.from_numpy(flow_noise(7, number, 1, model.head.noise_shape))
        given = model.step([stream], [inputs], noise, FlowKnobs(*(torch.tensor([each]) for each in knobs)))
        assert output.frames is not None and torch.equal(output.frames, given.latents[0])
        inputs = given.feedback


def test_it_goes_on_after_a_recording_as_the_reference_does() -> None:
    """A row of a speaker in the prompt, three of a recording behind it, and the latents before the first."""
    model = load_talker(CONFIG, weights())
    with torch.no_grad():
        model.get_parameter("head.stop.bias").add_(torch.tensor([30.0, 0.0]))
    engine, told = engine_on(model), voice()
    ids, before = told["voice.ids"].tolist()[:10], told["voice.before"]
    row = model.speaker(told["voice.speaker"])[None].detach()
    sampling = Sampling(temperature=0.5, seed=7, max_tokens=8)
    request = EngineRequest(id="a", ids=ids, sampling=sampling, embeds=row, positions=(3,), before=before)
    noise = iter(told["voice.noise"])
    for _ in range(2):  # the second time with what was kept of the recording
        engine.start(request)
        waiting = engine._queue.find("a")
        assert waiting is not None and apart(waiting.inputs[10:], told["voice.rows"]) <= 1e-5
        assert waiting.capacity == 10 + 3 + 8
        engine.abort("a")
        engine.step()
    engine.start(request)
    row_of = engine._queue.find("a")
    assert row_of is not None
    for number in range(8):
        row_of.noise = next(noise)[None].numpy()
        (output,) = engine.step()
        assert output.frames is not None and apart(output.frames, told["voice.latents"][number]) <= 1e-4
    assert output.finish_reason == "length"


def test_latents_before_are_whole_steps_and_fit(model: TalkerModel) -> None:
    engine = engine_on(model, kv_tokens=10)
    for shape in ((6, 8), (4, 7), (4,)):
        with pytest.raises(ProtocolError, match=r"latents before of shape .*this model takes \[n \* 4, 8\]"):
            engine.start(msgspec.structs.replace(asked("a"), before=torch.zeros(shape)))
    with pytest.raises(ContextLengthError, match="the prompt has 10 inputs; at most 9 fit"):
        engine.start(msgspec.structs.replace(asked("a"), before=torch.zeros(20, 8)))
    engine.start(msgspec.structs.replace(asked("a"), before=torch.zeros(16, 8)))
    assert len(rest_of(engine)) == 2
    engine.start(msgspec.structs.replace(asked("a"), before=torch.zeros(0, 8)))
    assert len(rest_of(engine)) > 2


def test_a_seed_gives_the_same_alone_and_beside_others_that_come_and_go(model: TalkerModel) -> None:
    alone = {}
    for seed, (id, ids) in enumerate(PROMPTS.items()):
        engine = engine_on(model)
        engine.start(asked(id, ids, steps=5 - seed, seed=seed))
        alone[id] = latents_of(rest_of(engine), id)
    engine, outputs = engine_on(model, max_running=2), []
    for seed, (id, ids) in enumerate(PROMPTS.items()):
        engine.start(asked(id, ids, steps=5 - seed, seed=seed))
        outputs += engine.step()
    outputs += rest_of(engine)
    assert [len(latents) for latents in alone.values()] == [20, 16, 12]
    for id in PROMPTS:
        assert torch.equal(latents_of(outputs, id), alone[id])


def test_it_ends_where_the_model_stops_with_the_latents_of_that_step() -> None:
    engine = engine_on(load_talker(CONFIG, weights()))
    engine.start(asked("a", steps=40))
    outputs = rest_of(engine)
    assert 4 < len(outputs) < 40
    assert [each.finish_reason for each in outputs[-2:]] == [None, "stop"]
    assert outputs[-1].frames is not None and outputs[-1].frames.shape == (4, 8)


def test_it_ends_where_positions_do(model: TalkerModel) -> None:
    engine = engine_on(model, kv_tokens=10)
    engine.start(asked("a", list(range(8)), steps=40))
    assert engine.stats() == EngineStats(0, 1, 0, 10)
    assert [each.finish_reason for each in rest_of(engine)] == [None, None, "length"]


def test_urgent_ones_run_first_and_the_others_soon(model: TalkerModel) -> None:
    """With 2 places, no more than 2 overtake."""
    engine = engine_on(model, max_running=2)
    for id in ("a", "b"):
        engine.start(asked(id, steps=1))
    engine.step()
    for id in ("c", "d"):
        engine.start(asked(id, steps=1))
    for number in range(4):
        engine.start(asked(f"u{number}", steps=1, urgent=True))
    assert engine.stats().num_waiting == 6
    assert [each.id for each in rest_of(engine)] == ["u0", "u1", "c", "u2", "u3", "d"]


def test_positions_bound_how_many_run_together(model: TalkerModel) -> None:
    engine = engine_on(model, kv_tokens=17)
    for id in ("a", "b", "c"):
        engine.start(asked(id))
    assert [each.id for each in engine.step()] == ["a", "b"]
    assert engine.stats() == EngineStats(2, 1, 16, 17)


def test_an_aborted_one_leaves_and_the_others_go_on(model: TalkerModel) -> None:
    engine = engine_on(model, max_running=2)
    for id in PROMPTS:
        engine.start(asked(id))
    engine.step()
    for id in ("a", "c", "nobody", "a"):
        engine.abort(id)
    outputs = rest_of(engine)
    assert [each.id for each in outputs if each.finish_reason == "abort"] == ["a", "c"]
    assert len(latents_of(outputs, "b")) == 8
    assert engine.stats() == EngineStats(0, 0, 0, 16384)


def test_what_it_does_not_take_is_said_and_the_next_is_served(model: TalkerModel) -> None:
    engine = engine_on(model, max_waiting=1)
    with pytest.raises(ContextLengthError, match="the prompt has 256 inputs; at most 255 fit"):
        engine.start(asked("a", [1] * 256))
    with pytest.raises(InvalidInputError, match="the prompt is empty"):
        engine.start(asked("a", []))
    with pytest.raises(InvalidInputError, match="temperature -1.0 is below 0"):
        engine.start(EngineRequest(id="a", ids=[1], sampling=Sampling(temperature=-1.0)))
    with pytest.raises(ProtocolError, match="outside of the vocabulary of 64"):
        engine.start(asked("a", [64]))
    with pytest.raises(ProtocolError, match="no `open` ones"):
        engine.start(EngineRequest(id="a", ids=[1], sampling=Sampling(), open=True))
    engine.start(asked("a"))
    with pytest.raises(ProtocolError, match="runs already"):
        engine.start(asked("a"))
    with pytest.raises(ProtocolError, match="not open"):
        engine.feed("a", torch.zeros(1, 32), True)
    with pytest.raises(OverloadedError, match="1 generations are waiting already"):
        engine.start(asked("b"))
    assert len(rest_of(engine)) == 3
