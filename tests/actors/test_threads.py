from __future__ import annotations

import threading
from collections.abc import Mapping

import anyio
import pytest

from actors.threads import Threads, in_order, ungrouped
from omniflow.errors import InvalidInputError
from tests.waiting import HANGS_S, until

pytestmark = pytest.mark.anyio


async def test_several_steps_run_at_the_same_time_and_no_more_than_are_allowed() -> None:
    threads, running, most = Threads(3), set[int](), list[int]()
    meeting = threading.Barrier(3, timeout=HANGS_S)

    def step(number: int) -> int:
        running.add(number)
        meeting.wait()
        most.append(len(running))
        meeting.wait()
        running.discard(number)
        return number

    async with anyio.create_task_group() as tasks:
        for number in range(9):  # in threes, or the barrier breaks
            tasks.start_soon(threads.run, step, number)
    assert most == [3] * 9 and threads.busy_s() == 0


async def test_a_step_that_runs_is_told_and_its_error_is_its_callers() -> None:
    threads, may_end = Threads(1), threading.Event()
    seen: list[float] = []

    def step() -> None:
        may_end.wait(HANGS_S)
        raise InvalidInputError("no", param="messages")

    async def watch() -> None:
        await until(threads.busy_s)
        seen.append(threads.busy_s())
        may_end.set()

    with pytest.raises(InvalidInputError, match="no"), ungrouped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await threads.run(step)
    assert seen and seen[0] > 0 and threads.busy_s() == 0


class Making:
    """Makes numbers when it is told to, and knows which were begun."""

    def __init__(self, items: Mapping[str, int]) -> None:
        self.items = items
        self.begun: list[int] = []
        self.may_end = {item: anyio.Event() for item in items.values()}
        self.taken: list[tuple[str, int]] = []

    async def make(self, item: int) -> int:
        self.begun.append(item)
        await self.may_end[item].wait()
        if item < 0:
            raise InvalidInputError(f"{item} is bad", param="messages")
        return 10 * item

    async def take(self, key: str, result: int) -> None:
        self.taken.append((key, result))

    async def run(self, most: int) -> None:
        await in_order(self.make, self.items, most, self.take)


async def test_results_are_taken_in_order_whichever_is_made_first() -> None:
    making = Making({"a": 1, "b": 2, "c": 3, "d": 4})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(making.run, 2)
        await anyio.wait_all_tasks_blocked()
        assert making.begun == [1, 2]
        making.may_end[2].set()
        await anyio.wait_all_tasks_blocked()
        assert (making.begun, making.taken) == ([1, 2], []), "what is made and not taken counts"
        making.may_end[1].set()
        await anyio.wait_all_tasks_blocked()
        assert (making.begun, making.taken) == ([1, 2, 3, 4], [("a", 10), ("b", 20)])
        making.may_end[4].set()
        making.may_end[3].set()
    assert making.taken == [("a", 10), ("b", 20), ("c", 30), ("d", 40)]
    await Making({}).run(2)


async def test_the_first_bad_item_is_told_of_and_the_rest_is_let_be() -> None:
    making = Making({"a": 1, "b": -2, "c": -3, "d": 4})
    making.may_end[-3].set()
    with pytest.raises(InvalidInputError, match="-2 is bad"), ungrouped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_alone, making)
            await anyio.wait_all_tasks_blocked()
            assert making.begun == [1, -2, -3]
            making.may_end[1].set()
            making.may_end[-2].set()
    assert making.taken == [("a", 10)]


async def run_alone(making: Making) -> None:
    await making.run(3)
