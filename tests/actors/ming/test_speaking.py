from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import numpy as np
import pytest

from actors.ming.script import AFTER, BEFORE, MingScript
from actors.ming.speaking import MingTalker
from omniflow.engine.base import EngineRequest
from omniflow.engine.loop import Generation
from omniflow.errors import ContextLengthError, UnsupportedError, WeightsError
from omniflow.media import Latents, Segment
from tests.actors.ming.reference import CHECKPOINT
from tests.actors.ming.tiny import tiny_tokenizer, write_checkpoint
from tests.doubles import ListEmit, ListStream, context

pytestmark = pytest.mark.anyio
TEXTS = ["A first sentence.", " And here is another."]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ming"))


@pytest.fixture(scope="module")
async def talker(anyio_backend: str, folder: Path) -> AsyncIterator[MingTalker]:
    actor = MingTalker(model=str(folder), max_running=4, temperature=0.5)
    await actor.setup()
    yield actor
    await actor.close()


async def speak(talker: MingTalker, *texts: str, **options: object) -> list[Latents]:
    emit: ListEmit[Latents] = ListEmit()
    await talker.run(ListStream([Segment(text, n) for n, text in enumerate(texts)]), emit, context(**options))
    return emit.items


def frames_of(items: list[Latents], segment: int) -> np.ndarray:
    return np.concatenate([each.frames for each in items if each.segment == segment])


def test_a_prompt_is_tokenized_piece_by_piece_and_the_users_marks_are_text(folder: Path) -> None:
    script, tokenizer = MingScript(folder), tiny_tokenizer()
    prompt = script.prompt(" Say <|im_end|> twice.")
    assert prompt is not None
    before, after = (sum((tokenizer.encode(each).ids for each in pieces), []) for pieces in (BEFORE, AFTER))
    assert prompt.ids[: len(before)] == before and prompt.ids[-len(after) :] == after
    spoken = prompt.ids[len(before) : -len(after)]
    end = tokenizer.token_to_id("<|im_end|>")
    assert len(spoken) == len("Say <|im_end|> twice.") and end not in spoken and end in before and end in after


def test_a_segment_is_cut_after_twice_its_time_and_two_seconds(folder: Path) -> None:
    """A step is 4 latents of 392 samples, and 14 letters or 4.7 ideographs take a second."""
    script = MingScript(folder)
    steps = [prompt.max_steps for prompt in map(script.prompt, ("a" * 14, "字" * 14, "a" * 60)) if prompt is not None]
    assert steps == [113, 225, 256]
    assert script.prompt(" ...\n") is None
    with pytest.raises(ContextLengthError, match="140 characters take about 10 s to say.*lasts at most 9 s"):
        script.prompt("a" * 140)


async def test_each_segment_has_latents_and_one_end(talker: MingTalker) -> None:
    items = await speak(talker, TEXTS[0], " ... ", TEXTS[1], seed=1)
    assert {each.segment for each in items} == {0, 2}
    assert [each.last for each in items] == [
        each is items[-1] or items[n + 1].segment != each.segment for n, each in enumerate(items)
    ]
    assert all(each.frames.shape == (4, 8) and each.frames.dtype == np.float32 for each in items)
    assert np.abs(frames_of(items, 0)).max() > 0.5


async def test_a_seed_says_the_same_alone_and_in_company(talker: MingTalker) -> None:
    alone = await speak(talker, *TEXTS, seed=1)
    others: dict[int, list[Latents]] = {}

    async def one(seed: int) -> None:
        others[seed] = await speak(talker, *TEXTS, seed=seed)

    async with anyio.create_task_group() as group:
        for seed in range(6):
            group.start_soon(one, seed)
    for segment in (0, 1):
        assert np.array_equal(frames_of(others[1], segment), frames_of(alone, segment))
        assert not np.array_equal(frames_of(others[2], segment)[:4], frames_of(alone, segment)[:4])
    twice = await speak(talker, TEXTS[0], TEXTS[0], seed=1)
    assert not np.array_equal(frames_of(twice, 0)[:4], frames_of(twice, 1)[:4])


async def test_the_first_words_of_a_request_are_urgent(talker: MingTalker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, generate = [], talker._loop.generate

    def noted(request: EngineRequest) -> AbstractAsyncContextManager[Generation]:
        asked.append(request)
        return generate(request)

    monkeypatch.setattr(talker._loop, "generate", noted)
    await speak(talker, "...", *TEXTS, seed=1)
    assert [request.urgent for request in asked] == [True, False]
    assert len({request.sampling.seed for request in asked}) == len({request.id for request in asked}) == 2


async def test_whoever_leaves_amid_a_segment_leaves_nothing(talker: MingTalker) -> None:
    class Leaving(ListEmit[Latents]):
        async def send(self, value: Latents) -> None:
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        await talker.run(ListStream([Segment(TEXTS[0], 0)]), Leaving(), context())
    await speak(talker, TEXTS[0], seed=1)
    stats = talker.engine_stats()
    assert stats.num_running == stats.num_waiting == 0 < stats.kv_tokens_total


async def test_another_speed_is_refused_and_the_next_is_served(talker: MingTalker) -> None:
    with pytest.raises(UnsupportedError, match="speed 1.5 is not offered by this talker: give 1") as refused:
        await speak(talker, TEXTS[0], speed=1.5)
    assert refused.value.param == "speed"
    assert await speak(talker, TEXTS[0])


async def test_a_checkpoint_without_a_tokenizer_is_named() -> None:
    with pytest.raises(WeightsError, match=r"has no tokenizer\.json"):
        await MingTalker(model=str(CHECKPOINT)).setup()
