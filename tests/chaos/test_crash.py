"""A crash is local: hosts die at random moments under 16 streaming requests."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from omniflow.config import RuntimeConfig
from omniflow.planner import plan

from ..graphs import paths
from ..running import CPU, settled
from .conftest import rounds
from .footprint import Footprint, quiet
from .rounds import Round, Watched, one_round, spreads

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]

SLACK = 4
"""Times a bound, for a machine that does other things, too."""


@asynccontextmanager
async def watched(**config: Any) -> AsyncIterator[Watched]:
    settings = RuntimeConfig(**{"deadline_s": 20.0, "start_timeout_s": 30.0, "shm_bytes": 2**24, **config})
    async with Watched(plan(paths.build().spec(), CPU, settings), settings) as runtime:
        yield runtime
        await settled(runtime)


async def play(runtime: Watched, dice: random.Random, num: int, **how: Any) -> list[Round]:
    """Rounds, after each of which nothing is left that was not there after the first three."""
    found = [await one_round(runtime, dice, **how) for _ in range(3)]
    first = Footprint.now()
    for _ in range(num - len(found)):
        found.append(await one_round(runtime, dice, **how))
        now = Footprint.now()
        assert now.hosts == len(paths.HOSTS)
        assert now.shm <= first.shm
        assert now.descriptors <= first.descriptors
        for name, held in (await quiet(runtime)).items():
            assert held.threads == 1, name
    return found


async def test_rounds_of_kill_9(dice: random.Random) -> None:
    async with watched() as runtime:
        found = spreads(await play(runtime, dice, rounds(10)))
    print(*found.items(), sep="\n")
    assert found["dead -> noticed"].p99_ms <= 50 * SLACK
    assert found["kill -> typed error"].num > 0
    assert found["noticed -> typed error"].max_ms <= 200 * SLACK
    assert found["kill -> next request's first item"].p99_ms <= 250 * SLACK
