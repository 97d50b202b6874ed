"""The sending end of a stream port: what a cancelled or shared send leaves behind."""

from __future__ import annotations

from collections.abc import Awaitable

import anyio
import pytest

from omniflow.actor import Port
from omniflow.errors import ProtocolError, UnsupportedError
from omniflow.mailbox import Credits
from omniflow.media import Segment
from omniflow.messages import READER_GONE
from omniflow.topology import Refusal
from omniflow.turns import Progress
from omniflow.visit import PortEmit, Reader, accepts

pytestmark = pytest.mark.anyio


class Way:
    """A way out that takes items at once, or keeps their sender waiting until `room` is set."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, object]] = []
        self.room = anyio.Event()
        self.room.set()

    def send(self, edge: int, request: int, seq: int, value: object) -> Awaitable[None] | None:
        if self.room.is_set():
            self.sent.append((edge, seq, value))
            return None
        return self._send_later(edge, seq, value)

    async def _send_later(self, edge: int, seq: int, value: object) -> None:
        await self.room.wait()
        self.sent.append((edge, seq, value))


def emit(way: Way, *readers: Credits, refusal: Refusal | None = None, loop: int | None = None) -> PortEmit:
    ends = [Reader(edge, way.send, credits, loop, None) for edge, credits in enumerate(readers)]
    return PortEmit("talker", Port("emit", "stream", int), 7, ends, refusal, Progress())


async def test_a_send_that_is_cancelled_while_it_waits_for_room_gives_its_number_back() -> None:
    way, credits = Way(), Credits(2)
    port = emit(way, credits)
    await port.send(1)
    way.room = anyio.Event()
    with anyio.move_on_after(0.001) as scope:
        await port.send(2)
    assert scope.cancelled_caught
    way.room.set()
    await port.send(3)
    assert way.sent == [(0, 0, 1), (0, 1, 3)]
    assert credits.seq == 2


async def test_tasks_that_share_a_port_send_one_after_the_other() -> None:
    way, credits = Way(), Credits(10)
    port = emit(way, credits)
    way.room = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(port.send, 1)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(port.send, 2)
        await anyio.wait_all_tasks_blocked()
        way.room.set()
    assert way.sent == [(0, 0, 1), (0, 1, 2)]


@pytest.mark.parametrize("num_readers", [1, 2])
async def test_a_task_that_goes_on_does_not_overtake_one_that_waits(num_readers: int) -> None:
    """The turn is free for the one that waits, which has yet to run, when the first sends again."""
    way = Way()
    port = emit(way, *(Credits(10) for _ in range(num_readers)))
    way.room = anyio.Event()

    async def send(*values: int) -> None:
        for value in values:
            await port.send(value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send, 1, 3, 4)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(send, 2)
        await anyio.wait_all_tasks_blocked()
        way.room.set()
    assert way.sent == [(edge, value - 1, value) for value in (1, 2, 3, 4) for edge in range(num_readers)]


async def test_every_reader_gets_every_item_and_the_slowest_sets_the_pace() -> None:
    way, fast, slow = Way(), Credits(5), Credits(1)
    port = emit(way, fast, slow)
    await port.send(1)
    with anyio.move_on_after(0.001) as scope:
        await port.send(2)
    assert scope.cancelled_caught
    slow.give(READER_GONE)
    await port.send(3)
    assert way.sent == [(0, 0, 1), (1, 0, 1), (0, 1, 3)], "a send that is cancelled has reached nobody"
    assert port.wanted
    fast.give(READER_GONE)
    assert not port.wanted
    await port.send(4)
    assert len(way.sent) == 3


async def test_without_readers_nothing_is_wanted() -> None:
    way = Way()
    port = emit(way)
    assert not port.wanted
    await port.send(1)
    assert way.sent == []


async def test_a_port_that_nobody_can_take_refuses() -> None:
    port = emit(Way(), refusal=Refusal("vocoder", "no vocoder here"))
    assert port.wanted, "so that the refusal is seen"
    with pytest.raises(UnsupportedError, match="stage 'vocoder': no vocoder here"):
        await port.send(1)


async def test_wrong_items_and_loops_beyond_their_bound_are_refused() -> None:
    port = emit(Way(), Credits(5), loop=1)
    with pytest.raises(ProtocolError, match="stage 'talker': port 'emit' gives int, but got str"):
        await port.send("x")
    await port.send(1)
    with pytest.raises(ProtocolError, match="feedback port 'emit' sent more than its bound"):
        await port.send(2)


class Marked(Segment, frozen=True):
    """Arrives in another process as a plain Segment, so it may not leave its own, either."""

    mark: str


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (int, 1, True),
        (int, "1", False),
        (float, 1, True),
        (float, "1", False),
        (list[int], "x", True),
        (int, None, False),
        (int, True, True),
        (Segment, Segment("a", 0), True),
        (Segment, Marked("a", 0, "b"), False),
    ],
)
def test_accepts(hint: object, value: object, expected: bool) -> None:
    assert accepts(hint, value) is expected
