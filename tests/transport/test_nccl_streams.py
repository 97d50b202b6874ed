"""Which streams NCCL is given a value in, and what ends the wait for its other end. What stands in for torch's streams
writes down what is asked of them.
"""

from __future__ import annotations

import threading
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

    def record_event(self) -> str:
        self._calls.append(("record", self.cuda_stream))
        return f"event of {self.cuda_stream}"


class Ready:
    """The event of a sender."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def record(self, stream: Stream) -> None:
        self._calls.append(("record", stream.cuda_stream))


class Bytes:
    """A tensor of which only its place matters."""

    def __init__(self, calls: list[Any], stream: Any = None) -> None:
        self._calls, self.stream = calls, stream

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
    way._communicator, way._ready = Communicator(calls), Ready(calls)
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


def test_a_receive_goes_beside_a_default_stream_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is of the stream that writes to it, and the default stream waits for it alone."""
    calls: list[Any] = []
    way = way_of(RECEIVER, calls)
    current = [way._default]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: Bytes(calls, current[0]))
    region, through = way.receive(5)
    assert (region.stream, through) == (way._default, "event of 0")
    assert calls == [("receive", 1000, 5, 0), ("record", 0)]
    calls.clear()
    way._default.idle = False
    region, through = way.receive(5)
    assert (region.stream, through, current[0]) == (way._stream, "event of 7", way._default)
    assert calls == [("receive", 1000, 5, 7), ("record", 7), ("wait", 0, "event of 7"), ("used by", 0)]

    def full(*_arguments: Any, **_settings: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(RuntimeError, match="out of memory"):
        way.receive(5)
    assert current[0] is way._default


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
