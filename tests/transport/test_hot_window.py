"""The hot window: open after traffic, shut soon after, and not opened where it does not pay."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from omniflow.transport.hot_window import HotWindow

pytestmark = pytest.mark.anyio


class Clock:
    """Stands where the hot window looks at the time, which passes only as a test says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    async def until_shut(self, window: HotWindow) -> float:
        """Nothing comes until the window is shut; gives the seconds that it was still open."""
        began = self.now_s
        while window.is_open:
            self.now_s += 10e-6
            await asyncio.sleep(0)
        return self.now_s - began

    async def one_message(self, window: HotWindow) -> float:
        """A message comes, then nothing until the window is shut; gives the seconds that it was open."""
        window.hit()
        return await self.until_shut(window)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("omniflow.transport.hot_window.time", clock)
    return clock


def hot_window(longest_s: float) -> HotWindow:
    window = HotWindow(longest_s)
    window.serve(asyncio.get_running_loop())
    return window


async def test_it_is_open_for_its_time_and_then_shut(clock: Clock) -> None:
    window = hot_window(0.01)
    assert not window.is_open
    assert await clock.one_message(window) == pytest.approx(0.01, abs=20e-6)
    assert not window.is_open


async def test_traffic_keeps_it_open(clock: Clock) -> None:
    window = hot_window(0.02)
    window.touch()
    for _ in range(50):
        clock.now_s += 0.015
        window.hit()
        await asyncio.sleep(0)
        assert window.is_open
    clock.now_s += 0.025
    await asyncio.sleep(0)
    assert not window.is_open


async def test_nothing_runs_once_it_is_shut(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    window = hot_window(0.001)
    look = Mock(wraps=window._look)
    monkeypatch.setattr(window, "_look", look)
    await clock.one_message(window)
    looked = look.call_count
    await asyncio.sleep(0.02)
    assert look.call_count == looked > 0


async def test_each_window_in_which_nothing_comes_is_half_as_long(clock: Clock) -> None:
    window = hot_window(0.004)
    for expected in (0.002, 0.001, 0.0005):
        await clock.one_message(window)
        assert window.length_s == expected


async def test_one_that_never_pays_is_tried_now_and_then(clock: Clock) -> None:
    window = hot_window(0.0001)
    for _ in range(8):
        await clock.one_message(window)
    opened = 0
    for _ in range(64):
        window.hit()
        opened += window.is_open
        await clock.until_shut(window)
    assert 0 < opened <= 12


async def test_one_that_pays_grows_again(clock: Clock) -> None:
    window = hot_window(0.004)
    for _ in range(3):
        await clock.one_message(window)
    for _ in range(5):
        window.hit()
    assert window.length_s == 0.004


async def test_without_length_it_never_opens() -> None:
    window = hot_window(0.0)
    window.hit()
    window.touch()
    assert not window.is_open


async def test_one_in_which_something_came_stays_as_long_as_it_is(clock: Clock) -> None:
    """A question and its answer, then a pause, again and again: the answer is waited for each time."""
    window = hot_window(0.002)
    for _ in range(20):
        window.touch()
        await asyncio.sleep(0)
        clock.now_s += 0.0015
        await asyncio.sleep(0)
        window.hit()
        await clock.until_shut(window)
        assert window.length_s == 0.002
