"""What a load generator makes of turns."""

from __future__ import annotations

import anyio
import pytest

from omniflow.client.connection import ServerError
from omniflow.client.load import generate, spread, summary
from omniflow.client.turns import Turn
from omniflow.telemetry import RequestTimes, Sound

pytestmark = pytest.mark.anyio


def turn(started: float, text_s: list[float], sounds: list[Sound], ended: float, tokens: int = 0) -> Turn:
    return Turn(RequestTimes(started, text_s, sounds), usage={"completion_tokens": tokens}, ended_s=ended)


async def test_metrics_of_turns() -> None:
    one = turn(0.0, [1.0, 1.5, 2.0], [Sound(3.0, 1.0), Sound(4.5, 1.0)], 5.0, tokens=6)
    two = turn(1.0, [1.2], [], 2.0, tokens=1)
    failed = turn(0.0, [], [], 9.0)
    failed.error = "server_error"
    found = summary([one, two, failed], 10.0, concurrency=2, rate_per_s=None)
    assert (found.num_turns, found.failures) == (3, {"server_error": 1})
    assert (found.turns_per_s, found.tokens_per_s, found.audio_s_per_s) == (0.2, 0.7, 0.2)
    medians = {name: metric.max for name, metric in found.metrics.items()}
    assert medians == pytest.approx(
        {"ttft_s": 1.0, "ttfa_s": 3.0, "itl_s": 0.5, "tpot_s": 0.2, "e2el_s": 5.0, "rtf": 2.25, "underrun_s": 0.5}
    )
    assert found.metrics["itl_s"].count == 2


def test_percentiles_are_values_that_occurred() -> None:
    found = spread([float(number) for number in range(1, 101)])
    assert (found.p50, found.p90, found.p99, found.max, found.mean) == (50.0, 90.0, 99.0, 100.0, 50.5)
    assert spread([2.0, 1.0]).p50 == 1.0 and spread([3.0]).p99 == 3.0


async def test_no_more_at_once_than_asked_for() -> None:
    now = most = 0

    async def take(number: int) -> Turn:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await anyio.sleep(0.001)
        now -= 1
        if number == 3:
            raise ServerError("no", "no")
        return turn(0.0, [], [], 1.0)

    found = await generate(take, num_turns=20, concurrency=4, rate_per_s=None)
    assert most == 4 and found.num_turns == 20 and found.failures == {"no": 1}


async def test_a_rate_spreads_turns_over_time() -> None:
    async def take(number: int) -> Turn:
        return turn(0.0, [], [], 1.0)

    found = await generate(take, num_turns=50, concurrency=4, rate_per_s=1000.0, seed=7)
    assert found.seconds > 0.02 and found.rate_per_s == 1000.0
