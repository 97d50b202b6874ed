"""Small real models for a laptop's CPU: what the profiles `embedded` and `embedded-vits` of `ming_omni` bind."""

from actors.detokenize import Detokenize
from actors.merge import Merge
from actors.piper.talker import PiperTalker
from actors.piper.vocoder import PiperVocoder
from actors.preprocess import Preprocess
from actors.segmenter import Segmenter
from actors.thinker import Thinker
from actors.tiny_talker.talker import TinyTalker
from actors.whisper.scribe import WhisperScribe
from actors.whisper.transcriber import WhisperTranscriber
from omniflow import Budget, absent, bind, one_for_one

again = one_for_one(max_restarts=5, within_s=60)
JOE_LETTERS_PER_S = 18.0
"""16.9 on average of 24 sentences; a quarter of them goes by quicker than 17.8."""
embedded = {
    "preprocess": bind(Preprocess),
    "audio_encoder": bind(WhisperTranscriber, memory=Budget(weights="80 MB", workspace="60 MB"), restart=again),
    "image_encoder": absent("this profile has no image encoder: no small one is packaged; send text or audio"),
    "merge": bind(Merge, model="smollm2-135m-instruct"),
    "thinker": bind(
        Thinker,
        model="smollm2-135m-instruct",
        # On a GPU it is a cap: SGLang's buffers take 0.2-0.5 GB beside the weights, and graphs of prompts 0.1-0.3.
        memory=Budget("650 MB", "1 GB", kv_tokens=16384, kv_bytes_per_token=46080, heads=9, kv_heads=3),
        restart=again,
    ),
    "detokenize": bind(Detokenize, model="smollm2-135m-instruct"),
    "segment": bind(Segmenter, letters_per_s=JOE_LETTERS_PER_S),
    "talker": bind(
        TinyTalker,
        model="tiny-talker",
        memory=Budget(weights="65 MB", workspace="250 MB", kv_tokens=16384, kv_bytes_per_token=7168),
        restart=again,
    ),
    "vocoder": bind(PiperVocoder, memory=Budget(weights="7 MB", workspace="100 MB"), restart=again),
    "transcribe": bind(WhisperScribe, memory=Budget(workspace="60 MB")),
    "painter": absent("this profile makes no images"),
    "voice": absent("this talker has the voices that it was trained with, and cannot learn others"),
}
vits_talker = bind(PiperTalker, memory=Budget(weights="57 MB", workspace="100 MB"), restart=again)
embedded_vits = embedded | {"talker": vits_talker}
