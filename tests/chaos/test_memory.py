"""Two thousand streams of 200 KB payloads, all aborted: no process grows, even without a garbage collector."""

from __future__ import annotations

import os
import random

import anyio
import pytest

from omniflow.runtime import Runtime

from ..graphs import paths
from ..graphs.paths import Ask, rss_bytes
from ..running import CPU, running
from .conftest import rounds
from .footprint import Footprint, quiet

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left", "no_collector")]

SIZE = 50_000
"""float32: 200 KB."""


async def memory(runtime: Runtime) -> dict[str, int]:
    found = {name: held.rss_bytes for name, held in (await quiet(runtime)).items()}
    return {"main": rss_bytes(os.getpid()), **found}


async def abort(runtime: Runtime, side: str, dice: random.Random) -> None:
    """Take some pieces of a stream that has more, then leave in one of the ways there are."""
    reply = await runtime.submit(side, Ask(num=1000, size=SIZE, pause_s=0))
    for _ in range(dice.randint(0, 4)):
        await anext(reply)
    match dice.choice(["cancel", "leave", "forget"]):
        case "cancel":
            await reply.cancel()
        case "leave":
            async with reply:
                pass
        case "forget":
            with anyio.move_on_after(0.001):
                await reply.collect()
            await reply.cancel()


async def aborted(runtime: Runtime, dice: random.Random, num: int) -> None:
    async with anyio.create_task_group() as tasks:
        for worker in range(8):
            tasks.start_soon(_some, runtime, paths.SIDES[worker % 2], dice, num // 8)


async def _some(runtime: Runtime, side: str, dice: random.Random, num: int) -> None:
    for _ in range(num):
        await abort(runtime, side, dice)


async def test_aborted_streams_leave_no_memory(dice: random.Random) -> None:
    num = rounds(2000)
    async with running(paths.build(), CPU, max_in_flight=8) as runtime:
        await aborted(runtime, dice, 400)
        before, first = await memory(runtime), Footprint.now()
        growth = []
        for _ in range(4):
            await aborted(runtime, dice, num // 4)
            now = await memory(runtime)
            growth.append({name: round(now[name] / before[name] - 1, 4) for name in now})
        print(*growth, sep="\n")
        assert Footprint.now().descriptors <= first.descriptors
        assert max(growth[-1].values()) < 0.02
