"""Ming-Omni with streaming speech: hears and sees, answers in text, and speaks the answer while it is written.

    preprocess => audio_encoder, image_encoder => (+) merge => thinker ~> detokenize ~> segment ~> talker ~> vocoder
                                                               thinker ~> painter
    transcribe
    voice

The thinker and the talker meet in text (as in Ming-flash-omni), so speech from text enters at `segment`. What is only
to be written down goes to `transcribe`, and a recording whose voice is to be learned to `voice`. An image would be made
of the thinker's hidden states by `painter`, which no profile has yet.
"""

from actors.roles import (
    AudioEncoderRole,
    DetokenizeRole,
    ImageEncoderRole,
    MergeRole,
    PainterRole,
    PreprocessRole,
    SegmenterRole,
    TalkerRole,
    ThinkerRole,
    TranscriberRole,
    VocoderRole,
    VoiceEncoderRole,
)
from graphs import _embedded, _ming
from omniflow import Graph

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
painter = graph.stage("painter", PainterRole)
voice = graph.stage("voice", VoiceEncoderRole, near="talker")

graph.result(preprocess, audio_encoder)
graph.result(preprocess, image_encoder)
graph.fan_in(merge, prompt=preprocess, audio=audio_encoder, image=image_encoder)
graph.result(merge, thinker)
graph.stream(thinker, detokenize, bound=64)
graph.stream(detokenize["text"], segment, bound=64)
graph.stream(segment, talker, bound=8)
graph.stream(talker, vocoder, bound=8)
graph.stream(thinker, painter, bound=64)

graph.input(chat=preprocess, speech=segment, transcription=transcribe, voice=voice)
graph.output(
    text=detokenize["text"],
    tool_calls=detokenize["tool_calls"],
    audio=vocoder,
    usage=thinker["result"],
    transcript=transcribe,
    voice=voice,
    image=painter,
)

graph.profile(
    "embedded",
    "small real models that run on a laptop CPU: SmolLM2-135M thinks, Whisper tiny.en hears, a tiny AR talker speaks",
    **_embedded.embedded,
)
graph.profile(
    "embedded-vits",
    "as embedded, but spoken by the Piper voice 'joe' itself, which is not autoregressive",
    **_embedded.embedded_vits,
)
graph.profile(
    "tiny",
    "all of Ming-flash-omni-2.0 with tiny random weights, on a CPU: it answers, and speaks, without sense",
    _ming.tiny_checkpoint,
    **_ming.tiny,
)
graph.profile(
    "ming-flash-omni-2.0",
    "100 B parameters, 6 B at work: its thinker on 4 GPUs of 80 GB, ears, eyes and speech beside it or on further ones",
    _ming.flash_checkpoint,
    **_ming.flash,
)
graph.profile(
    "ming-flash-omni-preview",
    "what was released before it: the same thinker and ears, other eyes, and a talker of 16 kHz",
    _ming.preview_checkpoint,
    **_ming.preview,
)
graph.profile(
    "ming-omni-tts",
    "Ming-omni-tts-0.5B, or the talker of Ming-flash-omni alone: speech from text on one GPU",
    _ming.tts_checkpoint,
    **_ming.tts,
)
