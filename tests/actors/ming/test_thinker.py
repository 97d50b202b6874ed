from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from actors.checkpoint import load
from actors.ming.config import AUDIO, IMAGE, TEXT, Thinker
from actors.ming.thinker_model import Experts, Gate, Rope, ThinkerModel, load_thinker
from actors.ming.weights import thinker_part
from omniflow.engine.base import EngineRequest, Sampling
from omniflow.engine.linear import pack_linears
from omniflow.engine.rows import Row, Span
from omniflow.engine.transformers import TransformersEngine
from omniflow.errors import ProtocolError, WeightsError
from tests.engine.tiny import ids_of, prompt, request, run

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}
CONFIG: dict[str, Any] = {
    **SIZES,
    "num_experts": 8,
    "num_shared_experts": 1,
    "router_type": "MultiRouter",
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000.0,
    "rope_scaling": {"type": "video_rope", "mrope_section": [1, 2, 1]},
    "use_qk_norm": True,
}
RENAMED = {
    "embed_tokens": "word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "gate.e_score_correction_bias": "gate.expert_bias",
}


def config(**changes: object) -> Thinker:
    return msgspec.convert({**CONFIG, **changes}, Thinker)


def hub_weights(glm: Glm4MoeForCausalLM) -> dict[str, torch.Tensor]:
    """The weights of `glm` as Ming's checkpoints name them, gates for media beside."""
    state, found = glm.state_dict(), {}
    for name, tensor in state.items():
        if name.endswith("q_proj.weight"):
            qkv = [state[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            found[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(qkv)
        elif name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found[name.replace("gate_up_proj", f"{number}.gate_proj.weight")] = gate
                found[name.replace("gate_up_proj", f"{number}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for number, down in enumerate(tensor):
                found[name.replace("down_proj", f"{number}.down_proj.weight")] = down
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            for old, new in RENAMED.items():
                name = name.replace(old, new)
            found[name] = tensor
    for name in [name for name in found if ".gate." in name]:
        for kind in ("image_gate", "audio_gate"):
            found[name.replace(".gate.", f".{kind}.")] = torch.randn_like(found[name]) * 0.2
    return {f"model.{name}": tensor.clone() for name, tensor in found.items()}


@pytest.fixture(scope="module")
def glm() -> Glm4MoeForCausalLM:
    return glm_of(5, CONFIG)


def glm_of(seed: int, config: dict[str, Any]) -> Glm4MoeForCausalLM:
    """A model with random weights of the sizes in `config`."""
    torch.manual_seed(seed)
    experts = {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    rope = {"rope_type": "default"} | {name: config[name] for name in ("rope_theta", "partial_rotary_factor")}
    sizes = Glm4MoeConfig(
        **{name: config[name] for name in SIZES},
        **experts,
        use_qk_norm=True,
        rope_parameters=rope,
        initializer_range=0.2,
    )
    model = Glm4MoeForCausalLM(sizes).eval().requires_grad_(False)
    for name, tensor in model.state_dict().items():
        if "norm" in name:
            tensor.add_(torch.randn_like(tensor) * 0.3)
        if name.endswith("e_score_correction_bias"):
            tensor.add_(torch.randn_like(tensor) * 0.2)
    return model


@pytest.fixture(scope="module")
def folder(glm: Glm4MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ming")
    weights = hub_weights(glm)
    names = sorted(weights)
    save_file({name: weights[name] for name in names[::2]}, folder / "model-00001-of-00002.safetensors")
    towers = {"vision.patch_embed.proj.weight": torch.ones(2), "linear_proj_audio.0.weight": torch.ones(2)}
    others = {name: weights[name] for name in names[1::2]}
    save_file(others | towers, folder / "model-00002-of-00002.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "bailingmm_moe_v2_lite", "llm_config": CONFIG}))
    return folder


def test_the_norms_of_ling_are_found_by_their_names(glm: Glm4MoeForCausalLM) -> None:
    of_ming = thinker_part(hub_weights(glm))
    names = {"attention.q_norm": "attention.query_layernorm", "attention.k_norm": "attention.key_layernorm"}
    of_ling = {}
    for name, tensor in hub_weights(glm).items():
        for old, new in names.items():
            name = name.replace(old, new)
        of_ling[name] = tensor
    assert thinker_part(of_ling).keys() == of_ming.keys()


@pytest.fixture(scope="module")
def model(folder: Path) -> ThinkerModel:
    return load_thinker(folder)


def logits(model: ThinkerModel, given: EngineRequest) -> torch.Tensor:
    """Of all inputs, [n, vocab]."""
    length = len(given.ids)
    with torch.inference_mode():
        span = Span(Row(given, len(model.model.layers), length), 0, length, 0, None)
        embeds = model.get_input_embeddings()(torch.tensor([given.ids]))
        return model(inputs_embeds=embeds, spans=[span], logits_to_keep=torch.arange(length)).logits[0]


def media_request(id: str, seed: int, length: int = 24) -> EngineRequest:
    """An image of 2 by 3 and then two inputs of audio, in a text."""
    kinds = torch.zeros(length, dtype=torch.uint8)
    kinds[4:10], kinds[15:17] = IMAGE, AUDIO
    places = torch.arange(length).repeat(3, 1)
    places[:, 4:10] = torch.tensor([[4] * 6, [4, 4, 4, 5, 5, 5], [4, 5, 6, 4, 5, 6]])
    places[:, 10:] -= 3
    return msgspec.structs.replace(request(id, prompt(length, seed)), places=places, kinds=kinds)


def test_logits_of_a_text_are_glm4_moes(glm: Glm4MoeForCausalLM, model: ThinkerModel) -> None:
    ids = prompt(40, seed=7)
    wanted = glm(torch.tensor([ids])).logits[0]
    apart = (logits(model, request("a", ids)) - wanted).abs().max() / wanted.abs().max()
    assert apart <= 1e-5


OTHERS: list[dict[str, Any]] = [
    {"num_hidden_layers": 5, "first_k_dense_replace": 2},
    {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_shared_experts": 2},
    {"num_experts": 16, "n_group": 8, "topk_group": 3, "num_experts_per_tok": 4},
    {"num_experts": 12, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 1.0},
    {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 24, "hidden_size": 80},
]


@pytest.mark.parametrize("sizes", OTHERS, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_logits_of_other_sizes_are_glm4_moes(sizes: dict[str, Any], tmp_path: Path) -> None:
    rope = {"type": "video_rope", "mrope_section": [sizes.get("head_dim", 16) // 4 - 2, 1, 1]}
    own = {**CONFIG, **sizes, "rope_scaling": rope}
    glm = glm_of(sum(map(int, sizes.values())), own)
    save_file(hub_weights(glm), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"llm_config": own}))
    ids = prompt(40, seed=8)
    wanted = glm(torch.tensor([ids])).logits[0]
    apart = (logits(load_thinker(tmp_path), request("a", ids)) - wanted).abs().max() / wanted.abs().max()
    assert apart <= 1e-5


def test_greedy_answers_are_glm4_moes(glm: Glm4MoeForCausalLM, model: ThinkerModel) -> None:
    engine = TransformersEngine(model, media=True)
    outputs = run(engine, [request(str(seed), prompt(9 + seed, seed), max_tokens=12) for seed in range(3)])
    for seed in range(3):
        ids = prompt(9 + seed, seed)
        for token in ids_of(outputs[str(seed)]):
            top = glm(torch.tensor([ids])).logits[0, -1].topk(2)
            assert top.values[0] - top.values[1] > 1e-4
            assert token == top.indices[0]
            ids.append(token)


def odd_model(_: ThinkerModel) -> ThinkerModel:
    """Sizes that do not fill the registers."""
    torch.manual_seed(6)
    rope = {"type": "video_rope", "mrope_section": [1, 2, 2]}
    odd = config(hidden_size=44, moe_intermediate_size=19, head_dim=20, num_experts=12, rope_scaling=rope)
    model = ThinkerModel(odd).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.mul_(3)
    pack_linears(model)
    return model


@pytest.mark.parametrize("of", [lambda model: model, odd_model], ids=["tiny", "odd"])
def test_a_request_is_the_same_alone_and_in_company(of: Any, model: ThinkerModel) -> None:
    model = of(model)

    def engine() -> TransformersEngine:
        return TransformersEngine(model, media=True, chunk=16)

    sampling = Sampling(max_tokens=8, top_logprobs=3)
    texts = [request(str(length), prompt(length, length)) for length in (5, 19, 33, 47)]
    media = [media_request(str(length), length, length) for length in (24, 35, 41)]
    requests = [msgspec.structs.replace(each, sampling=sampling) for each in (*texts, *media)]
    together = run(engine(), requests)
    for each in requests:
        assert run(engine(), [each])[each.id] == together[each.id]


def test_positions_go_on_after_the_largest(model: ThinkerModel) -> None:
    whole = media_request("a", 1)
    row = Row(msgspec.structs.replace(whole, places=whole.places[:, :12], kinds=whole.kinds[:12]), 1, 30)
    assert row.places(8, 15).tolist() == [[4, 4, 7, 8, 9, 10, 11], [5, 5, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10, 11]]
    assert row.kinds(8, 15).tolist() == [IMAGE, IMAGE, *[TEXT] * 5]
    assert row.places(20, 21).tolist() == [[17]] * 3
    assert Row(request("b", [1]), 1, 30).places(3, 5).tolist() == [[3, 4]] * 3


def test_kinds_and_places_change_the_answer(model: ThinkerModel) -> None:
    whole = media_request("a", 1)
    plain, own = msgspec.structs.replace(whole, places=None, kinds=None), logits(model, whole)
    for each in (
        plain,
        msgspec.structs.replace(whole, places=None),
        msgspec.structs.replace(whole, kinds=None),
    ):
        other = logits(model, each)
        assert torch.equal(other[:4], own[:4])
        assert (other[5:] - own[5:]).abs().amax(-1).min() > 1e-4
    equal = torch.arange(len(whole.ids)).expand(3, -1)
    texts = msgspec.structs.replace(whole, places=equal, kinds=torch.zeros(len(whole.ids), dtype=torch.uint8))
    assert torch.equal(logits(model, texts), logits(model, plain))


def test_media_are_refused_where_they_do_not_fit(glm: Glm4MoeForCausalLM, model: ThinkerModel) -> None:
    whole, engine = media_request("a", 1), TransformersEngine(model, media=True)
    for changes, message in (
        ({"places": whole.places[:, 1:]}, r"places of shape \[3, 23\]; this prompt takes \[3, 24\]"),
        ({"kinds": whole.kinds[1:]}, r"kinds of shape \[23\]; this prompt takes \[24\]"),
        ({"open": True}, "places need a model of several kinds and a whole prompt"),
    ):
        with pytest.raises(ProtocolError, match=message):
            engine.start(msgspec.structs.replace(whole, **changes))
    with pytest.raises(ProtocolError, match="places need a model of several kinds"):
        TransformersEngine(model).start(whole)
    assert ids_of(run(engine, [whole])["a"])


def best_experts(scores: list[float], biases: list[float], shape: Thinker) -> dict[int, float]:
    """Chosen experts and their weights, in plain loops."""
    biased = [score + bias for score, bias in zip(scores, biases, strict=True)]
    size = shape.num_experts // shape.n_group
    groups = [range(start, start + size) for start in range(0, shape.num_experts, size)]
    groups.sort(key=lambda group: -sum(sorted(biased[each] for each in group)[-2:]))
    open_experts = [each for group in groups[: shape.topk_group] for each in group]
    chosen = sorted(open_experts, key=lambda each: -biased[each])[: shape.num_experts_per_tok]
    total = sum(scores[each] for each in chosen)
    return {each: scores[each] / total * shape.routed_scaling_factor for each in chosen}


def random_experts(shape: Thinker) -> Experts:
    torch.manual_seed(3)
    experts = Experts(shape).requires_grad_(False)
    for gate in experts.modules():
        if isinstance(gate, Gate):
            gate.expert_bias.normal_(std=0.3)
    return experts


@pytest.mark.parametrize(("count", "best", "groups", "open_groups"), [(8, 2, 4, 2), (32, 8, 8, 4), (16, 4, 2, 1)])
def test_each_kind_goes_by_its_own_gate(count: int, best: int, groups: int, open_groups: int) -> None:
    shape = config(num_experts=count, num_experts_per_tok=best, n_group=groups, topk_group=open_groups)
    experts = random_experts(shape)
    x, kinds = torch.randn(30, 64), torch.arange(30, dtype=torch.uint8) % 3
    chosen, weights = experts.route(x, kinds)
    gates = {TEXT: experts.gate, IMAGE: experts.image_gate, AUDIO: experts.audio_gate}
    for row, kind in enumerate(kinds.tolist()):
        gate = gates[kind]
        assert gate is not None
        scores = torch.sigmoid(gate.scores.weight @ x[row]).tolist()
        wanted = best_experts(scores, gate.expert_bias.tolist(), shape)
        got = dict(zip(chosen[row].tolist(), weights[row].tolist(), strict=True))
        assert got == pytest.approx(wanted, abs=1e-5)


def test_one_router_sends_all_kinds_by_the_same_gate() -> None:
    experts = random_experts(config(router_type="topN"))
    x = torch.randn(6, 64)
    chosen, weights = experts.route(x, torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.uint8))
    wanted = experts.gate(x)
    assert torch.equal(chosen, wanted[0])
    assert torch.equal(weights, wanted[1])


def test_a_token_is_the_sum_of_its_experts_and_the_shared_one() -> None:
    experts = random_experts(config())
    x, kinds = torch.randn(7, 64), torch.tensor([0, 1, 2, 0, 1, 2, 0], dtype=torch.uint8)
    assert experts.shared_experts is not None
    chosen, weights = experts.route(x, kinds)
    got = experts(x, kinds)
    for row in range(7):
        wanted = experts.shared_experts(x[row], kinds[row])
        for number, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            wanted = wanted + weight * experts.experts[number](x[row], kinds[row])
        assert torch.allclose(got[row], wanted, atol=1e-5)


def test_video_rope_turns_height_and_width_first_and_time_last() -> None:
    rope = Rope(config(head_dim=32, rope_scaling={"rope_type": "video_rope", "mrope_section": [3, 2, 3]}))
    places = torch.tensor([[7, 7, 9], [2, 30, 9], [5, 11, 9]])
    cos, sin = rope(places)
    for column, (time, height, width) in enumerate(places.T.tolist()):
        for index, place in enumerate([height, width, height, width, height, time, time, time]):
            angle = torch.tensor(place * 600000.0 ** (-2 * index / 16), dtype=torch.float64)
            assert cos[column, index].item() == pytest.approx(angle.cos().item(), abs=1e-5)
            assert sin[column, index].item() == pytest.approx(angle.sin().item(), abs=1e-5)


def test_video_rope_is_a_plain_one_where_the_positions_are_equal() -> None:
    equal = torch.arange(50).expand(3, -1)
    cos, sin = Rope(config())(equal)
    plain_cos, plain_sin = Rope(config(rope_scaling=None))(equal)
    assert torch.equal(cos, plain_cos)
    assert torch.equal(sin, plain_sin)


def index_shapes(shape: Thinker) -> dict[str, list[int]]:
    """Names and shapes of a whole checkpoint's thinker."""
    hidden, inner, heads = shape.hidden_size, shape.moe_intermediate_size, shape.num_attention_heads
    shapes = {"word_embeddings": [shape.vocab_size, hidden], "norm": [hidden]}

    def mlp(name: str, size: int) -> None:
        for each in ("gate_proj", "up_proj"):
            shapes[f"{name}.{each}"] = [size, hidden]
        shapes[f"{name}.down_proj"] = [hidden, size]

    for layer in range(shape.num_hidden_layers):
        at = f"layers.{layer}"
        rows = (heads + 2 * shape.num_key_value_heads) * shape.dim
        shapes |= {f"{at}.attention.query_key_value": [rows, hidden]}
        shapes |= {f"{at}.attention.dense": [hidden, heads * shape.dim]}
        shapes |= {f"{at}.attention.{each}_norm": [shape.dim] for each in ("q", "k")}
        shapes |= {f"{at}.{each}_layernorm": [hidden] for each in ("input", "post_attention")}
        if layer < shape.first_k_dense_replace:
            mlp(f"{at}.mlp", shape.intermediate_size)
            continue
        shapes |= {f"{at}.mlp.{each}": [shape.num_experts, hidden] for each in ("gate", "image_gate", "audio_gate")}
        for number in range(shape.num_experts):
            mlp(f"{at}.mlp.experts.{number}", inner)
        mlp(f"{at}.mlp.shared_experts", inner * shape.num_shared_experts)
    found = {f"model.model.{name}.weight": size for name, size in shapes.items()}
    gates = [name for name in found if "gate.weight" in name]
    found |= {name.replace("weight", "expert_bias"): [shape.num_experts] for name in gates}
    return found | {"model.lm_head.weight": [shape.vocab_size, hidden]}


FULL: dict[str, Any] = {
    **CONFIG,
    "vocab_size": 157184,
    "hidden_size": 4096,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "rope_scaling": {"type": "video_rope", "mrope_section": [8, 12, 12]},
}


def test_an_index_of_the_full_model_maps_completely(tmp_path: Path) -> None:
    shape = msgspec.convert(FULL, Thinker)
    shapes = index_shapes(shape)
    files = dict.fromkeys([*shapes, "vision.norm.weight", "audio.ln_post.weight"], "model-00001-of-00042.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    names = json.loads(path.read_text())["weight_map"]
    stored = {name: torch.empty(shapes.get(name, [1]), device="meta") for name in names}
    with torch.device("meta"):
        model = ThinkerModel(shape)
    load(model, thinker_part(stored), "the thinker")
    assert sum(each.numel() for each in stored.values()) > 100e9


@pytest.mark.parametrize(
    ("lost", "extra", "message"),
    [
        ("model.model.layers.1.mlp.audio_gate.weight", None, "layers.1.mlp.audio_gate.scores.weight"),
        ("model.model.layers.2.mlp.experts.3.up_proj.weight", None, "up_proj is missing"),
        (None, "model.model.layers.3.mlp.gate.weight", "layers.3.mlp.gate.scores.weight"),
    ],
)
def test_what_is_missing_or_left_over_is_named(lost: str | None, extra: str | None, message: str) -> None:
    shape = config()
    stored = {name: torch.empty(size, device="meta") for name, size in index_shapes(shape).items()}
    if lost:
        del stored[lost]
    if extra:
        stored[extra] = torch.empty(8, 64, device="meta")
    with torch.device("meta"):
        model = ThinkerModel(shape)
    with pytest.raises(WeightsError, match=message):
        load(model, thinker_part(stored), "the thinker")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"mrope_section": [1, 2, 1]}}, "rope_scaling has no rope_type"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"rope_scaling": {"type": "video_rope"}}, "mrope_section has to sum to 4"),
        ({"n_group": 3}, "8 experts do not make 3 groups"),
        ({"n_group": 8}, "8 experts do not make 8 groups"),
        ({"topk_group": 5}, "5 of 4 groups of 2 experts do not hold the 2"),
        ({"num_experts_per_tok": 5}, "2 of 4 groups of 2 experts do not hold the 5"),
        ({"use_qkv_bias": True}, "use_qkv_bias"),
    ],
)
def test_other_architectures_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"llm_config": CONFIG | changes}))
    with pytest.raises(WeightsError, match=message):
        Thinker.load(tmp_path)
