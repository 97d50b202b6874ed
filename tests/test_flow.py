"""What a stream edge does when its reader is slow: its writer waits, the oldest item is lost, or the request fails."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniflow.errors import DeadlineError, EdgeFullError
from omniflow.mailbox import Mailbox
from omniflow.planner import Cluster
from omniflow.reply import Reply
from omniflow.runtime import EdgeStatus, Runtime
from omniflow.server.failures import error_response

from .graphs import fork
from .graphs.flow import Drop, Order, build
from .graphs.row import Job
from .running import CPU, INLINE, running, settled
from .waiting import HANGS_S

pytestmark = pytest.mark.anyio
everywhere = pytest.mark.parametrize("cluster", [INLINE, CPU], ids=lambda cluster: cluster.name)


async def ask(runtime: Runtime, order: Order, **how: Any) -> dict[str, Any]:
    return await (await runtime.submit("order", order, **how)).collect()


def numbers(drops: list[Drop]) -> list[int]:
    return [drop.number for drop in drops]


# -- block -------------------------------------------------------------------------------------------------------------


@everywhere
async def test_a_slow_client_holds_back_its_own_source_and_no_other(cluster: Cluster) -> None:
    async with running(build("block", 4), cluster, stream_bound=4) as runtime:
        slow = await runtime.submit("order", Order(50), outputs=["drops"])
        first = (await anext(slow)).value
        fast = await ask(runtime, Order(500), outputs=["drops"])
        assert numbers(fast["drops"]) == list(range(500))
        goes_on_s = time.monotonic()
        drops = [first, *(await slow.collect())["drops"]]
        assert numbers(drops) == list(range(50))
        # 4 wait for the client, 4 for the reader, which holds one more; credit for 2 of them may be under way.
        assert 5 <= sum(drop.at_s < goes_on_s for drop in drops) <= 13


@everywhere
async def test_the_status_shows_what_each_stage_has_to_do(cluster: Cluster) -> None:
    async with running(build("block", 4), cluster, hang_s=2.0) as runtime:
        reply = await runtime.submit("order", Order(20, "never"), outputs=["drops"])
        other = await runtime.submit("order", Order(20), outputs=["num"])
        with anyio.fail_after(HANGS_S):
            while [(s.running, s.queued) for s in runtime.status().stages] != [(1, 0), (1, 3)]:
                await anyio.sleep(0.01)  # until the next heartbeat; the reader holds the fourth
        assert (await other.collect())["num"] == 20
        assert [(s.name, s.in_flight) for s in runtime.status().stages] == [("pour", 1), ("sip", 1)]
        await reply.cancel()


# -- drop_oldest -------------------------------------------------------------------------------------------------------


@everywhere
async def test_a_late_reader_gets_the_newest_items_in_order(cluster: Cluster) -> None:
    async with running(build("drop_oldest", 4), cluster) as runtime:
        found = await ask(runtime, Order(100, "late"))
        assert (found["num"], found["missed"]) == (100, 95)
        first, *rest = numbers(found["drops"])
        assert (first < 96, rest) == (True, [96, 97, 98, 99])
        await settled(runtime)
        assert runtime.status().edges == (EdgeStatus("pour.emit -> sip.drops", 95),)


@everywhere
async def test_a_reader_that_keeps_up_misses_nothing(cluster: Cluster) -> None:
    async with running(build("drop_oldest", 64), cluster) as runtime:
        found = await ask(runtime, Order(64))
        assert (numbers(found["drops"]), found["missed"]) == (list(range(64)), 0)
        await settled(runtime)
        assert runtime.status().edges == (EdgeStatus("pour.emit -> sip.drops", 0),)


async def test_a_source_that_never_waits_lets_others_run_and_can_be_stopped() -> None:
    """Without a turn for the event loop its deadline would never be seen."""
    async with running(build("drop_oldest", 4)) as runtime:
        with pytest.raises(DeadlineError):
            await ask(runtime, Order(10**9), deadline_s=0.02)


async def test_what_a_cancelled_request_has_missed_is_counted() -> None:
    async with running(build("drop_oldest", 4)) as runtime:
        reply: Reply
        async with await runtime.submit("order", Order(100, "never"), outputs=["drops", "num"]) as reply:
            assert (await anext(reply)).value == 100
        await settled(runtime)
        assert runtime.status().edges[0].dropped == 95


@given(bound=st.integers(1, 5), moves=st.lists(st.booleans(), max_size=60))
def test_any_interleaving_keeps_the_order_and_counts_the_gaps(bound: int, moves: list[bool]) -> None:
    async def play() -> None:
        credit = bound
        read: list[int] = []

        def give(count: int) -> None:
            nonlocal credit
            credit += count

        box: Mailbox[int] = Mailbox(bound, give, "drop_oldest")
        sent = 0
        for write in moves:
            if write:
                credit -= 1
                box.put(sent, sent)
                sent += 1
            elif box.statistics().queued:
                read.append(await anext(box))
            assert 0 < credit <= bound, "the reader's pace must not reach the writer"
        box.end(sent)
        read += [item async for item in box]
        assert read == sorted(set(read))
        assert len(read) + box.dropped == sent
        assert read[len(read) - min(sent, 1) :] == [sent - 1][: len(read)]

    anyio.run(play)


# -- fail --------------------------------------------------------------------------------------------------------------


@everywhere
async def test_a_full_edge_ends_the_request_with_its_name(cluster: Cluster) -> None:
    async with running(build("fail", 4), cluster) as runtime:
        with pytest.raises(EdgeFullError) as caught:
            await ask(runtime, Order(20, "never"))
        assert str(caught.value) == (
            "stage 'sip': stream edge pour.emit -> sip.drops is full: its reader has not taken the 4 items under way"
        )
        response = error_response(caught.value)
        assert (response.status_code, response.headers["x-should-retry"]) == (503, "false")
        assert numbers((await ask(runtime, Order(4)))["drops"]) == [0, 1, 2, 3]


async def test_every_item_taken_makes_room_at_once() -> None:
    given: list[int] = []
    box: Mailbox[int] = Mailbox(8, given.append, "fail")
    for number in range(3):
        box.put(number, number)
        await anext(box)
    assert given == [1, 1, 1]


# -- fan-in ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("heard_out")
@everywhere
@pytest.mark.parametrize("late", ["left", "right"])
async def test_the_deadline_of_a_fan_in_names_the_missing_port(cluster: Cluster, late: str) -> None:
    async with running(fork.build(), cluster) as runtime:
        with pytest.raises(DeadlineError) as caught:
            await (await runtime.submit("job", Job(late, "sleep"), deadline_s=0.4)).collect()
        assert str(caught.value) == (
            f"stage {late!r}: the deadline of 0.4 s passed while stage {late!r} was running, "
            f"and port {late!r} of stage 'join' waited for it"
        )
        found = await (await runtime.submit("job", Job())).collect()
        assert found["job"].seen == ("start", "left", "start", "right")


@pytest.mark.usefixtures("heard_out")
async def test_a_source_that_cannot_even_say_that_it_runs_is_named_by_the_port_that_waits() -> None:
    async with running(fork.build(), CPU, hang_s=1.5) as runtime:
        with pytest.raises(DeadlineError) as caught:
            await (await runtime.submit("job", Job("right", "block"), deadline_s=0.4)).collect()
        assert str(caught.value) == ("stage 'join': the deadline of 0.4 s passed while port 'right' waited for right")
