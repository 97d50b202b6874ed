"""A crash is local: hosts die at random moments under 16 streaming requests."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import anyio
import multiprocess.forkserver
import pytest

from omniflow.errors import StageDiedError
from omniflow.graph import Restart

from ..conftest import left_in_shared_memory
from ..graphs import paths
from ..graphs.paths import Held
from ..running import pid_of, up_again
from ..waiting import HANGS_S
from .conftest import rounds
from .footprint import Footprint, quiet
from .rounds import NUM_REQUESTS, Load, Round, Watched, one_round, spreads
from .scenes import watched

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]


async def play(runtime: Watched, dice: random.Random, num: int, **how: Any) -> list[Round]:
    """Rounds, after each of which nothing is left that was not there after the first three."""
    found = [await one_round(runtime, dice, **how) for _ in range(3)]
    hosts, first = await quiet(runtime), Footprint.now()
    for _ in range(num - len(found)):
        found.append(await one_round(runtime, dice, **how))
        await nothing_more(runtime, first, hosts)
    return found


async def nothing_more(runtime: Watched, first: Footprint, hosts: dict[str, Held]) -> None:
    """Neither here nor in hosts there is more than there was."""
    held = await quiet(runtime)
    now = Footprint.now()
    assert now.hosts == len(paths.HOSTS)
    assert left_in_shared_memory(first.shm) == set()
    assert now.descriptors <= first.descriptors
    assert now.threads <= first.threads + len(paths.HOSTS), "a thread for each start at once, at most"
    assert {name: each.threads for name, each in held.items()} == dict.fromkeys(paths.HOSTS, 1)
    assert max(each.descriptors for each in held.values()) <= max(each.descriptors for each in hosts.values())


@pytest.mark.parametrize("num", [10, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_rounds_of_kill_9(num: int, dice: random.Random) -> None:
    async with watched(paths.build(), hang_s=3 * HANGS_S) as runtime:
        found = spreads(await play(runtime, dice, rounds(num)))
    print(*found.items(), sep="\n")
    assert found["noticed -> typed error"].num > 0
    assert found["kill -> noticed"].max_ms < 1000 * HANGS_S, "the kernel tells of a death, not the missing heartbeat"


async def test_what_nobody_has_seen_is_replayed(dice: random.Random) -> None:
    """Each request gives all that it should, once, or its caller had begun to take it and gets an error."""
    replay = Restart("one_for_one", max_restarts=1_000_000, within_s=0.001, in_flight="replay")
    async with watched(paths.build(replay)) as runtime:
        await play(runtime, dice, rounds(6))
        assert runtime._inputs.held_bytes == 0


async def test_rounds_of_hosts_that_hang(dice: random.Random) -> None:
    """SIGSTOP: alive, but silent. It is noticed by its heart, and all else is as with a death."""
    async with watched(paths.build(), hang_s=1.0) as runtime:
        found = spreads(await play(runtime, dice, rounds(4), how="stop"))
    assert 800 <= found["kill -> noticed"].p50_ms <= 10_000
    assert found["noticed -> typed error"].num > 0


async def test_several_hosts_at_once(dice: random.Random) -> None:
    """Two, three or all of them, or the fork server and with it all; requests end, and everything comes back."""
    async with watched(paths.build()) as runtime:
        await one_round(runtime, dice)
        hosts, first = await quiet(runtime), Footprint.now()
        for _ in range(rounds(6)):
            load = Load(runtime, dice)
            victims = dice.sample(paths.HOSTS, dice.randint(2, 4))
            pids = [pid_of(runtime, name) for name in victims]
            if dice.random() < 0.2:
                victims, pids = list(paths.HOSTS), [multiprocess.forkserver._forkserver._forkserver_pid]
            async with anyio.create_task_group() as tasks:
                for number in range(NUM_REQUESTS):
                    tasks.start_soon(load.one, paths.SIDES[number % 2], 1000 * number)
                await anyio.sleep(dice.random() * 0.1)
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                with anyio.fail_after(HANGS_S):
                    while not runtime.down_at.keys() >= set(victims):
                        await runtime._wait_change()
            assert {type(error) for _, _, error in load.errors} <= {StageDiedError}
            assert len(load.errors) + sum(load.finished.values()) == NUM_REQUESTS
            await up_again(runtime)
            await nothing_more(runtime, first, hosts)
            runtime.down_at.clear()
