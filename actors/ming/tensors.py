"""Which tensors a checkpoint of Ming-flash-omni has, 2.0 or preview: names and shapes, by the sizes in its config.json
files.

Each function takes what the file says and gives the tensors of one safetensors index. Those of 2.0 are in
the loaders of public ports of the model, of which one (mminf) loaded the released checkpoint with no name missing and
none left over; those of the preview's talker and AudioVAE in the program that its authors released with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from actors.speaker import SPEAKER_DIM

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]

_VAE_AGGREGATOR_LAYERS = 4
"""Whatever the encoder's config says."""


def model_shapes(config: Config) -> Shapes:
    """The thinker, both towers and their projectors: what lies beside the root's config.json."""
    llm, vision, audio = config["llm_config"], config["vision_config"], config["audio_config"]
    hidden, depth = llm["hidden_size"], config["mlp_depth"]
    whisper = audio["whisper_encoder_config"]
    found = _under("model.", dict(_thinker(llm)))
    found |= _under("vision.", vision_shapes(vision))
    found |= _under("audio.", dict(_whisper(whisper)))
    found |= dict(_linear("linear_proj.0", vision["out_hidden_size"], hidden))
    for layer in range(1, depth):
        found |= dict(_linear(f"linear_proj.{2 * layer}", hidden, hidden))
        found |= dict(_linear(f"linear_proj_audio.{2 * layer + 1}", hidden, hidden))
    return found | _conv("linear_proj_audio.0", whisper["n_state"], hidden, audio["ds_kernel_size"])


def vision_shapes(vision: Config) -> Shapes:
    """What lies below `vision.`: Qwen3-VL's transformer, or Qwen2.5-VL's, which the preview has."""
    return dict(_windowed_vision(vision) if vision.get("model_type") == "qwen2_5_vit" else _vision(vision))


def talker_shapes(config: Config, llm: Config, *, in_chat: bool = True) -> Shapes:
    """The talker: `talker/config.json`, and `talker/llm/config.json`, whose folder has a tokenizer and no weights.

    The preview's, not `in_chat`, has nothing for an embedding of who speaks.
    """
    hidden, latent = llm["hidden_size"], config.get("latent_dim", 64)
    flow, aggregator = config["flowmodel"], config["aggregator"]
    found = _under("model.", dict(_qwen2(llm)))
    found |= _under("cfm.model.", dict(_dit(flow, latent, latent)))
    found |= dict(_linear("cfm.model.t_embedder.time_mlp.0", 256, flow["hidden_size"]))
    found |= dict(_linear("cfm.model.t_embedder.time_mlp.2", flow["hidden_size"], flow["hidden_size"]))
    found |= dict(_linear("cfm.model.c_embedder.cond_embedder", hidden, flow["hidden_size"]))
    found |= _under("aggregator.", dict(_dit(aggregator, latent, hidden)))
    found |= {"aggregator.word_embedder.weight": (1, aggregator["hidden_size"])}
    if in_chat:
        found |= dict(_linear("spk_head", SPEAKER_DIM, hidden))
    return found | dict(_linear("stop_head", hidden, 2))


def vae_shapes(config: Config) -> Shapes:
    """The AudioVAE: `talker/vae/config.json`."""
    encoder, decoder = config["enc_kwargs"], config["dec_kwargs"]
    inner, outer, latent = encoder["backbone"], decoder["backbone"], decoder["latent_dim"]
    wide, window = inner["hidden_size"], 4 * decoder["output_dim"]
    found = _under("encoder.encoder.", dict(_qwen2(inner)))
    if config.get("patch_size", -1) > 0:
        found |= _under("encoder.aggregator.", dict(_qwen2({**inner, "num_hidden_layers": _VAE_AGGREGATOR_LAYERS})))
        found |= {"encoder.cls_embed": (1, 1, wide)}
    found |= {"encoder.fc1.weight": (wide, encoder["input_dim"])}
    found |= dict(_linear("encoder.fc2", wide, wide)) | dict(_linear("encoder.fc3", wide, 2 * encoder["latent_dim"]))
    found |= {"encoder.norm.weight": (wide,), "encoder.norm.bias": (wide,)}
    found |= _under("decoder.decoder.", dict(_qwen2(outer)))
    found |= dict(_linear("decoder.fc1", latent, outer["hidden_size"]))
    found |= dict(_linear("decoder.head.out", outer["hidden_size"], window + 2))
    return found | {"decoder.head.istft.window": (window,)}


Entries = Iterator[tuple[str, tuple[int, ...]]]


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Entries:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _layer_norm(name: str, size: int) -> Entries:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def _conv(name: str, inputs: int, outputs: int, *kernel: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs, *kernel), f"{name}.bias": (outputs,)}


def _gated(name: str, hidden: int, inner: int) -> Entries:
    for each in ("gate_proj", "up_proj"):
        yield from _linear(f"{name}.{each}", hidden, inner, bias=False)
    yield from _linear(f"{name}.down_proj", inner, hidden, bias=False)


def _thinker(llm: Config) -> Entries:
    hidden, heads, kv_heads = llm["hidden_size"], llm["num_attention_heads"], llm["num_key_value_heads"]
    dim = llm.get("head_dim") or hidden // heads
    yield "lm_head.weight", (llm["vocab_size"], hidden)
    yield "model.word_embeddings.weight", (llm["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(llm["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", (hidden,)
        yield from _linear(f"{at}.attention.query_key_value", hidden, (heads + 2 * kv_heads) * dim, bias=False)
        yield from _linear(f"{at}.attention.dense", heads * dim, hidden, bias=False)
        for norm in ("q_norm", "k_norm"):
            yield f"{at}.attention.{norm}.weight", (dim,)
        if layer < llm["first_k_dense_replace"]:
            yield from _gated(f"{at}.mlp", hidden, llm["intermediate_size"])
        else:
            yield from _experts(f"{at}.mlp", llm)


def _experts(at: str, llm: Config) -> Entries:
    hidden, inner, count = llm["hidden_size"], llm["moe_intermediate_size"], llm["num_experts"]
    gates = ("gate", "image_gate", "audio_gate") if llm["router_type"] == "MultiRouter" else ("gate",)
    for gate in gates:
        yield f"{at}.{gate}.weight", (count, hidden)
        yield f"{at}.{gate}.expert_bias", (count,)
    for expert in range(count):
        yield from _gated(f"{at}.experts.{expert}", hidden, inner)
    yield from _gated(f"{at}.shared_experts", hidden, inner * llm["num_shared_experts"])


def _vision(vision: Config) -> Entries:
    hidden, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    side, merged = vision["patch_size"], hidden * vision["spatial_merge_size"] ** 2
    patch = (vision["in_channels"], vision["temporal_patch_size"], side, side)
    yield from _conv("patch_embed.proj", patch[0], hidden, *patch[1:]).items()
    yield "pos_embed.weight", (vision["num_position_embeddings"], hidden)
    for layer in range(vision["depth"]):
        at = f"blocks.{layer}"
        yield from _layer_norm(f"{at}.norm1", hidden)
        yield from _layer_norm(f"{at}.norm2", hidden)
        yield from _linear(f"{at}.attn.qkv", hidden, 3 * hidden)
        yield from _linear(f"{at}.attn.proj", hidden, hidden)
        yield from _linear(f"{at}.mlp.linear_fc1", hidden, inner)
        yield from _linear(f"{at}.mlp.linear_fc2", inner, hidden)
    deep = [f"deepstack_merger_list.{number}" for number in range(len(vision["deepstack_visual_indexes"]))]
    for at, normed in [("merger", hidden), *((each, merged) for each in deep)]:
        yield from _layer_norm(f"{at}.norm", normed)
        yield from _linear(f"{at}.linear_fc1", merged, merged)
        yield from _linear(f"{at}.linear_fc2", merged, out)


def _windowed_vision(vision: Config) -> Entries:
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    side, merged = vision["patch_size"], hidden * vision["spatial_merge_size"] ** 2
    yield "patch_embed.proj.weight", (hidden, vision["in_channels"], vision["temporal_patch_size"], side, side)
    for layer in range(vision["depth"]):
        at = f"blocks.{layer}"
        yield f"{at}.norm1.weight", (hidden,)
        yield f"{at}.norm2.weight", (hidden,)
        yield from _linear(f"{at}.attn.qkv", hidden, 3 * hidden)
        yield from _linear(f"{at}.attn.proj", hidden, hidden)
        yield from _linear(f"{at}.mlp.gate_proj", hidden, inner)
        yield from _linear(f"{at}.mlp.up_proj", hidden, inner)
        yield from _linear(f"{at}.mlp.down_proj", inner, hidden)
    yield "merger.ln_q.weight", (hidden,)
    yield from _linear("merger.mlp.0", merged, merged)
    yield from _linear("merger.mlp.2", merged, vision["out_hidden_size"])


def _whisper(whisper: Config) -> Entries:
    state = whisper["n_state"]
    yield from _conv("conv1", whisper["n_mels"], state, 3).items()
    yield from _conv("conv2", state, state, 3).items()
    yield "positional_embedding", (whisper["n_ctx"], state)
    for layer in range(whisper["n_layer"]):
        at = f"blocks.{layer}"
        for each in ("query", "key", "value", "out"):
            yield from _linear(f"{at}.attn.{each}", state, state, bias=each != "key")
        yield from _layer_norm(f"{at}.attn_ln", state)
        yield from _linear(f"{at}.mlp.0", state, 4 * state)
        yield from _linear(f"{at}.mlp.2", 4 * state, state)
        yield from _layer_norm(f"{at}.mlp_ln", state)
    yield from _layer_norm("ln_post", state)


def _qwen2(llm: Config) -> Entries:
    hidden, heads, kv_heads = llm["hidden_size"], llm["num_attention_heads"], llm["num_key_value_heads"]
    dim = hidden // heads
    yield "embed_tokens.weight", (llm["vocab_size"], hidden)
    yield "norm.weight", (hidden,)
    for layer in range(llm["num_hidden_layers"]):
        at = f"layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", (hidden,)
        for each, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            yield from _linear(f"{at}.self_attn.{each}", hidden, count * dim)
        yield from _linear(f"{at}.self_attn.o_proj", heads * dim, hidden, bias=False)
        yield from _gated(f"{at}.mlp", hidden, llm["intermediate_size"])


def _dit(config: Config, inputs: int, outputs: int) -> Entries:
    hidden = config["hidden_size"]
    inner = int(hidden * config["mlp_ratio"])
    yield from _linear("x_embedder", inputs, hidden)
    yield "rotary_embed.inv_freq", (hidden // config["num_heads"] // 2,)
    for layer in range(config["depth"]):
        at = f"blocks.{layer}"
        for each in ("norm1", "norm2"):
            yield f"{at}.{each}.weight", (hidden,)
        for each in ("to_q", "to_k", "to_v", "to_out.0"):
            yield from _linear(f"{at}.attn.{each}", hidden, hidden)
        yield from _linear(f"{at}.mlp.ff.0.0", hidden, inner)
        yield from _linear(f"{at}.mlp.ff.2", inner, hidden)
    yield "final_layer.norm_final.weight", (hidden,)
    yield from _linear("final_layer.linear", hidden, outputs)
