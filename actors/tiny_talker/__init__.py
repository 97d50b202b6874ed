"""A small autoregressive talker in the voice of Piper's "joe", whose vocoder makes sound of its frames: US English.

Its weights were made for this project; their NOTICE says from what, and what of their licence is not settled.
"""

from omniflow.weights import InstalledWeights

TINY_TALKER = InstalledWeights(
    name="tiny-talker",
    license="not settled: see NOTICE of the package",
    package="omniflow-tiny-talker",
    files=(
        "codebooks.safetensors",
        "config.json",
        "talker-00001-of-00002.safetensors",
        "talker-00002-of-00002.safetensors",
        "talker.safetensors.index.json",
    ),
    size_bytes=32_189_495,
)
"""Shapes, steps and files: the package's README."""
