"""Checkpoints of other sizes and seeds: each part against its relative in transformers, or itself cut otherwise."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2Model
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from actors.checkpoint import load
from actors.ming.audio_slots import AudioSlots
from actors.ming.audio_tower import AudioTower
from actors.ming.audio_vae import load_audio_vae
from actors.ming.config import (
    AUDIO,
    IMAGE,
    AudioConfig,
    AudioVae,
    Dit,
    Pixels,
    Qwen2,
    Talker,
    Thinker,
    Transformer,
    VisionConfig,
)
from actors.ming.pixels import Shown
from actors.ming.talker import TalkerModel, load_talker
from actors.ming.tensors import talker_shapes, vae_shapes
from actors.ming.thinker_model import ThinkerModel
from actors.ming.tiny import audible, random_weights
from actors.ming.vision_tower import VisionTower
from actors.ming.weights import part, thinker_part
from actors.qwen2 import KeyValues, Qwen2Decoder, step
from actors.streaming_decoder import check_streaming_decoder
from omniflow.engine.flow import FlowKnobs, flow_noise
from omniflow.engine.flow_slots import SlottedFlow
from omniflow.engine.linear import pack_linears
from omniflow.engine.transformers import TransformersEngine
from tests.actors.ming.reference import apart
from tests.actors.ming.test_audio_tower import transformers_rows
from tests.actors.ming.test_thinker import CONFIG as THINKER
from tests.actors.ming.test_thinker import glm_of, hub_weights, logits, media_request
from tests.actors.ming.towers import AUDIO as EARS
from tests.actors.ming.towers import VISION, random_tower
from tests.engine.tiny import ids_of, prompt, request, run

# Without shrinking: what fails would be tried again a hundred times.
few = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 2**31 - 1)


@st.composite
def thinkers(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, groups = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4, 8]))
    dim, factor = draw(st.sampled_from([(8, 0.5), (16, 0.5), (16, 1.0), (24, 0.5), (32, 0.25)]))
    size, open_groups = draw(st.integers(2, 4)), draw(st.integers(1, groups))
    half = int(dim * factor) // 2
    height = draw(st.integers(0, half // 2))
    layers = draw(st.integers(1, 4))
    return {
        **THINKER,
        "hidden_size": draw(st.sampled_from([32, 48, 64, 80])),
        "num_hidden_layers": layers,
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "partial_rotary_factor": factor,
        "rope_theta": draw(st.sampled_from([10_000.0, 600_000.0, 2_400_000.0])),
        "rope_scaling": {"type": "video_rope", "mrope_section": [half - 2 * height, height, height]},
        "num_experts": groups * size,
        "n_group": groups,
        "topk_group": open_groups,
        # With one Glm4Moe sets its weight to 1; BailingMoeV2 leaves it.
        "num_experts_per_tok": draw(st.integers(2, open_groups * size)),
        "num_shared_experts": draw(st.integers(1, 2)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
    }


@few
@given(thinkers(), seeds)
def test_a_thinker_is_glm4_moe_and_answers_the_same_in_company(config: dict[str, Any], seed: int) -> None:
    glm = glm_of(seed, config)
    model = ThinkerModel(msgspec.convert(config, Thinker)).requires_grad_(False).eval()
    load(model, thinker_part(hub_weights(glm)), "the thinker")
    pack_linears(model)
    ids = prompt(30, seed)
    assert apart(logits(model, request("a", ids)), glm(torch.tensor([ids])).logits[0]) <= 2e-5
    asked = [media_request("a", seed), request("b", ids[:9]), media_request("c", seed + 1, 20), request("d", ids[:1])]
    together = run(TransformersEngine(model, media=True), asked)
    for each in asked:
        alone = run(TransformersEngine(model, media=True), [each])
        assert ids_of(together[each.id]) == ids_of(alone[each.id])
    if config["first_k_dense_replace"] < config["num_hidden_layers"]:
        whole = media_request("a", seed)
        assert whole.kinds is not None and {IMAGE, AUDIO} <= set(whole.kinds.tolist())
        texts = msgspec.structs.replace(whole, kinds=torch.zeros_like(whole.kinds))
        assert (logits(model, whole)[4:] - logits(model, texts)[4:]).abs().max() > 1e-5


@st.composite
def backbones(draw: st.DrawFn, vocab_size: int = 1) -> dict[str, Any]:
    kv_heads, dim = draw(st.sampled_from([1, 2])), draw(st.sampled_from([8, 16]))
    heads, layers = kv_heads * draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "hidden_size": heads * dim,
        "intermediate_size": draw(st.sampled_from([24, 64])),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": draw(st.sampled_from([10_000.0, 1_000_000.0])),
        "vocab_size": vocab_size,
        "use_sliding_window": draw(st.booleans()),
        "sliding_window": draw(st.integers(2, 20)),
        "max_window_layers": draw(st.integers(0, layers)),
    }


@few
@given(backbones(), seeds, st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_qwen2_is_transformers_however_it_is_cut(config: dict[str, Any], seed: int, sizes: list[int]) -> None:
    torch.manual_seed(seed)
    theirs = Qwen2Model(Qwen2Config(**config, attn_implementation="eager", initializer_range=0.3)).eval()
    theirs.requires_grad_(False)
    state = {f"model.{name}": each for name, each in theirs.state_dict().items() if "embed_tokens" not in name}
    own = msgspec.convert(config, Qwen2)
    ours = Qwen2Decoder(own.shape).requires_grad_(False)
    load(ours, part(state, ("model.",)), "the decoder")
    inputs = torch.randn(sum(sizes), own.hidden_size)
    wanted = theirs(inputs_embeds=inputs[None]).last_hidden_state[0]
    stream, other = KeyValues(own.windows), KeyValues(own.windows)
    got = [step(ours, [other, stream], [each.flip(0), each])[1] for each in inputs.split(sizes)]
    assert apart(torch.cat(got), wanted) <= 2e-5
    if config["use_sliding_window"]:
        assert stream.num_stored <= sum(own.sliding_window or 0 if window else sum(sizes) for window in own.windows)


@st.composite
def vaes(draw: st.DrawFn) -> AudioVae:
    hop, latent_dim = 2 * draw(st.integers(4, 24)), draw(st.sampled_from([4, 8, 20]))
    decoder = {"backbone": draw(backbones()), "latent_dim": latent_dim, "output_dim": hop}
    ratio = draw(st.sampled_from([-1, 1, 2, 3, 4, 5, 7]))
    return msgspec.convert({"sample_rate": 16_000, "patch_size": ratio, "dec_kwargs": decoder}, AudioVae)


def vae_weights(config: AudioVae, seed: int) -> dict[str, torch.Tensor]:
    decoder = msgspec.to_builtins(config.dec_kwargs)
    encoder = {"backbone": decoder["backbone"], "latent_dim": 4, "input_dim": 8}
    found = audible(random_weights(vae_shapes({"dec_kwargs": decoder, "enc_kwargs": encoder}), seed))
    return {name: torch.from_numpy(each) for name, each in found.items()}


@settings(few, max_examples=6)
@given(vaes(), seeds, st.integers(1, 20), st.lists(st.integers(0, 6), max_size=8))
def test_a_vocoder_sounds_the_same_however_latents_come(
    config: AudioVae, seed: int, count: int, sizes: list[int]
) -> None:
    plain = load_audio_vae(config, vae_weights(config, seed))
    latents = np.random.default_rng(seed).standard_normal((count, plain.latent_dim)).astype(np.float32)
    whole = plain.step(plain.init(), latents, True)
    assert len(whole) == count * plain.samples_per_frame and np.abs(whole).max() > 0.001
    loud = float(np.abs(whole).max())
    check_streaming_decoder(plain, latents, whole, sizes, 1e-5 * loud)
    slotted = load_audio_vae(config, vae_weights(config, seed))
    check_streaming_decoder(
        AudioSlots(slotted, slots=2, positions=256, dtype=torch.float32), latents, whole, sizes, 1e-4 * loud
    )


@st.composite
def talkers(draw: st.DrawFn) -> tuple[Talker, dict[str, Any], dict[str, Any]]:
    """One, and what its two config.json say."""
    llm = draw(backbones(vocab_size=40)) | {"use_sliding_window": False}
    latent_dim, patch = draw(st.sampled_from([4, 8, 12])), draw(st.integers(1, 5))

    def transformer() -> dict[str, Any]:
        heads, dim = draw(st.sampled_from([2, 4])), draw(st.sampled_from([8, 16]))
        depth = draw(st.integers(1, 3))
        return {"hidden_size": heads * dim, "depth": depth, "num_heads": heads, "mlp_ratio": draw(st.integers(1, 4))}

    flow, aggregator = transformer(), transformer()
    vae = {"backbone": llm, "latent_dim": latent_dim, "output_dim": 8}
    config = Talker(
        msgspec.convert(llm, Qwen2),
        msgspec.convert({"sample_rate": 16_000, "dec_kwargs": vae}, AudioVae),
        msgspec.convert({**flow, "patch_size": patch, "history_patch_size": draw(st.integers(1, 12))}, Dit),
        msgspec.convert(aggregator, Transformer),
    )
    return config, {"flowmodel": flow, "aggregator": aggregator, "latent_dim": latent_dim}, llm


def steps_of(model: Any, spans: list[tuple[int, int]], ids: list[list[int]], seed: int) -> list[list[torch.Tensor]]:
    """The latents of each stream, which joins at a step and leaves after some."""
    given: list[list[torch.Tensor]] = [[] for _ in ids]
    inputs, streams = [model.embedding(torch.tensor(own)) for own in ids], dict[int, Any]()
    for number in range(max(start + count for start, count in spans)):
        there = [each for each, (start, count) in enumerate(spans) if start <= number < start + count]
        if not there:
            continue
        streams |= {each: model.init() for each in there if each not in streams}
        noise = [flow_noise(seed + each, len(given[each]), 1, model.head.noise_shape) for each in there]
        knobs = FlowKnobs(torch.full((len(there),), 2.0), torch.full((len(there),), 0.1))
        own = [streams[each] for each in there], [inputs[each] for each in there]
        made = model.step(*own, torch.from_numpy(np.concatenate(noise)), knobs)
        for row, each in enumerate(there):
            inputs[each] = made.feedback[row : row + 1].clone()
            given[each].append(made.latents[row].clone())
            if number == sum(spans[each]) - 1:
                model.end(streams[each])
    return given


@settings(few, max_examples=4)
@given(talkers(), seeds, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=3, max_size=3))
def test_a_talker_says_the_same_alone_in_company_and_in_slots(
    made: tuple[Talker, dict[str, Any], dict[str, Any]], seed: int, spans: list[tuple[int, int]]
) -> None:
    config, sizes, llm = made
    weights = {name: torch.from_numpy(each) for name, each in random_weights(talker_shapes(sizes, llm), seed).items()}
    model: TalkerModel = load_talker(config, weights)
    ids = [[1, 2, 3], [4], list(range(5, 35))]
    together = steps_of(model, spans, ids, seed)
    slotted = steps_of(SlottedFlow(model, slots=3, positions=64), spans, ids, seed)
    for each, (_, count) in enumerate(spans):
        alone = steps_of(model, [(0, count if other == each else 0) for other in range(3)], ids, seed)[each]
        assert len(alone) == len(together[each]) == len(slotted[each]) == count
        for wanted, *others in zip(alone, together[each], slotted[each], strict=True):
            assert all(apart(other, wanted) <= 1e-4 for other in others)
    assert apart(together[0][0], together[1][0]) > 0.01


@few
@given(
    st.sampled_from([(16, 2), (32, 4), (24, 1), (40, 2)]),
    st.integers(1, 4),
    st.sampled_from([40, 80, 128]),
    seeds,
    st.integers(1, 400),
)
def test_ears_are_whispers(size: tuple[int, int], layers: int, num_mels: int, seed: int, frames: int) -> None:
    whisper = {"n_mels": num_mels, "n_ctx": 200, "n_state": size[0], "n_head": size[1], "n_layer": layers}
    config = {
        "llm_config": {"hidden_size": 40},
        "mlp_depth": 2,
        "audio_config": {**EARS, "whisper_encoder_config": whisper},
    }
    tower = random_tower(AudioTower(msgspec.convert(config, AudioConfig)), seed)
    assert isinstance(tower, AudioTower)
    clip = torch.randn(num_mels, frames, generator=torch.Generator().manual_seed(seed))
    *_, rows = tower.rows([clip.numpy(), clip.numpy()[:, :1]])
    assert rows is not None
    assert apart(torch.from_numpy(rows[0]), transformers_rows(tower, clip)) <= 2e-5


@few
@given(
    st.sampled_from([(16, 2), (32, 2), (48, 3), (40, 1)]),
    st.integers(1, 4),
    st.sampled_from([2, 4, 6]),
    st.sampled_from([4, 25, 49]),
    seeds,
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3),
)
def test_eyes_are_qwen3_vls(
    size: tuple[int, int], depth: int, patch: int, places: int, seed: int, grids: list[tuple[int, int, int]]
) -> None:
    vision = VISION | {"hidden_size": size[0], "num_heads": size[1], "depth": depth, "patch_size": patch}
    vision |= {"num_position_embeddings": places, "deepstack_visual_indexes": [], "intermediate_size": 40}
    config = msgspec.convert({"llm_config": {"hidden_size": 40}, "vision_config": vision}, VisionConfig)
    pixels = Pixels(image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5))
    tower = random_tower(VisionTower(config, pixels), seed)
    assert isinstance(tower, VisionTower)
    random = np.random.default_rng(seed)
    seen = [
        Shown(random.integers(0, 256, (4 * f * h * w, 6 * patch**2), dtype=np.uint8), (f, 2 * h, 2 * w))
        for f, h, w in grids
    ]
    *_, made = tower.rows(seen)
    theirs = Qwen3VLVisionModel(Qwen3VLVisionConfig(**{**vision, "model_type": "qwen3_vl_vision"}))
    state = tower.state_dict()
    theirs.load_state_dict({name.removeprefix("vision."): each for name, each in state.items() if "vision." in name})
    values = torch.cat([torch.from_numpy(each.values) for each in seen]).float() / 127.5 - 1
    with torch.no_grad():
        merged = theirs(values, torch.tensor([each.grid for each in seen])).pooler_output
    wanted = torch.nn.functional.linear(merged, state["linear_proj.0.weight"], state["linear_proj.0.bias"])
    assert made is not None
    got = torch.from_numpy(np.concatenate(made))
    assert apart(got, torch.nn.functional.normalize(wanted, dim=-1)) <= 2e-5
