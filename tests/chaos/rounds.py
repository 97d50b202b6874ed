"""Rounds of chaos: a host dies at a random moment under streaming requests, and everything that follows is timed."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import anyio
import anyio.to_thread
import numpy as np

from omniflow.errors import RequestError, StageDiedError
from omniflow.runtime import Runtime

from ..graphs.paths import HOSTS, SIDES, Ask
from ..running import pid_of, up_again
from .footprint import quiet

NUM_REQUESTS = 16


class Watched(Runtime):
    """A runtime that notes when it hears of deaths."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.down_at: dict[str, float] = {}
        self.ready_at: dict[str, float] = {}

    def on_down(self, host: str, reason: str) -> None:
        self.down_at[host] = time.perf_counter()
        super().on_down(host, reason)

    def on_ready(self, host: str) -> None:
        self.ready_at[host] = time.perf_counter()
        super().on_ready(host)


class Round(NamedTuple):
    """Seconds from the kill of `victim` to what it caused."""

    victim: str
    kernel_s: float
    """Until the kernel has taken the process down: no parent can hear of it earlier."""
    noticed_s: float
    errors_s: tuple[float, ...]
    """One for each request that it ended."""
    ready_s: float
    served_s: float
    """Until a request that came right after the death was noticed has its first item."""
    finished: int
    """Requests that ended with all of their content."""


class Load:
    """Requests on both paths; each checks what it gets."""

    def __init__(self, runtime: Watched, dice: random.Random) -> None:
        self._runtime = runtime
        self._dice = dice
        self.errors: list[tuple[str, float, RequestError]] = []
        self.finished = dict.fromkeys(SIDES, 0)

    async def one(self, side: str, start: int) -> None:
        ask = Ask(num=self._dice.randint(10, 40), start=start, size=self._dice.choice([100, 5000, 50_000]))
        number = 0
        try:
            async with await self._runtime.submit(side, ask) as reply:
                async for _, piece in reply:
                    assert piece.number == number
                    assert np.array_equal(piece.samples, np.full(ask.size, start + number, np.float32))
                    number += 1
        except RequestError as error:
            self.errors.append((side, time.perf_counter(), error))
            return
        assert number == ask.num
        self.finished[side] += 1


async def one_round(runtime: Watched, dice: random.Random, how: Literal["kill", "stop"] = "kill") -> Round:
    """Requests on both paths, a death, a restart; raises where anything but the path of the victim notices."""
    victim = dice.choice(HOSTS)
    side = victim.partition("_")[0]
    other = next(name for name in SIDES if name != side)
    load = Load(runtime, dice)
    runtime.down_at.clear()
    runtime.ready_at.clear()
    async with anyio.create_task_group() as tasks:
        for number in range(NUM_REQUESTS):
            tasks.start_soon(load.one, SIDES[number % 2], 1000 * number)
        delay_s = dice.random() * 0.1
        sign = signal.SIGKILL if how == "kill" else signal.SIGSTOP
        killed, dead = await anyio.to_thread.run_sync(_kill, pid_of(runtime, victim), sign, delay_s)
        while victim not in runtime.down_at:
            await runtime._wait_change()
        async with await runtime.submit(side, Ask(num=1)) as reply:
            await anext(reply)
            served = time.perf_counter()
    await up_again(runtime)
    for where, _, error in load.errors:
        assert where == side, f"a request on the other path failed: {error}"
        assert isinstance(error, StageDiedError) and error.stage == victim, error
    assert max((at for _, at, _ in load.errors), default=0.0) < runtime.ready_at[victim], "nobody waits for the restart"
    assert load.finished[other] == NUM_REQUESTS // 2
    assert len(load.errors) + sum(load.finished.values()) == NUM_REQUESTS
    await quiet(runtime)
    return Round(
        victim,
        dead - killed,
        runtime.down_at[victim] - killed,
        tuple(at - killed for _, at, _ in load.errors),
        runtime.ready_at[victim] - killed,
        served - killed,
        sum(load.finished.values()),
    )


def _kill(pid: int, sign: signal.Signals, delay_s: float) -> tuple[float, float]:
    """In a thread, so that it hits at any moment of the event loop; gives when, and when the process was dead."""
    time.sleep(delay_s)
    descriptor = os.pidfd_open(pid)
    at = time.perf_counter()
    signal.pidfd_send_signal(descriptor, sign)
    select.select([descriptor], [], [])
    dead = time.perf_counter()
    os.close(descriptor)
    return at, dead


class Spread(NamedTuple):
    """A distribution, in milliseconds."""

    num: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        found = np.array(seconds or [float("nan")]) * 1000
        p50, p99 = np.percentile(found, [50, 99])
        return cls(len(seconds), round(float(p50), 2), round(float(p99), 2), round(float(found.max()), 2))


def spreads(rounds: Sequence[Round]) -> dict[str, Spread]:
    """What all rounds together say."""
    return {
        "kill -> dead (kernel)": Spread.of([each.kernel_s for each in rounds]),
        "dead -> noticed": Spread.of([each.noticed_s - each.kernel_s for each in rounds]),
        "kill -> noticed": Spread.of([each.noticed_s for each in rounds]),
        "kill -> typed error": Spread.of([at for each in rounds for at in each.errors_s]),
        "noticed -> typed error": Spread.of([at - each.noticed_s for each in rounds for at in each.errors_s]),
        "kill -> stage ready": Spread.of([each.ready_s for each in rounds]),
        "kill -> next request's first item": Spread.of([each.served_s for each in rounds]),
    }
