from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from actors.checkpoint import load, read_tensors
from actors.ming.audio_vae import load_audio_vae
from actors.ming.config import Talker
from actors.ming.talker import TalkerModel, load_talker
from actors.ming.weights import part
from actors.qwen2 import step
from actors.qwen2_flow import FlowStream
from omniflow.engine.flow import FlowKnobs, FlowStep
from omniflow.engine.linear import pack_linears
from omniflow.errors import ContextLengthError, WeightsError
from tests.actors.ming.reference import CHECKPOINT, CONFIG, apart, expected, weights
from tests.actors.ming.tiny import flash_names

KNOBS = FlowKnobs(torch.tensor([2.0]), torch.tensor([0.25 * 0.5**0.5]))


@pytest.fixture(scope="module")
def model() -> TalkerModel:
    return load_talker(CONFIG, weights())


@pytest.fixture(scope="module")
def steps(model: TalkerModel) -> list[FlowStep]:
    return steps_of(model, model.init(), 12)


def steps_of(model: TalkerModel, stream: FlowStream, count: int) -> list[FlowStep]:
    inputs, steps = model.embedding(expected()["talker.ids"]), []
    for noise in expected()["talker.noise"][:count]:
        steps.append(model.step([stream], [inputs], noise[None], KNOBS))
        inputs = steps[-1].feedback
    return steps


def test_a_segment_is_the_references_step_by_step(steps: list[FlowStep]) -> None:
    """12 steps, each from what ours made before; an error of a step goes on through the backbone and the history."""
    wanted = expected()
    for number, made in enumerate(steps):
        assert apart(made.latents[0], wanted["talker.latents"][number]) <= 1e-5
        assert apart(made.feedback[0], wanted["talker.feedback"][number]) <= 1e-5
    probability = wanted["talker.stop"]
    assert (probability - 0.5).abs().min() > 0.001
    assert probability[:4].max() > 0.5, "nothing would have been held back"
    assert [bool(step.stopped) for step in steps] == [
        n > 3 and each > 0.5 for n, each in enumerate(probability.tolist())
    ]


def test_the_backbones_output_is_the_references(model: TalkerModel) -> None:
    wanted = expected()
    inputs = torch.cat([model.embedding(wanted["talker.ids"]), wanted["talker.feedback"][:-1]])
    (hidden,) = step(model.decoder, [model.init().past], [inputs])
    assert apart(hidden[6:], wanted["talker.hidden"]) <= 1e-5


def test_a_stream_gives_the_same_alone_and_beside_others_that_come_and_go(steps: list[FlowStep]) -> None:
    """Bit for bit with packed matrices, as engines on a CPU have them, and widths that are multiples of 32: torch's
    activations are an ulp off in the last few places of a tensor."""
    model = load_talker(CONFIG, weights())
    pack_linears(model, least_rows=1)
    alone = steps_of(model, model.init(), 6)
    assert apart(alone[5].latents, steps[5].latents) <= 1e-5
    streams = [model.init(), model.init(), model.init()]
    inputs = [model.embedding(expected()["talker.ids"][:n]) for n in (7, 4, 2)]
    for number, there in enumerate([[0], [0, 1], [2, 0, 1], [1, 2, 0], [0, 2], [0]]):
        noise = expected()["talker.noise"][[number if each == 0 else 6 + each for each in there]]
        jitter = torch.where(torch.tensor(there) == 0, KNOBS.jitter, 0.0)
        knobs = FlowKnobs(torch.full((len(there),), 2.0), jitter)
        given = model.step([streams[each] for each in there], [inputs[each] for each in there], noise, knobs)
        for row, each in enumerate(there):
            inputs[each] = given.feedback[row : row + 1]
        assert torch.equal(given.latents[there.index(0)], alone[number].latents[0])


def test_a_segment_has_an_end_and_the_others_go_on(model: TalkerModel, steps: list[FlowStep]) -> None:
    """It is refused before anything: the stream beside it goes on as if nothing had been asked."""
    full, other = model.init(), model.init()
    inputs, noise = model.embedding(torch.arange(250) % 64), expected()["talker.noise"][:2]
    model.step([full], [inputs], noise[:1], KNOBS)
    both = FlowKnobs(*(each.expand(2) for each in KNOBS))
    with pytest.raises(ContextLengthError, match="257 inputs in one segment; the talker takes at most 256"):
        model.step([other, full], [inputs[:3], inputs[:7]], noise, both)
    assert apart(steps_of(model, other, 1)[0].latents, steps[0].latents) <= 1e-5


def test_the_latents_before_a_segment_are_the_last_of_a_recording(model: TalkerModel, steps: list[FlowStep]) -> None:
    recording = torch.randn(40, 8)
    assert torch.equal(model.init(recording).state.history[0], recording[-32:])
    short = model.init(recording[:5])
    assert torch.equal(short.state.history[0], torch.cat([torch.zeros(27, 8), recording[:5]]))
    assert apart(steps_of(model, short, 1)[0].latents, steps[0].latents) > 0.01


def test_a_segment_is_heard(steps: list[FlowStep]) -> None:
    """The two halves together: 12 steps of 4 latents, decoded as they come."""
    vae = load_audio_vae(CONFIG.audio_tokenizer_config, weights())
    state = vae.init()
    parts = [vae.step(state, step.latents[0].numpy(), n == 11) for n, step in enumerate(steps)]
    assert sum(map(len, parts)) == 48 * vae.samples_per_frame
    whole = torch.cat([step.latents[0] for step in steps]).numpy()
    assert abs(vae.step(vae.init(), whole, True)).max() > 0.1


def test_the_layout_of_a_talkers_own_folder_is_read_too(model: TalkerModel) -> None:
    again = load_talker(CONFIG, flash_names(weights())).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_settings_that_a_checkpoint_may_leave_out_or_write_otherwise(tmp_path: Path) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    for name in ("ditar_config", "aggregator_config"):
        config[name] = {"patch_size": 4}
    del config["llm_config"]["rope_theta"]
    config["llm_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = Talker.load(tmp_path)
    assert (read.ditar_config.hidden_size, read.ditar_config.depth, read.ditar_config.history) == (1024, 28, 4)
    assert (read.aggregator_config.hidden_size, read.aggregator_config.num_heads) == (1152, 16)
    assert (read.llm_config.shape.rope_theta, CONFIG.llm_config.shape.rope_theta) == (5e5, 1e6)
    config["llm_config"]["rope_scaling"] = {"type": "yarn", "factor": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"\.llm_config\.rope_scaling"):
        Talker.load(tmp_path)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="config.json is no Ming talker's, and there is no talker/config.json"):
        Talker.load(tmp_path)
    with pytest.raises(WeightsError, match=r"has no \*\.safetensors"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((CHECKPOINT / "model-00001-of-00002.safetensors").read_bytes()[:1000])
    with pytest.raises(WeightsError, match=r"\.safetensors is broken, or not whole"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "other-1.safetensors", "c": "other-2.safetensors"}})
    )
    with pytest.raises(WeightsError, match="lacks other-1.safetensors and 1 others, which its index names"):
        read_tensors(tmp_path)


def test_what_does_not_fit_is_named_in_few_words() -> None:
    gate, up = torch.zeros(4, 2), torch.zeros(4, 3)
    with pytest.raises(WeightsError, match=r"a\.gate_proj\.weight and .* of the shapes \[4, 2\], \[4, 3\]"):
        part({"model.a.gate_proj.weight": gate, "model.a.up_proj.weight": up}, ("model.",))
    with pytest.raises(WeightsError, match=r"the weights of all do not fit: .* \.\.\.$") as refused:
        load(torch.nn.Linear(2, 2), {f"weight_of_{number}": gate for number in range(1000)}, "all")
    assert len(refused.value.message) < 700
