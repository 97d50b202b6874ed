"""Input that comes bit by bit: an async iterable for a stream entry, on one process and on several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import anyio
import pytest

from omniflow.actor import Actor, Emit, Stream
from omniflow.errors import InvalidInputError, OverloadedError
from omniflow.graph import Graph
from omniflow.media import TextDelta
from omniflow.planner import Cluster

from .running import CPU, INLINE, running
from .waiting import HANGS_S

pytestmark = pytest.mark.anyio


class Upper(Actor):
    heavy = True

    async def run(self, text: Stream[TextDelta], emit: Emit[TextDelta]) -> None:
        async for piece in text:
            if piece.text == "enough":
                return
            await emit.send(TextDelta(piece.text.upper()))


def upper() -> Graph:
    graph = Graph("upper")
    stage = graph.stage("upper", Upper)
    graph.input(text=stage)
    graph.output(text=stage)
    return graph


class Source:
    """Gives `pieces`, and knows how many were taken and whether it was closed."""

    def __init__(self, *pieces: object, then: BaseException | None = None, forever: bool = False) -> None:
        self._pieces = pieces
        self._then = then
        self._forever = forever
        self.num_taken = 0
        self.closed = False

    async def __call__(self) -> AsyncGenerator[object]:
        try:
            for piece in self._pieces:
                self.num_taken += 1
                yield piece
            if self._then is not None:
                raise self._then
            if self._forever:
                await anyio.sleep_forever()
        finally:
            self.closed = True


@pytest.mark.parametrize("cluster", [INLINE, CPU], ids=["one process", "two"])
async def test_each_item_comes_out_before_the_next_goes_in(cluster: Cluster) -> None:
    heard = anyio.create_memory_object_stream[str](1)

    async def question_and_answer() -> AsyncGenerator[TextDelta]:
        for word in ("one", "two", "three"):
            yield TextDelta(word)
            assert await heard[1].receive() == word.upper()

    async with running(upper(), cluster) as runtime:
        async with await runtime.submit("text", question_and_answer()) as reply:
            async for _, value in reply:
                heard[0].send_nowait(value.text)
    assert heard[1].statistics().current_buffer_used == 0
    heard[0].close()
    heard[1].close()


async def test_no_more_is_taken_than_the_stage_has_room_for() -> None:
    source = Source(*[TextDelta("x")] * 5000)
    async with running(upper(), CPU) as runtime:
        async with await runtime.submit("text", source()) as reply:
            await anyio.sleep(0.05)
            taken = source.num_taken
            assert 0 < taken < 1000
            assert len([value async for value in reply]) == 5000


async def test_where_it_breaks_off_the_request_ends_and_the_next_one_works() -> None:
    broken = Source(TextDelta("a"), then=KeyError("no such file"))
    async with running(upper()) as runtime:
        with pytest.raises(InvalidInputError, match="input 'text' broke off: KeyError: 'no such file'") as caught:
            await (await runtime.submit("text", broken())).collect()
        assert caught.value.param == "text"
        assert (await (await runtime.submit("text", Source(TextDelta("b"))())).collect())["text"] == [TextDelta("B")]


async def cancelled_within() -> AsyncGenerator[TextDelta]:
    """As a socket's reader that somebody else has cancelled."""
    yield TextDelta("a")
    task = asyncio.get_running_loop().create_task(asyncio.sleep(9))
    task.cancel()
    await task


async def closed_badly() -> AsyncGenerator[object]:
    try:
        yield 7
    finally:
        raise ConnectionError("the socket is gone already")


@pytest.mark.parametrize("cluster", [INLINE, CPU], ids=["one process", "two"])
@pytest.mark.parametrize(
    ("source", "message"),
    [(cancelled_within, "broke off: it was cancelled from within"), (closed_badly, "takes TextDelta, but got int")],
)
async def test_a_source_of_whatever_kind_does_not_end_the_runtime(
    cluster: Cluster, source: Callable[[], AsyncGenerator[object]], message: str
) -> None:
    async with running(upper(), cluster) as runtime:
        other = await runtime.submit("text", Source(TextDelta("b"), forever=True)())
        with pytest.raises(InvalidInputError, match=message):
            await (await runtime.submit("text", source())).collect()
        assert (await anext(other)).value == TextDelta("B")
        await other.cancel()


async def test_a_source_whose_request_ends_before_it_is_asked_is_let_go_of() -> None:
    taken = Source(forever=True)
    async with running(upper()) as runtime:
        before = asyncio.all_tasks()
        reply = await runtime.submit("text", taken())
        await reply.cancel()
        with anyio.fail_after(HANGS_S):
            while asyncio.all_tasks() - before:
                await anyio.sleep(0)


async def test_an_error_of_ours_is_told_as_it_is() -> None:
    async with running(upper()) as runtime:
        with pytest.raises(OverloadedError, match="too fast"):
            refused = Source(TextDelta("a"), then=OverloadedError("too fast"))
            await (await runtime.submit("text", refused())).collect()


async def test_an_item_of_another_type() -> None:
    source = Source(TextDelta("a"), 7)
    async with running(upper()) as runtime:
        with pytest.raises(InvalidInputError, match="input 'text' takes TextDelta, but got int"):
            await (await runtime.submit("text", source())).collect()
    assert source.closed


@pytest.mark.parametrize("cluster", [INLINE, CPU], ids=["one process", "two"])
async def test_a_cancelled_request_lets_go_of_its_source(cluster: Cluster) -> None:
    source = Source(TextDelta("a"), forever=True)
    async with running(upper(), cluster) as runtime:
        async with await runtime.submit("text", source()) as reply:
            assert (await anext(reply)).value == TextDelta("A")
        with anyio.fail_after(HANGS_S):
            while not source.closed:
                await anyio.sleep(0)


async def test_a_stage_that_has_enough_ends_the_request() -> None:
    source = Source(TextDelta("a"), TextDelta("enough"), forever=True)
    async with running(upper()) as runtime:
        found = await (await runtime.submit("text", source())).collect()
        assert found["text"] == [TextDelta("A")]
        with anyio.fail_after(HANGS_S):
            while not source.closed:
                await anyio.sleep(0)
