"""The body of POST /v1/chat/completions, and its way to `media.Chat` and `media.Options`.

Structs ignore keys they do not know; every field may be null. What cannot be done at all is refused by
`refuse_unsupported`; hints that change no result (user, store, metadata, service_tier, ...) are not even read.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from omniflow.errors import InvalidInputError, UnsupportedError
from omniflow.media import (
    AudioPart,
    Chat,
    ChatMessage,
    ImagePart,
    Options,
    Part,
    TextPart,
    ToolCall,
    VideoPart,
)
from omniflow.server.remote import Fetched, Wanted
from omniflow.server.tools import FunctionTool, Identifier, JsonObject, ToolChoice, schema_text, tooling
from omniflow.server.transcripts import Transcripts

NonEmpty = Annotated[str, Meta(min_length=1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_DATA_URI = re.compile(r"data:(?P<mime>[^;,]*)(?:;[^;,]*)*;base64,", re.IGNORECASE)
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
_AUDIO_ENDINGS = {".wav": "wav", ".mp3": "mp3", ".flac": "flac", ".ogg": "ogg", ".opus": "ogg"}
_TEXT_MIMES = ("text/", "application/json")
_UNTYPED = "application/octet-stream"
MAX_CHOICES = 16
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_LEAST_TOP_P = 1e-6
"""What 0 stands for: the likeliest token, as with OpenAI. Of engines, some take nothing but more than 0."""


class Url(Struct, frozen=True):
    """`{"url": ...}`: a data URI, or where this server fetches media, http or https."""

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
    """A clip as clients of vLLM send it."""

    audio_url: Url


class ImageContent(Struct, frozen=True, tag="image_url", tag_field="type"):
    """An image."""

    image_url: Url


class VideoContent(Struct, frozen=True, tag="video_url", tag_field="type"):
    """A video as clients of vLLM send it."""

    video_url: Url


class FileData(Struct, frozen=True):
    """`file_data` is a data URI of an audio, image, video or text file."""

    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FileContent(Struct, frozen=True, tag="file", tag_field="type"):
    """A file: what it holds is taken as any other part."""

    file: FileData


class RefusalContent(Struct, frozen=True, tag="refusal", tag_field="type"):
    """What the assistant declined to say, in an earlier turn."""

    refusal: str


Content = TextContent | AudioContent | AudioUrlContent | ImageContent | VideoContent | FileContent | RefusalContent


class AudioRef(Struct, frozen=True):
    """What the assistant said aloud in an earlier turn. Clients that send back all of it send its `transcript`, too:
    that is what counts where the id has expired.
    """

    id: str
    transcript: str | None = None


class WrittenCall(Struct, frozen=True):
    """What was to be called; `arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class MessageToolCall(Struct, frozen=True, tag="function", tag_field="type"):
    """A call that an assistant asked for in an earlier turn."""

    id: NonEmpty
    function: WrittenCall


class Message(Struct, frozen=True):
    """One turn. An assistant's may have `audio`, `refusal` or `tool_calls` in place of `content`."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Annotated[list[Content], Meta(min_length=1)] | None = None
    refusal: str | None = None
    audio: AudioRef | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None


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


class TextFormat(Struct, frozen=True, tag="text", tag_field="type"):
    """The answer is whatever the model writes."""


class JsonObjectFormat(Struct, frozen=True, tag="json_object", tag_field="type"):
    """The answer is some JSON object."""


class JsonSchema(Struct, frozen=True):
    """A schema and its name. It always holds, `strict` or not."""

    name: Identifier
    description: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, frozen=True, tag="json_schema", tag_field="type"):
    """The answer is JSON that follows the schema."""

    json_schema: JsonSchema


class ChatRequest(Struct, frozen=True, kw_only=True):
    """The request; ranges are OpenAI's."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    modalities: Annotated[list[Literal["text", "audio", "image"]], Meta(min_length=1)] | None = None
    audio: AudioOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Int64 | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], Meta(max_length=16)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
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
        """What the stages of the graph see of it. Raises InvalidInputError where fields do not fit together."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        called = tooling(self.tools or (), self.tool_choice)
        return Options(
            temperature=self.temperature,
            top_p=None if self.top_p is None else max(self.top_p, _LEAST_TOP_P),
            top_k=self.top_k,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            seed=self.seed,
            stop=stop,
            voice=voice_name(self.audio.voice) if self.audio is not None else None,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((_token_id(key), bias) for key, bias in (self.logit_bias or {}).items()),
            top_logprobs=self._top_logprobs(),
            json_schema=self._json_schema(),
            tools=called.tools,
            tool_choice=called.tool_choice,
            tool_name=called.tool_name,
            parallel_tool_calls=self.parallel_tool_calls is not False,
        )

    def _top_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidInputError("top_logprobs: needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def _json_schema(self) -> str | None:
        match self.response_format:
            case JsonObjectFormat():
                return "{}"
            case JsonSchemaFormat(given):
                return schema_text(given.schema or {}, "response_format.json_schema.schema")
        return None


def _token_id(key: str) -> int:
    """One spelling a token: of "5" and "05" it could not be said which one holds."""
    if not _TOKEN_ID.fullmatch(key):
        raise InvalidInputError(f"logit_bias: {key!r} is not a token id like '50256'", param="logit_bias")
    return int(key)


def refuse_unsupported(request: ChatRequest) -> None:
    """Raises UnsupportedError, naming the field, for what would change the answer and is not done here."""
    asked = {
        "functions": (bool(request.functions), "send them as tools"),
        "function_call": (request.function_call is not None, "send a tool_choice"),
        "web_search_options": (request.web_search_options is not None, "this model does not search the web"),
    }
    for field, (is_asked, instead) in asked.items():
        if is_asked:
            raise UnsupportedError(f"{field}: is not taken; {instead}", param=field)
    if "image" in (request.modalities or ()):
        raise UnsupportedError(
            "modalities: no images are made here; ask for 'text', or for 'text' and 'audio'", param="modalities"
        )


def wanted_media(messages: Sequence[Message]) -> Iterator[Wanted]:
    """What the conversation names by http or https."""
    for i, message in enumerate(messages):
        for j, content in enumerate(message.content if isinstance(message.content, list) else ()):
            at = f"messages[{i}].content[{j}]"
            match content:
                case AudioUrlContent(Url(url)) if is_remote(url):
                    yield Wanted(url, f"{at}.audio_url.url")
                case ImageContent(Url(url)) if is_remote(url):
                    yield Wanted(url, f"{at}.image_url.url")
                case VideoContent(Url(url)) if is_remote(url):
                    yield Wanted(url, f"{at}.video_url.url")


def is_remote(url: str) -> bool:
    """True for what must be fetched."""
    return url[:8].lower().startswith(("http://", "https://"))


def chat_of(messages: Sequence[Message], transcripts: Transcripts, fetched: Mapping[str, Fetched]) -> Chat:
    """The conversation as a graph takes it; `fetched` holds what `wanted_media` names, by its URL.

    Raises InvalidInputError with the path of what cannot be used.
    """
    written, known_calls = [], set[str]()
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        calls = _tool_calls(message, at)
        known_calls.update(call.id for call in calls)
        call_id = _answered_call(message, at, known_calls)
        written.append(ChatMessage(message.role, _parts(message, at, transcripts, fetched), calls, call_id))
    return Chat(tuple(written))


def _tool_calls(message: Message, at: str) -> tuple[ToolCall, ...]:
    if message.tool_calls and message.role != "assistant":
        raise InvalidInputError(f"{at}.tool_calls: only an assistant's message may have some", param=f"{at}.tool_calls")
    calls = message.tool_calls or ()
    return tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in calls)


def _answered_call(message: Message, at: str, known: set[str]) -> str | None:
    if message.role != "tool":
        return None
    if message.tool_call_id is None:
        raise InvalidInputError(f"{at}.tool_call_id: is required", param=f"{at}.tool_call_id")
    if message.tool_call_id not in known:
        raise InvalidInputError(
            f"{at}.tool_call_id: no tool call of an earlier message has the id {message.tool_call_id!r}",
            param=f"{at}.tool_call_id",
        )
    return message.tool_call_id


def _parts(message: Message, at: str, transcripts: Transcripts, fetched: Mapping[str, Fetched]) -> tuple[Part, ...]:
    if message.audio is not None and message.role == "assistant":
        return (TextPart(_transcript(message.audio, f"{at}.audio.id", transcripts)),)
    if message.content is None:
        if message.refusal is not None and message.role == "assistant":
            return (TextPart(message.refusal),)
        if message.tool_calls:
            return ()
        raise InvalidInputError(f"{at}.content: is required", param=f"{at}.content")
    if isinstance(message.content, str):
        return (TextPart(message.content),)
    return tuple(_part(content, f"{at}.content[{i}]", fetched) for i, content in enumerate(message.content))


def _transcript(audio: AudioRef, at: str, transcripts: Transcripts) -> str:
    kept = transcripts.find(audio.id)
    transcript = audio.transcript if kept is None else kept
    if transcript is None:
        raise InvalidInputError(
            f"{at}: {audio.id!r} is unknown or has expired; send its transcript as content", param=at
        )
    return transcript


def _part(content: Content, at: str, fetched: Mapping[str, Fetched]) -> Part:
    match content:
        case TextContent(text) | RefusalContent(text):
            return TextPart(text)
        case AudioContent(audio):
            return AudioPart(bytes_of_base64(audio.data, f"{at}.input_audio.data"), audio.format)
        case AudioUrlContent(Url(url)):
            return _audio_part(*media_of(url, f"{at}.audio_url.url", "audio/", fetched), f"{at}.audio_url.url", url)
        case ImageContent(Url(url)):
            return ImagePart(media_of(url, f"{at}.image_url.url", "image/", fetched)[1])
        case VideoContent(Url(url)):
            return VideoPart(media_of(url, f"{at}.video_url.url", "video/", fetched)[1])
        case FileContent(file):
            return _file_part(file, f"{at}.file")


def _audio_part(mime: str, data: bytes, at: str, url: str = "") -> AudioPart:
    format = _AUDIO_MIMES.get(mime)
    if format is None and mime == _UNTYPED:
        format = _AUDIO_ENDINGS.get(PurePosixPath(urlsplit(url).path).suffix.lower())
    if format is None:
        raise UnsupportedError(f"{at}: {mime} is not taken; one of {', '.join(_AUDIO_MIMES)} is", param=at)
    return AudioPart(data, format)


def _file_part(file: FileData, at: str) -> Part:
    if file.file_data is None:
        if file.file_id is not None:
            raise UnsupportedError(f"{at}.file_id: no files are kept here; send file_data", param=f"{at}.file_id")
        raise InvalidInputError(f"{at}.file_data: is required", param=f"{at}.file_data")
    at = f"{at}.file_data"
    mime, data = data_of_uri(file.file_data, at)
    match mime.partition("/")[0]:
        case "audio":
            return _audio_part(mime, data, at)
        case "image":
            return ImagePart(data)
        case "video":
            return VideoPart(data)
    if not mime.startswith(_TEXT_MIMES):
        raise UnsupportedError(f"{at}: {mime} is not read; send audio, images, video or text", param=at)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{at}: is not text in UTF-8: {error}", param=at) from error
    return TextPart(f"{file.filename}:\n{text}" if file.filename else text)


def media_of(url: str, at: str, kind: str, fetched: Mapping[str, Fetched]) -> tuple[str, bytes]:
    """MIME type and bytes of what a URL stands for; `kind` is how its type begins, and `fetched` holds what is remote.

    Raises InvalidInputError, whose `param` is `at`, for everything else.
    """
    if not is_remote(url):
        return data_of_uri(url, at, kind)
    if url not in fetched:
        raise UnsupportedError(
            f"{at}: this server fetches no media; send the bytes as data:{kind}...;base64,... "
            "(whoever runs it can set server.remote_media)",
            param=at,
        )
    found = fetched[url]
    if not found.mime.startswith(kind) and found.mime != _UNTYPED:
        raise InvalidInputError(f"{at}: leads to {found.mime}, not to {kind}...", param=at)
    return found.mime, found.data


def data_of_uri(uri: str, at: str, kind: str = "") -> tuple[str, bytes]:
    """MIME type and bytes of a base64 data URI whose type begins with `kind`.

    Raises InvalidInputError, whose `param` is `at`, for everything else.
    """
    found = _DATA_URI.match(uri)
    mime = found["mime"].lower() if found else ""
    if found is None or not mime.startswith(kind):
        raise InvalidInputError(f"{at}: expected a data URI like data:{kind}...;base64,...", param=at)
    return mime, bytes_of_base64(uri[found.end() :], at)


def bytes_of_base64(text: str, at: str) -> bytes:
    """The bytes. Raises InvalidInputError, whose `param` is `at`, where `text` is no base64, or there are none."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInputError(f"{at}: is not base64: {error}", param=at) from error
    if not data:
        raise InvalidInputError(f"{at}: is empty", param=at)
    return data
