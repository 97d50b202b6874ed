"""Cancels at any moment of a request's life: full capacity afterwards, and one end for each request."""

from __future__ import annotations

import random
from collections import Counter

import anyio
import numpy as np
import pytest

from omniflow.errors import RequestError
from omniflow.reply import Reply
from omniflow.runtime import Runtime

from ..graphs import paths
from ..graphs.paths import SIDES, Ask
from ..running import CPU, running, settled
from .conftest import rounds
from .footprint import quiet
from .scenes import cancels

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]


async def full(runtime: Runtime, num: int) -> None:
    """All places, credits and blocks are there: `num` requests at once, each larger than its bounds, give all."""

    async def one(side: str) -> None:
        found = await (await runtime.submit(side, Ask(num=12, size=50_000, start=7, pause_s=0))).collect()
        pieces = found[f"{side}_pieces"]
        assert [piece.number for piece in pieces] == list(range(12))
        assert all(np.all(piece.samples == 7 + piece.number) for piece in pieces)

    async with anyio.create_task_group() as tasks:
        for number in range(num):
            tasks.start_soon(one, SIDES[number % 2])


@pytest.mark.parametrize("processes", [True, False])
async def test_cancels_0_to_5_ms_after_submission(processes: bool, dice: random.Random) -> None:
    cluster = {"cluster": CPU} if processes else {}
    async with running(paths.build(), **cluster, max_in_flight=8, max_queued=0) as runtime:
        quiet_s = await cancels(runtime, dice, rounds(300))
        if processes:
            await quiet(runtime)
            await settled(runtime)
        await full(runtime, 8)
    print(f"quiet after a cancel: p50 {np.median(quiet_s) * 1000:.1f} ms, max {max(quiet_s) * 1000:.1f} ms")


async def test_an_id_is_free_at_once() -> None:
    """What comes late of the old request is none of the new one's."""
    async with running(paths.build(), CPU) as runtime:
        for number in range(30):
            old = await runtime.submit("left", Ask(num=1000, start=500, pause_s=0), request_id="mine")
            for _ in range(number % 4):
                await anext(old)
            await old.cancel()
            new = await runtime.submit("left", Ask(num=6, start=number), request_id="mine")
            pieces = (await new.collect())["left_pieces"]
            assert [int(piece.samples[0]) for piece in pieces] == list(range(number, number + 6))


async def test_cancels_that_race_with_the_end(dice: random.Random) -> None:
    """A cancel after any number of turns of the event loop: the request has given all, or it was cancelled."""
    ends: Counter[str] = Counter()
    async with running(paths.build(), max_in_flight=8) as runtime:

        async def one() -> None:
            num = dice.randint(0, 3)
            reply = await runtime.submit(dice.choice(SIDES), Ask(num=num, size=10, pause_s=0))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cancel, reply, dice.randint(0, 12))
                end = await end_of(reply, num)
            assert await end_of(reply, 0) == end, "it has ended, and stays so"
            await reply.cancel()
            assert await end_of(reply, 0) == end
            ends[end] += 1

        async def some() -> None:
            for _ in range(rounds(1000) // 8):
                await one()

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(some)
        await settled(runtime)
        await full(runtime, 8)
    print(ends)
    assert ends.keys() == {"all", "CancelledError"}
    assert min(ends.values()) > sum(ends.values()) / 20, "or it was no race"


async def cancel(reply: Reply, turns: int) -> None:
    for _ in range(turns):
        await anyio.sleep(0)
    await reply.cancel()


async def end_of(reply: Reply, num: int) -> str:
    """'all' after `num` items, or the name of the error."""
    found = 0
    try:
        async for _ in reply:
            found += 1
    except RequestError as error:
        return type(error).__name__
    assert found == num
    return "all"
