"""One host and scripted neighbours: what overtakes, what comes late, and when a request has nothing here any more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from omniflow import process
from omniflow.actor import Actor
from omniflow.engine.ranks import ALONE
from omniflow.errors import DeviceError, InvalidInputError, StageDiedError, StartError, UnavailableError
from omniflow.graph import Graph
from omniflow.host import Host, actor_of, host_spec
from omniflow.media import Options, TextDelta
from omniflow.messages import (
    READER_GONE,
    Beat,
    Cancel,
    Closed,
    Connect,
    Credit,
    End,
    Failure,
    HostFailed,
    HostReady,
    Open,
    Shutdown,
    Skip,
    StageReady,
    Unconnected,
    Waiting,
)
from omniflow.planner import Cluster, cluster_named, plan
from omniflow.planner.plan import FRONT
from omniflow.topology import Stage
from omniflow.transport.local_object import LocalObjectLink, local_pair

from .contract.ends import Inbox
from .graphs import words
from .graphs.words import Counted, Line
from .running import CPU
from .waiting import HANGS_S

pytestmark = pytest.mark.anyio


class Around:
    """A host of the words graph, the runtime's end of its link, and the ends of the hosts beside it."""

    def __init__(self, name: str, graph: Graph | None = None, cluster: Cluster = CPU) -> None:
        self.plan = plan((graph or words.build()).spec(), cluster)
        self.host = Host(host_spec(self.plan, name, shm_bytes=2**20, beat_s=1))
        self.at_front = Inbox()
        self.front, self.its_front = local_pair(FRONT, name, self.at_front, self.host)
        self.at: dict[str, Inbox] = {}
        self.beside: dict[str, LocalObjectLink] = {}
        for other in self.plan.hosts:
            if other.name != name:
                self.at[other.name] = Inbox()
                self.beside[other.name], self.host_end = local_pair(other.name, name, self.at[other.name], self.host)
                self.host.links[other.name] = self.host_end

    def edge(self, source: str, target: str, port: str | None = None) -> int:
        return next(
            edge.id
            for edge in self.plan.edges
            if (edge.source, edge.target) == (source, target) and port in (None, edge.target_port)
        )

    def open(self, request: int, *outputs: str, entry: str = "line") -> None:
        self.front.send(Open(request, f"r{request}", entry, tuple(sorted(outputs)), Options(), 5.0))

    def ask(self, request: int, text: str) -> None:
        """Let a line enter at host `shout`, whose neighbour `count` has nothing to count."""
        self.front.send_item(self.edge("client", "split"), request, 0, Line(text))
        self.beside["count"].send(Skip(self.edge("count", "join"), request))

    async def heard(self, kind: type[Any]) -> Any:
        """The next message of a kind that the runtime gets."""
        while True:
            for message in self.at_front.messages:
                if isinstance(message, kind):
                    self.at_front.messages.remove(message)
                    return message
            await self.at_front.news()


@asynccontextmanager
async def around(name: str, graph: Graph | None = None, cluster: Cluster = CPU) -> AsyncIterator[Around]:
    found = Around(name, graph, cluster)
    beside = dict(found.host.links)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(found.host.serve, found.its_front)
        await found.heard(HostReady)
        found.host.links |= beside
        with anyio.fail_after(HANGS_S):
            yield found
        found.front.send(Shutdown())


LINE = Line("a?")


async def test_start_is_reported_stage_by_stage() -> None:
    found = Around("shout")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(found.host.serve, found.its_front)
        await found.heard(HostReady)
        assert [m.stage for m in found.at_front.messages if isinstance(m, StageReady)] == [
            "split",
            "shout",
            "join",
            "words",
        ]
        found.front.close()  # a host whose runtime is gone ends


async def test_an_item_that_overtakes_its_open_waits_for_it() -> None:
    """The item comes from another host, `Open` from the runtime, whose socket may be full."""
    async with around("count") as it:
        edge = it.edge("split", "count")
        for request in (2, 1):
            it.beside["shout"].send_item(edge, request, 0, LINE)
        await anyio.wait_all_tasks_blocked()
        assert it.host.num_open == 0
        for request in (1, 2):
            it.open(request, "num_words")
        assert {(await it.at["shout"].item()).request for _ in range(2)} == {1, 2}
        assert {(await it.heard(Closed)).request for _ in range(2)} == {1, 2}
        assert it.host.num_open == 0


async def test_a_peer_whose_socket_could_not_be_taken_is_told_of_and_what_needs_it_is_refused() -> None:
    async with around("shout") as it:
        it.front.send(Connect("echo", 7))
        assert await it.heard(Unconnected) == Unconnected("echo", 7)
        it.open(1, "audio")
        failure = (await it.heard(Failure)).error
        assert (failure.kind, failure.stage) == ("UnavailableError", "words")
        it.open(2, "num_words")
        it.ask(2, "a b")
        assert {(await it.heard(Closed)).request for _ in range(2)} == {1, 2}
        assert not [message for message in it.at_front.messages if isinstance(message, Failure)]


async def test_the_early_of_requests_that_never_open_is_dropped_by_the_next_one() -> None:
    """A restarted host hears of requests of the one before it; numbers rise, so they are known to be stale."""
    async with around("echo") as it:
        edge = it.edge("words", "echo")
        for request in (3, 4, 6):
            it.beside["shout"].send_item(edge, request, 0, TextDelta("early"))
        it.beside["shout"].send(End(edge, 6, 1))
        it.beside["shout"].send(Skip(edge, 4))
        it.open(5, "audio")
        assert [request for request, _ in it.host._early] == [6, 6]
        it.beside["shout"].send(End(edge, 5, 0))
        assert (await it.heard(End)).request == 5
        it.open(6, "audio")
        assert it.host._early == []
        assert (await it.at_front.item()).value.samples[0] == np.float32(0.05)
        assert (await it.heard(End)).request == 6


async def test_credit_that_overtakes_open_is_not_lost() -> None:
    """A reader may be through before its writer has heard of the request."""
    async with around("shout") as it:
        edge = it.edge("words", "echo")
        it.beside["echo"].send(Credit(edge, 1, READER_GONE))
        it.open(1, "text", "audio")
        it.ask(1, "many x")
        texts = 0
        while texts < 101:
            assert (await it.at_front.item()).edge == it.edge("words", "client", "text")
            texts += 1
            if texts % 8 == 0:
                it.front.send(Credit(it.edge("words", "client", "text"), 1, 8))
        await it.heard(Closed)
        assert len(it.at["echo"].items) == 0


async def test_late_messages_of_a_request_that_is_over_are_ignored() -> None:
    async with around("shout") as it:
        it.open(1, "num_words")
        it.front.send(Cancel(1))
        closed = await it.heard(Closed)
        assert closed == Closed(
            1,
            (
                Waiting("split", "line"),
                Waiting("shout", "line"),
                Waiting("join", "counted"),
                Waiting("words", "joined"),
            ),
        )
        it.front.send_item(it.edge("client", "split"), 1, 0, LINE)
        it.beside["count"].send_item(it.edge("count", "join"), 1, 0, Counted(1, np.zeros(1)))
        it.beside["echo"].send(Credit(it.edge("words", "echo"), 1, 8))
        it.front.send(Cancel(1))
        it.front.send(Cancel(99))
        assert it.host.num_open == 0
        it.open(2, "num_words")
        it.ask(2, "a b")
        assert (await it.at_front.item()).value == -1


async def test_a_cancel_tells_what_each_stage_was_doing() -> None:
    async with around("shout") as it:
        it.open(1, "num_words", "text")
        it.front.send_item(it.edge("client", "split"), 1, 0, LINE)
        while not it.at["count"].items:
            await it.at["count"].news()
        await anyio.wait_all_tasks_blocked()
        it.front.send(Cancel(1))
        assert (await it.heard(Closed)).unfinished == (Waiting("join", "counted"), Waiting("words", "joined"))


async def test_a_stage_that_has_heard_nothing_of_its_stream_waits_for_its_port() -> None:
    async with around("echo") as it:
        it.open(1, "audio")
        it.front.send(Cancel(1))
        assert (await it.heard(Closed)).unfinished == (Waiting("echo", "text"),)
        it.open(2, "audio")
        it.beside["shout"].send_item(it.edge("words", "echo"), 2, 0, TextDelta("a"))
        await it.at_front.item()
        it.front.send(Cancel(2))
        assert (await it.heard(Closed)).unfinished == (Waiting("echo", None),)


@pytest.mark.parametrize(("seq", "end"), [(1, None), (0, 5)])
async def test_a_broken_order_fails_the_request_and_names_the_source(seq: int, end: int | None) -> None:
    async with around("echo") as it:
        edge = it.edge("words", "echo")
        it.open(1, "audio")
        it.beside["shout"].send_item(edge, 1, seq, TextDelta("a"))
        if end is not None:
            it.beside["shout"].send(End(edge, 1, end))
        failure = await it.heard(Failure)
        assert (failure.error.kind, failure.error.stage, failure.error.request_id) == ("ProtocolError", "words", "r1")
        assert (await it.heard(Closed)).request == 1


async def test_a_writer_that_ignores_its_credits_fails_its_request() -> None:
    async with around("echo") as it:
        edge = it.edge("words", "echo")
        it.open(1, "audio")
        for seq in range(9):
            it.beside["shout"].send_item(edge, 1, seq, TextDelta("a"))
        assert (
            await it.heard(Failure)
        ).error.message == "more than 8 items are waiting: the writer ignored its credits"


async def test_a_bad_item_is_the_fault_of_its_source() -> None:
    async with around("shout") as it:
        it.open(1, "num_words")
        it.open(2, "num_words")
        wrong = InvalidInputError("Expected `str`, got `int`")
        it.host.on_bad_item(it.its_front, it.edge("client", "split"), 1, wrong.info())
        it.host.on_bad_item(it.host_end, it.edge("count", "join"), 2, wrong.info())
        first, second = await it.heard(Failure), await it.heard(Failure)
        assert (first.error.kind, first.error.param) == ("InvalidInputError", "line")
        assert (second.error.kind, second.error.stage) == ("ProtocolError", "count")
        it.open(3, "num_words")
        it.host.on_bad_item(it.its_front, it.edge("client", "split"), 3, UnavailableError("too many files").info())
        third = await it.heard(Failure)
        assert (third.error.kind, third.error.param) == ("UnavailableError", None), "nobody's fault"


async def test_a_tensor_that_never_comes_is_the_death_of_its_source() -> None:
    """Its message is here, and what is computed from it is worth nothing: no answer may leave any more."""
    async with around("shout") as it:
        it.open(1, "num_words")
        it.beside["count"].send_item(it.edge("count", "join"), 1, 0, Counted(7, np.zeros(1)))
        it.host.on_bad_item(it.host_end, it.edge("count", "join"), 1, StageDiedError("it died").info())
        failure = await it.heard(Failure)
        assert (failure.error.kind, failure.error.stage) == ("StageDiedError", "count")
        it.front.send_item(it.edge("client", "split"), 1, 0, LINE)
        await it.heard(Closed)
        assert not it.at_front.items
        # What its tensors were given to may have gone on to other hosts already, and the request be through here.
        it.host.on_bad_item(it.host_end, it.edge("count", "join"), 1, StageDiedError("it died").info())
        assert (await it.heard(Failure)).request == 1


async def test_a_value_and_a_skip_complete_a_fan_in_in_any_order() -> None:
    for first in ("value", "skip"):
        async with around("shout") as it:
            counted = it.edge("count", "join")
            it.open(1, "num_words")
            if first == "skip":
                it.beside["count"].send(Skip(counted, 1))
            it.front.send_item(it.edge("client", "split"), 1, 0, LINE)
            if first == "value":
                while not it.at["count"].items:
                    await it.at["count"].news()
                it.beside["count"].send_item(counted, 1, 0, Counted(7, np.zeros(1)))
            assert (await it.at_front.item()).value == (7 if first == "value" else -1)


async def test_nothing_is_sent_to_a_host_that_is_gone() -> None:
    async with around("shout") as it:
        it.beside["echo"].close()
        assert "echo" not in it.host.links
        it.open(1, "audio", "text")
        it.ask(1, "a")
        assert (await it.at_front.item()).value == TextDelta("A! ")
        await it.heard(Closed)


async def test_a_request_is_closed_only_once_all_of_it_has_left_the_process() -> None:
    """What still lies in this process is lost if it dies, and then the runtime must know that it was involved."""
    async with around("shout") as it:
        link = it.host.links["echo"]
        stuck = Stuck(link)
        it.host.links["echo"] = stuck  # type: ignore[assignment]
        it.open(1, "audio", "text")
        it.ask(1, "a")
        await it.heard(End)
        await anyio.wait_all_tasks_blocked()
        assert not any(isinstance(message, Closed) for message in it.at_front.messages)
        stuck.free.set()
        assert (await it.heard(Closed)).request == 1


async def test_a_message_that_no_host_takes() -> None:
    async with around("count") as it:
        with pytest.raises(Exception, match="host count cannot take a Beat"):
            it.host.on_message(it.its_front, Beat("", 0.0), ())


class Faulty(Actor):
    """Meets an error of CUDA's for 'a', in a task group for 'b', and full memory for anything else."""

    heavy = True

    async def run(self, line: Line) -> Line:
        error = torch.AcceleratorError("CUDA error: device-side assert triggered")
        if line.text == "a":
            raise error
        if line.text == "b":
            raise ExceptionGroup("tasks", [ValueError(), ExceptionGroup("more", [error])])
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("device", "text", "dies"),
    [("gpu", "a", True), ("gpu", "b", True), ("gpu", "c", False), ("cpu", "a", False), ("cpu", "b", False)],
)
async def test_a_host_does_not_outlive_its_gpus_context(device: str, text: str, dies: bool) -> None:
    graph = Graph("faulty")
    faulty = graph.stage("faulty", Faulty, device=device)
    graph.input(line=faulty)
    graph.output(line=faulty)
    async with around("faulty", graph, cluster_named("1xh200")) as it:
        it.open(1, "line")
        it.front.send_item(it.edge("client", "faulty"), 1, 0, Line(text))
        assert (await it.heard(Failure)).error.kind == "StageError"
        await it.heard(Closed)
        said = [message.message for message in it.at_front.messages if isinstance(message, HostFailed)]
        what = "AcceleratorError: CUDA error: device-side assert triggered"
        if text == "b":
            what = "ExceptionGroup: tasks (2 sub-exceptions)"
        assert said == ([what] if dies else [])
        assert (it.host.broken, it.host.stopped.is_set()) == (dies, dies)


class Kernels:
    """A GPU in the place of CUDA's, whose context dies after some looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def look(self) -> None:
        self.looks -= 1
        if self.looks < 0:
            raise DeviceError("cuStreamQuery failed: CUDA_ERROR_ASSERT")


async def test_a_host_whose_gpu_does_nothing_any_more_ends_though_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = Graph("faulty")
    faulty = graph.stage("faulty", Faulty, device="gpu")
    graph.input(line=faulty)
    graph.output(line=faulty)
    uses, gpu = iter([False, False]), Kernels(3)
    monkeypatch.setattr(process, "has_bindings", lambda: True)
    monkeypatch.setattr(process, "uses_gpu", lambda: next(uses, True))
    monkeypatch.setattr(process, "cuda", lambda: gpu)
    async with around("faulty", graph, cluster_named("1xh200")) as it:
        await process.watch_gpu(it.host, 0.001)
        assert gpu.looks == -1
        said = (await it.heard(HostFailed)).message
        assert said == "the GPU has failed for this process: cuStreamQuery failed: CUDA_ERROR_ASSERT"
        assert it.host.broken


@pytest.mark.parametrize("has_bindings", [True, False])
async def test_a_gpu_that_is_dead_before_the_first_look_is_noticed_where_it_can_be(
    has_bindings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead() -> Any:
        raise DeviceError("cuDevicePrimaryCtxRetain failed: CUDA_ERROR_ASSERT")

    monkeypatch.setattr(process, "has_bindings", lambda: has_bindings)
    monkeypatch.setattr(process, "uses_gpu", lambda: True)
    monkeypatch.setattr(process, "cuda", dead)
    graph = Graph("faulty")
    faulty = graph.stage("faulty", Faulty, device="gpu")
    graph.input(line=faulty)
    graph.output(line=faulty)
    async with around("faulty", graph, cluster_named("1xh200")) as it:
        await process.watch_gpu(it.host, 0.001)
        assert it.host.broken == has_bindings


class Stuck:
    """A link that takes everything and says that it has not left yet."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self.peer = link.peer
        self.free = anyio.Event()

    def send(self, message: Any, descriptors: Any = ()) -> None:
        self._link.send(message, descriptors)

    def send_item(self, *item: Any) -> None:
        self._link.send_item(*item)

    def push(self) -> bool:
        return self.free.is_set()

    def allocate(self, num_bytes: int) -> None:
        """It has no memory."""

    async def flushed(self) -> None:
        await self.free.wait()


async def test_a_host_that_lacks_something_says_so_itself() -> None:
    """A program of one's own does not pass by the command line."""

    class Lacking(Actor):
        @classmethod
        def lacks(cls, settings: Mapping[str, Any], device: str) -> str | None:
            return f"install fast-engine for {device}"

    with pytest.raises(StartError, match="^install fast-engine for gpu$"):
        actor_of(Stage("a", Lacking, device="gpu"), ALONE)
