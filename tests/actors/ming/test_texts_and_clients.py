"""Speech of the whole tiny checkpoint, from text to sound: 32 clients at once, and texts of all kinds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import anyio
import numpy as np
import pytest

from actors.ming import script
from actors.ming.speaking import MingTalker
from actors.ming.tiny import write_checkpoint
from actors.ming.vocoder import MingVocoder
from actors.segmenter import Segmenter
from omniflow.media import AudioChunk, Latents, Segment, TextDelta
from tests.doubles import ListEmit, ListStream, context

pytestmark = pytest.mark.anyio
CLIENTS = 32
MAX_SIZE = 200


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def short_speech() -> Iterator[None]:
    """A segment of random weights lasts until it is cut: here after the fewest steps, or few more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "SLOWEST", 0.1)
        patch.setattr(script, "SPARE_S", 0.3)
        yield


@pytest.fixture(scope="module")
async def stages(
    anyio_backend: str, short_speech: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[MingTalker, MingVocoder]]:
    folder = tmp_path_factory.mktemp("ming")
    write_checkpoint(folder, seed=7)
    talker, vocoder = MingTalker(model=str(folder), max_running=CLIENTS), MingVocoder(model=str(folder))
    await talker.setup()
    await vocoder.setup()
    yield talker, vocoder
    await talker.close()


@pytest.fixture
async def segmenter() -> Segmenter:
    actor = Segmenter(max_size=MAX_SIZE)
    await actor.setup()
    return actor


async def segments_of(segmenter: Segmenter, text: str, size: int) -> list[Segment]:
    """What `text` becomes that comes in pieces of `size` characters."""
    pieces = [TextDelta(text[start : start + size]) for start in range(0, len(text), size)]
    emit: ListEmit[Segment] = ListEmit()
    await segmenter.run(ListStream(pieces), emit, context())
    return emit.items


async def latents_of(talker: MingTalker, segments: list[Segment], seed: int) -> list[Latents]:
    emit: ListEmit[Latents] = ListEmit()
    await talker.run(ListStream(segments), emit, context(seed=seed, voice="low"))
    return emit.items


async def sound_of(vocoder: MingVocoder, latents: list[Latents]) -> np.ndarray:
    emit: ListEmit[AudioChunk] = ListEmit()
    await vocoder.run(ListStream(latents), emit, context())
    return np.concatenate([np.zeros(0, np.float32), *(chunk.samples for chunk in emit.items)])


async def test_32_clients_hear_what_each_would_hear_alone(stages: tuple[MingTalker, MingVocoder]) -> None:
    """With seeds, texts and lengths of their own; latents to the last bit, sound within 1e-5."""
    talker, vocoder = stages
    texts = ["A boat.", "你好，世界。", "The garden of the old house is green.", "今天 3 点 meeting 吗？"]
    asked = {seed: [Segment(texts[seed % 4], 0), Segment(texts[seed % 3], 1)] for seed in range(CLIENTS)}
    latents: dict[int, list[Latents]] = {}
    sounds: dict[int, np.ndarray] = {}

    async def one(seed: int) -> None:
        latents[seed] = await latents_of(talker, asked[seed], seed)
        sounds[seed] = await sound_of(vocoder, latents[seed])

    async with anyio.create_task_group() as clients:
        for seed in asked:
            clients.start_soon(one, seed)
    for seed, segments in asked.items():
        alone = await latents_of(talker, segments, seed)
        assert [(each.segment, each.last) for each in alone] == [(each.segment, each.last) for each in latents[seed]]
        assert all(np.array_equal(*(x.frames for x in pair)) for pair in zip(alone, latents[seed], strict=True))
        assert np.abs(sounds[seed] - await sound_of(vocoder, alone)).max() <= 1e-5
        assert np.abs(sounds[seed]).max() > 0.05
    firsts = [each[0].frames for each in latents.values()]
    assert min(np.abs(a - b).max() for n, a in enumerate(firsts) for b in firsts[:n]) > 0.01, "all have their own noise"


CHINESE = "春天来了，河边的柳树发芽了，孩子们在院子里放风筝。老人坐在门口，说起从前的事情！"
MIXED = "我们明天用 Python 3.11 写一个 demo，然后 deploy 到 server 上。It should take about 20 minutes, 好吗？"
NUMBERS = "2026年11月30日，气温-3.5℃，降水概率80%，电话010-12345678，价格¥1,299.00，速度120km/h，比例3:2，1/3。"
EMOJI = "好的👍🏽，我们走吧🚗💨！👨‍👩‍👧‍👦 Family trip 🎉🎉🎉 到了😂"
UNBROKEN = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨露结为霜金生丽水玉出昆冈"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (CHINESE * 3, 1),
        (MIXED * 2, 5),
        (NUMBERS, 3),
        (EMOJI * 2, 1),
        (UNBROKEN * 4, 7),
        ("ฉันไปตลาด مرحبا بالعالم Привет, мир! 안녕하세요 こんにちは、世界。", 4),
        ("a" * 700, 50),
        ("第一行\n\n第二行\r\n\t- 列表 1\n- 列表 2\n```code```\n", 2),
    ],
    ids=["chinese", "mixed", "numbers", "emoji", "unbroken", "scripts", "one word", "lines"],
)
async def test_texts_of_all_kinds_are_cut_and_heard(
    stages: tuple[MingTalker, MingVocoder], segmenter: Segmenter, text: str, size: int
) -> None:
    segments = await segments_of(segmenter, text, size)
    assert "".join(each.text for each in segments) == text
    assert [each.index for each in segments] == list(range(len(segments)))
    assert all(segmenter._size_of(each.text) <= MAX_SIZE for each in segments)
    latents = await latents_of(stages[0], segments, 1)
    spoken = {each.index for each in segments if any(map(str.isalnum, each.text))}
    assert {each.segment for each in latents} == spoken
    for index in spoken:
        sound = await sound_of(stages[1], [each for each in latents if each.segment == index])
        assert np.isfinite(sound).all() and np.abs(sound).max() > 0.05


@pytest.mark.parametrize("text", ["。。。！？……——", "... !!! ??? ---", "👍👍👍🎉", " \n\t ", "「」『』（）【】"])
async def test_what_has_no_word_is_silent_and_the_next_is_heard(
    stages: tuple[MingTalker, MingVocoder], segmenter: Segmenter, text: str
) -> None:
    segments = await segments_of(segmenter, text, 2)
    assert "".join(each.text for each in segments) == text
    assert not await latents_of(stages[0], segments, 1)
    assert await latents_of(stages[0], [Segment("好。", 0)], 1)


async def test_5000_characters_are_cut_to_what_can_be_spoken(
    stages: tuple[MingTalker, MingVocoder], segmenter: Segmenter
) -> None:
    text = "".join(f"第{number}章：{CHINESE}{NUMBERS if number % 9 == 0 else MIXED}" for number in range(60))[:5000]
    segments = await segments_of(segmenter, text, 40)
    assert "".join(each.text for each in segments) == text and len(text) == 5000
    assert all(segmenter._size_of(each.text) <= MAX_SIZE for each in segments) and len(segments) < 5000 / 10
    prompts = [stages[0]._script.prompt(each.text) for each in segments]
    assert all(prompt is not None and prompt.max_steps < 60 for prompt in prompts)
    spoken = [*segments[::15], segments[-1]]  # all take 10 s
    latents = await latents_of(stages[0], spoken, 3)
    assert [each.segment for each in latents if each.last] == [each.index for each in spoken]
    assert np.abs(await sound_of(stages[1], latents)).max() > 0.05
    stats = stages[0].engine_stats()
    assert stats.num_running == stats.num_waiting == 0
