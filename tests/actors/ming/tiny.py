"""A tiny Ming checkpoint that can be spoken to: the reference's, whose sound is heard, with room and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import soundfile
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers

from tests.actors.ming.reference import CHECKPOINT, weights

SPECIAL = ["<|im_start|>", "<|im_end|>", "<audio>", "<|vision_start|>", "<|vision_pad|>", "<|vision_end|>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,:;!?'-<|>_"


def tiny_tokenizer() -> Tokenizer:
    """A token each letter, whatever its case, and each special mark."""
    vocab = {each: id for id, each in enumerate(["<unk>", *SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write_checkpoint(folder: Path) -> Path:
    """All that `MingTalker` and `MingVocoder` read. A step is 36 ms of sound; segments last up to 9 s."""
    for file in CHECKPOINT.glob("*.safetensors"):
        (folder / file.name).symlink_to(file)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config["llm_config"]["max_position_embeddings"] = 1024
    config["audio_tokenizer_config"]["dec_kwargs"]["backbone"]["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


FLASH_NAMES = {"model.model.": "model.", "flowloss.cfm.": "cfm.", "linear_proj_audio.": "aggregator."}
"""Prefixes of Ming-omni-tts, and what Ming-flash-omni has in their place."""


def write_flash_checkpoint(folder: Path) -> Path:
    """The same in the layout of Ming-flash-omni: a folder of the talker, and in it those of `llm` and `vae`."""
    write_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    for name in ("config.json", *(file.name for file in CHECKPOINT.glob("*.safetensors"))):
        (folder / name).unlink()
    talker = folder / "talker"
    for each in ("llm", "vae"):
        (talker / each).mkdir(parents=True)
    (folder / "tokenizer.json").rename(talker / "llm" / "tokenizer.json")
    flow, vae = config["ditar_config"], config["audio_tokenizer_config"]
    sizes = {name: flow.pop(name) for name in ("patch_size", "history_patch_size")}
    own = {"flowmodel": flow, "aggregator": config["aggregator_config"], "latent_dim": 8, "steps": 10, **sizes}
    for part, content in ((".", own), ("llm", config["llm_config"]), ("vae", vae)):
        (talker / part / "config.json").write_text(json.dumps(content))
    save_file(flash_names(weights()), talker / "model.safetensors")
    own_vae = {name.removeprefix("audio."): each for name, each in weights().items() if name.startswith("audio.")}
    save_file(own_vae, talker / "vae" / "model.safetensors")
    return folder


def flash_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The talker's of `weights`, as Ming-flash-omni names them."""
    renamed = {}
    for name, tensor in weights.items():
        old = next((each for each in FLASH_NAMES if name.startswith(each)), "")
        if not name.startswith("audio."):
            renamed[FLASH_NAMES.get(old, "") + name.removeprefix(old)] = tensor
    return renamed


def write_campplus(file: Path, size: int = 192) -> np.ndarray:
    """A network in the place of CAM++: the mean of all frames' squares, times the matrix [80, size] given back."""
    matrix = np.random.default_rng(5).standard_normal((80, size), np.float32)
    square = helper.make_node("Mul", ["features", "features"], ["squares"])
    mean = helper.make_node("ReduceMean", ["squares", "axes"], ["mean"], keepdims=0)
    embed = helper.make_node("MatMul", ["mean", "matrix"], ["embedding"])
    float32 = TensorProto.FLOAT
    graph = helper.make_graph(
        [square, mean, embed],
        "campplus",
        [helper.make_tensor_value_info("features", float32, [1, None, 80])],
        [helper.make_tensor_value_info("embedding", float32, [1, size])],
        [numpy_helper.from_array(matrix, "matrix"), numpy_helper.from_array(np.array([1]), "axes")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), file)
    return matrix


VOICES = {"Alto": "a low voice", "DB30": "二 voices"}
"""What is said in the recordings that `write_voices` writes."""


def write_voices(talker: Path) -> None:
    """What a talker's folder has of voices: recordings of `VOICES` of 2000 samples, one that is lost, and CAM++."""
    write_campplus(talker / "campplus.onnx")
    (talker / "data" / "wavs").mkdir(parents=True)
    listed = {name: {"prompt_wav_path": f"data/wavs/{name}.wav", "prompt_text": text} for name, text in VOICES.items()}
    for number, name in enumerate(VOICES):
        soundfile.write(talker / "data" / "wavs" / f"{name}.wav", recording(2000, number), 44100, "FLOAT")
    lost = {"Lost": {"prompt_wav_path": "data/wavs/lost.wav", "prompt_text": "gone"}}
    (talker / "data" / "voice_name.json").write_text(json.dumps(listed | lost))


def recording(length: int, seed: int = 0) -> np.ndarray:
    """A tone that swells, and noise; float32 at 44.1 kHz."""
    at = np.arange(length) / 44100
    tone = 0.3 * np.sin(2 * np.pi * (150 + 70 * seed) * at) * (1 + np.sin(2 * np.pi * 3 * at))
    sound: np.ndarray = tone + 0.02 * np.random.default_rng(seed).standard_normal(length)
    return sound.astype(np.float32)
