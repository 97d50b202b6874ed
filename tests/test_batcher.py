"""Calls of several requests in one call of `run`: company is never waited for, and never harms."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from omniflow.actor import BatchPolicy
from omniflow.batcher import Batcher
from omniflow.errors import InvalidInputError, ProtocolError, RequestError
from tests.waiting import HANGS_S

pytestmark = pytest.mark.anyio


class Doubler:
    """What a batched stage does: doubles numbers; refuses negative ones; holds a batch until `free` is set."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.free = anyio.Event()
        self.free.set()

    async def run(self, values: list[int]) -> list[Any]:
        self.batches.append(values)
        await self.free.wait()
        if any(value < 0 for value in values):
            raise InvalidInputError("negative")
        return [value * 2 for value in values]


@asynccontextmanager
async def serving(call: Any, max_size: int = 4, max_wait_ms: float = 0) -> AsyncIterator[Batcher]:
    batcher = Batcher("double", BatchPolicy(max_size, max_wait_ms), call)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(batcher.serve)
        yield batcher
        tasks.cancel_scope.cancel()


async def outcomes(batcher: Batcher, values: list[int]) -> list[Any]:
    """What each of the values gave when all are asked for at once: a result or an error."""
    found: list[Any] = [None] * len(values)

    async def ask(index: int) -> None:
        try:
            found[index] = await batcher.run(values[index])
        except RequestError as error:
            found[index] = error

    async with anyio.create_task_group() as tasks:
        for index in range(len(values)):
            tasks.start_soon(ask, index)
    return found


async def test_a_lone_call_is_a_batch_of_one_at_once() -> None:
    doubler = Doubler()
    async with serving(doubler.run) as batcher:
        with anyio.fail_after(HANGS_S):
            assert await batcher.run(3) == 6
    assert doubler.batches == [[3]]


async def test_calls_that_wait_run_together_up_to_the_size() -> None:
    doubler = Doubler()
    async with serving(doubler.run) as batcher:
        assert await outcomes(batcher, list(range(10))) == [value * 2 for value in range(10)]
    assert doubler.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


async def test_calls_that_come_while_a_batch_runs_form_the_next_one() -> None:
    doubler = Doubler()
    doubler.free = anyio.Event()
    async with serving(doubler.run) as batcher, anyio.create_task_group() as tasks:
        tasks.start_soon(batcher.run, 0)
        await anyio.wait_all_tasks_blocked()
        for value in (1, 2):
            tasks.start_soon(batcher.run, value)
        await anyio.wait_all_tasks_blocked()
        assert doubler.batches == [[0]]
        doubler.free.set()
    assert doubler.batches == [[0], [1, 2]]


async def test_only_the_bad_call_fails() -> None:
    doubler = Doubler()
    async with serving(doubler.run) as batcher:
        found = await outcomes(batcher, [1, -1, 2])
    assert (found[0], found[2]) == (2, 4)
    assert isinstance(found[1], InvalidInputError)
    assert doubler.batches == [[1, -1, 2], [1], [-1], [2]]


async def test_an_error_in_the_place_of_a_result_fails_that_call() -> None:
    async def run(values: list[int]) -> list[Any]:
        return [InvalidInputError("no") if value < 0 else value for value in values]

    async with serving(run) as batcher:
        found = await outcomes(batcher, [1, -1])
    assert found[0] == 1
    assert isinstance(found[1], InvalidInputError)


@pytest.mark.parametrize("given", [0, 1, 3])
async def test_a_wrong_number_of_results_fails_all_of_them(given: int) -> None:
    async def run(values: list[int]) -> list[int]:
        return [0] * given

    async with serving(run) as batcher:
        found = await outcomes(batcher, [1, 2])
    for error in found:
        assert isinstance(error, ProtocolError)
        assert str(error) == f"stage 'double': run() got a batch of 2 and returned {given} results"


async def test_a_result_that_is_no_list_fails_its_call_and_the_next_one_runs() -> None:
    async def run(values: list[int]) -> list[int]:
        return None if values == [0] else values  # type: ignore[return-value]

    async with serving(run) as batcher:
        with pytest.raises(TypeError):
            await batcher.run(0)
        assert await batcher.run(1) == 1


async def test_a_caller_that_leaves_before_its_batch_is_not_in_it() -> None:
    doubler = Doubler()
    doubler.free = anyio.Event()
    async with serving(doubler.run) as batcher, anyio.create_task_group() as tasks:
        tasks.start_soon(batcher.run, 0)
        await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0.001):
            await batcher.run(1)
        tasks.start_soon(batcher.run, 2)
        await anyio.wait_all_tasks_blocked()
        doubler.free.set()
    assert doubler.batches == [[0], [2]]


async def test_a_caller_that_leaves_during_its_batch_harms_nobody() -> None:
    doubler = Doubler()
    doubler.free = anyio.Event()
    results: list[int] = []

    async def ask() -> None:
        results.append(await batcher.run(2))

    async with serving(doubler.run) as batcher:
        async with anyio.create_task_group() as tasks, anyio.create_task_group() as leaving:
            leaving.start_soon(batcher.run, 1)
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert doubler.batches == [[1, 2]]
            leaving.cancel_scope.cancel()
            doubler.free.set()
        assert results == [4]
        assert await batcher.run(5) == 10


@pytest.mark.parametrize(("max_wait_ms", "batches"), [(0, [[1], [2]]), (50, [[1, 2]])])
async def test_a_window_gathers_company_and_ends(max_wait_ms: float, batches: list[list[int]]) -> None:
    doubler = Doubler()

    async def come_later() -> None:
        for _ in range(5):
            await anyio.sleep(0)
        await batcher.run(2)

    async with serving(doubler.run, 3, max_wait_ms) as batcher, anyio.create_task_group() as tasks:
        tasks.start_soon(batcher.run, 1)
        tasks.start_soon(come_later)
    assert doubler.batches == batches


async def test_a_full_window_does_not_wait_for_its_end() -> None:
    doubler = Doubler()
    async with serving(doubler.run, max_size=2, max_wait_ms=60_000) as batcher:
        with anyio.fail_after(HANGS_S):
            assert await outcomes(batcher, [1, 2]) == [2, 4]
