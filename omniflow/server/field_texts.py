"""What fields of requests mean, for /openapi.json: their types say the rest."""

from __future__ import annotations

from typing import Any

FIELD_TEXTS: dict[str, dict[str, str]] = {
    "ChatRequest": {
        "model": "The id of a served model.",
        "messages": "The conversation so far, oldest first.",
        "stream": "Send the answer as server-sent events, as it is made; `data: [DONE]` ends one that is whole.",
        "stream_options": "What a stream tells beside the answer.",
        "modalities": "`audio`: the answer is also spoken; its text is then the transcript.",
        "audio": "How it is spoken.",
        "max_tokens": "As `max_completion_tokens`, which goes before it.",
        "max_completion_tokens": "Tokens of the answer, at most.",
        "temperature": "0: always the likeliest token.",
        "top_p": "Draw from the likeliest tokens that have this share of the probability.",
        "top_k": "Draw from so many of the likeliest tokens. 0: from all.",
        "seed": "The same seed gives the same answer.",
        "stop": "The answer ends before the first of these texts.",
    },
    "SpeechRequest": {
        "model": "The id of a served model.",
        "input": "The text to say.",
        "voice": "Whose voice. Null: the model's own.",
        "response_format": "Null: mp3.",
        "speed": "2: twice as fast.",
        "stream_format": "`sse`: pieces of the file as events. `audio`: its bytes, while they are made.",
        "stream": "False: a whole file, with its true length in its header. True: one that starts at once.",
        "seed": "The same seed gives the same sound.",
        "instructions": "Taken, and without effect.",
    },
}
"""By Struct and field."""

NARROWED: dict[str, dict[str, dict[str, Any]]] = {"SpeechRequest": {"input": {"pattern": r"\S"}}}
"""Limits that endpoints check by hand."""
