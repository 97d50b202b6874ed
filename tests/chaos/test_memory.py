"""Two thousand streams of 200 KB pieces, all aborted: no process grows, even without a garbage collector."""

from __future__ import annotations

import random

import pytest

from ..graphs import paths
from ..running import CPU, running
from .conftest import rounds
from .footprint import Footprint
from .scenes import growth

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left", "no_collector")]


async def test_aborted_streams_leave_no_memory(dice: random.Random) -> None:
    async with running(paths.build(), CPU) as runtime:
        await growth(runtime, dice, 0)
        first = Footprint.now()
        found = await growth(runtime, dice, rounds(2000))
        print(found)
        assert max(found.values()) < 0.02
        assert Footprint.now().descriptors <= first.descriptors
