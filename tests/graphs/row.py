"""A row of stages that misbehave on demand: each request says where, and what."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec

from omniflow.actor import Actor, Emit, Stream
from omniflow.errors import ActorBrokenError, InvalidInputError
from omniflow.graph import Graph, Restart


class Job(msgspec.Struct, frozen=True):
    """`do` happens in the stage `at`; `seen` are the stages that it has passed."""

    at: str = ""
    do: str = ""
    seen: tuple[str, ...] = ()


def require(path: str) -> None:
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} is not there yet")


def touch(path: str) -> None:
    Path(path).touch()


def block() -> None:
    """What no `run` may do: hold up the event loop of its host."""
    time.sleep(60)


class Step(Actor):
    """Passes a job on. `in_setup` misbehaves before that: 'raise', 'kill', 'hang', or a path that must exist."""

    heavy = True

    def __init__(self, *, name: str, in_setup: str = "", in_close: str = "") -> None:
        self.name = name
        self.in_setup = in_setup
        self.in_close = in_close

    async def setup(self) -> None:
        match self.in_setup:
            case "":
                return
            case "raise":
                raise FileNotFoundError("no weights here")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                await anyio.sleep_forever()
            case path:
                require(path)

    async def close(self) -> None:
        if self.in_close == "raise":
            raise ZeroDivisionError("a bug in close")
        if self.in_close == "hang":
            await anyio.sleep_forever()
        if self.in_close:
            touch(self.in_close)

    async def run(self, job: Job) -> Job:
        if job.at == self.name:
            await self._misbehave(job.do)
            if job.do == "wrong type":
                return 5  # type: ignore[return-value]
        return Job(job.at, job.do, (*job.seen, self.name))

    async def _misbehave(self, do: str) -> None:
        match do:
            case "raise":
                raise ZeroDivisionError("a bug in run")
            case "refuse":
                raise InvalidInputError("no such thing", param="thing")
            case "refuse at length":
                raise InvalidInputError("x" * 1_000_000)
            case "out of memory":
                raise MemoryError
            case "broken":
                raise ActorBrokenError("the device is gone")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
            case "sleep":
                await anyio.sleep_forever()
            case "block":
                block()
            case "block a thread":
                await self.offload(time.sleep, 0.3)
            case "never return":
                await self.offload(time.sleep, 60)


class Count(Actor):
    """Emits numbers for ever; how many, `SENT` says in its own process."""

    async def run(self, job: Job, emit: Emit[int]) -> None:
        number = 0
        while emit.wanted:
            await emit.send(number)
            number += 1


class Sum(Actor):
    """Adds all numbers of a stream; 'first' returns after one of them."""

    heavy = True

    async def run(self, numbers: Stream[int]) -> int:
        total = 0
        async for number in numbers:
            if number == -1:
                return total
            if number == -2:
                os.kill(os.getpid(), signal.SIGKILL)
            total += number
        return total


def row(*names: str, restart: Restart | None = None, **settings: dict[str, Any]) -> Graph:
    """names[0] -> names[1] -> ...; `settings` by stage name are keywords of its stage."""
    graph = Graph("row")
    stages = [
        graph.stage(name, Step, **{"restart": restart, "name": name, **settings.get(name, {})})  # type: ignore[arg-type]
        for name in names
    ]
    for source, target in zip(stages, stages[1:], strict=False):
        graph.result(source, target)
    graph.input(job=stages[0], late=stages[-1])
    graph.output(job=stages[-1], early=stages[0])
    return graph


def numbers() -> Graph:
    """A stream for ever into the caller, and a stream from the caller into a sum."""
    graph = Graph("numbers")
    count = graph.stage("count", Count)
    total = graph.stage("total", Sum, restart=Restart("one_for_one", backoff_s=0.01))
    graph.input(job=count, numbers=total)
    graph.output(numbers=count, total=total)
    return graph
