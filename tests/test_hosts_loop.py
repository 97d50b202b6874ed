"""How hosts are told to run: the hot window by the number of cores, uvloop where it is asked for."""

from __future__ import annotations

import asyncio

import pytest

from omniflow.actor import Actor
from omniflow.config import RuntimeConfig
from omniflow.errors import StartError
from omniflow.graph import Graph
from omniflow.host import hot_window_s
from omniflow.planner import Cluster, plan
from omniflow.process import runs_on_uvloop

from .graphs import row
from .graphs.row import Job
from .running import CPU, running

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("names", "cores", "expected_s"),
    [
        (("a",), 1, 0.0),
        (("a",), 2, 200e-6),
        (("a", "b"), 2, 200e-6),
        (("a", "b", "c"), 2, 0.0),
        (("a", "b", "c"), 3, 200e-6),
    ],
)
def test_no_window_where_hosts_outnumber_cores(names: str, cores: int, expected_s: float) -> None:
    """Each `Step` is heavy: a host of its own."""
    placed = plan(row.row(*names).spec(), Cluster("cpu", cores, 0))
    assert hot_window_s(placed, RuntimeConfig()) == expected_s
    assert hot_window_s(placed, RuntimeConfig(hot_window_us=0)) == 0.0


class WhichLoop(Actor):
    heavy = True

    async def run(self, job: Job) -> str:
        return type(asyncio.get_running_loop()).__module__


def which_loop() -> Graph:
    graph = Graph("which_loop")
    stage = graph.stage("stage", WhichLoop)
    graph.input(job=stage)
    graph.output(loop=stage)
    return graph


@pytest.mark.parametrize(("uvloop", "module"), [(False, "asyncio"), (True, "uvloop"), (None, "uvloop")])
async def test_hosts_run_on_uvloop_where_it_is_installed(uvloop: bool | None, module: str) -> None:
    pytest.importorskip("uvloop")
    async with running(which_loop(), CPU, uvloop=uvloop) as runtime:
        loop = (await (await runtime.submit("job", Job())).collect())["loop"]
    assert loop.startswith(module)


async def test_uvloop_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniflow.process.importlib.util.find_spec", lambda module: None)
    with pytest.raises(StartError, match="runtime.uvloop is true, but uvloop is not installed: pip install uvloop"):
        runs_on_uvloop(RuntimeConfig(uvloop=True))
    assert not runs_on_uvloop(RuntimeConfig())
