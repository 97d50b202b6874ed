"""What /openapi.json says of requests beyond their types: what fields mean, and what endpoints check by hand."""

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
        "n": "So many answers.",
        "frequency_penalty": "Makes a token less likely for each time that it was written.",
        "presence_penalty": "Makes a token less likely once it was written.",
        "repetition_penalty": "Above 1: makes a token less likely that is in the prompt or was written. 1: does not.",
        "logit_bias": "Added to the logits of these token ids.",
        "logprobs": "Tell the log-probability of each token.",
        "top_logprobs": "And those of so many likeliest ones in its place.",
        "response_format": "What the answer is to look like; a JSON schema always holds.",
        "tools": "Functions that the model may ask its caller to call.",
        "tool_choice": "Which of them it may call, or must.",
        "parallel_tool_calls": "False: one call at most.",
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
        "ref_audio": "A recording to sound like, instead of a voice: a data URI, base64, or http(s) where fetched.",
        "ref_text": "What is said in it. Null: unknown.",
    },
    "TranscriptionRequest": {
        "model": "The id of a served model.",
        "language": "What is spoken, as `en`. Left out: it is found out.",
        "languages[]": "What may be spoken.",
        "prompt": "What was said before, or how names are spelled.",
        "keywords[]": "How names are spelled.",
        "response_format": "Left out: json.",
        "temperature": "0: always the likeliest token.",
        "timestamp_granularities[]": "What `verbose_json`, and only that, gives times of; left out: segments.",
        "include[]": "Not taken.",
        "stream": "Send the text as server-sent events, as it is understood; `json` and `text` only.",
    },
}
"""By Struct and field."""

_BASE64 = r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{4}|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{2}==)$"
_NULL = {"type": "null"}
_THERE = {"not": _NULL}


def _uri(kind: str) -> dict[str, Any]:
    """A data URI of this kind."""
    return {"properties": {"url": {"pattern": rf"^data:{kind};base64,{_BASE64}"}}}


def _is(**fields: Any) -> dict[str, Any]:
    """True of an object that has these fields."""
    return {"properties": fields, "required": list(fields)}


_FORMATS = {"enum": ["json", "text", "srt", "verbose_json", "vtt"]}

NARROWED: dict[str, dict[str, dict[str, Any]]] = {
    "SpeechRequest": {"input": {"pattern": r"\S"}, "ref_text": {"pattern": r"\S"}},
    "InputAudio": {"data": {"pattern": f"^{_BASE64}", "contentEncoding": "base64"}},
    "ChatRequest": {"logit_bias": {"propertyNames": {"pattern": r"^(?:0|[1-9][0-9]{0,9})$"}}},
    "TranscriptionRequest": {"response_format": {"anyOf": [_FORMATS, _NULL]}},
    "TranslationRequest": {"response_format": {"anyOf": [_FORMATS, _NULL]}},
}
"""Added to the schemas of these fields."""

NOT_FETCHED: dict[str, dict[str, dict[str, Any]]] = {
    "AudioUrlContent": {"audio_url": _uri("audio/(?:wav|x-wav|mpeg|flac|ogg)")},
    "ImageContent": {"image_url": _uri(r"image/\w+")},
    "VideoContent": {"video_url": _uri(r"video/\w+")},
}
"""The same, where nothing is fetched by URL."""

RULES: dict[str, list[dict[str, Any]]] = {
    "Message": [
        {
            "if": _is(role={"const": "assistant"}),
            "then": {
                "anyOf": [_is(content=_THERE), _is(audio=_THERE), _is(tool_calls={"type": "array", "minItems": 1})]
            },
            "else": _is(content=_THERE) | {"properties": {"content": _THERE, "tool_calls": {"maxItems": 0}}},
        },
        {"if": _is(role={"const": "tool"}), "then": _is(tool_call_id={"type": "string"})},
    ],
    "SpeechRequest": [{"if": _is(ref_text=_THERE), "then": _is(ref_audio=_THERE)}],
    "ChatRequest": [
        {"if": _is(top_logprobs={"type": "integer"}), "then": _is(logprobs={"const": True})},
        {"properties": {"modalities": {"items": {"not": {"const": "image"}}}}},
        {
            "if": _is(tool_choice={"not": {"enum": [None, "none", "auto"]}}),
            "then": _is(tools={"type": "array", "minItems": 1}),
        },
        {
            "if": _is(stream={"const": True}, modalities={"contains": {"const": "audio"}}, audio=_is(format=_THERE)),
            "then": {"properties": {"audio": {"properties": {"format": {"enum": ["pcm16", None]}}}}},
        },
    ],
}
"""What fields of these Structs ask of each other."""

REFUSED = {
    "ChatRequest": ("functions", "function_call", "web_search_options"),
    "FileData": ("file_id",),
    "TranscriptionRequest": ("include[]",),
}
"""Fields of which only null is taken, or no item."""

TAG_MAY_BE_LEFT_OUT = ("FunctionTool", "MessageToolCall")
"""Structs whose `type` msgspec does not ask for, because there is but one that they can be."""
