"""Turns of an actor: first chunks before later ones, each served once, and nobody starves."""

from __future__ import annotations

import threading

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniflow.actor import Actor, Emit
from omniflow.graph import Graph
from omniflow.turns import MOST_PASSES, Progress, Turns, progress

from .graphs.row import Job
from .running import running

pytestmark = pytest.mark.anyio


async def quiet() -> None:
    """Let every task run until it waits; `wait_all_tasks_blocked` looks every 0.1 s only."""
    for _ in range(6):
        await anyio.sleep(0)


class Counter:
    """Callers of one `Turns`; each keeps its turn until the test lets it go."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.turns = Turns()
        self.served: list[str] = []
        self._tasks = tasks
        self._go = anyio.Semaphore(0)

    async def call(self, name: str) -> anyio.CancelScope:
        """A caller queues up: one whose name is 'F...' has sent nothing yet."""
        scope = anyio.CancelScope()
        self._tasks.start_soon(self._caller, name, scope)
        await quiet()
        return scope

    async def _caller(self, name: str, scope: anyio.CancelScope) -> None:
        run = Progress()
        run.has_sent = not name.startswith("F")
        progress.set(run)
        with scope:
            async with self.turns.turn():
                self.served.append(name)
                await self._go.acquire()

    async def step(self) -> None:
        """Whoever has the turn ends it."""
        self._go.release()
        await quiet()


async def test_first_chunks_overtake_and_later_ones_age() -> None:
    async with anyio.create_task_group() as tasks:
        counter = Counter(tasks)
        for name in ("L0", "L1", "L2", "F1", "F2", "F3", "F4", "F5"):
            await counter.call(name)
        assert counter.turns.num_waiting == 7
        for _ in range(8):
            await counter.step()
    assert counter.served == ["L0", "F1", "F2", "F3", "L1", "F4", "F5", "L2"]
    assert counter.turns.num_waiting == 0


async def test_first_chunks_without_end_starve_nobody() -> None:
    async with anyio.create_task_group() as tasks:
        counter = Counter(tasks)
        await counter.call("F")
        for number in range(5):
            await counter.call(f"L{number}")
        for number in range(40):
            await counter.call(f"F{number}")
            await counter.step()
        places = [counter.served.index(f"L{number}") for number in range(5)]
        assert places == [(MOST_PASSES + 1) * (number + 1) for number in range(5)]
        for _ in range(60):
            await counter.step()


async def test_a_cancelled_caller_leaves_the_queue_and_loses_no_turn() -> None:
    async with anyio.create_task_group() as tasks:
        counter = Counter(tasks)
        await counter.call("F0")
        leaves, handed_over = await counter.call("F1"), await counter.call("F2")
        await counter.call("F3")
        leaves.cancel()
        await quiet()
        assert counter.turns.num_waiting == 2
        counter._go.release()
        while counter.turns.num_waiting == 2:
            await anyio.sleep(0)
        handed_over.cancel()  # in the same moment as it gets its turn
        await quiet()
        await counter.step()
        assert counter.served[-1] == "F3"
        for _ in range(2):
            await counter.step()
        await counter.call("L9")
        assert counter.served[-1] == "L9"
        await counter.step()


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["F", "L", "step"]), max_size=40))
def test_any_order_of_callers(moves: list[str]) -> None:
    """Each is served once, each class in its order, and a later chunk waits for a bounded number of others."""

    async def play() -> None:
        async with anyio.create_task_group() as tasks:
            counter = Counter(tasks)
            called: list[str] = []
            latest: dict[str, int] = {}
            for move in moves:
                if move == "step":
                    await counter.step()
                    continue
                name = f"{move}{len(called)}"
                before_it = sum(n.startswith("L") and n not in counter.served for n in called)
                latest[name] = len(counter.served) + (MOST_PASSES + 1) * (before_it + 1)
                called.append(name)
                await counter.call(name)
            for _ in moves:
                await counter.step()
            assert sorted(counter.served) == sorted(called)
            for kind in "FL":
                assert [n for n in counter.served if n[0] == kind] == [n for n in called if n[0] == kind]
            for name in called:
                assert name.startswith("F") or counter.served.index(name) <= latest[name]

    anyio.run(play)


async def test_a_run_has_sent_once_its_first_item_is_out() -> None:
    seen: list[bool] = []

    class Says(Actor):
        async def run(self, job: Job, emit: Emit[int]) -> None:
            run = progress.get()
            assert run is not None
            for number in range(2):
                seen.append(run.has_sent)
                await emit.send(number)

    graph = Graph("g")
    stage = graph.stage("says", Says)
    graph.input(job=stage)
    graph.output(numbers=stage)
    async with running(graph) as runtime:
        for _ in range(2):
            await (await runtime.submit("job", Job())).collect()
    assert seen == [False, True] * 2


async def test_a_new_request_is_heard_before_those_that_are_under_way_go_on() -> None:
    order: list[str] = []
    gate = threading.Semaphore(0)

    def work(name: str) -> None:
        gate.acquire()
        order.append(name)

    class Talks(Actor):
        async def run(self, job: Job, emit: Emit[int]) -> None:
            for number in range(3):
                await self.offload(work, f"{job.do}{number}")
                await emit.send(number)

    graph = Graph("g")
    stage = graph.stage("talks", Talks)
    graph.input(job=stage)
    graph.output(numbers=stage)
    async with running(graph) as runtime:
        replies = [await runtime.submit("job", Job(do=name)) for name in "ab"]
        for number in range(2):
            assert (await release(gate, replies[0]), await release(gate, replies[1])) == (number, number)
        replies.append(await runtime.submit("job", Job(do="c")))
        await anyio.wait_all_tasks_blocked()
        gate.release(5)
        for reply in replies:
            await reply.collect()
    # a2 was being made when c came; c0 then goes before b2, which had waited longer.
    assert order[:6] == ["a0", "b0", "a1", "b1", "a2", "c0"]


async def release(gate: threading.Semaphore, reply: object) -> int:
    gate.release()
    return (await anext(reply)).value  # type: ignore[call-overload, no-any-return]
