"""The hot window: open after traffic, shut soon after, and not opened where it does not pay."""

from __future__ import annotations

import asyncio
import time

import pytest

from omniflow.transport.hot_window import HotWindow

pytestmark = pytest.mark.anyio


def hot_window(longest_s: float) -> HotWindow:
    window = HotWindow(longest_s)
    window.serve(asyncio.get_running_loop())
    return window


async def one_message(window: HotWindow) -> float:
    """A message comes, then nothing until the window is shut; gives the seconds that it was open."""
    began = time.monotonic()
    window.hit()
    while window.is_open:
        await asyncio.sleep(0)
    return time.monotonic() - began


async def test_it_is_open_for_its_time_and_then_shut() -> None:
    window = hot_window(0.01)
    assert not window.is_open
    assert await one_message(window) >= 0.01
    assert not window.is_open


async def test_traffic_keeps_it_open() -> None:
    window = hot_window(0.02)
    began = time.monotonic()
    window.touch()
    while time.monotonic() - began < 0.05:
        window.hit()
        await asyncio.sleep(0)
        assert window.is_open


async def test_nothing_runs_once_it_is_shut() -> None:
    window = hot_window(0.001)
    await one_message(window)
    began = time.process_time()
    await asyncio.sleep(0.02)
    assert time.process_time() - began < 0.005


async def test_each_window_in_which_nothing_comes_is_half_as_long() -> None:
    window = hot_window(0.004)
    for expected in (0.002, 0.001, 0.0005):
        await one_message(window)
        assert window.length_s == expected


async def test_one_that_never_pays_is_tried_now_and_then() -> None:
    window = hot_window(0.0001)
    for _ in range(8):
        await one_message(window)
    opened = 0
    for _ in range(64):
        window.hit()
        opened += window.is_open
        while window.is_open:
            await asyncio.sleep(0)
    assert 0 < opened <= 12


async def test_one_that_pays_grows_again() -> None:
    window = hot_window(0.004)
    for _ in range(3):
        await one_message(window)
    for _ in range(5):
        window.hit()
    assert window.length_s == 0.004


async def test_without_length_it_never_opens() -> None:
    window = hot_window(0.0)
    window.hit()
    window.touch()
    assert not window.is_open


async def test_one_in_which_something_came_stays_as_long_as_it_is() -> None:
    """A question and its answer, then a pause, again and again: the answer is waited for each time."""
    window = hot_window(0.002)
    for _ in range(20):
        window.touch()
        await asyncio.sleep(0)
        window.hit()
        while window.is_open:
            await asyncio.sleep(0)
        assert window.length_s == 0.002
