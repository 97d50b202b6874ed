"""A stream edge for one request: bounded, ordered, woken, and never more credit than was given."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniflow.errors import ProtocolError
from omniflow.mailbox import Credits, Mailbox
from omniflow.messages import READER_GONE

pytestmark = pytest.mark.anyio


def mailbox(bound: int = 4) -> tuple[Mailbox[int], list[int]]:
    """A mailbox, and the credits that its reader has given back."""
    given: list[int] = []
    return Mailbox(bound, given.append), given


async def test_items_come_in_order_and_then_the_end() -> None:
    box, _ = mailbox()
    for number in range(3):
        box.put(number, number * 10)
    box.end(3)
    assert [item async for item in box] == [0, 10, 20]
    assert [item async for item in box] == []


async def test_a_waiting_reader_is_woken_by_an_item_and_by_the_end() -> None:
    box, _ = mailbox()
    got: list[int] = []

    async def read() -> None:
        async for item in box:
            got.append(item)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        box.put(0, 5)
        await anyio.wait_all_tasks_blocked()
        assert got == [5]
        box.end(1)


async def test_a_second_reader_is_told_and_the_first_not_forgotten() -> None:
    box, _ = mailbox()
    async with anyio.create_task_group() as tasks:
        found: list[int] = []

        async def read() -> None:
            found.append(await anext(box))

        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="one reader"):
            await anext(box)
        box.put(0, 5)
    assert found == [5]


async def test_a_wait_that_times_out_loses_nothing() -> None:
    box, _ = mailbox()
    with anyio.move_on_after(0.001) as scope:
        await anext(box)
    assert scope.cancelled_caught
    box.put(0, 1)
    assert await anext(box) == 1


@pytest.mark.parametrize(
    ("bound", "expected"), [(1, [1, 1, 1, 1]), (2, [1, 1, 1, 1]), (4, [2, 2]), (5, [3]), (8, [4]), (16, [])]
)
async def test_credit_returns_once_half_is_consumed(bound: int, expected: list[int]) -> None:
    box, given = mailbox(bound)
    for number in range(4):
        box.put(number, number)
        await anext(box)
    assert given == expected


def test_more_than_the_bound_is_a_broken_contract() -> None:
    box, _ = mailbox(2)
    box.put(0, 0)
    box.put(1, 1)
    with pytest.raises(ProtocolError, match="more than 2 items are waiting: the writer ignored its credits"):
        box.put(2, 2)


@pytest.mark.parametrize("seq", [1, -1])
def test_an_item_out_of_order_is_a_broken_contract(seq: int) -> None:
    box, _ = mailbox()
    with pytest.raises(ProtocolError, match=f"item {seq} arrived where item 0 was due"):
        box.put(seq, 0)


def test_an_end_that_does_not_count_what_came_is_a_broken_contract() -> None:
    box, _ = mailbox()
    box.put(0, 0)
    with pytest.raises(ProtocolError, match="the stream ended after 2 items, but 1 arrived"):
        box.end(2)


def test_an_item_after_the_end_is_a_broken_contract() -> None:
    box, _ = mailbox()
    box.end(0)
    with pytest.raises(ProtocolError, match="item 0 arrived after the end of its stream"):
        box.put(0, 0)


async def test_a_reader_that_leaves_drops_what_waits_and_tells_the_writer_once() -> None:
    box, given = mailbox()
    box.put(0, 0)
    box.discard()
    box.discard()
    box.put(1, 1)
    assert given == [READER_GONE]
    assert box.statistics() == (0, 4, 2, False, 0)
    box.end(2)


def test_a_reader_that_leaves_after_the_end_tells_nobody() -> None:
    box, given = mailbox()
    box.end(0)
    box.discard()
    assert given == []


async def test_a_reader_that_always_finds_items_lets_others_run() -> None:
    box, _ = mailbox(200)
    for number in range(200):
        box.put(number, number)
    box.end(200)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.sleep(0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        async for _item in box:
            pass
        assert turns >= 3
        tasks.cancel_scope.cancel()


async def test_a_writer_waits_for_credit() -> None:
    credits = Credits(2)
    assert [await credits.take(), await credits.take()] == [0, 1]
    taken: list[int] = []

    async def write() -> None:
        taken.append(await credits.take())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        await anyio.wait_all_tasks_blocked()
        assert taken == []
        credits.give(1)
    assert taken == [2]


async def test_a_writer_whose_reader_leaves_is_woken() -> None:
    credits = Credits(1)
    await credits.take()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(credits.take)
        await anyio.wait_all_tasks_blocked()
        credits.give(READER_GONE)
    assert credits.gone
    assert await credits.take() == -1
    assert credits.seq == 1


async def test_a_cancelled_wait_takes_no_credit() -> None:
    credits = Credits(1)
    await credits.take()
    with anyio.move_on_after(0.001):
        await credits.take()
    credits.give(1)
    assert await credits.take() == 1


async def test_an_item_that_was_not_sent_gives_its_number_back() -> None:
    credits = Credits(1)
    await credits.take()
    credits.untake()
    assert (await credits.take(), credits.seq) == (0, 1)


@given(bound=st.integers(1, 9), moves=st.lists(st.booleans(), max_size=60))
def test_writer_and_reader_never_exceed_the_bound(bound: int, moves: list[bool]) -> None:
    """Any interleaving of writes (True) and reads: what is under way never exceeds the bound, and nobody is stuck."""

    async def play() -> None:
        credits = Credits(bound)
        box: Mailbox[int] = Mailbox(bound, credits.give)
        written = read = 0
        for write in moves:
            if write and credits._free:
                box.put(await credits.take(), written)
                written += 1
            elif not write and read < written:
                assert await anext(box) == read
                read += 1
            assert credits._free + box.statistics().queued + box._taken == bound
            assert credits._free or box.statistics().queued, "neither side can move"

    anyio.run(play)
