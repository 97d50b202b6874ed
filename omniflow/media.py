"""Values that travel on edges. All are frozen msgspec Structs; buffers are numpy arrays, torch tensors or bytes.

A receiver in another process gets read-only views of the sender's buffers, so values are never changed in place.
Field names carry units: `_hz`, `_s`, `_ms`, `_bytes`. Tensor fields state their shape in the field's comment.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np


class Options(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the caller asked for, beside the input itself; every stage sees it as `ctx.options`.

    `None` means: the model's own default.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    voice: str | None = None
    speed: float = 1.0


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


class Chat(msgspec.Struct, frozen=True):
    """A conversation that wants an answer: the input of a chat graph."""

    messages: tuple[ChatMessage, ...]


class Prompt(msgspec.Struct, frozen=True):
    """A conversation whose media parts were taken out: `media` numbers say where they belong.

    Each message is (role, pieces); a piece is text, or the index of a media item of the request.
    """

    messages: tuple[tuple[str, tuple[str | int, ...]], ...]


class Waveforms(msgspec.Struct, frozen=True):
    """The audio inputs of one request, decoded: `samples[i]` float32 [num_samples], mono, `sample_rate_hz`.

    `index[i]` is the number that `Prompt` uses for clip i.
    """

    samples: list[np.ndarray]
    index: tuple[int, ...]
    sample_rate_hz: int = 16000


class Images(msgspec.Struct, frozen=True):
    """The image inputs of one request, still encoded; `index[i]` is the number that `Prompt` uses for image i."""

    data: list[bytes]
    index: tuple[int, ...]


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
    """Image embeddings: `rows` float32 [num_rows, hidden]; `index` as in `Images`."""

    rows: np.ndarray
    index: tuple[int, ...]


class TokenPrompt(msgspec.Struct, frozen=True):
    """What an AR stage starts from: `ids` in the vocabulary of its model.

    Where media rows take the place of placeholder tokens, `rows` float32 [num_rows, hidden] stand at `positions`.
    """

    ids: list[int]
    rows: np.ndarray | None = None
    positions: tuple[int, ...] = ()
    audio_tokens: int = 0


class Tokens(msgspec.Struct, frozen=True):
    """Tokens that an AR stage has produced since its last message."""

    ids: tuple[int, ...]


class Generated(msgspec.Struct, frozen=True):
    """How an AR stage ended: OpenAI finish reason and token counts."""

    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int


class TextDelta(msgspec.Struct, frozen=True):
    """A piece of text; joined deltas are the whole text, no delta splits a character."""

    text: str


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
