"""kill -9 of the main process, or of its whole group, at any moment: within 2 s nothing of it is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..conftest import shared_memory
from .conftest import rounds

GONE_S = 2


def marked(mark: str) -> dict[int, str]:
    """Living processes that were started with `mark` in their environment, wherever they hang in the tree."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")[:100]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@contextmanager
def program(then: str = "", module: str = "program") -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Leader of a group of its own, and the mark of all that comes from it."""
    mark = f"CHAOS_MARK={uuid.uuid4().hex}"
    environment = {**os.environ, "CHAOS_MARK": mark.partition("=")[2]}
    command = [sys.executable, "-m", f"tests.chaos.{module}", then]
    shm = shared_memory()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0, env=environment
    ) as process:
        yield process, mark
    until = time.monotonic() + GONE_S
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes live {GONE_S} s after their main process"
    assert shared_memory() <= shm


def up(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"


def kill(process: subprocess.Popen[bytes], whole_group: bool) -> None:
    if whole_group:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize("then", ["", "drain", "restart"])
def test_killed_under_load(then: str, whole_group: bool, dice: random.Random) -> None:
    with program(then) as (process, mark):
        up(process)
        assert len(marked(mark)) >= 6
        time.sleep(dice.random() * 0.1)
        kill(process, whole_group)


@pytest.mark.parametrize("whole_group", [False, True])
def test_killed_while_it_starts(whole_group: bool, dice: random.Random) -> None:
    """Before the fork server is there, while that imports its modules, while hosts are forked."""
    for _ in range(rounds(6)):
        with program() as (process, _):
            time.sleep(dice.random() * 0.8)
            kill(process, whole_group)


def test_killed_while_the_fork_server_imports(dice: random.Random) -> None:
    """From its first instruction on it must know whose child it is."""
    for _ in range(rounds(4)):
        with program(module="early") as (process, _):
            up(process)
            time.sleep(dice.random() * 0.1)
            process.kill()


def test_killed_while_a_host_is_stopped() -> None:
    """What is stopped cannot end itself; the kernel ends it."""
    with program() as (process, mark):
        up(process)
        for pid, command in marked(mark).items():
            if "forkserver" in command:
                os.kill(pid, signal.SIGSTOP)
        process.kill()


def test_a_fork_server_that_dies_takes_its_hosts_along() -> None:
    """Both die at the same time: the hosts are told by neither, and by both."""
    with program() as (process, mark):
        up(process)
        parents = {pid for pid, command in marked(mark).items() if "forkserver import main" in command}
        server = min(parents)
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
        process.kill()
