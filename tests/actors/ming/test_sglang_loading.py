"""Where tensors of checkpoints belong among SGLang's parameters. No SGLang is needed."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from actors.ming.config import Thinker
from actors.ming.sglang_model.loading import Place, pieces, place_of
from tests.actors.ming.test_index import config, index


def parameters(thinker: Thinker) -> list[str]:
    """Of the thinker as SGLang has it; `test_thinker_sglang` holds it against the real one."""
    found = ["model.word_embeddings.weight", "model.norm.weight", "lm_head.weight"]
    gates = ["gate", "image_gate", "audio_gate"]
    for layer in range(thinker.num_hidden_layers):
        names = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        names += [f"attention.{each}.weight" for each in ("query_key_value", "q_norm", "k_norm", "dense")]
        dense = "mlp." if layer < thinker.first_k_dense_replace else "mlp.shared_experts."
        names += [f"{dense}gate_up_proj.weight", f"{dense}down_proj.weight"]
        if layer >= thinker.first_k_dense_replace:
            names += [f"mlp.{gate}.{each}" for gate in gates for each in ("weight", "expert_bias")]
            names += ["mlp.experts.w13_weight", "mlp.experts.w2_weight"]
        found += [f"model.layers.{layer}.{name}" for name in names]
    return found


def test_an_index_of_the_real_checkpoint_fills_every_parameter() -> None:
    (root,) = config(".")
    thinker = msgspec.convert(root["llm_config"], Thinker)
    places = [place_of(name) for name in index(".")]
    filled = Counter(place.parameter for place in places if place is not None)
    assert filled == {name: pieces(name, thinker.num_experts) for name in parameters(thinker)}
    assert places.count(None) > 500  # the towers'


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.lm_head.weight", Place("lm_head.weight")),
        ("model.model.layers.3.attention.key_layernorm.weight", Place("model.layers.3.attention.k_norm.weight")),
        ("model.model.layers.0.mlp.up_proj.weight", Place("model.layers.0.mlp.gate_up_proj.weight", (1,))),
        (
            "model.model.layers.9.mlp.experts.31.down_proj.weight",
            Place(
                "model.layers.9.mlp.experts.w2_weight",
                ("model.layers.9.mlp.experts.31.down_proj.weight",),
                {"shard_id": "w2", "expert_id": 31},
            ),
        ),
        ("model.model.layers.9.mlp.gate.expert_bias", Place("model.layers.9.mlp.gate.expert_bias")),
        ("vision.blocks.0.mlp.linear_fc1.weight", None),
        ("linear_proj_audio.0.weight", None),
    ],
)
def test_names_of_ming_and_of_ling(name: str, place: Place | None) -> None:
    assert place_of(name) == place
