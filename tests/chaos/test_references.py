"""Nothing of a request outlives it, without the help of the garbage collector: no reference cycle on its path."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from omniflow.errors import RequestError
from omniflow.runtime import Runtime

from ..graphs import payloads
from ..graphs.payloads import LEDGER, Block
from ..running import running, settled
from ..waiting import HANGS_S

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_collector")]


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """pytest keeps all records, and with them the frames of all errors."""
    LEDGER.forget()
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


ENDS = [
    ("", ""),
    ("make", "raise"),
    ("make", "raise from"),
    ("make", "refuse"),
    ("make", "time out"),
    ("make", "fail in a group"),
    ("make", "wrong item"),
    ("enter", "skip"),
    ("enter", "raise"),
    ("thread", "raise"),
    ("thread", "raise from"),
    ("thread", "refuse"),
    ("thread", "wrong type"),
    ("batch", "raise"),
    ("batch", "refuse"),
    ("batch", "too few"),
    ("asyncbatch", "raise"),
    ("asyncbatch", "raise from"),
    ("sink", "raise"),
    ("sink", "leave"),
]


async def end(runtime: Runtime, block: Block, **how: Any) -> str:
    try:
        async with await runtime.submit("block", block, **how) as reply:
            async for _output in reply:
                pass
    except RequestError as error:
        return type(error).__name__
    return "all"


async def none_alive() -> None:
    """A thread may still be on its way out, a batch runs to its end. Says who holds the first that should be dead."""
    until = time.monotonic() + HANGS_S
    while (alive := LEDGER.alive()) and time.monotonic() < until:
        alive.clear()
        await anyio.sleep(0.005)
    if alive:
        holders = [holder for holder in gc.get_referrers(alive[0]) if holder is not alive]
        pytest.fail(f"{len(alive)} blocks live on; the first is held by {[str(holder)[-200:] for holder in holders]}")


@pytest.mark.parametrize(("at", "do"), ENDS)
async def test_no_payload_outlives_its_request(at: str, do: str) -> None:
    async with running(payloads.build()) as runtime:
        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(end, runtime, LEDGER.block(at, do))
        await settled(runtime)
        await none_alive()


@pytest.mark.parametrize(
    ("at", "do"), [("make", "sleep"), ("sink", "sleep"), ("asyncbatch", "sleep"), ("thread", "block")]
)
@pytest.mark.parametrize("how", ["deadline", "cancel", "leave", "caller cancelled", "dropped"])
async def test_no_payload_outlives_a_request_that_was_stopped(at: str, do: str, how: str) -> None:
    async with running(payloads.build()) as runtime:
        for _ in range(3):
            deadline_s = 0.02 if how in ("deadline", "dropped") else 5
            if how == "caller cancelled":
                with anyio.move_on_after(0.02):
                    await end(runtime, LEDGER.block(at, do))
                continue
            reply = await runtime.submit("block", LEDGER.block(at, do), deadline_s=deadline_s)
            await anyio.sleep(0.01)
            if how == "cancel":
                await reply.cancel()
            if how == "leave":
                async with reply:
                    await anext(reply)
            if how == "deadline":
                with pytest.raises(RequestError):
                    await reply.collect()
            del reply
        await settled(runtime)
        await none_alive()


async def test_an_error_that_its_caller_keeps_holds_no_payload() -> None:
    async with running(payloads.build()) as runtime:
        errors = []
        for at in ("make", "thread", "batch", "sink"):
            reply = await runtime.submit("block", LEDGER.block(at, "raise"))
            try:
                await reply.collect()
            except RequestError as error:
                errors.append(error)
            del reply
        await settled(runtime)
        await none_alive()
        assert len(errors) == 4
