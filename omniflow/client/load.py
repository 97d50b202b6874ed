"""A load generator: many turns at once, or at random times, and what they took.

Metrics have the names that serving benchmarks use: TTFT, TTFA, ITL, TPOT, E2EL, RTF, underrun, throughputs. The first
four and the two of sound are defined in omniflow/telemetry.py, stamped here when a piece has been read.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import anyio
import msgspec

from omniflow.client.connection import ServerError
from omniflow.client.turns import Turn, new_turn

Take = Callable[[int], Awaitable[Turn]]
"""Runs turn number n."""


class Metric(msgspec.Struct, frozen=True):
    """How one number spread over the turns that have it."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    count: int


class Load(msgspec.Struct, frozen=True):
    """What came of one load. `failures` counts turns by the code of their error; they are in no other number."""

    concurrency: int
    rate_per_s: float | None
    num_turns: int
    seconds: float
    failures: dict[str, int]
    turns_per_s: float
    tokens_per_s: float
    audio_s_per_s: float
    metrics: dict[str, Metric]


async def generate(take: Take, *, num_turns: int, concurrency: int, rate_per_s: float | None, seed: int = 0) -> Load:
    """Run `num_turns`, at most `concurrency` at once; with a rate they begin at random times (exponential gaps)."""
    turns: list[Turn] = []
    dice = random.Random(seed)
    places = anyio.CapacityLimiter(concurrency)

    async def one(number: int) -> None:
        async with places:
            turns.append(await _taken(take, number))

    began = time.monotonic()
    async with anyio.create_task_group() as tasks:
        for number in range(num_turns):
            if rate_per_s is not None:
                await anyio.sleep(dice.expovariate(rate_per_s))
            tasks.start_soon(one, number)
    return summary(turns, time.monotonic() - began, concurrency, rate_per_s)


async def _taken(take: Take, number: int) -> Turn:
    began = time.monotonic()
    try:
        return await take(number)
    except ServerError as error:
        failed = new_turn()
        failed.times.started_s, failed.ended_s, failed.error = began, time.monotonic(), error.code
        return failed


def summary(turns: Sequence[Turn], seconds: float, concurrency: int, rate_per_s: float | None) -> Load:
    """The numbers of a load that took `seconds` in all."""
    good = [turn for turn in turns if turn.error is None]
    return Load(
        concurrency=concurrency,
        rate_per_s=rate_per_s,
        num_turns=len(turns),
        seconds=seconds,
        failures=dict(Counter(turn.error for turn in turns if turn.error is not None)),
        turns_per_s=len(good) / seconds,
        tokens_per_s=sum(turn.num_tokens for turn in good) / seconds,
        audio_s_per_s=sum(turn.times.audio_s for turn in good) / seconds,
        metrics={name: spread(values) for name, values in _values(good).items() if values},
    )


def _values(turns: Sequence[Turn]) -> dict[str, list[float]]:
    return {
        "ttft_s": [turn.times.ttft_s for turn in turns if turn.times.ttft_s is not None],
        "ttfa_s": [turn.times.ttfa_s for turn in turns if turn.times.ttfa_s is not None],
        "itl_s": [gap for turn in turns for gap in turn.times.itl_s],
        "tpot_s": [found for turn in turns if (found := _tpot_s(turn)) is not None],
        "e2el_s": [turn.seconds for turn in turns],
        "rtf": [turn.times.rtf for turn in turns if turn.times.rtf is not None],
        "underrun_s": [turn.times.underrun_s for turn in turns if turn.times.underrun_s is not None],
        "barge_in_s": [turn.barge_in_s for turn in turns if turn.barge_in_s is not None],
    }


def _tpot_s(turn: Turn) -> float | None:
    """Time per output token: from the first text to the last, over the tokens behind the first."""
    text_s = turn.times.text_s
    return (text_s[-1] - text_s[0]) / (turn.num_tokens - 1) if text_s and turn.num_tokens > 1 else None


def spread(values: Sequence[float]) -> Metric:
    """Percentiles are values that occurred (nearest rank)."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[math.ceil(len(ordered) * share) - 1]

    return Metric(statistics.fmean(ordered), at(0.5), at(0.9), at(0.99), ordered[-1], len(ordered))
