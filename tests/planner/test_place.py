"""Placement: who runs where, how each edge travels, and what does not fit, on clusters that need not exist."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import ming_omni
from omniflow.actor import Actor
from omniflow.config import RuntimeConfig, configure, set_layer
from omniflow.errors import PlanError
from omniflow.graph import Budget, Graph, GraphSpec, Stage, absent, one_for_one
from omniflow.planner import Cluster, Gpu, Plan, cluster_named, plan
from omniflow.planner.place import may_hold_tensor
from omniflow.planner.plan import FRONT

GIB = 2**30


class Tensor:
    """Stands for torch's, which takes seconds to import."""


class Rows(msgspec.Struct, frozen=True):
    rows: Tensor


class Word(msgspec.Struct, frozen=True):
    text: str


class Light(Actor):
    @classmethod
    def refuses_tp(cls, settings: Mapping[str, Any]) -> str | None:
        return None

    async def run(self, a: Rows) -> Rows: ...


class Whole(Actor):
    async def run(self, a: Rows) -> Rows: ...


class Heavy(Light):
    heavy = True


class Engine(Light):
    owns_process = True


class Joins(Engine):
    async def run(self, a: Rows, b: Rows) -> Rows: ...


class Words(Light):
    async def run(self, a: Rows) -> Word: ...


class Reads(Light):
    async def run(self, a: Word) -> Rows: ...


class Untyped(Light):
    async def run(self, a: Rows) -> Any: ...


class TakesAny(Light):
    heavy = True

    async def run(self, a: Any) -> Rows: ...


class Either(Light):
    async def run(self, a: Rows) -> Rows | Word: ...


class TakesEither(Light):
    heavy = True

    async def run(self, a: Rows | Word) -> Rows: ...


def chain(*stages: tuple[str, type[Actor], dict[str, Any]], **profile: Any) -> GraphSpec:
    """A graph of (name, actor, keywords) in a row."""
    graph = Graph("g")
    made = [graph.stage(name, actor, **values) for name, actor, values in stages]
    for source, target in zip(made, made[1:], strict=False):
        graph.result(source, target)
    graph.input(ask=made[0])
    graph.output(answer=made[-1])
    if profile:
        graph.profile("p", "why", **profile)
    return graph.spec()


def gpu(weights: str = "1 GiB", **values: Any) -> dict[str, Any]:
    return {"device": "gpu", "memory": Budget(weights=weights), **values}


def hosts(found: Plan) -> dict[str, tuple[str, ...]]:
    return {host.name: host.stages for host in found.hosts}


def devices(found: Plan) -> dict[str, tuple[str, ...]]:
    return {stage: host.devices for host in found.hosts for stage in host.stages}


def transports(found: Plan) -> dict[str, str]:
    return {f"{edge.source}>{edge.target}": edge.transport for edge in found.edges}


CPU = cluster_named("cpu")


# -- hosts -------------------------------------------------------------------------------------------------------------


def test_light_stages_share_one_host() -> None:
    found = plan(chain(("a", Light, {}), ("b", Light, {})), CPU)
    assert hosts(found) == {"a": ("a", "b")}
    assert found.hosts[0].reason == "light stages only: one host is enough"
    assert (found.hosts[0].start_method, found.hosts[0].process) == ("forkserver", True)


def test_a_heavy_stage_has_its_own_host_and_light_neighbours_ride_along() -> None:
    found = plan(chain(("a", Light, {}), ("b", Heavy, {}), ("c", Light, {}), ("d", Heavy, {"memory": Budget(5)})), CPU)
    assert hosts(found) == {"b": ("a", "b"), "d": ("c", "d")}
    assert [host.reason for host in found.hosts] == [
        "b keeps a core busy; light stages ride along: a",
        "d keeps a core busy; light stages ride along: c",
    ]
    assert transports(found) == {
        "client>a": "arrow_shm",
        "a>b": "local_object",
        "b>c": "arrow_shm",
        "c>d": "local_object",
        "d>client": "arrow_shm",
    }


def test_a_light_stage_far_from_any_heavy_one_follows_its_neighbours() -> None:
    found = plan(chain(("a", Light, {}), ("b", Light, {}), ("c", Light, {}), ("d", Heavy, {})), CPU)
    assert hosts(found) == {"d": ("a", "b", "c", "d")}


def test_near_chooses_the_host() -> None:
    heavy = {"memory": Budget("1 GiB")}
    found = plan(chain(("a", Heavy, {}), ("b", Light, {"near": "a"}), ("c", Heavy, heavy)), CPU)
    assert hosts(found) == {"a": ("a", "b"), "c": ("c",)}


def test_near_a_stage_without_a_host_of_its_own_is_refused() -> None:
    spec = chain(("a", Heavy, {}), ("b", Light, {"near": "c"}), ("c", Light, {}))
    with pytest.raises(PlanError) as caught:
        plan(spec, CPU)
    assert str(caught.value) == "stage 'b': near='c' names no stage with a host of its own"


def test_near_an_absent_stage_falls_back_to_the_neighbours() -> None:
    graph = Graph("g")
    first, light, heavy = graph.stage("a", Heavy), graph.stage("b", Light, near="c"), graph.stage("c", Heavy)
    graph.result(first, light)
    graph.result(light, heavy)
    graph.input(ask=first)
    graph.output(early=light, answer=heavy)
    graph.profile("p", "why", c=absent("no model"))
    found = plan(graph.spec(), CPU)
    assert hosts(found) == {"a": ("a", "b")}
    assert transports(found).keys() == {"client>a", "a>b", "b>client"}


def test_an_isolated_stage_is_alone() -> None:
    found = plan(chain(("a", Light, {}), ("b", Light, {"isolate": True}), ("c", Light, {})), CPU)
    assert hosts(found) == {"a": ("a", "c"), "b": ("b",)}
    assert found.hosts[1].reason == "b asked to be isolated"
    asked = plan(chain(("a", Light, {"near": "b"}), ("b", Light, {"isolate": True}), ("c", Light, {})), CPU)
    assert hosts(asked)["b"] == ("a", "b")


def test_engines_that_own_their_process() -> None:
    found = plan(chain(("a", Engine, gpu()), ("b", Engine, gpu())), cluster_named("1xh200"))
    assert hosts(found) == {"a": ("a",), "b": ("b",)}
    assert found.hosts[0].reason == "the engine of a owns its process"
    assert transports(found)["a>b"] == "cuda_ipc"


def test_a_host_takes_the_restart_of_its_anchor() -> None:
    again = one_for_one(max_restarts=7)
    found = plan(chain(("a", Light, {}), ("b", Heavy, {"restart": again}), ("c", Heavy, {})), CPU)
    assert [host.restart.strategy for host in found.hosts] == ["one_for_one", "stop"]
    assert found.hosts[0].restart == again


def test_a_restart_of_its_own_needs_a_process_of_its_own() -> None:
    again = one_for_one()
    own: dict[str, Any] = {"restart": again}
    with pytest.raises(PlanError, match=r"stage 'b': its restart= cannot hold: it shares the process of 'a'"):
        plan(chain(("a", Heavy, {}), ("b", Light, own)), CPU)
    assert hosts(plan(chain(("a", Heavy, own), ("b", Light, own)), CPU)) == {"a": ("a", "b")}
    alone = plan(chain(("a", Heavy, {}), ("b", Light, own | {"isolate": True})), CPU)
    assert [host.restart.strategy for host in alone.hosts] == ["stop", "one_for_one"]


def test_one_process_for_tests_and_notebooks() -> None:
    cluster = Cluster("inline", 2, 0, single_process=True)
    found = plan(chain(("a", Heavy, {}), ("b", Engine, {})), cluster)
    assert hosts(found) == {"main": ("a", "b")}
    assert (found.hosts[0].process, found.hosts[0].start_method) == (False, "inline")
    assert set(transports(found).values()) == {"local_object"}
    assert all("object itself" in edge.reason for edge in found.edges)


def test_one_process_is_none_for_a_gpu() -> None:
    """The runtime's own process has no links to others that values of its stages could go by."""
    cluster = msgspec.structs.replace(cluster_named("1xh200"), single_process=True)
    assert hosts(plan(chain(("a", Heavy, {}), ("b", Light, {})), cluster)) == {"main": ("a", "b")}
    with pytest.raises(PlanError, match=r"stage 'b': .*\(single_process\).* leave that out, or set b\.device=cpu"):
        plan(chain(("a", Heavy, {}), ("b", Light, gpu())), cluster)


# -- GPUs --------------------------------------------------------------------------------------------------------------


def test_adjacent_stages_on_one_gpu_share_a_host() -> None:
    found = plan(chain(("a", Light, gpu()), ("b", Light, gpu()), ("c", Heavy, {})), cluster_named("1xh200"))
    assert hosts(found) == {"a": ("a", "b"), "c": ("c",)}
    assert found.hosts[0].reason == "a, b are adjacent and share gpu:0"
    assert found.hosts[0].budget_bytes == 2 * GIB
    assert found.hosts[0].start_method == "spawn"


@pytest.mark.parametrize("values", [{"isolate": True}, {"restart": one_for_one()}, {"tp": 2}])
def test_what_keeps_stages_of_one_gpu_apart(values: dict[str, Any]) -> None:
    found = plan(chain(("a", Light, gpu()), ("b", Light, gpu(**values))), cluster_named("2xh200"))
    assert hosts(found) == {"a": ("a",), "b": ("b",)}


def test_stages_on_two_gpus_write_to_each_other_and_words_go_through_shared_memory() -> None:
    spec = chain(
        ("a", Light, gpu("100 GiB")), ("b", Words, gpu("100 GiB")), ("c", Reads, gpu("30 GiB")), ("d", Heavy, {})
    )
    found = plan(spec, cluster_named("2xh200"))
    assert devices(found) == {"a": ("gpu:0",), "b": ("gpu:1",), "c": ("gpu:0",), "d": ("cpu",)}
    assert transports(found) == {
        "client>a": "arrow_shm",
        "a>b": "cuda_ipc",
        "b>c": "arrow_shm",
        "c>d": "arrow_shm",
        "d>client": "arrow_shm",
    }
    reason = "device tensors from gpu:0 to gpu:1: one copy from GPU to GPU, over NVLink where there is one"
    assert found.edges[1].reason == reason


def test_tensor_parallel_stages_take_as_many_gpus() -> None:
    found = plan(chain(("a", Light, gpu("400 GiB", tp=4)), ("b", Light, gpu("100 GiB"))), cluster_named("8xh200"))
    assert devices(found) == {"a": ("gpu:0", "gpu:1", "gpu:2", "gpu:3"), "b": ("gpu:4",)}
    assert [host.ranks for host in found.hosts] == [4, 1]
    assert found.hosts[0].reason == (
        "a is split over gpu:0, gpu:1, gpu:2, gpu:3: a process for each, which live and die together"
    )
    assert found.gpu_bytes == (*(100 * GIB,) * 4, 100 * GIB + GIB // 4, *(0,) * 3)


def test_what_a_split_stage_holds_on_each_gpu() -> None:
    """Weights and heads are shared out, a workspace is not; 2 heads of keys and values for 4 GPUs are there twice."""
    memory = Budget(weights="40 GiB", workspace="3 GiB", kv_tokens=2**20, kv_bytes_per_token=16384, kv_heads=2)
    for tp, share in ((1, 40 + 3 + 16), (2, 20 + 3 + 8), (4, 10 + 3 + 8)):
        found = plan(chain(("a", Light, {"device": "gpu", "tp": tp, "memory": memory})), cluster_named("8xh100"))
        assert [host.device_bytes for host in found.hosts] == [share * GIB]


def test_light_stages_ride_with_the_first_process_of_a_split_one() -> None:
    found = plan(chain(("a", Whole, {}), ("b", Engine, gpu(tp=2)), ("c", Whole, {})), cluster_named("2xh200"))
    assert hosts(found) == {"b": ("a", "b", "c")}
    assert (found.hosts[0].ranks, found.hosts[0].start_method) == (2, "spawn")


def test_a_stage_that_cannot_be_split() -> None:
    with pytest.raises(PlanError, match="stage 'a': tp=2 cannot be: Whole runs on one GPU"):
        plan(chain(("a", Whole, gpu(tp=2))), cluster_named("2xh200"))
    plan(chain(("a", Whole, gpu(tp=1))), cluster_named("2xh200"))


@pytest.mark.parametrize(("heads", "tp", "fits"), [(9, 2, False), (9, 3, True), (0, 2, True), (32, 8, True)])
def test_heads_that_gpus_cannot_share(heads: int, tp: int, fits: bool) -> None:
    spec = chain(("a", Light, {"device": "gpu", "tp": tp, "memory": Budget(heads=heads)}))
    if fits:
        plan(spec, cluster_named("8xh200"))
        return
    with pytest.raises(PlanError) as caught:
        plan(spec, cluster_named("8xh200"))
    assert str(caught.value) == "stage 'a': tp=2 does not divide its 9 attention heads; 1, 3, 9 do"


def test_the_thinker_is_split_by_sglang_alone() -> None:
    graph = ming_omni.graph.spec("embedded")
    layers = [set_layer(["thinker.device=gpu", "thinker.tp=2"])]
    with pytest.raises(PlanError, match="stage 'thinker': tp=2 cannot be: its engine runs on one GPU; set engine='sgl"):
        plan(configure(graph, layers).spec, cluster_named("2xh200"))
    layers.append(set_layer(["thinker.engine=sglang"]))
    with pytest.raises(PlanError, match="stage 'thinker': tp=2 does not divide its 9 attention heads; 1, 3, 9 do"):
        plan(configure(graph, layers).spec, cluster_named("4xh200"))
    layers.append(set_layer(["thinker.tp=3"]))
    found = plan(configure(graph, layers).spec, cluster_named("4xh200"))
    host = next(host for host in found.hosts if "thinker" in host.stages)
    assert (host.devices, host.ranks) == (("gpu:0", "gpu:1", "gpu:2"), 3)


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_sglang_is_for_gpus(stage: str) -> None:
    """Also where it is not installed: the plan is for another machine."""
    graph, layers = ming_omni.graph.spec("embedded"), [set_layer([f"{stage}.engine=sglang"])]
    with pytest.raises(
        PlanError, match=f"stage '{stage}': device='cpu' cannot be: engine='sglang' is for GPUs; set dev"
    ):
        plan(configure(graph, layers).spec, cluster_named("8xh200"))
    layers.append(set_layer([f"{stage}.device=gpu"]))
    with pytest.raises(PlanError, match=f"or set {stage}.device=cpu and another engine"):
        plan(configure(graph, layers).spec, cluster_named("cpu"))
    assert plan(configure(graph, layers).spec, cluster_named("1xh200"))


def test_kv_tokens_that_are_set_are_planned_for() -> None:
    graph = ming_omni.graph.spec("embedded")
    layers = [set_layer(["thinker.engine=sglang", "thinker.device=gpu", "thinker.kv_tokens=10000000"])]
    with pytest.raises(PlanError, match="stage 'thinker': it needs 430.69 GiB on GPU 0, which has 134.00 GiB"):
        plan(configure(graph, layers).spec, cluster_named("1xh200"))


def test_the_gpus_of_a_host_are_in_their_order() -> None:
    cluster = Cluster("many", 64, 0, (Gpu("any", GIB),) * 12)
    found = plan(chain(("a", Light, {"device": "gpu:8", "tp": 4})), cluster)
    assert devices(found) == {"a": ("gpu:8", "gpu:9", "gpu:10", "gpu:11")}


def test_a_gpu_by_number() -> None:
    found = plan(
        chain(("a", Light, {"device": "gpu:3", "tp": 2}), ("b", Light, {"device": "gpu:3"})), cluster_named("8xh200")
    )
    assert devices(found) == {"a": ("gpu:3", "gpu:4"), "b": ("gpu:3",)}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "cpu",
        gpu(),
        "stage 'a': it wants a GPU (device='gpu'), and cluster 'cpu' has none; choose a profile for CPUs (--profile), "
        "or set a.device=cpu (`omniflow doctor` shows the GPUs of this machine)",
    ),
    (
        "1xh200",
        gpu("200 GiB"),
        "stage 'a': it needs 200.00 GiB on GPU 0, which has 134.00 GiB of 134.00 GiB left; lower its kv_tokens, raise "
        "tp, or add a GPU",
    ),
    ("2xh200", gpu(tp=4), "stage 'a': tp=4 needs as many GPUs; there are 2"),
    ("2xh200", gpu(tp=0), "stage 'a': tp=0 is no number of GPUs; write 1 or more"),
    ("2xh200", {"tp": 2}, "stage 'a': tp=2 needs GPUs; set device='gpu'"),
    ("2xh200", {"device": "gpu:2"}, "stage 'a': GPU 2 does not exist; there are 2"),
    ("2xh200", {"device": "gpu:1", "tp": 2}, "stage 'a': GPU 2 does not exist; there are 2"),
    ("2xh200", {"device": "cuda"}, "stage 'a': device 'cuda' is unknown; write cpu, gpu or gpu:0"),
    ("2xh200", {"device": "gpu:x"}, "stage 'a': device 'gpu:x' is unknown; write cpu, gpu or gpu:0"),
]


@pytest.mark.parametrize(("cluster", "values", "message"), REFUSED)
def test_what_does_not_fit(cluster: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(chain(("a", Light, values)), cluster_named(cluster))
    assert str(caught.value) == message


def test_budgets_of_one_gpu_add_up() -> None:
    spec = chain(("a", Light, gpu("70 GiB")), ("b", Light, gpu("70 GiB")))
    with pytest.raises(
        PlanError, match="stage 'b': it needs 70.00 GiB on GPU 0, which has 64.00 GiB of 134.00 GiB left"
    ):
        plan(spec, cluster_named("1xh200"))
    assert devices(plan(spec, cluster_named("2xh200"))) == {"a": ("gpu:0",), "b": ("gpu:1",)}


def test_kv_tokens_count() -> None:
    memory = Budget(weights="1 GiB", kv_tokens=100_000, kv_bytes_per_token="1 MiB")
    with pytest.raises(PlanError, match="it needs 98.66 GiB on GPU 0, which has 76.00 GiB"):
        plan(chain(("a", Light, {"device": "gpu", "memory": memory})), cluster_named("1xh100"))


def test_the_memory_of_the_machine() -> None:
    spec = chain(("a", Heavy, {"memory": Budget("3 GiB")}), ("b", Heavy, {"memory": Budget("2 GiB")}))
    assert plan(spec, cluster_named("cpu", memory_bytes=5 * GIB))
    with pytest.raises(PlanError) as caught:
        plan(spec, cluster_named("cpu", memory_bytes=4 * GIB))
    assert str(caught.value) == (
        "the CPU stages need 5.00 GiB, the machine has 4.00 GiB; lower the budgets or choose a smaller profile"
    )


def test_clusters() -> None:
    assert cluster_named("8xH200").gpus == (Gpu("H200", 134 * GIB),) * 8
    assert cluster_named("cpu", cpu_cores=3).cpu_cores == 3
    for name in ("0xh200", "8xfoo", "h200", ""):
        with pytest.raises(
            PlanError, match=rf"unknown cluster '{name}'; write cpu, or NxGPU with GPU one of h200, h100"
        ):
            cluster_named(name)


TWO = chain(("a", Engine, gpu("60 GiB")), ("b", Engine, gpu("20 GiB", tp=2)))


def test_what_is_planned_for_each_gpu() -> None:
    found = plan(TWO, cluster_named("2xh100"))
    assert [(host.devices, host.device_bytes, host.pool_bytes) for host in found.hosts] == [
        (("gpu:0",), 60 * GIB, GIB // 4),
        (("gpu:0", "gpu:1"), 10 * GIB, 0),
    ]
    assert found.gpu_bytes == (70 * GIB + GIB // 4, 10 * GIB)
    assert [gpu["planned_bytes"] for gpu in found.as_dict()["cluster"]["gpus"]] == list(found.gpu_bytes)


def test_pools_count() -> None:
    spec = chain(("a", Engine, gpu("70 GiB")), ("b", Engine, gpu("6 GiB")))
    with pytest.raises(PlanError) as caught:
        plan(spec, cluster_named("1xh100"))
    assert str(caught.value) == (
        "GPU 0 has 76.00 GiB, and 76.25 GiB are planned for it (a 70.00 GiB, values of a on their way 0.25 GiB, "
        "b 6.00 GiB); lower kv_tokens or runtime.device_pool_bytes, or add a GPU"
    )
    assert plan(spec, cluster_named("1xh100"), RuntimeConfig(device_pool_bytes=0)).gpu_bytes == (76 * GIB,)


def test_a_host_that_another_gpu_writes_to_has_a_pool() -> None:
    config = RuntimeConfig()
    apart = chain(("a", Engine, gpu("60 GiB")), ("b", Engine, gpu("60 GiB")))
    assert [host.pool_bytes for host in plan(apart, cluster_named("2xh100"), config).hosts] == [0, GIB // 4]
    near = chain(("a", Engine, gpu("20 GiB")), ("b", Engine, gpu("20 GiB")))
    assert [host.pool_bytes for host in plan(near, cluster_named("1xh100"), config).hosts] == [GIB // 4, 0]


def test_a_host_has_a_pool_for_each_that_writes_to_it_from_another_gpu() -> None:
    """And one for all that it sends itself, where any of that stays on its GPU or goes by NCCL."""
    graph = Graph("g")
    wanted = {"a": 0, "b": 1, "c": 2, "d": 2, "e": 0}
    made = {
        name: graph.stage(name, Joins if name == "c" else Engine, **{**gpu(), "device": f"gpu:{n}"})
        for name, n in wanted.items()
    }
    graph.input(ask=made["a"])
    graph.result(made["a"], made["b"])
    graph.result(made["a"], made["c"]["a"])
    graph.result(made["b"], made["c"]["b"])
    for target in "de":
        graph.result(made["c"], made[target])
    graph.output(answer=made["d"], other=made["e"])
    pool = GIB // 4

    def pools(**config: Any) -> dict[str, int]:
        found = plan(graph.spec(), cluster_named("3xh100"), RuntimeConfig(**config))
        one_each = {host.name: host.lane_bytes for host in found.hosts}
        assert one_each == {"a": pool, "b": pool, "c": pool, "d": 0, "e": 0 if config else pool}
        assert sum(found.gpu_bytes) == sum(host.pool_bytes for host in found.hosts) + 5 * GIB
        return {host.name: host.pool_bytes for host in found.hosts}

    assert pools() == {"a": 0, "b": pool, "c": 3 * pool, "d": 0, "e": pool}
    nccl = 900 * 10**6  # of both ends, for each direction: a>b, a>c, b>c and c>e
    assert pools(between_gpus="nccl") == {
        "a": pool + 2 * nccl, "b": pool + 2 * nccl, "c": pool + 3 * nccl, "d": 0, "e": nccl,
    }  # fmt: skip


def test_a_host_with_a_stage_that_names_no_budget_is_not_held() -> None:
    found = plan(chain(("a", Light, gpu()), ("b", Light, {"device": "gpu"})), cluster_named("1xh200"))
    assert (found.hosts[0].stages, found.hosts[0].device_bytes) == (("a", "b"), 0)


def test_why_tensors_go_through_the_host() -> None:
    def edge(cluster: Cluster, **config: Any) -> tuple[str, str]:
        found = plan(TWO, cluster, RuntimeConfig(**config)).edges[1]
        return found.transport, found.reason

    two = cluster_named("2xh100")
    assert edge(two)[0] == "cuda_ipc"
    assert edge(two, device_pool_bytes=0) == (
        "arrow_shm",
        "tensors from gpu:0 to gpu:0 go through the host: runtime.device_pool_bytes is 0",
    )
    assert edge(msgspec.structs.replace(two, unshared="torch is built without CUDA")) == (
        "arrow_shm",
        "tensors from gpu:0 to gpu:0 go through the host: torch is built without CUDA",
    )


def test_nccl_between_two_gpus_where_it_is_asked_for() -> None:
    spec = chain(("a", Light, {"device": "gpu:0"}), ("b", Light, {"device": "gpu:1"}))
    found = plan(spec, cluster_named("2xh100"), RuntimeConfig(between_gpus="nccl")).edges[1]
    assert found.transport == "nccl"
    assert "point to point, as runtime.between_gpus says" in found.reason


class Deep(msgspec.Struct, frozen=True):
    rows: list[Rows] | None


class Endless(msgspec.Struct, frozen=True):
    inner: Endless | None
    many: dict[str, Endless]


@pytest.mark.parametrize(
    ("hint", "holds"),
    [
        (Tensor, True),
        (Rows, True),
        (Deep, True),
        (dict[str, tuple[int, Tensor]], True),
        (Tensor | None, True),
        (Word, False),
        (np.ndarray, False),
        (Endless, False),
        (int, False),
    ],
)
def test_which_values_may_hold_tensors(hint: object, holds: bool) -> None:
    assert may_hold_tensor(hint) is holds


# -- edges -------------------------------------------------------------------------------------------------------------


def test_bounds_come_from_the_edge_or_the_configuration() -> None:
    from tests.graphs.words import build

    found = plan(build().spec(), CPU, RuntimeConfig(stream_bound=5))
    bounds = {f"{edge.source}>{edge.target}": edge.bound for edge in found.edges}
    assert bounds["words>echo"] == 8
    assert bounds["client>echo"] == 5
    assert bounds["split>shout"] == 1


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (Untyped, TakesAny, "it names no type that a receiver could rebuild"),
        (Either, TakesEither, "If a type union contains multiple Struct types, all Struct types must be tagged"),
    ],
)
def test_a_type_that_cannot_be_rebuilt_does_not_leave_its_process(
    source: type[Actor], target: type[Actor], reason: str
) -> None:
    spec = chain(("a", source, {"isolate": True}), ("b", target, {}))
    with pytest.raises(PlanError, match=f"edge a.result -> b.a carries .* which cannot be sent: {reason}"):
        plan(spec, CPU)
    inline = Cluster("inline", 2, 0, single_process=True)
    assert set(transports(plan(spec, inline)).values()) == {"local_object"}


def test_the_plan_as_json() -> None:
    spec = chain(("a", Heavy, {"memory": Budget("1 GiB", kv_tokens=5)}), ("b", Light, {}))
    found = json.loads(plan(spec, cluster_named("1xh200")).to_json())
    assert found["schema"] == 1
    assert found["cluster"] == {
        "name": "1xh200",
        "cpu_cores": 16,
        "gpus": [{"model": "H200", "memory_bytes": 134 * GIB, "planned_bytes": 0}],
    }
    assert found["hosts"][0]["stages"] == ["a", "b"]
    assert found["stages"][0] | {"actor": ""} == {
        "name": "a",
        "actor": "",
        "host": "a",
        "device": "cpu",
        "tp": 1,
        "memory_bytes": GIB,
        "kv_tokens": 5,
        "settings": {},
        "absent": None,
    }
    assert found["edges"][1] == {
        "id": 1,
        "kind": "result",
        "source": "a.result",
        "target": "b.a",
        "type": "Rows",
        "transport": "local_object",
        "bound": 1,
        "policy": None,
        "reason": "both stages run in host a: the object itself is handed over",
    }


# -- any graph on any cluster ------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> GraphSpec:
    """2-9 stages, each fed by an earlier one (several may read the same), on any devices, with any wishes."""
    graph = Graph("g")
    made: list[Stage] = []
    for index in range(draw(st.integers(2, 9))):
        actor = draw(st.sampled_from([Light, Light, Heavy, Engine]))
        device = draw(st.sampled_from(["cpu", "cpu", "gpu"]))
        values: dict[str, Any] = {
            "device": device,
            "tp": draw(st.sampled_from([1, 1, 2])) if device == "gpu" else 1,
            "memory": Budget(weights=draw(st.integers(0, 40)) * GIB),
            "isolate": draw(st.integers(0, 5)) == 0,
            "restart": draw(st.sampled_from([None, None, one_for_one()])),
        }
        stage = graph.stage(f"s{index}", actor, **values)
        if index:
            graph.result(draw(st.sampled_from(made)), stage)
        made.append(stage)
    graph.input(ask=made[0])
    read = {edge.source for edge in graph._edges}
    graph.output(**{f"o_{stage.name}": stage for stage in made if stage.name not in read})
    return graph.spec()


CLUSTERS = ["cpu", "1xh200", "2xh100", "8xh200"]


def planned(spec: GraphSpec, name: str, single_process: bool = False) -> Plan | None:
    try:
        return plan(spec, msgspec.structs.replace(cluster_named(name), single_process=single_process))
    except PlanError as error:
        assert len(str(error)) > 20
        return None


@given(graphs(), st.sampled_from(CLUSTERS), st.booleans())
def test_whatever_is_planned_holds_together(spec: GraphSpec, cluster: str, single_process: bool) -> None:
    found = planned(spec, cluster, single_process)
    if found is None:
        return
    names = [stage for host in found.hosts for stage in host.stages]
    assert sorted(names) == sorted(stage.name for stage in spec.stages), "every stage on exactly one host"
    assert len({host.name for host in found.hosts}) == len(found.hosts)
    assert all(host.reason for host in found.hosts)
    used: dict[str, int] = {}
    for stage in spec.stages:
        placed = next(host for host in found.hosts if stage.name in host.stages)
        if stage.device == "gpu":
            assert len(placed.devices) == stage.tp
            for device in placed.devices:
                used[device] = used.get(device, 0) + -(-stage.memory.total_bytes // stage.tp)
        if stage.isolate and not (single_process and stage.device == "cpu"):
            assert placed.stages == (stage.name,)
        if single_process and stage.device == "cpu":
            assert placed.name == "main"
    for device, size in used.items():
        index = int(device.removeprefix("gpu:"))
        assert size <= found.gpu_bytes[index] <= found.cluster.gpus[index].memory_bytes, device
    for host in found.hosts:
        engines = [name for name in host.stages if spec.stage(name).actor.owns_process]
        assert len(engines) <= 1 or host.name == "main"
    check_edges(spec, found)


def check_edges(spec: GraphSpec, found: Plan) -> None:
    assert [edge.id for edge in found.edges] == list(range(len(spec.all_edges)))
    for edge in found.edges:
        assert edge.reason and edge.bound >= 1
        ends = {edge.source_host, edge.target_host}
        assert (edge.source == "client") == (edge.source_host == FRONT)
        if len(ends) == 1:
            assert edge.transport == "local_object"
        elif ends <= {FRONT, "main"}:
            assert edge.transport == "local_object"
        else:
            assert edge.transport != "local_object"
        if edge.transport in ("cuda_ipc", "nccl"):
            on = [host.devices for host in found.hosts if host.name in ends]
            assert all(devices[0].startswith("gpu") for devices in on)
            target = next(host for host in found.hosts if host.name == edge.target_host)
            assert edge.transport == "cuda_ipc" and (on[0][0] == on[1][0] or target.pool_bytes)


def test_a_setting_may_decide_that_an_engine_owns_its_process() -> None:
    class Choosing(Heavy):
        def __init__(self, *, engine: str = "plain") -> None: ...

        @classmethod
        def wants_process(cls, settings: Mapping[str, Any]) -> bool:
            return settings.get("engine") == "alone"

    def stages(engine: str) -> list[tuple[str, ...]]:
        graph = Graph("g")
        first = graph.stage("first", Heavy, device="gpu")
        second = graph.stage("second", Choosing, device="gpu", engine=engine)
        graph.result(first, second)
        graph.input(a=first)
        graph.output(b=second)
        return [host.stages for host in plan(graph.spec(), cluster_named("1xh200")).hosts]

    assert stages("plain") == [("first", "second")]
    assert stages("alone") == [("first",), ("second",)]


@given(graphs(), st.sampled_from(CLUSTERS), st.randoms())
def test_the_order_of_edges_does_not_matter(spec: GraphSpec, cluster: str, random: Any) -> None:
    edges = list(spec.edges)
    random.shuffle(edges)
    one, other = planned(spec, cluster), planned(msgspec.structs.replace(spec, edges=tuple(edges)), cluster)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.hosts == other.hosts
        assert transports(one) == transports(other)


@given(graphs())
def test_more_memory_never_makes_a_plan_impossible(spec: GraphSpec) -> None:
    if planned(spec, "2xh100") is not None:
        assert planned(spec, "8xh200") is not None
