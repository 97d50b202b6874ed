"""A stage whose engine holds a request for as long as a file is not there."""

from __future__ import annotations

import time
from pathlib import Path

from omniflow.actor import Actor, Context
from omniflow.engine.base import EngineOutput, EngineRequest, Sampling
from omniflow.engine.loop import EngineLoop
from omniflow.engine.stats import EngineStats
from omniflow.graph import Graph, Restart

KV_TOKENS = 100


class TallyEngine:
    """Runs one request at a time, which ends once the file that `later` names is there. Each holds 10 KV tokens."""

    def __init__(self, later: Path) -> None:
        self._later = later
        self._requests: list[str] = []

    def start(self, request: EngineRequest) -> None:
        self._requests.append(request.id)

    def feed(self, request_id: str, rows: object, done: bool) -> None:
        raise NotImplementedError

    def step(self) -> list[EngineOutput]:
        time.sleep(0.001)
        if not self._later.exists():
            return []
        ended, self._requests = self._requests, []
        return [EngineOutput(request_id, (), "stop") for request_id in ended]

    def abort(self, request_id: str) -> None:
        self._requests.remove(request_id)

    def has_work(self) -> bool:
        return bool(self._requests)

    def is_reading(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        running = min(1, len(self._requests))
        return EngineStats(running, len(self._requests) - running, 10 * running, KV_TOKENS)

    def close(self) -> None:
        self._requests.clear()


class Tally(Actor):
    """Asks its engine."""

    heavy = True

    def __init__(self, *, later: str) -> None:
        self._loop = EngineLoop(lambda: TallyEngine(Path(later)))

    async def setup(self) -> None:
        await self._loop.setup()

    def engine_stats(self) -> EngineStats:
        return self._loop.stats

    async def close(self) -> None:
        await self._loop.close()

    async def run(self, number: int, ctx: Context) -> int:
        async with self._loop.generate(EngineRequest(id=ctx.run_id, ids=[number], sampling=Sampling())) as outputs:
            await anext(outputs)
        return number


class Next(Actor):
    """Has no engine."""

    async def run(self, number: int) -> int:
        return number + 1


def tally(later: Path) -> Graph:
    graph = Graph("tally")
    asks = graph.stage("asks", Tally, restart=Restart("one_for_one", backoff_s=0.01), later=str(later))
    after = graph.stage("after", Next)
    graph.result(asks, after)
    graph.input(number=asks)
    graph.output(number=after)
    return graph
