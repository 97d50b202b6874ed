"""kill -9 of the main process, or of its group, at any moment: nothing of it is left (how soon: bench/chaos.py)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from ..conftest import left_in_shared_memory, shared_memory
from .conftest import rounds
from .scenes import gone_after, kill, marked, program, up


@pytest.fixture(autouse=True)
def no_shared_memory() -> Iterator[None]:
    before = shared_memory()
    yield
    assert left_in_shared_memory(before) == set()


@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize("then", ["", "drain", "restart"])
def test_killed_under_load(then: str, whole_group: bool, dice: random.Random) -> None:
    with program(then) as (process, mark):
        up(process)
        assert len(marked(mark)) >= 6
        time.sleep(dice.random() * 0.1)
        kill(process, whole_group)
        gone_after(mark)


@pytest.mark.parametrize("whole_group", [False, True])
def test_killed_while_it_starts(whole_group: bool, dice: random.Random) -> None:
    """Before the fork server is there, while that imports its modules, while hosts are forked."""
    for _ in range(rounds(4)):
        with program() as (process, mark):
            time.sleep(dice.random() * 0.8)
            kill(process, whole_group)
            gone_after(mark)


def test_killed_while_the_fork_server_imports(dice: random.Random) -> None:
    """From its first instruction on it must know whose child it is."""
    for _ in range(rounds(3)):
        with program(module="early") as (process, mark):
            up(process)
            time.sleep(dice.random() * 0.1)
            process.kill()
            gone_after(mark)


def test_killed_while_a_host_is_stopped() -> None:
    """What is stopped cannot end itself; the kernel ends it."""
    with program() as (process, mark):
        up(process)
        for pid, command in marked(mark).items():
            if "forkserver" in command:
                os.kill(pid, signal.SIGSTOP)
        process.kill()
        gone_after(mark)


def test_a_fork_server_that_dies_takes_its_hosts_along() -> None:
    """Both die at the same time: the hosts are told by neither, and by both."""
    with program() as (process, mark):
        up(process)
        parents = {pid for pid, command in marked(mark).items() if "forkserver import main" in command}
        server = min(parents)
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
        process.kill()
        gone_after(mark)
