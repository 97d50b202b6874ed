"""Cuts a Piper voice (one VITS graph) where its stages meet, and takes the dice out of it.

    encoder.onnx   phonemes int64 [1, P], num_phonemes int64 [1], scales float32 [3] = (unused, length, duration noise),
                   duration_noise float32 [1, 2, P]
                   -> mean, log_scale float32 [1, 192, T]: the prior of the T latent frames that P phonemes last
    flow.onnx      prior float32 [1, 192, n], a draw from it -> latent float32 [1, 192, n]
    decoder.onnx   latent float32 [1, 192, n] -> samples float32 [1, 1, 1, 256 n]
    voice.json     the voice's own configuration: phoneme ids, sample rate, scales

The original draws its two noises inside (RandomNormalLike, without a seed). Here one is an input, and the other is
added between the first two graphs, where T is known; so a seed gives the same speech. With zero noise the three in a
row give what the original gives.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.utils import Extractor

ENCODER_INPUTS = {
    "input": "phonemes",
    "input_lengths": "num_phonemes",
    "scales": "scales",
    "/dp/RandomNormalLike_output_0": "duration_noise",
}
ENCODER_OUTPUTS = {"/Transpose_3_output_0": "mean", "/Transpose_5_output_0": "log_scale"}
PRIOR = "/Add_output_0"
MASK = "/Cast_2_output_0"
LATENT = "/Mul_7_output_0"


def convert(source: Path, target: Path) -> None:
    """Read `source/voice.onnx` and `source/voice.json`; write the files above into the folder `target`."""
    whole = Extractor(onnx.shape_inference.infer_shapes(onnx.load(source / "voice.onnx")))
    encoder = whole.extract_model(list(ENCODER_INPUTS), list(ENCODER_OUTPUTS))
    flow = whole.extract_model([PRIOR, MASK], [LATENT])
    decoder = whole.extract_model([LATENT], ["output"])
    _fix_to_one(flow, MASK)  # it masks the padding of a batch, and one utterance has none
    _save(encoder, ENCODER_INPUTS | ENCODER_OUTPUTS, target / "encoder.onnx")
    _save(flow, {PRIOR: "prior", LATENT: "latent"}, target / "flow.onnx")
    _save(decoder, {LATENT: "latent", "output": "samples"}, target / "decoder.onnx")
    (target / "voice.json").write_bytes((source / "voice.json").read_bytes())


def _fix_to_one(model: onnx.ModelProto, name: str) -> None:
    graph = model.graph
    graph.input.remove(next(value for value in graph.input if value.name == name))
    graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 1), np.float32), name))


def _save(model: onnx.ModelProto, names: dict[str, str], path: Path) -> None:
    graph = model.graph
    del graph.value_info[:]  # internal shapes, of no use to a runtime
    for value in [*graph.input, *graph.output]:
        value.name = names[value.name]
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    onnx.checker.check_model(model)
    onnx.save(model, path)
