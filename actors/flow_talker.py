"""A talker whose steps are patches of latents, by flow matching: text becomes prompts, and a flow engine speaks them.

A model adds which prompts a text is, whom it can speak as, and its network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from actors.roles import TalkerRole
from actors.seeds import part_seed, request_seed
from actors.stage import EngineStage
from omniflow.actor import Context, Emit, Stream
from omniflow.engine.base import Engine, EngineRequest, Sampling
from omniflow.engine.loop import EngineLoop
from omniflow.errors import UnsupportedError
from omniflow.media import Latents, Options, Segment

if TYPE_CHECKING:
    import torch

Speaker = TypeVar("Speaker")


class FlowPrompt(msgspec.Struct, frozen=True):
    """What the engine starts from, and when it is stopped. `rows` float32 [n, hidden] stand at `positions`."""

    ids: list[int]
    max_steps: int
    rows: torch.Tensor | None = None
    positions: tuple[int, ...] = ()
    before: torch.Tensor | None = None
    """Latents that come before the first, float32 [n, latent_dim]: those of a recording of the voice."""


class FlowTalker(EngineStage, TalkerRole, ABC, Generic[Speaker]):
    """Speaks segments of text with a flow engine; the requests of all callers step together.

    Each step of a segment gives `Latents` of one patch, the last of them marked; a segment without a word gives none.
    With `Options.seed` the same segments give the same latents, alone and beside others (on CPUs to the last bit).

    Segments of whose request nothing was heard yet step first. On a GPU each of `max_running` has a slot of
    `kv_tokens` / `max_running` positions.
    """

    guidance: float
    """Scale of the head's rule, as its checkpoints are meant to be run; `prepare` may read it from one."""
    sigma: ClassVar[float]
    """Of the noise between the steps of the flow, at temperature 1."""

    def __init__(
        self,
        model: str,
        device: str,
        threads: int,
        max_running: int,
        max_waiting: int,
        kv_tokens: int,
        temperature: float,
        dtype: Literal["auto", "float32", "bfloat16"],
    ) -> None:
        super().__init__(model, device, threads)
        self._limits = {"max_running": max_running, "max_waiting": max_waiting, "kv_tokens": kv_tokens}
        self._temperature = temperature
        self._dtype = ("float32" if self._device == "cpu" else "bfloat16") if dtype == "auto" else dtype
        self._loop = EngineLoop(self._build)

    @abstractmethod
    async def prepare(self, folder: Path) -> None:
        """Load what `speaker` and `prompt` need of the checkpoint in `folder`. Raises WeightsError."""

    @abstractmethod
    def speaker(self, options: Options) -> Speaker:
        """Whom a request with `options` is spoken by. Raises InvalidInputError for a voice that nobody has."""

    @abstractmethod
    def prompt(self, text: str, speaker: Speaker | None = None, said: str = "") -> FlowPrompt | None:
        """What says `text` after `said`, as `speaker`; None where it has no word. Called by one thread at a time."""

    @abstractmethod
    def load_model(self, folder: Path, device: str, dtype: torch.dtype) -> Any:
        """The network: a `FlowModel`, and for GPUs a `FlowBackbone`, too. Called in the engine's thread."""

    async def setup(self) -> None:
        """Load the model, and take a step. Raises WeightsError where something cannot be loaded."""
        await self.prepare(self._weights.path())
        await self._loop.setup()
        prompt = await self.offload(self.prompt, "Ready.")
        if prompt is not None:
            async with self._loop.generate(EngineRequest(id="setup", ids=prompt.ids, sampling=Sampling())) as outputs:
                await anext(outputs)

    async def run(self, segments: Stream[Segment], emit: Emit[Latents], ctx: Context) -> None:
        """See the class. Raises UnsupportedError for another `speed` than 1, InvalidInputError for an unknown voice."""
        if ctx.options.speed != 1:
            raise UnsupportedError(f"speed {ctx.options.speed} is not offered by this talker: give 1", param="speed")
        seed = request_seed(ctx.options)
        speaker, said, is_heard = self.speaker(ctx.options), "", False
        async for segment in segments:
            prompt = await self.offload(self.prompt, segment.text, speaker, said)
            said = segment.text if any(map(str.isalpha, segment.text)) else said
            if prompt is None:
                continue
            # Each has a seed of its own: no two say their words with the same noise.
            own = part_seed(seed, segment.index)
            request = EngineRequest(
                id=f"{ctx.run_id}-{segment.index:06}",
                ids=prompt.ids,
                sampling=Sampling(temperature=self._temperature, seed=own, max_tokens=prompt.max_steps),
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

    def _build(self) -> Engine:
        # Imports torch, so not at the top: a graph is checked and explained without it.
        import torch

        from omniflow.engine.flow_engine import FlowEngine
        from omniflow.engine.flow_slots import SlottedFlow
        from omniflow.engine.linear import pack_linears

        torch.set_num_threads(self._threads)
        dtype = torch.float32 if self._dtype == "float32" else torch.bfloat16
        model = self.load_model(self._weights.path(), self._device, dtype)
        if self._device == "cpu":
            pack_linears(model)
            return FlowEngine(model, guidance=self.guidance, sigma=self.sigma, overlap=False, **self._limits)
        slots = self._limits["max_running"]
        slotted = SlottedFlow(model, slots=slots, positions=self._limits["kv_tokens"] // slots)
        return FlowEngine(slotted, guidance=self.guidance, sigma=self.sigma, overlap=True, **self._limits)
