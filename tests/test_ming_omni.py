"""The graph that ships: which profile serves which checkpoint, and where the real model would run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.ming.tensors import model_shapes, talker_shapes, vae_shapes
from actors.ming.tiny import LLM, write_checkpoint
from actors.roles import PainterRole
from graphs.ming_omni import graph
from omniflow import (
    Chat,
    ChatMessage,
    ConfigError,
    Context,
    GraphError,
    GraphSpec,
    HiddenStates,
    Options,
    Picture,
    PlanError,
    Runtime,
    RuntimeConfig,
    Stream,
    TextPart,
    cluster_named,
    plan,
)
from omniflow.cli.chosen import choose
from omniflow.config import Layer, configure, set_layer
from omniflow.topology import parse_bytes
from tests.running import INLINE

FLASH, PREVIEW = "ming-flash-omni-2.0", "ming-flash-omni-preview"
CONFIGS = json.loads((Path(__file__).parent / "actors/ming/fixtures/flash_omni_2.json").read_text())["configs"]
ROOT: dict[str, Any] = CONFIGS["."]


@pytest.mark.parametrize(
    ("config", "profile"),
    [
        (ROOT, FLASH),
        ({**ROOT, "vision_config": {"depth": 27}}, FLASH),
        ({**ROOT, "vision_config": {"model_type": "qwen2_5_vit"}}, PREVIEW),
        ({**ROOT, "llm_config": {"hidden_size": 64}}, "tiny"),
        ({"model_type": "dense", "llm_config": {"hidden_size": 896}}, "ming-omni-tts"),
    ],
)
def test_a_checkpoint_finds_its_profile(config: dict[str, Any], profile: str) -> None:
    assert graph.profile_for("x", config).name == profile


@pytest.mark.parametrize(
    ("config", "found"),
    [
        # Ming-lite-omni has other parts throughout.
        ({**ROOT, "vision_config": {"model_type": "other_vit"}}, "vision_config.model_type other_vit"),
        ({"model_type": "bailingmm", "llm_config": {"hidden_size": 2048}}, "model_type bailingmm"),
        ({}, "no model_type"),
    ],
)
def test_its_relatives_are_refused_by_what_they_are(config: dict[str, Any], found: str) -> None:
    with pytest.raises(GraphError, match=f"no profile of 'ming_omni' is for such a checkpoint.* has .*{found}"):
        graph.profile_for("x", config)


@pytest.mark.parametrize("name", ["tiny", FLASH, PREVIEW, "ming-omni-tts"])
def test_one_checkpoint_is_that_of_all_stages(name: str) -> None:
    profile = graph.profiles[name]
    layer = Layer("--model", dict.fromkeys(profile.of_checkpoint, "/other"))
    stages = configure(graph.spec(name), [layer]).spec.stages
    assert {stage.settings.get("model", "/other") for stage in stages} == {"/other"}
    assert len(profile.of_checkpoint) >= 3


@pytest.mark.parametrize("profile", [FLASH, PREVIEW])
@pytest.mark.parametrize("cluster", ["4xh200", "8xh200", "4xh100", "8xh100"])
def test_the_real_model_has_a_plan(cluster: str, profile: str) -> None:
    spec = graph.spec(profile)
    assert spec.absent.keys() == {"painter", "transcribe"}
    assert spec.stage("talker").memory.kv_tokens == spec.stage("talker").settings["kv_tokens"]
    made = plan(spec, cluster_named(cluster))
    (thinker,) = [host for host in made.hosts if "thinker" in host.stages]
    assert thinker.devices == ("gpu:0", "gpu:1", "gpu:2", "gpu:3")
    assert set(thinker.stages) == {"preprocess", "merge", "thinker", "detokenize"}
    small = [host.devices for host in made.hosts if not {"thinker", "voice"} & set(host.stages)]
    assert len(set(small)) == len(small) == len(made.hosts) - 2 == 4  # each on a GPU of its own
    assert all(used <= gpu.memory_bytes for used, gpu in zip(made.gpu_bytes, made.cluster.gpus, strict=True))


def test_two_large_gpus_do_with_half_the_split() -> None:
    with pytest.raises(PlanError, match="tp=4 needs as many GPUs"):
        plan(graph.spec(FLASH), cluster_named("2xh200"))
    halved = configure(graph.spec(FLASH), [Layer("--set", {"thinker.tp": 2})])
    made = plan(halved.spec, cluster_named("2xh200"))
    assert all(used <= gpu.memory_bytes for used, gpu in zip(made.gpu_bytes, made.cluster.gpus, strict=True))
    with pytest.raises(PlanError, match="it needs .* GiB on GPU 0"):
        plan(halved.spec, cluster_named("2xh100"))


def test_the_talker_alone_fits_one_gpu_and_speaks_from_one_process() -> None:
    made = plan(graph.spec("ming-omni-tts"), cluster_named("1xrtx4090"))
    assert {frozenset(host.stages) for host in made.hosts} == {
        frozenset({"segment", "talker", "vocoder"}),
        frozenset({"voice"}),
    }
    assert made.inputs.keys() == {"speech", "voice"}


def test_budgets_hold_the_weights_at_their_real_sizes() -> None:
    model = model_shapes(ROOT)
    own = {
        "thinker": {name: shape for name, shape in model.items() if name.startswith("model.")},
        "image_encoder": {name: shape for name, shape in model.items() if name.startswith(("vision.", "linear_proj."))},
        "audio_encoder": {
            name: shape for name, shape in model.items() if name.startswith(("audio.", "linear_proj_audio."))
        },
        "talker": talker_shapes(CONFIGS["talker"], CONFIGS["talker/llm"]),
        "vocoder": {name: s for name, s in vae_shapes(CONFIGS["talker/vae"]).items() if name.startswith("decoder.")},
        "voice": {name: s for name, s in vae_shapes(CONFIGS["talker/vae"]).items() if name.startswith("encoder.")},
    }
    for name, shapes in own.items():
        stored_bytes = (4 if name == "voice" else 2) * sum(map(math.prod, shapes.values()))
        planned = parse_bytes(graph.spec(FLASH).stage(name).memory.weights)
        assert stored_bytes <= planned <= 2 * stored_bytes, name
    llm = ROOT["llm_config"]
    both = 2 * llm["num_hidden_layers"] * llm["num_key_value_heads"] * 128
    assert graph.spec(FLASH).stage("thinker").memory.kv_bytes_per_token == 2 * both
    assert (
        graph.spec(FLASH).stage("thinker").memory.kv_tokens == graph.spec(FLASH).stage("thinker").settings["kv_tokens"]
    )


def with_painter(spec: GraphSpec) -> GraphSpec:
    """`spec` with somebody in the place of `painter`, which no profile has."""
    stages = tuple(
        msgspec.structs.replace(stage, actor=Painter, settings={}) if stage.name == "painter" else stage
        for stage in spec.stages
    )
    absent = {name: reason for name, reason in spec.absent.items() if name != "painter"}
    return msgspec.structs.replace(spec, stages=stages, absent=absent)


class Painter(PainterRole):
    """Stands where an image would be made: tells how many hidden states there were."""

    async def run(self, hidden: Stream[HiddenStates], ctx: Context) -> Picture:
        return Picture(str([len(each.rows) async for each in hidden]).encode())


@pytest.mark.anyio
async def test_another_checkpoint_of_the_kind_is_served(tmp_path: Path) -> None:
    """Of another seed, with more layers and experts than that of `tiny`."""
    write_checkpoint(tmp_path, seed=7, llm={**LLM, "num_hidden_layers": 4, "num_experts": 12})
    chosen = choose("ming_omni", None, [], str(tmp_path))
    assert f"profile tiny ({tmp_path} is such a checkpoint" in chosen.why
    asked = Chat((ChatMessage("user", (TextPart("Who is there?"),)),))
    config = RuntimeConfig(start_timeout_s=100.0)
    options = Options(seed=1, max_tokens=6, temperature=0)
    async with Runtime(plan(with_painter(chosen.spec), INLINE, config), config) as runtime:
        spoken = await runtime.submit("chat", asked, outputs=["text", "audio", "usage"], options=options)
        given = await spoken.collect()
        pictured = await (await runtime.submit("chat", asked, outputs=["image"], options=options)).collect()
    num_inputs = given["usage"].prompt_tokens + 6 - 1
    assert sum(json.loads(pictured["image"].data)) == num_inputs
    assert given["usage"].completion_tokens == 6
    assert "".join(delta.text for delta in given["text"]).split()
    assert sum(len(chunk.samples) for chunk in given["audio"]) > 4410


@pytest.mark.parametrize(
    "pair",
    [
        "talker.max_running=0",
        "talker.max_waiting=0",
        "thinker.max_tokens=-4",
        "thinker.kv_tokens=0",
        "segment.max_size=0",
        "segment.letters_per_s=0",
        "preprocess.decoders=0",
        "vocoder.sample_rate_hz=0",
    ],
)
def test_settings_that_nothing_could_run_with_are_refused_before_the_start(pair: str) -> None:
    """No place for an utterance: the talker's first word would never be said."""
    with pytest.raises(ConfigError, match=rf"{pair.partition('=')[0]}='.*': Expected `\w+` >"):
        configure(graph.spec("embedded"), [set_layer([pair])])
