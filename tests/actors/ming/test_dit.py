from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actors.ming.talker import TalkerModel, load_talker
from omniflow.engine.flow import FlowKnobs, FlowState, follow, guide, time_grid
from omniflow.errors import WeightsError
from tests.actors.ming.reference import CONFIG, apart, expected, weights


@pytest.fixture(scope="module")
def model() -> TalkerModel:
    return load_talker(CONFIG, weights())


def knobs(batch: int, temperature: float, guidance: float = 2.0) -> FlowKnobs:
    return FlowKnobs(torch.full((batch,), guidance), torch.full((batch,), 0.25 * temperature**0.5))


def state() -> FlowState:
    return FlowState(torch.zeros(2, dtype=torch.int64), expected()["cfm.history"])


def test_a_velocity_is_the_references(model: TalkerModel) -> None:
    wanted, net = expected(), model.head.net
    condition = net.condition(wanted["cfm.hidden"], wanted["cfm.history"])
    for row, time in enumerate(wanted["dit.t"].tolist()):
        got = net(wanted["dit.x"], time, condition)[row]
        assert apart(got, wanted["dit.velocity"][row]) <= 1e-5


def test_the_aggregator_is_the_references(model: TalkerModel) -> None:
    wanted = expected()
    assert apart(model.head.feedback(wanted["aggregator.latents"]), wanted["aggregator.embedding"]) <= 1e-5


def test_every_step_of_a_sampling_is_the_references(model: TalkerModel) -> None:
    wanted, net = expected(), model.head.net
    noise, jitter = wanted["cfm.noise"], knobs(2, 0.8).jitter
    times = time_grid(10)
    hidden = torch.cat([wanted["cfm.hidden"], torch.zeros(2, 32)])
    condition = net.condition(hidden, torch.cat([wanted["cfm.history"]] * 2))
    seen: list[torch.Tensor] = []

    def velocity(x: torch.Tensor, time: float) -> torch.Tensor:
        seen.append(x)
        return guide("beyond", *net(torch.cat([x, x]), time, condition).chunk(2), torch.full((2,), 2.0))

    seen.append(follow(velocity, noise, times, jitter))
    trajectory = wanted["cfm.trajectory"]
    assert apart(seen[0], trajectory[:, 0]) == 0
    for step in range(1, 11):
        shift = 0 if step == 10 else 0.25 * (0.8 * (times[step] - times[step - 1])) ** 0.5 * noise[:, step]
        assert apart(seen[step] - shift, trajectory[:, step]) <= 1e-5


def test_a_row_is_the_same_alone_and_in_a_batch(model: TalkerModel) -> None:
    wanted = expected()
    both = model.head(wanted["cfm.hidden"], wanted["cfm.noise"], knobs(2, 0.8), state())
    assert apart(both.latents, wanted["cfm.trajectory"][:, -1]) <= 1e-5
    for row in (0, 1):
        one = slice(row, row + 1)
        own = FlowState(*(each[one] for each in state()))
        alone = model.head(wanted["cfm.hidden"][one], wanted["cfm.noise"][one], knobs(1, 0.8), own)
        assert apart(alone.latents, both.latents[one]) <= 1e-5
        assert apart(alone.feedback, both.feedback[one]) <= 1e-5


def test_guidance_temperature_and_noise_all_count(model: TalkerModel) -> None:
    wanted = expected()
    usual = model.head(wanted["cfm.hidden"], wanted["cfm.noise"], knobs(2, 0.8), state()).latents
    for other in (knobs(2, 0.0), knobs(2, 0.8, guidance=0.0)):
        assert apart(model.head(wanted["cfm.hidden"], wanted["cfm.noise"], other, state()).latents, usual) > 0.01
    noise = wanted["cfm.noise"].flip(0)
    assert apart(model.head(wanted["cfm.hidden"], noise, knobs(2, 0.8), state()).latents, usual) > 0.01


def test_a_step_never_asks_for_a_value(model: TalkerModel) -> None:
    """A tensor without values takes it to its end, which is what the capture of a graph needs."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        hidden, noise = mode.from_tensor(torch.zeros(3, 32)), torch.zeros(3, *model.head.noise_shape)
        step = model.head(hidden, noise, knobs(3, 0.8), model.head.begin(3, torch.device("cpu")))
    assert (step.latents.shape, step.feedback.shape, step.stopped.shape) == ((3, 4, 8), (3, 32), (3,))
    assert (step.state.step.shape, step.state.history.shape) == ((3,), (3, 32, 8))


def test_a_head_of_16_bits_gives_float32_latents_near_the_others(model: TalkerModel) -> None:
    wanted = expected()
    half = load_talker(CONFIG, weights()).head.to(torch.bfloat16)
    step = half(wanted["cfm.hidden"].bfloat16(), wanted["cfm.noise"], knobs(2, 0.8), state())
    assert (step.latents.dtype, step.state.history.dtype) == (torch.float32, torch.float32)
    assert step.feedback.dtype == torch.bfloat16
    assert apart(step.latents, wanted["cfm.trajectory"][:, -1]) <= 0.02


def test_weights_that_do_not_fit_are_named() -> None:
    name = "flowloss.cfm.model.blocks.1.attn.to_k.weight"
    less = {each: tensor for each, tensor in weights().items() if each != name}
    with pytest.raises(
        WeightsError, match=r"beside .*blocks\.1\.attn\.to_q\.weight one of to_q, to_k, to_v is missing"
    ):
        load_talker(CONFIG, less)
    with pytest.raises(WeightsError, match="the talker's stop_head do not fit.*bias"):
        load_talker(CONFIG, {each: tensor for each, tensor in weights().items() if each != "stop_head.bias"})
    with pytest.raises(WeightsError, match="the talker's aggregator do not fit.*extra"):
        load_talker(CONFIG, weights() | {"linear_proj_audio.extra": torch.zeros(1)})
