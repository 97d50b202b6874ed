"""Ming's talker as an actor: segments of text in, latents out; the requests of all callers step together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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
from actors.roles import TalkerRole
from actors.seeds import part_seed, request_seed
from actors.stage import EngineStage
from omniflow.actor import Context, Count, Emit, NamedVoice, Stream
from omniflow.engine.base import Engine, EngineRequest, Sampling
from omniflow.engine.loop import EngineLoop
from omniflow.errors import InvalidInputError, UnsupportedError, WeightsError
from omniflow.media import Latents, Options, Segment

GUIDANCE, SIGMA = 2.0, 0.25
"""Of the flow, as the checkpoints are meant to be run."""


class MingTalker(EngineStage, TalkerRole):
    """Speaks segments of text with the flow talker of a Ming checkpoint (`model`, in the layout of Ming-omni-tts or of
    Ming-flash-omni).

    Each step of a segment gives `Latents` of one patch, the last of them marked; a segment without a word gives none.
    With `Options.seed` the same segments give the same latents, alone and beside others (on CPUs to the last bit).

    `max_running` segments step together within `kv_tokens` positions, those first of whose request nothing was heard
    yet; `max_waiting` wait for it, then OverloadedError (429). `temperature` above 0 adds noise between the steps of
    the flow.

    It speaks with the voices that the checkpoint brings, whose recordings it hears when it starts, and with those that
    a `MingVoiceEncoder` learned. With `normalise` figures of English and Chinese text become words.

    On a GPU each of `max_running` has a slot of `kv_tokens` / `max_running` positions, and a step is a few CUDA graphs.
    `dtype` auto is bfloat16 there, and float32 on a CPU; noise and latents are float32 in any case.
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
        super().__init__(model, device, threads)
        self._max_running, self._max_waiting, self._kv_tokens = max_running, max_waiting, kv_tokens
        self._temperature = temperature
        self._dtype = ("float32" if self._device == "cpu" else "bfloat16") if dtype == "auto" else dtype
        self._normalise = normalise
        self._script: MingScript
        self._voices: dict[str, Voice] = {}
        self._loop = EngineLoop(self._build)

    def voices(self) -> Sequence[NamedVoice]:
        """What the checkpoint brings, or `default` where it brings none; nothing where it is not on this machine."""
        try:
            return named_voices(self._weights.path())
        except WeightsError:
            return ()

    async def setup(self) -> None:
        """Load the model, hear its voices, and take a step. Raises WeightsError where something cannot be loaded."""
        folder = self._weights.path()
        self._script = await self.offload(MingScript, folder, self._normalise)
        listed = await self.offload(listed_voices, folder)
        if listed:
            encode = await self.offload(VoiceEncoder, folder, self._device, self._threads)
            for name, each in listed.items():
                self._voices[name] = await self.offload(load_voice, folder, name, each, encode)
        await self._loop.setup()
        prompt = await self.offload(self._script.prompt, "Ready.")
        if prompt is not None:
            async with self._loop.generate(EngineRequest(id="setup", ids=prompt.ids, sampling=Sampling())) as outputs:
                await anext(outputs)

    async def run(self, segments: Stream[Segment], emit: Emit[Latents], ctx: Context) -> None:
        """See the class. Raises UnsupportedError for another `speed` than 1, InvalidInputError for an unknown voice."""
        if ctx.options.speed != 1:
            raise UnsupportedError(f"speed {ctx.options.speed} is not offered by this talker: give 1", param="speed")
        seed = request_seed(ctx.options)
        voice, said, is_heard = self._voice(ctx.options), "", False
        async for segment in segments:
            prompt = await self.offload(self._script.prompt, segment.text, voice, said)
            said = segment.text if any(map(str.isalpha, segment.text)) else said
            if prompt is None:
                continue
            # Each has a seed of its own: no two say their words with the same noise.
            own = part_seed(seed, segment.index)
            sampling = Sampling(temperature=self._temperature, seed=own, max_tokens=prompt.max_steps)
            id = f"{ctx.run_id}-{segment.index:06}"
            request = EngineRequest(
                id=id,
                ids=prompt.ids,
                sampling=sampling,
                embeds=prompt.rows,
                positions=prompt.positions,
                before=prompt.before,
                urgent=not is_heard,
            )
            async with self._loop.generate(request) as outputs:
                async for output in outputs:
                    if output.frames is not None:
                        last = output.finish_reason is not None
                        await emit.send(Latents(output.frames.numpy(), segment.index, last))
            is_heard = True

    def _voice(self, options: Options) -> Voice | None:
        """Whom to speak as. Raises InvalidInputError for a voice that nobody has."""
        if options.voice_code is not None:
            return decode_voice(options.voice_code, options.voice_text, self._script.latent_dim, self._script.patch)
        names = list(self._voices) or [UNNAMED]
        name = names[0] if options.voice is None else options.voice
        if name not in names:
            raise InvalidInputError(f"voice: there is no voice {name!r}; there are {', '.join(names)}", param="voice")
        return self._voices.get(name)

    def _build(self) -> Engine:
        import torch

        from actors.checkpoint import read_tensors
        from actors.ming.config import Folders, Talker
        from actors.ming.talker import load_talker
        from omniflow.engine.flow_engine import FlowEngine
        from omniflow.engine.flow_slots import SlottedFlow
        from omniflow.engine.linear import pack_linears

        torch.set_num_threads(self._threads)
        folder = self._weights.path()
        weights = read_tensors(Folders.of(folder).talker)
        dtype = torch.float32 if self._dtype == "float32" else torch.bfloat16
        model = load_talker(Talker.load(folder), weights, self._device, dtype)
        limits = {"max_running": self._max_running, "max_waiting": self._max_waiting, "kv_tokens": self._kv_tokens}
        if self._device == "cpu":
            pack_linears(model)
            return FlowEngine(model, guidance=GUIDANCE, sigma=SIGMA, overlap=False, **limits)
        slotted = SlottedFlow(model, slots=self._max_running, positions=self._kv_tokens // self._max_running)
        return FlowEngine(slotted, guidance=GUIDANCE, sigma=SIGMA, overlap=True, **limits)
