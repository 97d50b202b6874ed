"""A process that is about to end says so at once, whatever it still has to give back."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Iterator

import pytest

from omniflow.prctl import can_tell_end, tell_end


@pytest.fixture
def told() -> Iterator[tuple[int, int]]:
    """A process that sleeps after `tell_end`, and the end of the pipe that says when it ends."""
    reads, writes = os.pipe()
    ready, is_ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reads)
            tell_end(writes)
            os.close(writes)
            os.write(is_ready, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writes)
    os.close(is_ready)
    os.read(ready, 1)
    os.close(ready)
    yield pid, reads
    os.close(reads)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def pipe_of(end: int) -> str:
    return os.readlink(f"/proc/self/fd/{end}")


def test_the_end_is_told_by_a_thread_with_files_of_its_own(told: tuple[int, int]) -> None:
    pid, reads = told
    assert pipe_of(reads) not in {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    other = next(task for task in os.listdir(f"/proc/{pid}/task") if int(task) != pid)
    files = f"/proc/{pid}/task/{other}/fd"
    assert [os.readlink(f"{files}/{fd}") for fd in os.listdir(files)] == [pipe_of(reads)]
    assert select.select([reads], [], [], 0)[0] == []
    os.kill(pid, signal.SIGKILL)
    assert os.read(reads, 1) == b""


def test_where_a_thread_cannot_have_files_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is told as that of any open file."""

    class Forbidden:
        def unshare(self, what: int) -> int:
            return -1

    assert can_tell_end()
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: Forbidden())
    assert not can_tell_end()
    reads, writes = os.pipe()
    tell_end(writes)
    os.close(writes)
    assert select.select([reads], [], [], 0)[0] == []
    held = next(fd for fd in map(int, os.listdir("/proc/self/fd")) if fd != reads and same(fd, reads))
    os.close(held)
    assert os.read(reads, 1) == b""
    os.close(reads)


def test_no_more_files_are_closed_than_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may allow a billion."""
    allowed: list[object] = []
    monkeypatch.setattr(os, "sysconf", allowed.append)
    monkeypatch.setattr(os, "closerange", lambda *bounds: allowed.append(bounds))
    reads, writes = os.pipe()
    tell_end(writes)
    os.close(writes)
    assert allowed == []
    assert select.select([reads], [], [], 0)[0] == []  # held by a thread of this process
    os.close(reads)


def same(fd: int, other: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == os.readlink(f"/proc/self/fd/{other}")
    except FileNotFoundError:
        return False
