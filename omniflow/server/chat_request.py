"""The body of POST /v1/chat/completions, and its way to `media.Chat` and `media.Options`.

Structs ignore keys they do not know; every field may be null. What a graph of this kind cannot do is refused by
`refuse_unsupported`; hints that change no result (user, store, metadata, service_tier, ...) are not even read.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from omniflow.errors import InvalidInputError, UnsupportedError
from omniflow.media import AudioPart, Chat, ChatMessage, ImagePart, Options, Part, TextPart, VideoPart
from omniflow.server.transcripts import Transcripts

NonEmpty = Annotated[str, Meta(min_length=1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_DATA_URI = re.compile(r"data:(?P<mime>[^;,]*)(?:;[^;,]*)*;base64,")
_AUDIO_MIMES = {
    "audio/wav": "wav",
    "audio/x-wav": "wav",
    "audio/wave": "wav",
    "audio/mpeg": "mp3",
    "audio/mp3": "mp3",
    "audio/flac": "flac",
    "audio/x-flac": "flac",
    "audio/ogg": "ogg",
}


class Url(Struct, frozen=True):
    """`{"url": ...}`: here always a data URI."""

    url: str


class InputAudio(Struct, frozen=True):
    """Base64 of an encoded clip."""

    data: NonEmpty
    format: Literal["wav", "mp3", "flac", "ogg"]


class TextContent(Struct, frozen=True, tag="text", tag_field="type"):
    """Text."""

    text: str


class AudioContent(Struct, frozen=True, tag="input_audio", tag_field="type"):
    """A clip, as OpenAI's clients send it."""

    input_audio: InputAudio


class AudioUrlContent(Struct, frozen=True, tag="audio_url", tag_field="type"):
    """A clip as a data URI, as clients of vLLM send it."""

    audio_url: Url


class ImageContent(Struct, frozen=True, tag="image_url", tag_field="type"):
    """An image as a data URI."""

    image_url: Url


class VideoContent(Struct, frozen=True, tag="video_url", tag_field="type"):
    """A video as a data URI, as clients of vLLM send it."""

    video_url: Url


class FileContent(Struct, frozen=True, tag="file", tag_field="type"):
    """A file; refused."""


class RefusalContent(Struct, frozen=True, tag="refusal", tag_field="type"):
    """What the assistant declined to say, in an earlier turn."""

    refusal: str


Content = TextContent | AudioContent | AudioUrlContent | ImageContent | VideoContent | FileContent | RefusalContent


class AudioRef(Struct, frozen=True):
    """What the assistant said aloud in an earlier turn."""

    id: str


class Message(Struct, frozen=True):
    """One turn. An assistant's may have `audio` in place of `content`."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Annotated[list[Content], Meta(min_length=1)] | None = None
    audio: AudioRef | None = None
    tool_calls: list[Any] | None = None


class VoiceRef(Struct, frozen=True):
    """A voice by its id."""

    id: NonEmpty


Voice = NonEmpty | VoiceRef


def voice_name(voice: Voice | None) -> str | None:
    """The voice asked for, however it was written; None for the model's own."""
    return voice.id if isinstance(voice, VoiceRef) else voice


class AudioOptions(Struct, frozen=True):
    """How an answer is spoken. `format` null: wav whole, pcm16 streamed."""

    voice: Voice | None = None
    format: Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"] | None = None


class StreamOptions(Struct, frozen=True):
    """What a stream tells beside the answer."""

    include_usage: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """The form of the answer; only `text` is supported."""

    type: str


class ChatRequest(Struct, frozen=True, kw_only=True):
    """The request; ranges are OpenAI's."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    modalities: Annotated[list[Literal["text", "audio"]], Meta(min_length=1)] | None = None
    audio: AudioOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Int64 | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], Meta(max_length=16)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    web_search_options: dict[str, Any] | None = None

    @property
    def wants_audio(self) -> bool:
        """True where the answer is to be spoken; its text is then the transcript."""
        return self.modalities is not None and "audio" in self.modalities

    @property
    def wants_usage_chunk(self) -> bool:
        """True where a stream is to tell its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def options(self) -> Options:
        """What the stages of the graph see of this request."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Options(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            seed=self.seed,
            stop=stop,
            voice=voice_name(self.audio.voice) if self.audio is not None else None,
        )


def refuse_unsupported(request: ChatRequest) -> None:
    """Raises UnsupportedError, naming the field, for what would change the answer and cannot be done here."""
    asked = {
        "n": (request.n or 1) > 1,
        "frequency_penalty": bool(request.frequency_penalty),
        "presence_penalty": bool(request.presence_penalty),
        "logit_bias": bool(request.logit_bias),
        "logprobs": bool(request.logprobs),
        "top_logprobs": bool(request.top_logprobs),
        "response_format": request.response_format is not None and request.response_format.type != "text",
        "tools": bool(request.tools) and request.tool_choice != "none",
        "tool_choice": request.tool_choice not in (None, "none", "auto"),
        "functions": bool(request.functions),
        "web_search_options": request.web_search_options is not None,
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise UnsupportedError(f"{field}: not supported by this model; leave it out", param=field)


def chat_of(request: ChatRequest, transcripts: Transcripts) -> Chat:
    """The conversation as a graph takes it. Raises InvalidInputError with the path of what cannot be used."""
    return Chat(
        tuple(
            ChatMessage(message.role, _parts(message, f"messages[{i}]", transcripts))
            for i, message in enumerate(request.messages)
        )
    )


def _parts(message: Message, at: str, transcripts: Transcripts) -> tuple[Part, ...]:
    if message.tool_calls or message.role == "tool":
        field = "tool_calls" if message.tool_calls else "role"
        raise UnsupportedError(f"{at}.{field}: this model does not call tools", param=f"{at}.{field}")
    if message.audio is not None and message.role == "assistant":
        return (TextPart(_transcript(message.audio.id, f"{at}.audio.id", transcripts)),)
    if message.content is None:
        raise InvalidInputError(f"{at}.content: is required", param=f"{at}.content")
    if isinstance(message.content, str):
        return (TextPart(message.content),)
    return tuple(_part(content, f"{at}.content[{i}]") for i, content in enumerate(message.content))


def _transcript(audio_id: str, at: str, transcripts: Transcripts) -> str:
    transcript = transcripts.find(audio_id)
    if transcript is None:
        raise InvalidInputError(
            f"{at}: {audio_id!r} is unknown or has expired; send its transcript as content", param=at
        )
    return transcript


def _part(content: Content, at: str) -> Part:
    match content:
        case TextContent(text) | RefusalContent(text):
            return TextPart(text)
        case AudioContent(audio):
            return AudioPart(_base64(audio.data, f"{at}.input_audio.data"), audio.format)
        case AudioUrlContent(url):
            return _audio_part(url.url, f"{at}.audio_url.url")
        case ImageContent(url):
            return ImagePart(_data_uri(url.url, f"{at}.image_url.url", "image/")[1])
        case VideoContent(url):
            return VideoPart(_data_uri(url.url, f"{at}.video_url.url", "video/")[1])
        case FileContent():
            raise UnsupportedError(f"{at}: files are not taken; send text, audio or images", param=at)


def _audio_part(url: str, at: str) -> AudioPart:
    mime, data = _data_uri(url, at, "audio/")
    if mime not in _AUDIO_MIMES:
        raise UnsupportedError(f"{at}: {mime} is not taken; one of {', '.join(_AUDIO_MIMES)} is", param=at)
    return AudioPart(data, _AUDIO_MIMES[mime])


def _data_uri(url: str, at: str, kind: str) -> tuple[str, bytes]:
    """MIME type and bytes of a base64 data URI."""
    if url[:8].lower().startswith(("http://", "https://")):
        raise UnsupportedError(
            f"{at}: remote URLs are not fetched; send the bytes as data:{kind}...;base64,...", param=at
        )
    found = _DATA_URI.match(url)
    mime = found["mime"].lower() if found else ""
    if found is None or not mime.startswith(kind):
        raise InvalidInputError(f"{at}: expected a data URI like data:{kind}...;base64,...", param=at)
    return mime, _base64(url[found.end() :], at)


def _base64(text: str, at: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInputError(f"{at}: is not base64: {error}", param=at) from error
    if not data:
        raise InvalidInputError(f"{at}: is empty", param=at)
    return data
