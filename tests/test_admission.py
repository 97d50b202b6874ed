"""Who gets a place, who waits, and who is told at once to come later; nothing here waits for a service time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from omniflow.admission import Admission, Place
from omniflow.errors import DeadlineError, OverloadedError, RequestError

from .graphs import words
from .graphs.words import Line
from .running import running, settled
from .waiting import HANGS_S

pytestmark = pytest.mark.anyio
LONG_S = 1000.0
as_if_no_time_passed = pytest.mark.usefixtures("still")


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places grow older only as tests say."""
    monkeypatch.setattr("omniflow.admission.time", SimpleNamespace(monotonic=lambda: LONG_S))


async def full(*ages_s: float, held_s: float | None = None, first_s: float | None = None, share: float = 0.5) -> Any:
    """An admission whose places were taken so long ago, oldest first, and what it has learned lately."""
    admission = Admission(len(ages_s), 100, share)
    for age_s in ages_s:
        (await admission.take(LONG_S))._began_s -= age_s
    for recent, seconds in ((admission.held, held_s), (admission.first_output, first_s)):
        if seconds is not None:
            recent.add(seconds)
    return admission


@as_if_no_time_passed
async def test_the_nth_in_the_queue_waits_for_the_nth_oldest() -> None:
    admission = await full(9.0, 4.0, held_s=10.0)
    waits_s = []
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            waits_s.append(round(admission.wait_s, 1))
            tasks.start_soon(admission.take, LONG_S)
            await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert waits_s == [1.0, 6.0, 11.0, 16.0, 21.0]


@as_if_no_time_passed
async def test_requests_that_differ_may_run_on_although_they_are_the_oldest() -> None:
    admission = await full(*[100.0] * 4, held_s=8.0)
    assert admission.wait_s == 0
    admission.held.add(16.0)
    assert (admission.held.mean_s, admission.held.deviation_s) == (9.0, 2.0)
    assert admission.wait_s == 0.5 * 2.0 / 4


async def test_with_a_free_place_or_without_experience_nothing_is_refused() -> None:
    admission = Admission(2, 1, 0.5)
    admission.held.add(LONG_S)
    place = await admission.take(0.01)
    assert (admission.wait_s, admission.num_taken) == (None, 1)
    admission.free(place)
    unknown = await full(1.0)
    with anyio.move_on_after(0) as scope:
        await unknown.take(0.01)
    assert scope.cancelled_caught


async def refused(take: Callable[[], Awaitable[Place]]) -> OverloadedError:
    """The refusal that `take` gets without waiting."""
    with anyio.CancelScope() as scope:
        scope.cancel()  # the first wait would end it
        with pytest.raises(OverloadedError) as caught:
            await take()
        return caught.value
    raise AssertionError("it waits")


@as_if_no_time_passed
async def test_a_deadline_that_would_pass_in_the_queue_is_refused_at_once() -> None:
    admission = await full(2.0, held_s=10.0)
    error = await refused(lambda: admission.take(7.5))
    assert str(error) == "1 requests run and 0 wait: no place is expected within 7.5 s; try again later"
    assert error.retry_after_s == pytest.approx(8.0)
    with anyio.move_on_after(0) as scope:
        await admission.take(8.5)
    assert scope.cancelled_caught
    assert (admission.num_taken, admission.num_queued) == (1, 0)


@as_if_no_time_passed
@pytest.mark.parametrize(
    ("first_s", "share", "longest_s"), [(4.0, 0.5, 2.0), (4.0, 2.0, 8.0), (0.1, 0.5, 0.1), (0.3, 0.5, 0.15)]
)
async def test_nobody_waits_longer_than_a_share_of_a_first_output(
    first_s: float, share: float, longest_s: float
) -> None:
    admission = await full(10.0 - longest_s * 1.1, held_s=10.0, first_s=first_s, share=share)
    error = await refused(lambda: admission.take(LONG_S))
    assert f"no place is expected within {longest_s:.2g} s" in str(error)
    assert error.retry_after_s == pytest.approx(longest_s * 1.1)
    admission = await full(10.0 - longest_s * 0.9, held_s=10.0, first_s=first_s, share=share)
    with anyio.move_on_after(0) as scope:
        await admission.take(LONG_S)
    assert scope.cancelled_caught


async def test_a_wrong_estimate_ends_the_wait_after_the_longest_one() -> None:
    admission = await full(10.0, held_s=10.0, first_s=0.01)
    with anyio.fail_after(HANGS_S), pytest.raises(OverloadedError):
        await admission.take(LONG_S)
    assert (admission.num_taken, admission.num_queued) == (1, 0)


async def test_places_are_passed_on_in_order() -> None:
    admission = await full(0.0)
    (first,) = admission._places
    order: list[int] = []

    async def one(number: int) -> None:
        place = await admission.take(LONG_S)
        order.append(number)
        admission.finish(place)

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(one, number)
        await anyio.wait_all_tasks_blocked()
        admission.finish(first)
    assert order == [0, 1, 2, 3, 4]
    assert (admission.num_taken, admission.num_queued) == (0, 0)


# -- in a runtime ------------------------------------------------------------------------------------------------------


async def test_requests_teach_how_long_they_take() -> None:
    async with running(words.build()) as runtime:
        await (await runtime.submit("line", Line("a slow slow slow b"))).collect()
        await settled(runtime)
        held_s, first_s = runtime._admission.held.mean_s, runtime._admission.first_output.mean_s
        assert held_s is not None and first_s is not None
        assert held_s >= 0.6
        assert 0 < first_s < held_s / 2, "it is slow after its first word"


@as_if_no_time_passed
async def test_five_times_the_capacity() -> None:
    """Each of 20 clients gets one answer: 4 run, 2 may wait for the oldest of them, and 14 are told at once."""
    async with running(words.build(), max_in_flight=4) as runtime:
        admission = runtime._admission
        admission.held.add(10.0)
        admission.first_output.add(8.0)
        replies = [await runtime.submit("line", Line("hang x")) for _ in range(4)]
        for reply in replies[:2]:
            reply.place._began_s -= 7.0
        answers: list[str] = []

        async def client() -> None:
            try:
                found = await (await runtime.submit("line", Line("a b"))).collect()
                answers.append(f"{len(found['text'])} words")
            except OverloadedError as error:
                assert error.retry_after_s == pytest.approx(10.0)
                answers.append("refused")

        async with anyio.create_task_group() as tasks:
            for _ in range(16):
                tasks.start_soon(client)
            await anyio.wait_all_tasks_blocked()
            assert answers == ["refused"] * 14
            assert (runtime.status().in_flight, runtime.status().queued) == (4, 2)
            for reply in replies:
                await reply.cancel()
        assert answers[14:] == ["2 words"] * 2


@as_if_no_time_passed
@pytest.mark.parametrize(("held_s", "after_s"), [(None, 1.0), (30.0, 30.0)])
async def test_a_full_queue_says_when_to_come_back(held_s: float | None, after_s: float) -> None:
    async with running(words.build(), max_in_flight=1, max_queued=0) as runtime:
        if held_s is not None:
            runtime._admission.held.add(held_s)
        reply = await runtime.submit("line", Line("hang x"))
        with pytest.raises(OverloadedError, match="1 requests run and 0 wait; try again later") as caught:
            await runtime.submit("line", Line("a"))
        assert caught.value.retry_after_s == pytest.approx(after_s)
        await reply.cancel()


async def test_a_deadline_that_is_long_enough_still_holds_in_the_queue() -> None:
    async with running(words.build(), max_in_flight=1) as runtime:
        reply = await runtime.submit("line", Line("hang x"))
        runtime._admission.held.add(0.01)
        with pytest.raises(RequestError) as caught:
            await runtime.submit("line", Line("a"), deadline_s=0.05)
        assert isinstance(caught.value, DeadlineError)
        await reply.cancel()
