"""Ming itself: what the profiles `tiny`, `ming-flash-omni-2.0`, `ming-flash-omni-preview` and `ming-omni-tts` of
`ming_omni` bind, and for what.

Budgets are the weights at their real sizes, keys and values, and an estimate of the rest.
"""

from actors.detokenize import Detokenize
from actors.ming.hearing import MingAudioEncoder
from actors.ming.merging import MingMerge
from actors.ming.seeing import MingImageEncoder
from actors.ming.speaking import MingTalker
from actors.ming.thinking import MingThinker
from actors.ming.vocoder import MingVocoder
from actors.ming.voices import MingVoiceEncoder
from actors.preprocess import Preprocess
from actors.segmenter import Segmenter
from omniflow import CHECKPOINT, Budget, Checkpoint, absent, bind, one_for_one

_MODEL_TYPE = "bailingmm_moe_v2_lite"
_EYES = {"vision_config.model_type": ("qwen3_moe_vit", None)}
tiny_checkpoint = Checkpoint(
    "ming-tiny", {"model_type": _MODEL_TYPE, "llm_config.hidden_size": range(1, 1025), **_EYES}
)
flash_checkpoint = Checkpoint("hf:inclusionAI/Ming-flash-omni-2.0", {"model_type": _MODEL_TYPE, **_EYES})
preview_checkpoint = Checkpoint(
    "hf:inclusionAI/Ming-flash-omni-Preview",
    {"model_type": _MODEL_TYPE, "vision_config.model_type": "qwen2_5_vit"},
)
tts_checkpoint = Checkpoint("hf:inclusionAI/Ming-omni-tts-0.5B", {"model_type": "dense"})

_again = one_for_one(max_restarts=5, within_s=60)
tiny = {
    "preprocess": bind(Preprocess, max_videos=4),
    "audio_encoder": bind(MingAudioEncoder, model=CHECKPOINT, restart=_again),
    "image_encoder": bind(MingImageEncoder, model=CHECKPOINT, restart=_again),
    "merge": bind(MingMerge, model=CHECKPOINT),
    "thinker": bind(MingThinker, model=CHECKPOINT, max_tokens=24, temperature=1.0, restart=_again),
    "detokenize": bind(Detokenize, model=CHECKPOINT),
    "segment": bind(Segmenter),
    "talker": bind(MingTalker, model=CHECKPOINT, restart=_again),
    "vocoder": bind(MingVocoder, model=CHECKPOINT, restart=_again),
    "voice": bind(MingVoiceEncoder, model=CHECKPOINT, restart=_again),
    "painter": absent("no images are made: what Ming makes them with is not built here"),
    "transcribe": absent("this model writes down what it hears in a chat: send the audio, and ask for its words"),
}
_hears, _sees = Budget(weights="1.4 GB", workspace="3 GB"), Budget(weights="1.3 GB", workspace="5 GB")
_thinks = Budget(weights="206 GB", workspace="6 GB", kv_tokens=262144, kv_bytes_per_token=65536, heads=32, kv_heads=4)
_speaks = Budget(weights="2.6 GB", workspace="6 GB", kv_tokens=32768, kv_bytes_per_token=12288)
_sounds, _learns = Budget(weights="0.8 GB", workspace="4 GB"), Budget(weights="1.7 GB", workspace="1 GB")
_gpu = {"model": CHECKPOINT, "device": "gpu", "restart": _again}
_speech = {
    "talker": bind(MingTalker, max_running=32, max_waiting=256, kv_tokens=32768, memory=_speaks, **_gpu),
    "vocoder": bind(MingVocoder, memory=_sounds, **_gpu),
    "voice": bind(MingVoiceEncoder, memory=_learns, **_gpu),
}
flash = {
    **tiny,
    **_speech,
    "audio_encoder": bind(MingAudioEncoder, memory=_hears, **_gpu),
    "image_encoder": bind(MingImageEncoder, memory=_sees, **_gpu),
    "thinker": bind(
        MingThinker,
        engine="sglang",
        tp=4,
        max_tokens=2048,
        temperature=0.4,  # and top_p 0.9, as vllm-omni serves it
        max_running=64,
        max_waiting=256,
        kv_tokens=262144,
        memory=_thinks,
        **_gpu,
    ),
}
_sees_in_windows = Budget(weights="1.6 GB", workspace="5 GB")
# 50 latents a second instead of 12.5: 2048 positions for each of 32 segments, as the authors' program has for one.
_speaks_finer = Budget(weights="2.6 GB", workspace="6 GB", kv_tokens=65536, kv_bytes_per_token=12288)
preview = {
    **flash,
    "image_encoder": bind(MingImageEncoder, memory=_sees_in_windows, **_gpu),
    "talker": bind(MingTalker, max_running=32, max_waiting=256, kv_tokens=65536, memory=_speaks_finer, **_gpu),
}
_only_speaks = absent("Ming-omni-tts only speaks: send its text to /v1/audio/speech")
tts = {**dict.fromkeys(tiny, _only_speaks), "segment": tiny["segment"], **_speech}
