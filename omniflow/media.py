"""Values that travel on edges. All are frozen msgspec Structs; buffers are numpy arrays, torch tensors or bytes.

A receiver in another process gets read-only views of the sender's buffers, so values are never changed in place.
Field names carry units: `_hz`, `_s`, `_ms`, `_bytes`. Tensor fields state their shape in the field's comment.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may ask the caller to call. `parameters` is a JSON schema, as JSON text."""

    name: str
    description: str = ""
    parameters: str = "{}"
    strict: bool = False
    """True where the arguments must follow the schema whatever the model would rather write."""


class ToolCall(msgspec.Struct, frozen=True):
    """One call that a model asked for; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of the call number `index` of an answer: `id` and `name` come whole, with its first piece only."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class Options(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the caller asked for, beside the input itself; every stage sees it as `ctx.options`.

    `None` means: the model's own default. Names and ranges are those of OpenAI's API, where it has them.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    voice: str | None = None
    voice_code: bytes | None = None
    """What the graph made of a recording (`VoiceCode`): the voice to speak with, instead of one that has a name."""
    voice_text: str = ""
    """What is said in that recording; "": unknown."""
    speed: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    top_logprobs: int | None = None
    """None: no log-probabilities; n: that of each token, and of the n likeliest in its place."""
    json_schema: str | None = None
    """The answer is JSON that follows this schema (JSON text); "{}" takes any JSON object."""
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str | None = None
    """With `tool_choice` "required": the one tool to call; None: any of them."""
    parallel_tool_calls: bool = True
    """False: at most one call an answer."""
    language: str | None = None
    """What is spoken in audio that is transcribed, ISO 639-1."""
    hint: str | None = None
    """What was said before the audio that is transcribed: names and spellings are taken from it."""
    words: bool = False
    """True where a transcript is to tell the times of its words."""
    translate: bool = False
    """True where a transcript is to be in English, whatever is spoken."""


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """Text inside a chat message."""

    text: str


class AudioPart(msgspec.Struct, frozen=True, tag="audio"):
    """An encoded audio clip (wav, mp3, flac, ogg) inside a chat message."""

    data: bytes
    format: str


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """An encoded image (png, jpeg, webp) inside a chat message."""

    data: bytes


class VideoPart(msgspec.Struct, frozen=True, tag="video"):
    """An encoded video clip inside a chat message."""

    data: bytes


Part = TextPart | AudioPart | ImagePart | VideoPart


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    parts: tuple[Part, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    """What an assistant asked for in this turn."""
    tool_call_id: str | None = None
    """Which call a tool's turn answers."""


class Chat(msgspec.Struct, frozen=True):
    """A conversation that wants an answer: the input of a chat graph."""

    messages: tuple[ChatMessage, ...]


class PromptMessage(msgspec.Struct, frozen=True):
    """One turn whose media parts were taken out: a piece is text, or the number of a media item of the request."""

    role: str
    pieces: tuple[str | int, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class Prompt(msgspec.Struct, frozen=True):
    """A conversation whose media parts were taken out; their numbers say where they belong."""

    messages: tuple[PromptMessage, ...]


class Waveforms(msgspec.Struct, frozen=True):
    """The audio inputs of one request, decoded: `samples[i]` float32 [num_samples], mono, `sample_rate_hz`.

    `index[i]` is the number that `Prompt` uses for clip i, and `where[i]` what the caller knows it by, for errors.
    """

    samples: list[np.ndarray]
    index: tuple[int, ...]
    sample_rate_hz: int = 16000
    where: tuple[str, ...] = ()


class Images(msgspec.Struct, frozen=True):
    """The image inputs of one request, still encoded; `index[i]` is the number that `Prompt` uses for image i.

    Those numbers that are in `videos` are clips. `where[i]` is what the caller knows image i by, for errors.
    """

    data: list[bytes]
    index: tuple[int, ...]
    videos: tuple[int, ...] = ()
    where: tuple[str, ...] = ()


class AudioFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """What an audio encoder understood of `Waveforms`; `index` as there.

    A model that hears by transcription fills `texts`; one that takes embeddings fills `rows`, float32
    [num_rows, hidden], clip after clip, with `num_rows[i]` rows for clip i. `audio_s` is the seconds heard.
    """

    index: tuple[int, ...]
    audio_s: float
    texts: tuple[str, ...] = ()
    rows: np.ndarray | None = None
    num_rows: tuple[int, ...] = ()


class ImageFeatures(msgspec.Struct, frozen=True):
    """Image embeddings: `rows` float32 [num_rows, hidden], image after image; `index` and `videos` as in `Images`.

    `grids[i]` is (frames, rows, columns) of image i, as it is seen: their product is how many of the rows are its own.
    `times_s[i]` are the times of the frames of a clip, empty for an image.
    """

    rows: np.ndarray
    index: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...] = ()
    videos: tuple[int, ...] = ()
    times_s: tuple[tuple[float, ...], ...] = ()


class TokenPrompt(msgspec.Struct, frozen=True):
    """What an AR stage starts from: `ids` in the vocabulary of its model.

    Where media rows take the place of placeholder tokens, `rows` float32 [num_rows, hidden] stand at `positions`.
    For models that know several kinds of input, `places` int64 [3, len(ids)] and `kinds` uint8 [len(ids)] are those of
    `EngineRequest`.
    """

    ids: list[int]
    rows: np.ndarray | None = None
    positions: tuple[int, ...] = ()
    audio_tokens: int = 0
    image_tokens: int = 0
    places: np.ndarray | None = None
    kinds: np.ndarray | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural logarithm of a token's probability as the model gave it, before temperature and masks.

    `top` holds the likeliest tokens in its place, the likeliest first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Tokens(msgspec.Struct, frozen=True):
    """Tokens that an AR stage has produced since its last message; `logprobs` one a token where they were asked for."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Generated(msgspec.Struct, frozen=True):
    """How an AR stage ended: OpenAI finish reason and token counts.

    Of the `prompt_tokens`, `audio_tokens` and `image_tokens` stand for media, and `cached_tokens` were not computed.
    """

    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    audio_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0


class HiddenStates(msgspec.Struct, frozen=True):
    """What an AR stage made of its next n inputs: `rows` float32 [n, hidden], after its model's last norm.

    Together they are those of the prompt, and of each token but the last.
    """

    rows: np.ndarray


class Picture(msgspec.Struct, frozen=True):
    """An image that was made, as png."""

    data: bytes


class TextLogprob(msgspec.Struct, frozen=True):
    """`TokenLogprob` for people: `data` are the bytes of a token, which may be a part of a character."""

    token: str
    data: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...] = ()


class TextDelta(msgspec.Struct, frozen=True):
    """A piece of text; joined deltas are the whole text, no delta splits a character."""

    text: str
    logprobs: tuple[TextLogprob, ...] = ()
    """Of the tokens that the text came from, where they were asked for."""


class Word(msgspec.Struct, frozen=True):
    """A word of a transcript, and when it was spoken."""

    text: str
    start_s: float
    end_s: float


class Transcript(msgspec.Struct, frozen=True):
    """A stretch of speech in words; joined by blanks, the stretches are the whole transcript."""

    text: str
    start_s: float
    end_s: float
    language: str
    words: tuple[Word, ...] = ()
    tokens: tuple[int, ...] = ()
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0


class VoiceSample(msgspec.Struct, frozen=True):
    """An encoded clip (wav, mp3, flac, ogg) of someone whose voice is to be spoken with; `at` is its field's name."""

    data: bytes
    at: str


class VoiceCode(msgspec.Struct, frozen=True):
    """A voice as the talker of the same graph takes it in `Options.voice_code`, of `audio_s` seconds of sound.

    It has at most 64 KiB: options are small.
    """

    data: bytes
    audio_s: float


class Segment(msgspec.Struct, frozen=True):
    """A speakable piece of text; joined segments are the whole text. `index` counts from 0."""

    text: str
    index: int


class Latents(msgspec.Struct, frozen=True):
    """Frames for a vocoder: `frames` float32 [num_frames, channels], of segment `segment`; `last` ends that segment."""

    frames: np.ndarray
    segment: int
    last: bool


class AudioChunk(msgspec.Struct, frozen=True):
    """Playable audio: `samples` float32 [num_samples, channels] flattened C-order, in [-1, 1].

    A change of `sample_rate_hz` or `channels` inside one stream is an error.
    """

    samples: np.ndarray
    sample_rate_hz: int
    channels: int = 1

    @property
    def duration_s(self) -> float:
        """Seconds of sound in this chunk."""
        return len(self.samples) / self.channels / self.sample_rate_hz
