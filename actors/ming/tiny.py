"""Writes a whole checkpoint in the layout and with the names of Ming-flash-omni-2.0, tiny and of random numbers.

All parts are there, so the profile `tiny` runs what the real one runs. It answers in words without sense, and speaks
them as noise that swells and fades; the same seed gives the same files.
"""

from __future__ import annotations

import json
import wave
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.ming.tensors import Shapes, model_shapes, talker_shapes, vae_shapes
from actors.speaker import SPEAKER_DIM

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORDS = (
    "the a and of in on with under over boat river house garden bread letter window morning evening rain wind song "
    "child friend old small green quiet long warm walks sings opens carries waits finds reads again often here there"
).split()
"""What the thinker's answers are made of."""
MARKS = [".", ","]
THINKER_CONTROLS = (
    "<|startoftext|> <|endoftext|> [CLS] [gMASK] <role> </role> <|role_end|> <imagePatch> <image> </image> <video> "
    "</video> <audioPatch> <audio> </audio> <framePatch>"
).split()
TALKER_CONTROLS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_pad|> <|vision_end|> "
    "<audio> </audio> <audioPatch> <spk> </spk>"
).split()
VOICES = {"DB30": 160.0, "low": 90.0}
"""What the checkpoint brings, and their pitches in Hz."""
SAID = "a boat on the river"
"""In the recordings of the voices."""

WHISPER = {"n_mels": 128, "n_ctx": 1500, "n_state": 32, "n_head": 2, "n_layer": 2}
VISION = {
    "model_type": "qwen3_moe_vit",
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
    "hidden_act": "gelu_pytorch_tanh",
}
LLM = {
    "model_type": "bailing_moe_v2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "router_type": "MultiRouter",
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000.0,
    "rope_scaling": {"type": "video_rope", "factor": None, "mrope_section": [2, 3, 3]},
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
TALKER_LLM = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
_DIT = {"hidden_size": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 2, "in_channels": 64}
TALKER = {"steps": 10, "patch_size": 4, "history_patch_size": 32, "cfg_strength": 2.0, "flowmodel": _DIT}
TALKER["aggregator"] = _DIT
_BACKBONE = {**TALKER_LLM, "vocab_size": 1, "max_position_embeddings": 4096, "tie_word_embeddings": False}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
VAE: dict[str, Any] = {
    "model_type": "audio_vae",
    "sample_rate": 44100,
    "patch_size": 4,
    "enc_kwargs": {"backbone": {**_BACKBONE, **_WINDOWED}, "latent_dim": 64, "input_dim": 882, "hop_size": 882},
    "dec_kwargs": {"backbone": {**_BACKBONE, **_WINDOWED}, "latent_dim": 64, "output_dim": 882},
    "semantic_module_kwargs": None,
}


def write(_source: Path, folder: Path) -> None:
    """Write the checkpoint into `folder`; the other argument is what `PackagedWeights.convert` brings."""
    write_checkpoint(folder)


def write_checkpoint(
    folder: Path,
    seed: int = 0,
    llm: Mapping[str, Any] = LLM,
    vision: Mapping[str, Any] = VISION,
    talker: Mapping[str, Any] = TALKER,
    vae: Mapping[str, Any] = VAE,
) -> None:
    """Write the checkpoint of `seed` into `folder`; the rest are the config.json of its parts: `llm` of the thinker,
    `vision` of the eyes, and `vae` of the AudioVAE, without whose patches it is one of the preview.
    """
    thinker = tokenizer_of(THINKER_CONTROLS)
    config = {**_config(thinker, llm), "vision_config": vision}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": thinker.token_to_id("<|role_end|>")})
    _write_json(folder / "preprocessor_config.json", {"min_pixels": 64 * 64, "max_pixels": 256 * 256})
    weights = random_weights(model_shapes(config), seed)
    weights["model.lm_head.weight"] *= _likely(thinker)[:, None]
    _write_shards(folder, weights)
    thinker.save(str(folder / "tokenizer.json"))
    _write_talker(folder / "talker", seed, talker, vae)


def _write_talker(folder: Path, seed: int, talker: Mapping[str, Any], vae: Mapping[str, Any]) -> None:
    tokenizer, in_chat = tokenizer_of(TALKER_CONTROLS), vae.get("patch_size", -1) > 0
    llm = {**TALKER_LLM, "vocab_size": tokenizer.get_vocab_size()}
    for part, content in ((".", talker), ("llm", llm), ("vae", vae)):
        _write_json(folder / part / "config.json", content)
    tokenizer.save(str(folder / "llm" / "tokenizer.json"))
    shapes = talker_shapes(talker, llm, in_chat=in_chat)
    _write_safetensors(folder / "model.safetensors", random_weights(shapes, seed))
    _write_safetensors(folder / "vae" / "model.safetensors", audible(random_weights(vae_shapes(vae), seed)))
    _write_voices(folder, vae.get("sample_rate", 16000))
    if in_chat:
        _write_speaker_network(folder / "campplus.onnx")


def _config(tokenizer: Tokenizer, llm: Mapping[str, Any]) -> dict[str, Any]:
    ids = {name: tokenizer.token_to_id(token) for name, token in (("eos", "<|role_end|>"), ("pad", "<|endoftext|>"))}
    patches = {"image_patch_token": "<imagePatch>", "audio_patch_token": "<audioPatch>"}
    own = {name: tokenizer.token_to_id(token) for name, token in patches.items()}
    own |= {f"{name}_token_id": id for name, id in ids.items()}
    return {
        "architectures": ["BailingMM2NativeForConditionalGeneration"],
        "model_type": "bailingmm_moe_v2_lite",
        "mlp_depth": 2,
        "llm_config": {**llm, **own, "vocab_size": tokenizer.get_vocab_size()},
        "audio_config": {
            "ds_kernel_size": 3,
            "ds_stride": 2,
            "norm_query_embeds": True,
            "whisper_encoder_config": WHISPER,
        },
    }


def tokenizer_of(controls: Iterable[str]) -> Tokenizer:
    """Bytes, `WORDS` with a blank before each, and `controls`; any text can be written."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = {letter: id for id, letter in enumerate(alphabet)}, []
    for word in WORDS:
        known = "Ġ"
        for letter in word:
            if known + letter not in vocab:
                vocab[known + letter] = len(vocab)
                merges.append((known, letter))
            known += letter
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(controls))
    return tokenizer


def _likely(tokenizer: Tokenizer) -> np.ndarray:
    """For each token how far its logit may be from 0: words, stops and the end of a turn are what is said."""
    far = {f"Ġ{word}": 6.0 for word in WORDS} | dict.fromkeys(MARKS, 6.0) | {"<|role_end|>": 5.0}
    vocabulary = tokenizer.get_vocab()
    return np.array([far.get(token, 0.0) for token in sorted(vocabulary, key=vocabulary.__getitem__)], np.float32)


def random_weights(shapes: Shapes, seed: int) -> dict[str, np.ndarray]:
    """A tensor for each of `shapes`, neither near 0 nor near 1, so that every one of them matters."""
    return {name: _drawn(name, shape, seed) for name, shape in shapes.items()}


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """One tensor; it depends on its name, its shape and `seed` alone."""
    if name.endswith("inv_freq"):
        return (10000.0 ** (-np.arange(shape[0]) / shape[0])).astype(np.float32)
    if name.endswith("istft.window"):
        return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(shape[0]) / shape[0])).astype(np.float32)
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape).astype(np.float32)
    if name.endswith("bias"):
        return normal * np.float32(0.1)
    if len(shape) == 1:  # of a norm
        return 1 + normal * np.float32(0.1)
    if "embed" in name.rsplit(".", 2)[-2] or name.endswith(("cls_embed", "positional_embedding")):
        return normal * np.float32(1.0 if "word_embeddings" in name or "embed_tokens" in name else 0.3)
    return normal * np.float32(np.prod(shape[1:]) ** -0.5)


def audible(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those of an AudioVAE with low sounds louder than high ones, at a level of speech."""
    bias = weights["decoder.head.out.bias"]
    num_pitches = len(bias) // 2
    bias[:num_pitches] += np.linspace(3.6, -3, num_pitches)
    weights["decoder.head.out.weight"] *= np.float32(0.7)
    return weights


def _write_voices(talker: Path, rate_hz: int) -> None:
    """Recordings of `VOICES`."""
    listed = {name: {"prompt_wav_path": f"data/wavs/{name}.wav", "prompt_text": SAID} for name in VOICES}
    _write_json(talker / "data" / "voice_name.json", listed)
    (talker / "data" / "wavs").mkdir()
    at = np.arange(rate_hz) / rate_hz  # 1 s
    for name, pitch_hz in VOICES.items():
        sound = sum(np.sin(2 * np.pi * pitch_hz * tone * at) / tone for tone in range(1, 6))
        sound = 8000 * sound * np.abs(np.sin(2 * np.pi * 2 * at))
        with wave.open(str(talker / "data" / "wavs" / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, rate_hz, 0, "NONE", ""))
            file.writeframes(sound.astype("<i2").tobytes())


def _write_speaker_network(file: Path) -> None:
    """In CAM++'s place: how loud each band of the features [1, n, 80] is, times a matrix."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    matrix = np.random.default_rng(0).standard_normal((80, SPEAKER_DIM)).astype(np.float32) / 9
    nodes = [
        helper.make_node("Mul", ["features", "features"], ["squares"]),
        helper.make_node("ReduceMean", ["squares", "axes"], ["loudness"], keepdims=0),
        helper.make_node("MatMul", ["loudness", "matrix"], ["embedding"]),
    ]
    graph = helper.make_graph(
        nodes,
        "speaker",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, [1, None, 80])],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, [1, SPEAKER_DIM])],
        [numpy_helper.from_array(matrix, "matrix"), numpy_helper.from_array(np.array([1]), "axes")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), file)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


def _write_safetensors(path: Path, weights: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, path)


def _write_shards(folder: Path, weights: dict[str, np.ndarray]) -> None:
    """In two files and an index of them, as large checkpoints are."""
    names = sorted(weights)
    index: dict[str, str] = {}
    for number, own in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        _write_safetensors(folder / file, {name: weights[name] for name in own})
        index |= dict.fromkeys(own, file)
    size = sum(each.nbytes for each in weights.values())
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))},
    )
