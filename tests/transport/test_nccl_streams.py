"""Which streams NCCL is given a value in, and what ends the wait for its other end. What stands in for torch's streams
writes down what is asked of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from omniflow.transport import gloo_way, nccl, nccl_ways
from omniflow.transport.gloo_way import GlooWay
from omniflow.transport.nccl_ways import RECEIVER, SENDER, NcclWay, Notes
from tests.waiting import HANGS_S

torch = pytest.importorskip("torch")


class Stream:
    def __init__(self, number: int, calls: list[Any]) -> None:
        self.cuda_stream = number
        self.idle = True
        self._calls = calls

    def query(self) -> bool:
        return self.idle

    def wait_event(self, event: Any) -> None:
        self._calls.append(("wait", self.cuda_stream, event))


class Event:
    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls
        self.through = False

    def record(self, stream: Stream) -> None:
        self._calls.append(("record", stream.cuda_stream))

    def query(self) -> bool:
        return self.through


class Bytes:
    """A tensor of which only its place matters. New ones are of the `current` stream."""

    def __init__(self, calls: list[Any], current: Sequence[Stream] = ()) -> None:
        self._calls, self._current = calls, current
        self.stream = current[0] if current else None

    def new_empty(self, size: int) -> Bytes:
        return Bytes(self._calls, self._current)

    def data_ptr(self) -> int:
        return 1000

    def record_stream(self, stream: Stream) -> None:
        self._calls.append(("used by", stream.cuda_stream))


class Communicator:
    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def send(self, address: int, size: int, stream: int) -> None:
        self._calls.append(("send", address, size, stream))

    def receive(self, address: int, size: int, stream: int) -> None:
        self._calls.append(("receive", address, size, stream))


def way_of(rank: int, calls: list[Any]) -> Any:
    way: Any = NcclWay(rank, Notes(lambda key, value: None))
    way._communicator, way._ready = Communicator(calls), Event(calls)
    way._default, way._stream = Stream(0, calls), Stream(7, calls)
    return way


def test_a_send_waits_for_the_default_stream_where_that_is_busy() -> None:
    calls: list[Any] = []
    way = way_of(SENDER, calls)
    way.send(Bytes(calls), 5)
    assert calls == [("send", 1000, 5, 7), ("used by", 7)]
    calls.clear()
    way._default.idle = False
    way.send(Bytes(calls), 5)
    assert calls == [("record", 0), ("wait", 7, way._ready), ("send", 1000, 5, 7), ("used by", 7)]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A way that receives, and its `calls` and `current` stream."""
    calls: list[Any] = []
    way = way_of(RECEIVER, calls)
    way.calls, way.current = calls, [way._default]
    way._byte = Bytes(calls, way.current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: way.current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: way.current.__setitem__(0, stream))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(calls))
    return way


def test_a_receive_goes_beside_a_default_stream_that_is_busy(receiver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is of the stream that writes to it, and the default stream waits for it alone."""
    region = receiver.receive(5, (1, 1))
    assert region.stream is receiver._default
    assert receiver.calls == [("receive", 1000, 5, 0), ("record", 0)]
    receiver.calls.clear()
    receiver._default.idle = False
    region = receiver.receive(5, (1, 2))
    through = receiver._coming[-1][0]
    assert (region.stream, receiver.current[0]) == (receiver._stream, receiver._default)
    assert receiver.calls == [("receive", 1000, 5, 7), ("record", 7), ("wait", 0, through), ("used by", 0)]

    def full(size: int) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(receiver._byte, "new_empty", full, raising=False)
    with pytest.raises(RuntimeError, match="out of memory"):
        receiver.receive(5, (1, 3))
    assert receiver.current[0] is receiver._default


def test_what_may_never_come_is_known_and_events_serve_again(receiver: Any) -> None:
    """The first of eight receives are through when the ninth is asked for."""
    for request in range(8):
        receiver.receive(5, (1, request))
    assert receiver.lost() == [(1, request) for request in range(8)]
    events = [through for through, _ in receiver._coming]
    for event in events[:3]:
        event.through = True  # what GPUs say; recorded anew, they say it again once they are through again
    assert receiver.lost() == [(1, request) for request in range(3, 8)]
    receiver.receive(5, (1, 8))
    assert receiver._coming[-1][0] is events[2]
    events[2].through = False
    assert receiver.lost() == [(1, request) for request in range(3, 9)]
    receiver.receive(5, (1, 9))
    assert (receiver._coming[-1][0], receiver._spare) == (events[1], [events[0]])


class Slow:
    """A communicator whose other end does not come."""

    made: list[Slow]

    def __init__(self, name: bytes, rank: int) -> None:
        self.waits, self.aborted = threading.Event(), threading.Event()
        self.made.append(self)

    def open(self) -> None:
        self.waits.set()
        if self.aborted.wait(HANGS_S):
            raise RuntimeError("the communicator was closed")

    def abort(self) -> None:
        self.aborted.set()


@pytest.mark.parametrize("early", [False, True])
def test_no_thread_waits_for_a_peer_that_dies_while_the_two_meet(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had said that it comes. The link ends while NCCL waits, or just before NCCL is asked."""
    monkeypatch.setattr(nccl_ways, "Communicator", Slow)
    made: list[Slow] = []
    monkeypatch.setattr(Slow, "made", made, raising=False)
    way = NcclWay(RECEIVER, Notes(lambda key, value: None))
    way.notes.put("name", bytes(128))
    problems: list[str | None] = []
    if early:
        way.abort()
    thread = threading.Thread(target=lambda: problems.append(nccl._opened(way)))
    thread.start()
    while not made:
        thread.join(0.001)
    if not early:
        assert made[0].waits.wait(HANGS_S)
        way.abort()
    thread.join(HANGS_S)
    assert problems == ["RuntimeError: the communicator was closed"]
    assert made[0].aborted.is_set()


@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
def test_no_thread_waits_for_long_for_a_peer_that_dies_while_gloo_connects(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said where it is, and is gone before it connects. Only gloo's own timeout, of which it waits several,
    ends that wait.
    """
    monkeypatch.setattr(gloo_way, "CONNECT_S", 0.1)
    theirs: Notes
    said = threading.Event()
    ours = Notes(lambda key, value: theirs.close())

    def hear(key: str, value: bytes) -> None:
        ours.put(key, value)
        said.set()

    theirs = Notes(hear)
    problems: list[str | None] = []
    peer = threading.Thread(target=lambda: problems.append(nccl._opened(GlooWay(1 - rank, theirs))), daemon=True)
    peer.start()
    assert said.wait(HANGS_S)
    thread = threading.Thread(target=lambda: problems.append(nccl._opened(GlooWay(rank, ours))), daemon=True)
    thread.start()
    thread.join(HANGS_S)
    peer.join(HANGS_S)
    assert not thread.is_alive() and not peer.is_alive()
    assert len(problems) == 2 and None not in problems


def test_a_group_that_is_made_after_its_link_has_ended_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[bool] = []

    class Group:
        def abort(self) -> None:
            aborted.append(True)

    def make(rank: int, store: Any) -> Group:
        way.abort()  # finds no group yet
        return Group()

    monkeypatch.setattr(gloo_way, "_make_group", make)
    way = GlooWay(RECEIVER, Notes(lambda key, value: None))
    assert nccl._opened(way) == "RuntimeError: the communicator was closed"
    assert (way._group, aborted) == (None, [True])
