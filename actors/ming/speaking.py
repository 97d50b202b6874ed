"""Ming's talker as an actor: segments of text in, latents out; the requests of all callers step together."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from actors.catalogue import PACKAGED
from actors.roles import TalkerRole
from actors.segmenter import LETTERS_PER_S
from actors.thinker import torch_device
from actors.tokenizer import load_tokenizer
from omniflow.actor import Context, Emit, Stream
from omniflow.engine.base import Engine, EngineRequest, Sampling
from omniflow.engine.loop import EngineLoop
from omniflow.errors import ContextLengthError, UnsupportedError
from omniflow.media import Latents, Segment
from omniflow.weights import Weights, resolve

BEFORE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
    "<|im_start|>user\n",
    "Please generate speech based on the following description.\n",
    " Text input:\n",
)
AFTER = ("<|im_end|>\n", "<|im_start|>assistant\n", "<audio>")
"""What stands around a text that is to be spoken; the model was trained with each piece tokenized by itself."""
GUIDANCE, SIGMA = 2.0, 0.25
"""Of the flow, as the checkpoints are meant to be run."""
SLOWEST, SPARE_S = 2.0, 2.0
"""A segment is cut once it lasts twice as long as its text takes to say, and 2 s: it has missed its end."""


class Prompt(msgspec.Struct, frozen=True):
    """What the engine starts from, and when it is stopped."""

    ids: list[int]
    max_steps: int


class MingScript:
    """How the talker of the checkpoint in `folder` is spoken to; used by one thread at a time.

    Raises WeightsError where its config.json or its tokenizer.json is missing or is no dense talker's.
    """

    def __init__(self, folder: Path) -> None:
        # Imports torch, so not at the top: a graph is checked and explained without it.
        from actors.ming.config import Folders, Talker

        config, self._tokenizer = Talker.load(folder), load_tokenizer(Folders.of(folder).llm)
        self._before, self._after = self._ids(BEFORE), self._ids(AFTER)
        self._tokenizer.encode_special_tokens = True  # as text, wherever a user writes them
        vae, patch = config.audio_tokenizer_config, config.ditar_config.patch_size
        ratio = max(1, vae.patch_size)
        self._step_s = patch * ratio * vae.dec_kwargs.output_dim / vae.sample_rate
        self._most_steps = vae.dec_kwargs.backbone.max_position_embeddings // ratio // patch

    def prompt(self, text: str) -> Prompt | None:
        """None where `text` has no word. Raises ContextLengthError where it takes longer than the AudioVAE can say."""
        from actors.cutting import size_of

        text = text.strip()
        if not any(map(str.isalnum, text)):
            return None
        expected_s = size_of(text) / LETTERS_PER_S
        if expected_s > self._most_steps * self._step_s:
            raise ContextLengthError(
                f"{len(text)} characters take about {expected_s:.0f} s to say; a segment of this talker lasts at most "
                f"{self._most_steps * self._step_s:.0f} s: give shorter ones",
                param="input",
            )
        most_steps = math.ceil((SLOWEST * expected_s + SPARE_S) / self._step_s)
        return Prompt([*self._before, *self._ids([text]), *self._after], min(most_steps, self._most_steps))

    def _ids(self, pieces: Sequence[str]) -> list[int]:
        return [id for each in pieces for id in self._tokenizer.encode(each, add_special_tokens=False).ids]


class MingTalker(TalkerRole):
    """Speaks segments of text with the flow talker of a Ming checkpoint (`model`, in the layout of
    Ming-omni-tts or of Ming-flash-omni).

    Each step of a segment gives `Latents` of one patch, the last of them marked; a segment without a word gives none.
    With `Options.seed` the same segments give the same latents, alone and beside others (on CPUs to the last bit).

    `max_running` segments step together within `kv_tokens` positions, those first of whose request nothing was heard
    yet; `max_waiting` wait for it, then OverloadedError (429). `temperature` above 0 adds noise between the steps of
    the flow.

    On a GPU each of `max_running` has a slot of `kv_tokens` / `max_running` positions, and a step is a few CUDA graphs.
    `dtype` auto is bfloat16 there, and float32 on a CPU; noise and latents are float32 in any case. With `fuse` what
    stands between the matrices is compiled (by Triton, at the start), else it is torch's kernels one by one.
    """

    heavy = True
    preload = ("torch", "actors.ming.talker", "omniflow.engine.flow_engine", "actors.cutting", "tokenizers")

    def __init__(
        self,
        *,
        model: str,
        device: str = "cpu",
        threads: int = 1,
        max_running: int = 8,
        max_waiting: int = 64,
        kv_tokens: int = 16384,
        temperature: float = 0.0,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        fuse: bool = True,
    ) -> None:
        self._weights = resolve(model, PACKAGED)
        self._device = torch_device(device)
        self._threads = threads
        self._limits = {"max_running": max_running, "max_waiting": max_waiting, "kv_tokens": kv_tokens}
        self._temperature = temperature
        self._dtype = ("float32" if self._device == "cpu" else "bfloat16") if dtype == "auto" else dtype
        self._fuse = fuse
        self._script: MingScript
        self._loop = EngineLoop(self._build)

    def weights(self) -> Sequence[Weights]:
        """The checkpoint."""
        return (self._weights,)

    async def setup(self) -> None:
        """Load the model, and take a step. Raises WeightsError where it cannot be loaded."""
        self._script = await self.offload(MingScript, self._weights.path())
        await self._loop.setup()
        prompt = await self.offload(self._script.prompt, "Ready.")
        if prompt is not None:
            async with self._loop.generate(EngineRequest(id="setup", ids=prompt.ids, sampling=Sampling())) as outputs:
                await anext(outputs)

    def busy_s(self) -> float:
        return max(super().busy_s(), self._loop.busy_s())

    async def close(self) -> None:
        await self._loop.close()

    async def run(self, segments: Stream[Segment], emit: Emit[Latents], ctx: Context) -> None:
        """See the class. Raises UnsupportedError for another `speed` than 1."""
        if ctx.options.speed != 1:
            raise UnsupportedError(f"speed {ctx.options.speed} is not offered by this talker: give 1", param="speed")
        seed = secrets.randbits(64) if ctx.options.seed is None else ctx.options.seed % 2**64
        is_heard = False
        async for segment in segments:
            prompt = await self.offload(self._script.prompt, segment.text)
            if prompt is None:
                continue
            # Each has a seed of its own: no two say their words with the same noise.
            own = int(np.random.SeedSequence([seed, segment.index]).generate_state(1, np.uint64)[0])
            sampling = Sampling(temperature=self._temperature, seed=own, max_tokens=prompt.max_steps)
            id = f"{ctx.run_id}-{segment.index:06}"
            request = EngineRequest(id=id, ids=prompt.ids, sampling=sampling, urgent=not is_heard)
            async with self._loop.generate(request) as outputs:
                async for output in outputs:
                    if output.frames is not None:
                        last = output.finish_reason is not None
                        await emit.send(Latents(output.frames.numpy(), segment.index, last))
            is_heard = True

    def _build(self) -> Engine:
        import torch

        from actors.ming.config import Folders, Talker
        from actors.ming.talker import load_talker
        from actors.ming.weights import read_folder
        from omniflow.engine.flow_engine import FlowEngine
        from omniflow.engine.flow_slots import SlottedFlow
        from omniflow.engine.linear import pack_linears

        torch.set_num_threads(self._threads)
        folder = self._weights.path()
        weights = read_folder(Folders.of(folder).talker)
        dtype = torch.float32 if self._dtype == "float32" else torch.bfloat16
        model = load_talker(Talker.load(folder), weights, self._device, dtype)
        if self._device == "cpu":
            pack_linears(model)
            return FlowEngine(model, guidance=GUIDANCE, sigma=SIGMA, **self._limits)
        if self._fuse:
            model.compile_blocks()
        slots = self._limits["max_running"]
        slotted = SlottedFlow(model, slots=slots, positions=self._limits["kv_tokens"] // slots)
        return FlowEngine(slotted, guidance=GUIDANCE, sigma=SIGMA, **self._limits)
