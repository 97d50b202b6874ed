"""Hosts on GPUs: how they start, what they see, what they hand each other, and what comes back after kill -9.

Without a GPU the same processes run on the CPU: there tensors go through shared memory, and the log says why.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import multiprocess.resource_tracker
import pytest

from omniflow.errors import StageDiedError, StageError
from omniflow.planner import Cluster, Gpu
from omniflow.runtime import Runtime

from .running import pid_of, running, up_again

torch = pytest.importorskip("torch")
from .graphs import tensors  # noqa: E402 - needs torch
from .graphs.tensors import Folded, Wanted  # noqa: E402
from .waiting import HANGS_S  # noqa: E402

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]

NUM_GPUS = torch.cuda.device_count()
SEEN = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
"""The GPUs that these tests may use, by the numbers that hosts are told."""
MACHINE = Cluster("gpus", 8, 0, gpus=(Gpu("any", 2**36), Gpu("any", 2**36)))
two = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
WAYS = [
    pytest.param(("gpu:0", "gpu:0"), {}, id="cuda_ipc"),
    pytest.param(("gpu:0", "gpu:1"), {}, id="cuda_ipc between GPUs", marks=two),
    pytest.param(("gpu:0", "gpu:1"), {"between_gpus": "nccl"}, id="nccl", marks=two),
]


def gpu(test: Any) -> Any:
    """Mark a test that needs a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(NUM_GPUS < 1, reason="needs a GPU")(test))


@pytest.fixture(scope="module", autouse=True)
def resource_tracker() -> None:
    """Started before descriptors are counted: it outlives each runtime."""
    multiprocess.resource_tracker.ensure_running()


@asynccontextmanager
async def hosts(devices: tuple[str, str], weights: str = "0", **config: object) -> AsyncIterator[Runtime]:
    graph = tensors.build(devices=devices, weights=weights)
    async with running(
        graph, MACHINE, start_timeout_s=60, shm_bytes=2**28, device_pool_bytes=2**26, **config
    ) as runtime:
        yield runtime


async def ask(runtime: Runtime, size: int = 1000, cycles: int = 0) -> Folded:
    folded = (await (await runtime.submit("ask", Wanted(size, cycles))).collect())["answer"]
    assert isinstance(folded, Folded)
    assert folded.sums == (size * (size - 1) / 2, folded.sums[1], 45.0)
    return folded


async def kill(runtime: Runtime, stage: str) -> None:
    pid = pid_of(runtime, stage)
    os.kill(pid, signal.SIGKILL)
    await gone(runtime, pid)


async def gone(runtime: Runtime, pid: int) -> None:
    """The runtime knows that a host has died: its peers may know before."""
    with anyio.fail_after(HANGS_S):
        while any(status.pid == pid for status in runtime.status().stages):
            await runtime._wait_change()


@pytest.mark.skipif(NUM_GPUS > 0, reason="for machines without a GPU")
async def test_spawned_hosts_without_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    """They start, see the GPU of the plan alone, and say why tensors go through the host."""
    async with hosts(("gpu:0", "gpu:1")) as runtime:
        assert [host.start_method for host in runtime.plan.hosts] == ["spawn", "spawn"]
        assert runtime.plan.edges[1].transport == "cuda_ipc"
        found = await ask(runtime, 100_000)
        assert found.devices == ("cpu", "cpu", "cpu")
        assert found.visible == "1"
        with anyio.fail_after(HANGS_S):
            while "through the host" not in (said := capfd.readouterr().err):
                await anyio.sleep(0.01)
        assert "device tensors to fold go through the host, not by cuda_ipc: torch is built without CUDA" in said


BUSY = 1_000_000_000
"""Clock cycles: 0.5 s of an H200."""
LARGE = 12_000_000
"""Floats: 48 MB, of a pool of 64 MB."""


@gpu
@pytest.mark.parametrize(("devices", "config"), WAYS)
async def test_tensors_stay_on_their_gpus(devices: tuple[str, str], config: dict[str, Any]) -> None:
    async with hosts(devices, **config) as runtime:
        found = await open_lane(runtime)
        assert found.devices == ("cuda", "cuda", "cpu")
        assert found.visible == SEEN[int(devices[1].removeprefix("gpu:"))]
        for _ in range(20):
            await ask(runtime, LARGE)
        async with anyio.create_task_group() as tasks:
            for size in (10, 1000, 100_000, LARGE):
                tasks.start_soon(ask, runtime, size)
        assert (await ask(runtime, 2 * LARGE)).devices == ("cuda", "cuda", "cpu"), "larger than the pool"


@gpu
@pytest.mark.parametrize(("devices", "config"), WAYS)
@pytest.mark.parametrize("stage", ["make", "fold"])
async def test_kill_while_tensors_are_on_their_way(
    devices: tuple[str, str], config: dict[str, Any], stage: str
) -> None:
    """The GPU of `make` is busy when `fold` has its tensor already: fold's stream waits for what never comes."""
    async with hosts(devices, **config) as runtime:
        before = await open_lane(runtime)
        errors: list[str] = []
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(die, runtime, errors)
            await anyio.sleep(0.2)
            await kill(runtime, stage)
        assert errors == ["StageDiedError"] * 4
        await up_again(runtime, 40)
        after = await open_lane(runtime)
        survivor = 1 if stage == "make" else 0
        assert after.pids[survivor] == before.pids[survivor]
        # What torch's allocators keep of what they had is not lost, nor what other tests use meanwhile.
        assert "PYTEST_XDIST_WORKER" in os.environ or before.free_bytes - after.free_bytes < 400e6


@gpu
@pytest.mark.parametrize(("devices", "config"), WAYS)
async def test_a_context_that_dies_after_its_tensors_were_sent(
    devices: tuple[str, str], config: dict[str, Any]
) -> None:
    """`make` is through with the request, and waits for its GPU nowhere; what `fold` waits for never comes."""
    async with hosts(devices, **config) as runtime:
        before = await open_lane(runtime)
        with pytest.raises(StageDiedError, match="stage 'make'"), anyio.fail_after(HANGS_S):
            await (await runtime.submit("ask", Wanted(1000, BUSY, spoils=True))).collect()
        await gone(runtime, before.pids[0])
        await up_again(runtime, 40)
        after = await open_lane(runtime)
        assert (after.pids[0] != before.pids[0], after.pids[1]) == (True, before.pids[1])


async def die(runtime: Runtime, errors: list[str]) -> None:
    try:
        await ask(runtime, LARGE, BUSY)
    except StageDiedError as error:
        errors.append(type(error).__name__)


async def open_lane(runtime: Runtime) -> Folded:
    """Ask until tensors go by the lane: then `fold` takes no memory of torch's for what it gets; by NCCL it does."""
    by_nccl = runtime.plan.edges[1].transport == "nccl"
    with anyio.fail_after(30):
        while True:
            found = await ask(runtime, LARGE)
            if by_nccl or found.taken_bytes < LARGE:
                return found
            await anyio.sleep(0.05)


@gpu
async def test_a_stage_that_wants_more_than_its_budget_fails_alone() -> None:
    async with hosts(("gpu:0", "gpu:0"), "1 GiB") as runtime:
        await ask(runtime)
        with pytest.raises(StageError, match="out of memory"):
            await ask(runtime, 300_000_000)
        await ask(runtime, 1000)
