"""The weights of the voice activity detector."""

from __future__ import annotations

from omniflow.weights import PackagedWeights, Wheel, WheelFile

SILERO_VAD = PackagedWeights(
    name="silero-vad",
    license="MIT",
    wheels=(
        Wheel(
            package="silero-vad",
            version="6.2.3",
            sha256="7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
            size_bytes=11_317_527,
        ),
    ),
    files=(
        WheelFile(
            name="silero_vad_16k_sequence.onnx",
            sha256="9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85",
            parts=("silero_vad/data/silero_vad_16k_sequence.onnx",),
        ),
    ),
)
"""By the Silero team. The form of the network that takes any number of frames of one clip in a call."""
