"""Settings of all tests, and the look for what a test leaves behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from .waiting import HANGS_S

# Two busy cores make single examples slow; the suite's own time limit (pytest-timeout) is what holds.
hypothesis.settings.register_profile("shared", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("shared")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def descendants(pid: int) -> dict[int, tuple[int, str]]:
    """All living processes below `pid`: their parents and command lines."""
    found: dict[int, tuple[int, str]] = {}
    todo = [pid]
    while todo:
        parent = todo.pop()
        for child in children_of(parent):
            try:
                state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
                command = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                found[child] = (parent, command)
                todo.append(child)
    return found


def children_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def hosts_below(pid: int) -> set[int]:
    """The processes below `pid`, less the fork server and the resource tracker, which outlive a runtime."""
    return {
        child
        for child, (parent, command) in descendants(pid).items()
        if "resource_tracker" not in command and not ("forkserver import main" in command and parent == pid)
    }


def shared_memory() -> set[str]:
    """Entries of /dev/shm that processes like ours could leave; other programs on this machine have their own."""
    ours = ("omniflow", "psm_", "wnsm_", "sem.mp-", "torch_")
    return {name for name in os.listdir("/dev/shm") if name.startswith(ours)}


def left_in_shared_memory(before: set[str]) -> set[str]:
    """New names in /dev/shm, less those of programs that have nothing to do with the tests and still use theirs."""
    left = shared_memory() - before
    ours = {os.getpid(), *descendants(os.getpid())}
    for process in Path("/proc").glob("[0-9]*") if left else ():
        if int(process.name) not in ours:
            with contextlib.suppress(OSError):
                maps = (process / "maps").read_text()
                left = {name for name in left if f"/dev/shm/{name}" not in maps}
    return left & shared_memory()


def descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return found


@pytest.fixture
def heard_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts have a second to say what a request waited for when its deadline came, where users wait 0.1 s for it."""
    monkeypatch.setattr("omniflow.runtime._QUIET_S", 1.0)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a process, an open descriptor or an entry in /dev/shm behind."""
    before, shm, hosts = descriptors(), shared_memory(), hosts_below(os.getpid())
    yield
    until = time.monotonic() + HANGS_S  # a killed process needs a moment until the kernel has taken it down
    while (
        hosts_below(os.getpid()) - hosts or left_in_shared_memory(shm) or len(descriptors()) > len(before)
    ) and time.monotonic() < until:
        time.sleep(0.01)
    assert hosts_below(os.getpid()) - hosts == set()
    assert left_in_shared_memory(shm) == set()
    after = descriptors()
    assert len(after) <= len(before), {name: after[name] for name in after.keys() - before.keys()}
