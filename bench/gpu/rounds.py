"""Rounds of contenders who take turns, so that what slows the machine down slows all of them down."""

from __future__ import annotations

import asyncio
import operator
import statistics
from collections.abc import Awaitable, Callable, Collection, Mapping

import torch

PROMPT_TOKENS = 128
Round = Callable[[int, int, int], Awaitable[dict[str, float]]]
"""`await round(batch, tokens, number)` gives a `summary`; no two rounds have the same number."""


def prompts(count: int, round: int) -> list[list[int]]:
    """Prompts that no other round has: the prefix cache finds nothing."""
    generator = torch.Generator().manual_seed(1000 * round + count)
    return torch.randint(10, 49_000, (count, PROMPT_TOKENS), generator=generator).tolist()


def summary(first_s: list[float], total_s: float, count: int, tokens: int) -> dict[str, float]:
    return {
        "tokens_per_s": count * tokens / total_s,
        "ttft_ms": 1e3 * statistics.median(first_s),
        "ttft_last_ms": 1e3 * max(first_s),
    }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


WARM_TOKENS = 16
QUIET_S = 0.05
"""An engine that overlaps steps has one more under way when a request's last token is told: 5 ms with 8B, for which the
next prompt would wait. SGLang's bare loop is through with it before its round ends.
"""


class Turns:
    """Contenders by name, in turns: every other time in the opposite order, the first of all rounds for nothing.

    Each warms up before each of its rounds: the first prompt after another process had the GPU took 5 ms longer.
    """

    def __init__(self, contenders: Mapping[str, Round]) -> None:
        self._contenders = contenders
        self._number = 0

    async def take(
        self, batch: int, tokens: int, times: int, only: Collection[str] = ()
    ) -> dict[str, list[dict[str, float]]]:
        """`times` rounds of each, or of `only` those, in order."""
        found: dict[str, list[dict[str, float]]] = {name: [] for name in only or self._contenders}
        for time in range(times + 1):
            for name in list(found)[:: -1 if time % 2 else 1]:
                self._number += 2
                await self._contenders[name](batch, WARM_TOKENS, self._number - 1)
                await asyncio.sleep(QUIET_S)
                found[name].append(await self._contenders[name](batch, tokens, self._number))
        return {name: rows[1:] for name, rows in found.items()}


def quartiles(
    of: list[dict[str, float]],
    beside: list[dict[str, float]],
    metric: str,
    compare: Callable[[float, float], float] = operator.truediv,
) -> list[float]:
    """Of the ratios of rounds that were next to each other: lower, median, upper. At least two rounds.

    `compare` is another way than their ratio: `operator.sub` is their difference.
    """
    values = [compare(a[metric], b[metric]) for a, b in zip(of, beside, strict=True)]
    return [round(value, 4) for value in statistics.quantiles(values, n=4, method="inclusive")]
