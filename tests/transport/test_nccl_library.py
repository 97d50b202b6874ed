"""What is asked of NCCL, in which order, and what is given up when the other end dies. A library that counts takes its
place: no machine of these tests has GPUs. That it works with NCCL itself is measured by bench/gpu/transports.py.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from omniflow.transport import nccl_library
from omniflow.transport.nccl_library import Communicator
from tests.waiting import HANGS_S

IN_PROGRESS, REMOTE_ERROR = 7, 6


class Library:
    """Writes down its calls. A communicator is made once `states` says so; they are asked for in turn."""

    def __init__(self, *states: int) -> None:
        self.calls: list[Any] = []
        self.asked = threading.Event()
        self._states = list(states)
        self._handles = 0

    def _make(self, where: Any) -> None:
        self._handles += 1
        where._obj.value = self._handles

    def ncclCommInitRankConfig(self, where: Any, ranks: int, name: Any, rank: int, config: Any) -> int:
        self.calls.append(("init", ranks, rank, config._obj.blocking))
        self._make(where)
        return IN_PROGRESS

    def ncclCommSplit(self, meeting: Any, color: int, key: int, where: Any, config: Any) -> int:
        self.calls.append(("split", meeting.value, color, key, config._obj.blocking))
        self._make(where)
        return IN_PROGRESS

    def ncclCommGetAsyncError(self, handle: Any, state: Any) -> int:
        assert ("abort", handle.value) not in self.calls  # it is freed
        state._obj.value = self._states.pop(0) if self._states else IN_PROGRESS
        self.calls.append(("ask", handle.value))
        self.asked.set()
        return 0

    def ncclCommAbort(self, handle: Any) -> int:
        self.calls.append(("abort", handle.value))
        return 0

    def ncclSend(self, *arguments: Any) -> int:
        self.calls.append(("send", *arguments[:4], arguments[4].value, arguments[5]))
        return 0

    ncclRecv = ncclSend

    def ncclGetLastError(self, handle: Any) -> bytes:
        return b""

    def ncclGetErrorString(self, error: int) -> bytes:
        return b"remote process exited or there was a network error"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Library:
    found = Library(*request.param)
    monkeypatch.setattr(nccl_library, "_library", lambda: found)
    monkeypatch.setattr(nccl_library, "_LOOK_S", 0.001)
    return found


@pytest.mark.parametrize("library", [(IN_PROGRESS, 0, IN_PROGRESS, 0)], indirect=True)
def test_the_ends_meet_without_blocking_and_send_by_a_communicator_that_blocks(library: Library) -> None:
    made = Communicator(bytes(128), 1)
    made.open()
    made.send(100, 5, 77)
    made.abort()
    made.abort()
    assert library.calls == [
        ("init", 2, 1, 0), ("ask", 1), ("ask", 1), ("split", 1, 0, 1, 1), ("ask", 1), ("ask", 1),
        ("send", 100, 5, 1, 0, 2, 77), ("abort", 2), ("abort", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("library", "handles"), [((), [1]), ((0,), [2, 1])], indirect=["library"])
def test_an_end_whose_peer_does_not_come_is_given_up(library: Library, handles: list[int]) -> None:
    """While the two meet, and while the second is split from the first: no thread is left that waits."""
    made = Communicator(bytes(128), 0)
    problems: list[str] = []

    def open_it() -> None:
        try:
            made.open()
        except RuntimeError as error:
            problems.append(str(error))

    thread = threading.Thread(target=open_it)
    thread.start()
    while ("split", 1, 0, 0, 1) not in library.calls and len(handles) == 2:
        library.asked.wait(HANGS_S)
    assert library.asked.wait(HANGS_S)
    made.abort()
    thread.join(HANGS_S)
    assert not thread.is_alive()
    assert problems == ["the communicator was closed"]
    assert [handle for call, handle, *_ in library.calls if call == "abort"] == handles
    with pytest.raises(RuntimeError, match="was closed"):
        made.open()


@pytest.mark.parametrize("library", [(REMOTE_ERROR,), (0, REMOTE_ERROR)], indirect=True)
def test_what_nccl_says_of_a_peer_that_died(library: Library) -> None:
    with pytest.raises(RuntimeError, match=r"nccl.*: remote process exited"):
        Communicator(bytes(128), 0).open()


def test_the_settings_have_the_layout_of_nccl() -> None:
    """ncclConfig_t up to netName: 40 bytes on 64-bit machines, by which NCCL tells which fields it was given."""
    config = nccl_library._config(blocking=False)
    assert (ctypes.sizeof(config), config.size, config.magic) == (40, 40, 0xCAFEBEEF)
    assert (nccl_library._Config.blocking.offset, nccl_library._Config.net_name.offset) == (16, 32)
    assert (config.blocking, config.max_ctas) == (0, -(2**31))


class Stuck:
    """A communicator whose first byte does not come through."""

    def __init__(self, library: Library, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
        self.fails, self.waits = threading.Event(), threading.Event()
        self.problems: list[str] = []
        self.made = Communicator(bytes(128), rank)
        self.made.open()

        def call(*arguments: Any) -> int:
            library.calls.append(("first byte", arguments[0], arguments[1], arguments[3]))
            self.waits.set()
            self.fails.wait(HANGS_S)
            library.calls.append(("failed",))
            return REMOTE_ERROR

        monkeypatch.setattr(self.made, "_receive" if rank else "_send", call)
        self.thread = threading.Thread(target=self._connect)
        self.thread.start()
        assert self.waits.wait(HANGS_S)

    def _connect(self) -> None:
        try:
            self.made.connect(100, 77)
        except RuntimeError as error:
            self.problems.append(str(error))


@pytest.mark.parametrize("library", [(0, 0)], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_freed_while_nccl_finds_out_that_the_peer_has_died(
    library: Library, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_library, "_FAILS_S", HANGS_S)
    stuck = Stuck(library, monkeypatch, rank)
    aborting = threading.Thread(target=stuck.made.abort)
    aborting.start()
    assert stuck.made._aborted.wait(HANGS_S)
    stuck.fails.set()
    aborting.join(HANGS_S)
    stuck.thread.join(HANGS_S)
    assert library.calls[-4:] == [("first byte", 100, 1, 1 - rank), ("failed",), ("abort", 2), ("abort", 1)]
    assert stuck.problems and "remote process exited" in stuck.problems[0]
    with pytest.raises(RuntimeError, match="was closed"):
        stuck.made.connect(100, 77)


@pytest.mark.parametrize("library", [(0, 0)], indirect=True)
def test_a_first_byte_that_waits_for_ever_is_ended(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library, "_FAILS_S", 0.001)
    stuck = Stuck(library, monkeypatch, 0)
    monkeypatch.setattr(library, "ncclCommAbort", lambda handle: stuck.fails.set(), raising=True)
    stuck.made.abort()
    stuck.thread.join(HANGS_S)
    assert not stuck.thread.is_alive()
