"""When the two ends of a communicator meet: one may load its weights for minutes after the other is there."""

from __future__ import annotations

import anyio
import pytest

from omniflow.transport.nccl import NcclLane
from tests.contract.ends import Ends
from tests.waiting import HANGS_S

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]


async def test_nothing_is_opened_and_no_clock_runs_until_the_receiver_is_there() -> None:
    ends = Ends("nccl")
    assert isinstance(ends.lane_a, NcclLane) and isinstance(ends.lane_b, NcclLane)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends.lane_a.serve, ends.a)
        await anyio.sleep(0.01)
        assert ends.lane_a._out is None
        tasks.start_soon(ends.lane_b.serve, ends.b)
        with anyio.fail_after(HANGS_S):
            await ends.lane_a.settled()
            await ends.lane_b.settled()
        assert ends.lane_a.is_open and ends.lane_b.is_open
        assert (await ends.there(torch.ones(9), torch.Tensor)).sum() == 9
        ends.close()
        tasks.cancel_scope.cancel()


async def test_a_receiver_that_comes_later_hears_at_once_that_there_is_no_communicator() -> None:
    """Its host is not ready before it knows."""
    ends = Ends("nccl")
    assert isinstance(ends.lane_a, NcclLane) and isinstance(ends.lane_b, NcclLane)
    ends.lane_a._backend = "nccl"  # there is none here, or no GPU
    ends.lane_b.sends, ends.lane_b._undecided = False, 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends.lane_a.serve, ends.a)
        await anyio.sleep(0.01)
        tasks.start_soon(ends.lane_b.serve, ends.b)
        with anyio.fail_after(HANGS_S):
            await ends.lane_b.settled()
        assert ends.lane_a.problem is not None and ends.lane_b._in is None
        assert (await ends.there(torch.ones(9), torch.Tensor)).sum() == 9
        ends.close()
        tasks.cancel_scope.cancel()


async def test_a_sender_does_not_wait_for_a_host_that_has_no_lane() -> None:
    ends = Ends("nccl")
    assert isinstance(ends.lane_a, NcclLane)
    ends.lane_a.receives, ends.lane_a._undecided = False, 1
    ends.b._lane = None
    with anyio.fail_after(HANGS_S):
        await ends.lane_a.serve(ends.a)
    assert (ends.lane_a.problem, ends.lane_a._out) == ("the other host has no lane", None)
    ends.close()
