"""Ming-omni's speech side: a Qwen2 talker whose steps are latents, and the AudioVAE that makes sound of them.

By inclusionAI, MIT; the names of weights and settings are those of its checkpoints.
"""
