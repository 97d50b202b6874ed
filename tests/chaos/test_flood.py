"""Five times as much as there is room for: each client is answered with a result, a 429 or a 503."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from omniflow.config import RuntimeConfig
from omniflow.errors import OverloadedError, RequestError, StageDiedError, UnavailableError
from omniflow.planner import plan
from omniflow.runtime import Runtime
from omniflow.server.app import build_app
from omniflow.server.serve import serve

from ..graphs import parrot, paths
from ..graphs.paths import SIDES, Ask
from ..running import CPU, pid_of, running, settled, up_again
from ..waiting import HANGS_S
from .footprint import quiet

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]

PLACES, QUEUE, DEADLINE_S = 8, 8, 2 * HANGS_S
CLIENTS = 5 * (PLACES + QUEUE)


class Answers:
    """How long each client waited, and what for."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def add(self, end: str, began: float) -> None:
        self.seconds.setdefault(end, []).append(time.perf_counter() - began)

    @property
    def ends(self) -> Counter[str]:
        return Counter({end: len(seconds) for end, seconds in self.seconds.items()})

    def __str__(self) -> str:
        found = {end: np.percentile(seconds, [50, 95, 100]) * 1000 for end, seconds in self.seconds.items()}
        return "\n".join(
            f"{end}: {self.ends[end]}, p50 {p50:.0f} ms, p95 {p95:.0f} ms, max {most:.0f} ms"
            for end, (p50, p95, most) in found.items()
        )


async def clients(runtime: Runtime, answers: Answers, dice: random.Random, attempts: int) -> None:
    """All at once; who is refused comes back a moment later. That it hears of it at once: tests/test_admission.py."""

    async def client(side: str) -> None:
        for _ in range(attempts):
            began = time.perf_counter()
            try:
                ask = Ask(num=20, size=5000)
                reply = await runtime.submit(side, ask, deadline_s=DEADLINE_S)
                assert len((await reply.collect())[f"{side}_pieces"]) == 20
                answers.add("result", began)
            except RequestError as error:
                answers.add(type(error).__name__, began)
                await anyio.sleep(dice.random() * 0.05)

    async with anyio.create_task_group() as tasks:
        for number in range(CLIENTS):
            tasks.start_soon(client, SIDES[number % 2])


async def test_a_flood(dice: random.Random) -> None:
    answers = Answers()
    async with running(paths.build(), CPU, max_in_flight=PLACES, max_queued=QUEUE) as runtime:
        await clients(runtime, answers, dice, 4)
        await settled(runtime)
        await quiet(runtime)
    print(answers)
    assert answers.ends.total() == CLIENTS * 4
    assert answers.ends.keys() == {"result", OverloadedError.__name__}


async def test_a_flood_while_hosts_die(dice: random.Random) -> None:
    """Who waits for a restart holds none of the places, and is one of those that may wait."""
    answers = Answers()
    config = {"max_in_flight": PLACES, "max_queued": QUEUE, "restart_wait_s": 0.5}
    async with running(paths.build(), CPU, **config) as runtime, anyio.create_task_group() as tasks:
        tasks.start_soon(clients, runtime, answers, dice, 4)
        for _ in range(5):
            await anyio.sleep(0.05)
            await up_again(runtime)
            os.kill(pid_of(runtime, dice.choice(paths.HOSTS)), signal.SIGKILL)
    print(answers)
    assert answers.ends.total() == CLIENTS * 4
    possible = {"result", *(kind.__name__ for kind in (OverloadedError, StageDiedError, UnavailableError))}
    assert answers.ends.keys() <= possible


async def test_a_flood_of_http_clients() -> None:
    answers = Answers()
    config = RuntimeConfig(max_in_flight=PLACES, max_queued=QUEUE, deadline_s=DEADLINE_S)
    body: Any = {"model": "parrot", "messages": [{"role": "user", "content": "one wait two"}]}
    async with (
        Runtime(plan(parrot.graph.spec(), CPU, config), config) as runtime,
        serve(build_app(runtime, model="parrot"), port=0) as address,
        httpx.AsyncClient(base_url=address.url, timeout=HANGS_S, limits=httpx.Limits(max_connections=CLIENTS)) as http,
    ):

        async def client() -> None:
            began = time.perf_counter()
            answer = await http.post("/v1/chat/completions", json=body)
            if answer.status_code == 429:
                assert float(answer.headers["retry-after"]) > 0
            else:
                assert answer.json()["choices"][0]["message"]["content"] == "one wait two "
            answers.add(str(answer.status_code), began)

        async with anyio.create_task_group() as tasks:
            for _ in range(CLIENTS):
                tasks.start_soon(client)
        await settled(runtime)
    print(answers)
    assert answers.ends.total() == CLIENTS
    assert answers.ends["200"] >= PLACES + QUEUE
    assert answers.ends.keys() == {"200", "429"}
