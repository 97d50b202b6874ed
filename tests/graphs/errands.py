"""Two stages in processes of their own, of which the second waits at a gate: there it can be killed, and run again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import msgspec

from omniflow.actor import Actor, Emit, Stream
from omniflow.graph import Graph, Restart, one_for_one


class Errand(msgspec.Struct, frozen=True):
    """A stage notes in the file `diary` that it begins; `carry` goes on once there is a file `gate`."""

    diary: str
    gate: str
    says: int = 0
    """What `carry` emits before it comes to the gate; once more after it."""
    kills: bool = False
    load: bytes = b""


def note(diary: str, word: str) -> None:
    with Path(diary).open("a") as file:
        file.write(word + "\n")


def is_open(gate: str) -> bool:
    return Path(gate).exists()


class Fetch(Actor):
    heavy = True

    async def run(self, errand: Errand) -> Errand:
        note(errand.diary, "fetch")
        return errand


class Carry(Actor):
    heavy = True

    async def run(self, errand: Errand, says: Emit[int]) -> int:
        note(errand.diary, "carry")
        if errand.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        for number in range(errand.says):
            await says.send(number)
        while not is_open(errand.gate):
            await anyio.sleep(0.002)
        for number in range(errand.says):
            await says.send(number)
        return len(errand.load)


class Weigh(Actor):
    """Adds up a stream; the item -1 has it wait for a file `gate` in its folder."""

    heavy = True

    def __init__(self, *, folder: str = ".") -> None:
        self.folder = folder

    async def run(self, weights: Stream[int]) -> int:
        total = 0
        async for weight in weights:
            if weight == -1:
                note(f"{self.folder}/diary", "weigh")
                while not is_open(f"{self.folder}/gate"):
                    await anyio.sleep(0.002)
            else:
                total += weight
        return total


def build(restart: Restart | None = None, folder: str = ".") -> Graph:
    restart = restart or one_for_one(backoff_s=0.01, in_flight="replay")
    graph = Graph("errands")
    fetch = graph.stage("fetch", Fetch, restart=one_for_one(backoff_s=0.01))
    carry = graph.stage("carry", Carry, restart=restart)
    weigh = graph.stage("weigh", Weigh, restart=restart, folder=folder)
    graph.result(fetch, carry)
    graph.input(errand=fetch, weights=weigh)
    graph.output(says=carry["says"], load=carry["result"], fetched=fetch, total=weigh)
    return graph


graph = build()
