"""Ming's talker as an actor: segments of text in, latents out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from actors.flow_talker import FlowPrompt, FlowTalker
from actors.ming.config import Folders, Talker
from actors.ming.script import MingScript
from actors.ming.voices import (
    UNNAMED,
    Voice,
    VoiceEncoder,
    decode_voice,
    listed_voices,
    load_voice,
    named_voices,
)
from omniflow.actor import Count, NamedVoice
from omniflow.errors import InvalidInputError, WeightsError
from omniflow.media import Options

if TYPE_CHECKING:
    import torch

    from actors.ming.talker import TalkerModel


class MingTalker(FlowTalker[Voice | None]):
    """Speaks segments of text with the flow talker of a Ming checkpoint (`model`, in the layout of Ming-omni-tts or of
    Ming-flash-omni, 2.0 or preview). With a seed the same text sounds the same, alone and beside others (on CPUs to the
    last bit).

    `max_running` segments step together within `kv_tokens` positions, those first of whose request nothing was heard
    yet; `max_waiting` wait for it, then OverloadedError (429). `temperature` above 0 adds noise between the steps of
    the flow. On a GPU each of `max_running` has a slot of `kv_tokens` / `max_running` positions, and a step is a few
    CUDA graphs. `dtype` auto is bfloat16 there, and float32 on a CPU; noise and latents are float32 in any case.

    It speaks with the voices that the checkpoint brings, whose recordings it hears when it starts, and with those that
    a `MingVoiceEncoder` learned. With `normalise` figures of English and Chinese text become words.
    """

    preload = (
        "torch",
        "actors.ming.talker",
        "omniflow.engine.flow_engine",
        "actors.cutting",
        "actors.normalise",
        "normt2s",
        "tokenizers",
    )
    sigma = 0.25

    def __init__(
        self,
        *,
        model: str,
        device: str = "cpu",
        threads: int = 1,
        max_running: Count = 8,
        max_waiting: Count = 64,
        kv_tokens: Count = 16384,
        temperature: float = 0.0,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        normalise: bool = True,
    ) -> None:
        super().__init__(model, device, threads, max_running, max_waiting, kv_tokens, temperature, dtype)
        self._normalise = normalise
        self._script: MingScript
        self._voices: dict[str, Voice] = {}

    def voices(self) -> Sequence[NamedVoice]:
        """What the checkpoint brings, or `default` where it brings none; nothing where it is not on this machine."""
        try:
            return named_voices(self._weights.path())
        except WeightsError:
            return ()

    async def prepare(self, folder: Path) -> None:
        """Load the tokenizer, and hear the checkpoint's voices."""
        self.guidance = (await self.offload(Talker.load, folder)).manner.guidance
        self._script = await self.offload(MingScript, folder, self._normalise)
        listed = await self.offload(listed_voices, folder)
        if listed:
            encode = await self.offload(VoiceEncoder, folder, self._device, self._threads)
            for name, each in listed.items():
                self._voices[name] = await self.offload(load_voice, folder, name, each, encode)

    def speaker(self, options: Options) -> Voice | None:
        if options.voice_code is not None:
            script = self._script
            return decode_voice(
                options.voice_code, options.voice_text, script.latent_dim, script.patch, script.speaker_dim
            )
        names = list(self._voices) or [UNNAMED]
        name = names[0] if options.voice is None else options.voice
        if name not in names:
            raise InvalidInputError(f"voice: there is no voice {name!r}; there are {', '.join(names)}", param="voice")
        return self._voices.get(name)

    def prompt(self, text: str, speaker: Voice | None = None, said: str = "") -> FlowPrompt | None:
        return self._script.prompt(text, speaker, said)

    def load_model(self, folder: Path, device: str, dtype: torch.dtype) -> TalkerModel:
        # Imports torch, so not at the top: a graph is checked and explained without it.
        from actors.checkpoint import read_tensors
        from actors.ming.talker import load_talker

        return load_talker(Talker.load(folder), read_tensors(Folders.of(folder).talker), device, dtype)
