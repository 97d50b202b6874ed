"""Ming-Omni with streaming speech: hears and sees, answers in text, and speaks the answer while it is written.

    preprocess => audio_encoder, image_encoder => (+) merge => thinker ~> detokenize ~> segment ~> talker ~> vocoder
    transcribe
    voice

The thinker and the talker meet in text (as in Ming-flash-omni), so speech from text enters at `segment`. What is only
to be written down goes to `transcribe`, and a recording whose voice is to be learned to `voice`.
"""

from actors.detokenize import Detokenize
from actors.merge import Merge
from actors.ming.hearing import MingAudioEncoder
from actors.ming.merging import MingMerge
from actors.ming.seeing import MingImageEncoder
from actors.ming.speaking import MingTalker
from actors.ming.thinking import MingThinker
from actors.ming.vocoder import MingVocoder
from actors.ming.voices import MingVoiceEncoder
from actors.piper.talker import PiperTalker
from actors.piper.vocoder import PiperVocoder
from actors.preprocess import Preprocess
from actors.roles import (
    AudioEncoderRole,
    DetokenizeRole,
    ImageEncoderRole,
    MergeRole,
    PreprocessRole,
    SegmenterRole,
    TalkerRole,
    ThinkerRole,
    TranscriberRole,
    VocoderRole,
    VoiceEncoderRole,
)
from actors.segmenter import Segmenter
from actors.thinker import Thinker
from actors.tiny_talker.talker import TinyTalker
from actors.whisper.scribe import WhisperScribe
from actors.whisper.transcriber import WhisperTranscriber
from omniflow import CHECKPOINT, Budget, Checkpoint, Graph, absent, bind, one_for_one

graph = Graph("ming_omni")
preprocess = graph.stage("preprocess", PreprocessRole, near="thinker")
audio_encoder = graph.stage("audio_encoder", AudioEncoderRole)
image_encoder = graph.stage("image_encoder", ImageEncoderRole)
merge = graph.stage("merge", MergeRole, near="thinker")
thinker = graph.stage("thinker", ThinkerRole)
detokenize = graph.stage("detokenize", DetokenizeRole, near="thinker")
segment = graph.stage("segment", SegmenterRole, near="talker")
talker = graph.stage("talker", TalkerRole)
vocoder = graph.stage("vocoder", VocoderRole)
transcribe = graph.stage("transcribe", TranscriberRole, near="audio_encoder")
voice = graph.stage("voice", VoiceEncoderRole, near="talker")

graph.result(preprocess, audio_encoder)
graph.result(preprocess, image_encoder)
graph.fan_in(merge, prompt=preprocess, audio=audio_encoder, image=image_encoder)
graph.result(merge, thinker)
graph.stream(thinker, detokenize, bound=64)
graph.stream(detokenize["text"], segment, bound=64)
graph.stream(segment, talker, bound=8)
graph.stream(talker, vocoder, bound=8)

graph.input(chat=preprocess, speech=segment, transcription=transcribe, voice=voice)
graph.output(
    text=detokenize["text"],
    tool_calls=detokenize["tool_calls"],
    audio=vocoder,
    usage=thinker["result"],
    transcript=transcribe,
    voice=voice,
)

again = one_for_one(max_restarts=5, within_s=60)
embedded = {
    "preprocess": bind(Preprocess),
    "audio_encoder": bind(WhisperTranscriber, memory=Budget(weights="80 MB", workspace="60 MB"), restart=again),
    "image_encoder": absent("this profile has no image encoder: no small one is packaged; send text or audio"),
    "merge": bind(Merge, model="smollm2-135m-instruct"),
    "thinker": bind(
        Thinker,
        model="smollm2-135m-instruct",
        memory=Budget(weights="650 MB", workspace="300 MB", kv_tokens=16384, kv_bytes_per_token=46080),
        restart=again,
    ),
    "detokenize": bind(Detokenize, model="smollm2-135m-instruct"),
    "segment": bind(Segmenter),
    "talker": bind(
        TinyTalker,
        memory=Budget(weights="65 MB", workspace="250 MB", kv_tokens=16384, kv_bytes_per_token=7168),
        restart=again,
    ),
    "vocoder": bind(PiperVocoder, memory=Budget(weights="7 MB", workspace="100 MB"), restart=again),
    "transcribe": bind(WhisperScribe, memory=Budget(workspace="60 MB")),
    "voice": absent("this talker has the voices that it was trained with, and cannot learn others"),
}
vits_talker = bind(PiperTalker, memory=Budget(weights="57 MB", workspace="100 MB"), restart=again)
graph.profile(
    "embedded",
    "small real models that run on a laptop CPU: SmolLM2-135M thinks, Whisper tiny.en hears, a tiny AR talker speaks",
    **embedded,
)
graph.profile(
    "embedded-vits",
    "the same, spoken by the Piper voice 'joe' itself, which is not autoregressive",
    **embedded | {"talker": vits_talker},
)

ming = {
    "preprocess": bind(Preprocess, max_videos=4),
    "audio_encoder": bind(MingAudioEncoder, model=CHECKPOINT, restart=again),
    "image_encoder": bind(MingImageEncoder, model=CHECKPOINT, restart=again),
    "merge": bind(MingMerge, model=CHECKPOINT),
    "thinker": bind(MingThinker, model=CHECKPOINT, max_tokens=24, temperature=1.0, restart=again),
    "detokenize": bind(Detokenize, model=CHECKPOINT),
    "segment": bind(Segmenter),
    "talker": bind(MingTalker, model=CHECKPOINT, restart=again),
    "vocoder": bind(MingVocoder, model=CHECKPOINT, restart=again),
    "voice": bind(MingVoiceEncoder, model=CHECKPOINT, restart=again),
    "transcribe": absent("this model writes down what it hears in a chat: send the audio, and ask for its words"),
}
talker_memory = Budget(weights="2.6 GB", workspace="6 GB", kv_tokens=32768, kv_bytes_per_token=12288)
vocoder_memory = Budget(weights="0.8 GB", workspace="4 GB")
hears_memory, sees_memory = Budget(weights="1.4 GB", workspace="3 GB"), Budget(weights="1.3 GB", workspace="5 GB")
thinker_memory = Budget(
    weights="206 GB", workspace="6 GB", kv_tokens=262144, kv_bytes_per_token=65536, heads=32, kv_heads=4
)
many = {"max_waiting": 256, "device": "gpu", "restart": again}
gpu_speech = {
    "talker": bind(MingTalker, model=CHECKPOINT, max_running=32, kv_tokens=32768, memory=talker_memory, **many),
    "vocoder": bind(MingVocoder, model=CHECKPOINT, device="gpu", memory=vocoder_memory, restart=again),
}
gpu = gpu_speech | {
    "audio_encoder": bind(MingAudioEncoder, model=CHECKPOINT, device="gpu", memory=hears_memory, restart=again),
    "image_encoder": bind(MingImageEncoder, model=CHECKPOINT, device="gpu", memory=sees_memory, restart=again),
    "thinker": bind(
        MingThinker, model=CHECKPOINT, engine="sglang", tp=4, max_running=64, kv_tokens=262144, memory=thinker_memory,
        **many,
    ),
}  # fmt: skip
MING, TTS = "bailingmm_moe_v2_lite", "hf:inclusionAI/Ming-omni-tts-0.5B"
graph.profile(
    "tiny",
    "all of Ming-flash-omni-2.0 with tiny random weights, on a CPU: it answers, and speaks, without sense",
    Checkpoint("ming-tiny", {"model_type": MING, "llm_config.hidden_size": range(1, 1025)}),
    **ming,
)
graph.profile(
    "ming-flash-omni-2.0",
    "100 B parameters, 6 B at work: its thinker on 4 GPUs of 80 GB, ears, eyes and speech beside it or on further ones",
    Checkpoint(
        "hf:inclusionAI/Ming-flash-omni-2.0",
        {"model_type": MING, "vision_config.model_type": ("qwen3_moe_vit", None)},
    ),
    **ming | gpu,
)
only_speaks = absent("Ming-omni-tts only speaks: send its text to /v1/audio/speech")
graph.profile(
    "ming-omni-tts",
    "Ming-omni-tts-0.5B, or the talker of Ming-flash-omni alone: speech from text on one GPU",
    Checkpoint(TTS, {"model_type": "dense"}),
    **dict.fromkeys(ming, only_speaks) | {name: ming[name] for name in ("segment", "voice")} | gpu_speech,
)
