"""Ming-flash-omni-2.0, which hears and sees, thinks and speaks, and Ming-omni-tts, which is its talker alone.

By inclusionAI, MIT; the names of weights and settings are those of its checkpoints.
"""

from omniflow.weights import PackagedWeights

MING_TINY = PackagedWeights(
    name="ming-tiny",
    license="nobody's: random numbers",
    convert="actors.ming.tiny:write",
    convert_version=2,
)
"""All parts of Ming-flash-omni-2.0, tiny: 6 MB, written in half a second; see `actors.ming.tiny`."""
