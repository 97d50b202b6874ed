from __future__ import annotations

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.segmenter import LETTERS_PER_S, Segmenter
from omniflow.errors import StageDiedError
from omniflow.media import Segment, TextDelta
from tests.actors.test_cutting import ALL_TEXTS, cut_all
from tests.doubles import ListEmit, ListStream, Pause, context
from tests.waiting import exact_time

pytestmark = pytest.mark.anyio
NEVER_S = 100.0


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    return exact_time


async def segment(
    items: list[TextDelta | Pause | Exception], speed: float = 1.0, **options: float
) -> ListEmit[Segment]:
    segmenter = Segmenter(**options)
    await segmenter.setup()
    emit: ListEmit[Segment] = ListEmit()
    await segmenter.run(ListStream(items), emit, context(speed=speed))
    return emit


def deltas(text: str, size: int = 3) -> list[TextDelta | Pause | Exception]:
    return [TextDelta(text[at : at + size]) for at in range(0, len(text), size)]


def texts_of(emit: ListEmit[Segment]) -> list[str]:
    return [segment.text for segment in emit.items]


@given(text=ALL_TEXTS, size=st.integers(1, 20))
@settings(max_examples=50)
async def test_segments_are_the_text_numbered_in_order(text: str, size: int) -> None:
    emit = await segment(deltas(text, size), first_wait_s=NEVER_S)
    assert "".join(texts_of(emit)) == text
    assert [segment.index for segment in emit.items] == list(range(len(emit.items)))
    assert texts_of(emit) == cut_all(text)


@given(text=ALL_TEXTS, size=st.integers(1, 20))
@settings(max_examples=50)
async def test_nothing_is_lost_where_every_receive_is_too_late(text: str, size: int) -> None:
    """A limit in the past cancels each receive at its first wait."""
    items = [item for delta in deltas(text, size) for item in (Pause(0), delta)]
    emit = await segment(items, first_wait_s=-1.0, lead_s=NEVER_S)
    assert "".join(texts_of(emit)) == text


async def test_no_text_gives_no_segments() -> None:
    assert (await segment([])).items == []
    assert (await segment([TextDelta("")])).items == []


async def test_the_first_segment_leaves_at_its_time_limit_with_whole_words() -> None:
    slow = [TextDelta("Well, I"), TextDelta(" think"), TextDelta(" ab"), Pause(0.1), TextDelta("out it.")]
    began_s = anyio.current_time()
    emit = await segment(slow, first_wait_s=0.03)
    assert texts_of(emit) == ["Well, I think ", "about it."]
    assert emit.times_s[0] - began_s == pytest.approx(0.03)
    assert emit.times_s[1] - began_s == pytest.approx(0.1)


async def test_the_time_limit_counts_from_the_first_text() -> None:
    emit = await segment([Pause(0.06), TextDelta(""), *deltas("One two three four", 4)], first_wait_s=0.03)
    assert texts_of(emit) == ["One two three four"]


async def test_a_limit_that_finds_no_whole_words_waits_for_them() -> None:
    slow = [TextDelta("Interna"), Pause(0.04), TextDelta("tional"), TextDelta(" law"), TextDelta(" is")]
    emit = await segment(slow, first_wait_s=0.01)
    assert texts_of(emit) == ["International ", "law is"]


@pytest.mark.parametrize(("speed", "letters_per_s"), [(100 / LETTERS_PER_S, LETTERS_PER_S), (1.0, 100.0), (2.0, 50.0)])
async def test_slow_text_is_cut_before_the_player_runs_dry(speed: float, letters_per_s: float) -> None:
    """A word of 7 letters each 20 ms, spoken at 100 letters/s: without the limit the second piece is 144 letters."""
    items = [item for number in range(14) for item in (TextDelta(f"word{number:02} "), Pause(0.02))]
    emit = await segment(items, speed=speed, first_wait_s=0.03, lead_s=0.02, letters_per_s=letters_per_s)
    assert len(emit.items) > 2
    spoken_until_s = emit.times_s[0] + 0.02
    for piece, time_s in zip(texts_of(emit), emit.times_s, strict=True):
        assert time_s <= spoken_until_s + 1e-9
        spoken_until_s = max(spoken_until_s, time_s) + len(piece) / 100


async def test_fast_text_is_cut_by_its_meaning_only() -> None:
    text = "Hello there! This is a sentence that is long enough to stand alone. And this is another of its kind."
    assert texts_of(await segment(deltas(text))) == [
        "Hello there! ",
        "This is a sentence that is long enough to stand alone. ",
        "And this is another of its kind.",
    ]


async def test_sizes_are_settings() -> None:
    text = "one two three four five six seven eight nine ten eleven twelve"
    assert texts_of(await segment([TextDelta(text)], first_size=8))[0] == "one two "
    assert max(map(len, texts_of(await segment([TextDelta(text)], first_size=40, max_size=20)))) <= 20


async def test_a_failure_upstream_comes_through_as_it_is() -> None:
    with pytest.raises(StageDiedError):
        await segment([TextDelta("Hello"), StageDiedError("gone")])
