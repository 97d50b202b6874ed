"""A crash is local: hosts die at random moments under 16 streaming requests."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ..conftest import left_in_shared_memory
from ..graphs import paths
from .conftest import rounds
from .footprint import Footprint, quiet
from .rounds import Round, Watched, one_round, spreads
from .scenes import watched

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]

SLACK = 4
"""Times a bound, for a machine that does other things, too."""


async def play(runtime: Watched, dice: random.Random, num: int, **how: Any) -> list[Round]:
    """Rounds, after each of which nothing is left that was not there after the first three."""
    found = [await one_round(runtime, dice, **how) for _ in range(3)]
    first = Footprint.now()
    for _ in range(num - len(found)):
        found.append(await one_round(runtime, dice, **how))
        now = Footprint.now()
        assert now.hosts == len(paths.HOSTS)
        assert left_in_shared_memory(first.shm) == set()
        assert now.descriptors <= first.descriptors
        for name, held in (await quiet(runtime)).items():
            assert held.threads == 1, name
    return found


async def test_rounds_of_kill_9(dice: random.Random) -> None:
    async with watched(paths.build()) as runtime:
        found = spreads(await play(runtime, dice, rounds(10)))
    print(*found.items(), sep="\n")
    assert found["dead -> noticed"].p99_ms <= 50 * SLACK
    assert found["kill -> typed error"].num > 0
    assert found["noticed -> typed error"].max_ms <= 200 * SLACK
    assert found["kill -> next request's first item"].p99_ms <= 250 * SLACK
