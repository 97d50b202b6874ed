"""What a host's process sees of the GPUs, and which of its links have lanes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest

from omniflow import devices
from omniflow.actor import Actor
from omniflow.config import RuntimeConfig, arguments_of
from omniflow.devices import Gpus, Lanes, cap_memory, gpus_of
from omniflow.graph import Budget, Graph
from omniflow.planner import Plan, cluster_named, plan
from omniflow.transport.cuda_ipc import CudaIpcLane
from omniflow.transport.nccl import NcclLane

pytestmark = pytest.mark.anyio


class Tensor:
    """Stands for torch's."""


class Rows(msgspec.Struct, frozen=True):
    rows: Tensor


class Engine(Actor):
    owns_process = True

    def __init__(self, *, device: str = "cpu") -> None:
        self.device = device

    async def run(self, a: Rows) -> Rows: ...


def planned(**config: Any) -> Plan:
    """first (GPU 0) -> second (GPU 0) -> third (GPU 1) -> fourth (CPU)"""
    graph = Graph("g")
    wanted = {"first": "gpu:0", "second": "gpu:0", "third": "gpu:1", "fourth": "cpu"}
    made = [graph.stage(n, Engine, device=d, memory=Budget("1 GiB")) for n, d in wanted.items()]
    for source, target in zip(made, made[1:], strict=False):
        graph.result(source, target)
    graph.input(ask=made[0])
    graph.output(answer=made[-1])
    return plan(graph.spec(), cluster_named("2xh100"), RuntimeConfig(**{"between_gpus": "nccl", **config}))


def lanes_of(found: Plan, name: str) -> Lanes:
    host = next(host for host in found.hosts if host.name == name)
    return Lanes(name, gpus_of(host), [edge for edge in found.edges if name in (edge.source_host, edge.target_host)])


def test_what_a_host_may_use() -> None:
    found = planned()
    assert [gpus_of(host) for host in found.hosts] == [
        Gpus((0,), 2**30, 2**28),
        Gpus((0,), 2**30, 2**28),
        Gpus((1,), 2**30, 0),
        Gpus((), 0, 0),
    ]


@pytest.mark.parametrize(
    ("numbers", "environ", "visible"),
    [
        ((1,), {}, "1"),
        ((0, 3), {"CUDA_VISIBLE_DEVICES": "4, 5,6,7"}, "4,7"),
        ((0,), {"CUDA_VISIBLE_DEVICES": "GPU-aaaa"}, "GPU-aaaa"),
    ],
)
def test_a_process_sees_its_own_gpus_alone(numbers: tuple[int, ...], environ: dict[str, str], visible: str) -> None:
    found = Gpus(numbers).environment(environ)
    assert found.pop("NCCL_P2P_NVL_CHUNKSIZE") == "131072"
    assert found == {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_a_users_own_setting_of_nccl_stays() -> None:
    assert Gpus((0,)).environment({"NCCL_P2P_NVL_CHUNKSIZE": "65536"})["NCCL_P2P_NVL_CHUNKSIZE"] == "65536"


def test_hosts_without_gpus_keep_their_environment() -> None:
    assert Gpus().environment({"CUDA_VISIBLE_DEVICES": "1"}) == {}


def test_an_actor_is_told_the_kind_of_its_device() -> None:
    stages = planned().graph.stages
    assert [arguments_of(stage)["device"] for stage in stages] == ["gpu", "gpu", "gpu", "cpu"]


async def test_lanes_know_which_peer_is_on_another_gpu() -> None:
    lanes = lanes_of(planned(between_gpus="cuda_ipc"), "second")
    one, two = lanes.to("first"), lanes.to("third")
    assert isinstance(one, CudaIpcLane) and isinstance(two, CudaIpcLane)
    assert (one._far, two._far) == (False, True)
    assert one.pool is two.pool and one.pool.limit_bytes == 2**28


async def test_which_links_have_lanes() -> None:
    found = planned()
    first, second, third = (lanes_of(found, name) for name in ("first", "second", "third"))
    one, two = first.to("second"), second.to("first")
    assert isinstance(one, CudaIpcLane) and isinstance(two, CudaIpcLane)
    assert (one.sends, one.receives, two.sends, two.receives) == (True, False, False, True)
    one, two = second.to("third"), third.to("second")
    assert isinstance(one, NcclLane) and isinstance(two, NcclLane)
    assert (one.sends, one.receives, two.sends, two.receives) == (True, False, False, True)
    assert first.to("third") is None and third.to("fourth") is None and lanes_of(found, "fourth").to("third") is None


async def test_a_host_waits_until_it_is_known_how_its_tensors_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = lanes_of(planned(), "second")
    settled = anyio.Event()

    async def wait() -> None:
        await lanes.settled()
        settled.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        lane = lanes.to("first")
        assert lane is not None
        lane.decided()
        await anyio.wait_all_tasks_blocked()
        assert not settled.is_set()
        lane = lanes.to("third")
        assert lane is not None
        lane.refuse("there is no NCCL", "third")
    assert settled.is_set()
    monkeypatch.setattr(devices, "_PEER_S", 0.01)
    await lanes_of(planned(), "second").settled()
    await lanes_of(planned(), "fourth").settled()
    await lanes_of(planned(device_pool_bytes=0), "second").settled()


async def test_lanes_open_once_the_actors_are_set_up() -> None:
    lanes = lanes_of(planned(), "second")
    served: list[object] = []

    class Served(NcclLane):
        async def serve(self, port: object) -> None:
            served.append(port)

    lane = Served("gloo", 100, sends=True, receives=False)
    port: Any = object()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lanes.serve, lane, port)
        await anyio.wait_all_tasks_blocked()
        assert served == []
        tasks.start_soon(lanes.settled)
        await anyio.wait_all_tasks_blocked()
        assert served == [port]
        tasks.cancel_scope.cancel()


def test_nothing_is_held_where_no_budget_or_no_torch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.sys.modules, "torch", None)  # importing it would fail
    cap_memory(Gpus((), 2**30), planned().graph.stages)
    cap_memory(Gpus((0,), 0), planned().graph.stages)
    monkeypatch.delitem(devices.sys.modules, "torch")
    cap_memory(Gpus((0,), 2**30), planned().graph.stages)
    assert "torch" not in devices.sys.modules


@pytest.mark.parametrize(
    ("gpus", "rank", "held", "chosen"),
    [(Gpus((2, 3), 50, 0, 2), 1, {1: 0.5}, [1]), (Gpus((2, 3), 50), 0, {0: 0.5, 1: 0.5}, [])],
)
def test_which_gpus_a_rank_is_held_on(
    gpus: Gpus, rank: int, held: dict[int, float], chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several ranks touches its own alone: a look at another would take memory of it."""
    cuda = pytest.importorskip("torch").cuda
    found: dict[int, float] = {}
    set_to: list[int] = []
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "set_device", set_to.append)
    monkeypatch.setattr(cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(cuda, "set_per_process_memory_fraction", lambda part, index: found.update({index: part}))
    cap_memory(gpus, planned().graph.stages, rank)
    assert (found, set_to) == (held, chosen)
