"""Roles: what a stage of an omni graph takes and gives, without saying how. A profile binds each to an actor."""

from __future__ import annotations

from abc import ABC, abstractmethod

from omniflow.actor import Actor, Context, Emit, Outputs, Stream
from omniflow.media import (
    AudioChunk,
    AudioFeatures,
    Chat,
    Generated,
    HiddenStates,
    ImageFeatures,
    Images,
    Latents,
    Picture,
    Prompt,
    Segment,
    TextDelta,
    TokenPrompt,
    Tokens,
    ToolCallDelta,
    Transcript,
    VoiceCode,
    VoiceSample,
    Waveforms,
)


class Preprocessed(Outputs):
    """A conversation taken apart: what is text, and what an encoder must see first."""

    prompt: Prompt
    audio: Waveforms | None
    image: Images | None


class PreprocessRole(Actor, ABC):
    """Takes a conversation apart and decodes its media."""

    @abstractmethod
    async def run(self, chat: Chat) -> Preprocessed: ...


class AudioEncoderRole(Actor, ABC):
    """Hears."""

    @abstractmethod
    async def run(self, audio: Waveforms) -> AudioFeatures: ...


class ImageEncoderRole(Actor, ABC):
    """Sees."""

    @abstractmethod
    async def run(self, image: Images) -> ImageFeatures: ...


class MergeRole(Actor, ABC):
    """Puts what was heard and seen back into the conversation, in the thinker's vocabulary."""

    @abstractmethod
    async def run(
        self, prompt: Prompt, audio: AudioFeatures | None, image: ImageFeatures | None, ctx: Context
    ) -> TokenPrompt: ...


class ThinkerRole(Actor, ABC):
    """Answers, token by token; `hidden` is for who makes something else of its thoughts."""

    @abstractmethod
    async def run(
        self, prompt: TokenPrompt, emit: Emit[Tokens], hidden: Emit[HiddenStates], ctx: Context
    ) -> Generated: ...


class PainterRole(Actor, ABC):
    """Makes an image of what the thinker thought."""

    @abstractmethod
    async def run(self, hidden: Stream[HiddenStates], ctx: Context) -> Picture: ...


class DetokenizeRole(Actor, ABC):
    """Tokens to text, and to the tool calls in it."""

    @abstractmethod
    async def run(
        self, tokens: Stream[Tokens], text: Emit[TextDelta], tool_calls: Emit[ToolCallDelta], ctx: Context
    ) -> None: ...


class SegmenterRole(Actor, ABC):
    """Cuts running text into pieces that can be spoken one after the other."""

    @abstractmethod
    async def run(self, text: Stream[TextDelta], emit: Emit[Segment], ctx: Context) -> None: ...


class TalkerRole(Actor, ABC):
    """Speaks, as frames for a vocoder."""

    @abstractmethod
    async def run(self, segments: Stream[Segment], emit: Emit[Latents], ctx: Context) -> None: ...


class VoiceEncoderRole(Actor, ABC):
    """Learns a voice from a recording."""

    @abstractmethod
    async def run(self, sample: VoiceSample) -> VoiceCode: ...


class VocoderRole(Actor, ABC):
    """Frames to sound."""

    @abstractmethod
    async def run(self, latents: Stream[Latents], emit: Emit[AudioChunk], ctx: Context) -> None: ...


class TranscriberRole(Actor, ABC):
    """Writes down what is said."""

    @abstractmethod
    async def run(self, audio: Stream[AudioChunk], emit: Emit[Transcript], ctx: Context) -> None: ...
