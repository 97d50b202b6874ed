"""A toy talker by flow matching, with random weights and no checkpoint: what a model adds to `FlowTalker`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from torch import nn

from actors.flow_talker import FlowPrompt, FlowTalker
from actors.qwen2_flow import Qwen2Flow
from omniflow.engine.decoder import DecoderShape
from omniflow.engine.flow import FlowHead, FlowNet, time_grid
from omniflow.errors import InvalidInputError, UnsupportedError
from omniflow.media import Latents, Options, Segment
from tests.doubles import ListEmit, ListStream, context

pytestmark = pytest.mark.anyio
STEPS = 5


class Net(FlowNet):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.history, self.latent_dim = 2, 3, 4
        self.mix, self.told = nn.Linear(4, 4), nn.Linear(32, 4)

    def condition(self, hidden: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        return self.told(hidden)[:, None] + history.mean(1, keepdim=True)

    def forward(self, x: torch.Tensor, time: float, condition: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mix(x) * (1 - time) + condition
        return mixed


class Toy(FlowTalker[int]):
    """Speaks as one of two: their numbers stand before the bytes of a text."""

    guidance, sigma = 1.0, 0.1

    def __init__(self, *, max_running: int = 3) -> None:
        super().__init__(".", "cpu", 1, max_running, 64, 1024, 0.5, "auto")
        self.heard: list[tuple[str, str]] = []

    async def prepare(self, folder: Path) -> None:
        self.names = {"low": 1, "high": 2}

    def speaker(self, options: Options) -> int:
        if options.voice not in (None, *self.names):
            raise InvalidInputError(f"voice: there is no voice {options.voice!r}", param="voice")
        return self.names[options.voice or "low"]

    def prompt(self, text: str, speaker: int | None = None, said: str = "") -> FlowPrompt | None:
        self.heard.append((said, text))
        return FlowPrompt([speaker or 1, *text.encode()], max_steps=STEPS) if text.strip() else None

    def load_model(self, folder: Path, device: str, dtype: torch.dtype) -> Qwen2Flow:
        torch.manual_seed(0)
        stop = nn.Linear(32, 2)
        nn.init.constant_(stop.bias[:1], 30.0)  # never: a segment lasts until it is cut
        head = FlowHead(
            Net(), nn.Sequential(nn.Flatten(), nn.Linear(8, 32)), stop, times=time_grid(4), rule="beyond", min_steps=1
        )
        shape = DecoderShape(32, 64, 2, 4, 2, 8, max_position_embeddings=256)
        return Qwen2Flow(shape, [None, 16], 256, head).to(dtype).requires_grad_(False).eval()


@pytest.fixture
async def talker() -> AsyncIterator[Toy]:
    actor = Toy()
    await actor.setup()
    yield actor
    await actor.close()


async def speak(talker: Toy, *texts: str, **options: object) -> list[Latents]:
    emit: ListEmit[Latents] = ListEmit()
    await talker.run(ListStream([Segment(text, n) for n, text in enumerate(texts)]), emit, context(**options))
    return emit.items


async def test_segments_are_latents_with_an_end_and_know_what_was_said(talker: Toy) -> None:
    items = await speak(talker, "One.", " ", "Two.", seed=1)
    assert [(each.segment, each.last) for each in items] == [
        (n, step == STEPS - 1) for n in (0, 2) for step in range(STEPS)
    ]
    assert all(each.frames.shape == (2, 4) for each in items)
    assert talker.heard[1:] == [("", "One."), ("One.", " "), ("One.", "Two.")]


async def test_a_seed_and_a_voice_say_the_same_in_any_company(talker: Toy) -> None:
    asked = {seed: {"seed": seed, "voice": ["low", "high"][seed % 2]} for seed in range(9)}
    together: dict[int, list[Latents]] = {}

    async def one(seed: int) -> None:
        together[seed] = await speak(talker, "A boat.", "On the river.", **asked[seed])

    async with anyio.create_task_group() as clients:
        for seed in asked:
            clients.start_soon(one, seed)
    for seed, options in asked.items():
        alone = await speak(talker, "A boat.", "On the river.", **options)
        assert all(np.array_equal(*(each.frames for each in pair)) for pair in zip(alone, together[seed], strict=True))
    (other, *_) = await speak(talker, "A boat.", seed=0, voice="high")
    assert not np.array_equal(other.frames, together[0][0].frames)


async def test_what_is_not_offered_is_refused_and_the_next_is_served(talker: Toy) -> None:
    with pytest.raises(UnsupportedError, match="speed 2 is not offered by this talker: give 1"):
        await speak(talker, "Hi.", speed=2)
    with pytest.raises(InvalidInputError, match="no voice 'x'"):
        await speak(talker, "Hi.", voice="x")
    assert len(await speak(talker, "Hi.")) == STEPS
