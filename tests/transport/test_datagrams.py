"""How messages share datagrams: the peer is a bare socket, so each of them is seen."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import msgspec
import pytest

from omniflow.messages import Beat, Cancel, Connect, Message
from omniflow.transport import datagrams
from omniflow.transport.arrow_shm import ArrowShmLink, SharedMemory, socket_pair

from ..contract.ends import Inbox
from ..waiting import HANGS_S

pytestmark = pytest.mark.anyio


class Pair(NamedTuple):
    link: ArrowShmLink
    peer: socket.socket

    def datagrams(self) -> Iterator[list[Any]]:
        """What has arrived at the peer: the messages of each datagram."""
        decoder = msgspec.msgpack.Decoder(list[Message])
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.peer, 2**17, 4)
            except BlockingIOError:
                return
            for descriptor in descriptors:
                socket.close(descriptor)
            if not data:
                return
            yield decoder.decode(data)


LATE_S = datagrams._LATE_S


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(datagrams, "_LATE_S", HANGS_S)  # no turn of a test lasts, however busy the machine is
    left, right = socket_pair()
    right.setblocking(False)
    memory = SharedMemory(2**20)
    link = ArrowShmLink("peer", Inbox(), left, memory, {1: str})
    yield Pair(link, right)
    link.close()
    right.close()
    memory.close()


async def test_the_first_leaves_at_once_and_the_rest_of_a_turn_together(pair: Pair) -> None:
    for number in range(5):
        pair.link.send(Cancel(number))
    assert list(pair.datagrams()) == [[Cancel(0)]]
    assert pair.link.statistics().backlog == 4
    await asyncio.sleep(0)
    assert list(pair.datagrams()) == [[Cancel(1), Cancel(2), Cancel(3), Cancel(4)]]
    await asyncio.sleep(0)
    pair.link.send(Cancel(5))
    assert list(pair.datagrams()) == [[Cancel(5)]]


async def test_what_announces_more_waits_for_it(pair: Pair) -> None:
    pair.link.send(Cancel(1), more=True)
    assert list(pair.datagrams()) == []
    pair.link.send(Cancel(2))
    await asyncio.sleep(0)
    assert list(pair.datagrams()) == [[Cancel(1), Cancel(2)]]


async def test_what_announces_more_that_does_not_come_leaves_at_the_end_of_the_turn(pair: Pair) -> None:
    pair.link.send(Cancel(1), more=True)
    await asyncio.sleep(0)
    assert list(pair.datagrams()) == [[Cancel(1)]]


async def test_a_turn_that_lasts_holds_nothing_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datagrams, "_LATE_S", LATE_S)
    pair.link.send(Cancel(0))
    time.sleep(0.001)  # noqa: ASYNC251 - what no stage should do, and some will
    pair.link.send(Cancel(1))
    assert list(pair.datagrams()) == [[Cancel(0)], [Cancel(1)]]


async def test_what_is_held_leaves_when_asked_for(pair: Pair) -> None:
    pair.link.send(Cancel(0))
    pair.link.send(Cancel(1))
    assert pair.link.push()
    assert list(pair.datagrams()) == [[Cancel(0)], [Cancel(1)]]


async def test_what_is_held_leaves_when_the_link_is_closed(pair: Pair) -> None:
    pair.link.send(Cancel(0))
    pair.link.send(Cancel(1))
    pair.link.close()
    assert [message for messages in pair.datagrams() for message in messages] == [Cancel(0), Cancel(1)]


async def test_who_waits_for_room_ends_with_the_link(pair: Pair) -> None:
    """What is held while the peer has no room must not go to a descriptor that is somebody else's by now."""
    number = 0
    while pair.link.push():
        number += 1
        pair.link.send(Cancel(number))
    for _ in range(2):
        pair.link.send(Cancel(number + 1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pair.link.flushed)
        await anyio.lowlevel.checkpoint()
        pair.link.close()
    assert pair.link.push() and pair.link.statistics().backlog == 0


async def test_what_is_held_and_a_large_message_are_two_datagrams(pair: Pair) -> None:
    """Both are not too large, and together they are."""
    pair.link.send(Cancel(0))
    for size in (60_000, 100_000):
        pair.link.send(Connect("x" * size), more=True)
    pair.link.push()
    got = [message for messages in pair.datagrams() for message in messages]
    assert got == [Cancel(0), *(Connect("x" * size) for size in (60_000, 100_000))]


async def test_a_descriptor_travels_alone_and_in_order(pair: Pair) -> None:
    pair.link.send(Cancel(0))
    pair.link.send(Cancel(1))
    pair.link.send(Connect("c"), (socket.socket().detach(),))
    pair.link.send(Cancel(2))
    pair.link.send(Cancel(3))
    await asyncio.sleep(0)
    assert list(pair.datagrams()) == [[Cancel(0)], [Cancel(1)], [Connect("c")], [Cancel(2), Cancel(3)]]


async def test_a_slow_peer_gets_full_datagrams_in_order(pair: Pair) -> None:
    """What waits is packed; values wait with it once much does; nothing is lost or overtaken."""
    number = 0
    while (pending := pair.link.send_item(1, 1, number, "x" * 150)) is None:
        number += 1
    assert not pair.link.push()
    got: list[int] = []
    sizes: list[int] = []
    async with anyio.create_task_group() as tasks:

        async def send_last() -> None:
            await pending

        tasks.start_soon(send_last)
        with anyio.fail_after(HANGS_S):
            while len(got) <= number:
                for messages in pair.datagrams():
                    got += [item.seq for item in messages]
                    sizes.append(len(messages))
                await asyncio.sleep(0)
    assert got == list(range(number + 1))
    assert max(sizes) > 100
    assert len(got) / len(sizes) > 20


async def test_the_end_of_a_peer_is_met_by_silence(pair: Pair) -> None:
    pair.peer.close()
    pair.link.send(Beat("", 0.0))
    pair.link.send(Beat("", 0.0))
    await asyncio.sleep(0)
    assert pair.link.statistics().backlog == 0


async def test_where_no_descriptor_can_be_carried_the_message_goes_without(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts those that are under way, of all processes of a user."""

    def refuse(*_arguments: object) -> int:
        raise OSError(errno.ETOOMANYREFS, "Too many references")

    one, other = socket.socketpair()
    number = 0
    while pair.link.push():
        number += 1
        pair.link.send(Cancel(number))
    pair.link.send(Connect("c"), (one.detach(),))
    pair.link.send(Cancel(0))
    monkeypatch.setattr(socket, "send_fds", refuse)
    got: list[Message] = []
    with anyio.fail_after(HANGS_S):
        while Cancel(0) not in got:
            got += [message for messages in pair.datagrams() for message in messages]
            await asyncio.sleep(0)
    assert got == [*(Cancel(each) for each in range(1, number + 1)), Connect("c"), Cancel(0)]
    with other:
        assert other.recv(1) == b"", "the descriptor is open"


class Poor:
    """A socket whose kernel has no memory for the next datagrams."""

    def __init__(self, connection: socket.socket, count: int) -> None:
        self._connection = connection
        self.count = count
        self.tries = 0
        self.fileno = connection.fileno

    def send(self, data: bytes) -> int:
        self.tries += 1
        if self.tries <= self.count:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return self._connection.send(data)


@pytest.mark.parametrize("count", [1, 3])
async def test_what_the_kernel_has_no_memory_for_leaves_later(pair: Pair, count: int) -> None:
    pair.link._writer._socket = Poor(pair.link._writer._socket, count)
    for number in range(3):
        pair.link.send(Cancel(number))
    with anyio.fail_after(HANGS_S):
        await pair.link.flushed()
    assert [message for messages in pair.datagrams() for message in messages] == [Cancel(0), Cancel(1), Cancel(2)]


async def test_a_kernel_without_memory_is_not_asked_at_every_turn_of_the_loop(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket is writable all the while."""
    writer = pair.link._writer
    poor = writer._socket = Poor(writer._socket, 2)
    pair.link.send(Cancel(0))
    monkeypatch.setattr(datagrams, "_MEMORY_S", HANGS_S)
    while poor.tries < 2:
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert poor.tries == 2


async def test_a_link_that_is_closed_while_the_kernel_has_no_memory_sends_no_more(pair: Pair) -> None:
    writer = pair.link._writer
    poor = writer._socket = Poor(writer._socket, 1)
    pair.link.send(Cancel(0))
    pair.link.close()
    await anyio.sleep(10 * datagrams._MEMORY_S)
    assert poor.tries == 1
