"""Two paths that share no process: left_talk -> left_pass, right_talk -> right_pass; each streams numbered pieces.

Beside each of the four stages stands one that looks into their host: what it still holds of other requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from pathlib import Path

import anyio
import msgspec
import numpy as np

from omniflow.actor import Actor, Context, Emit, Stream
from omniflow.graph import Graph, Restart
from omniflow.host import Host
from omniflow.transport.arrow_shm import ArrowShmLink

SIDES = ("left", "right")
HOSTS = ("left_talk", "left_pass", "right_talk", "right_pass")
OF_REQUESTS = ("_run_stage", "_close_when_sent")
"""Tasks of a host that belong to a request."""


class Ask(msgspec.Struct, frozen=True):
    """`num` pieces of `size` numbers, each `start` larger than its place; `pause_s` after each."""

    num: int = 30
    size: int = 5000
    start: int = 0
    pause_s: float = 0.001


class Piece(msgspec.Struct, frozen=True):
    number: int
    samples: np.ndarray


class Calm(Actor):
    """Its process has no garbage collector: whatever is in a reference cycle stays, and is seen."""

    heavy = True

    async def setup(self) -> None:
        gc.disable()


class Talk(Calm):
    async def run(self, ask: Ask, out: Emit[Piece]) -> None:
        for number in range(ask.num):
            await out.send(Piece(number, np.full(ask.size, ask.start + number, np.float32)))
            await anyio.sleep(ask.pause_s)


class Pass(Calm):
    async def run(self, pieces: Stream[Piece], out: Emit[Piece]) -> None:
        async for piece in pieces:
            await out.send(piece)


class Held(msgspec.Struct, frozen=True):
    """What a host holds of requests (the one that asks is not counted), and of the machine."""

    visits: int
    early: int
    tasks: int
    blocks: int
    lent: int
    backlog: int
    links: tuple[str, ...]
    descriptors: int
    threads: int
    rss_bytes: int

    @property
    def of_requests(self) -> tuple[int, ...]:
        return self.visits, self.early, self.blocks, self.lent, self.backlog


class Look(Actor):
    async def run(self, number: int, ctx: Context) -> Held:
        return held()


def held() -> Held:
    """Of this process, which is a host."""
    (host,) = [found for found in gc.get_objects() if isinstance(found, Host)]
    links = [link for link in host.links.values() if isinstance(link, ArrowShmLink)]
    statistics = [link.statistics() for link in links]
    return Held(
        visits=host.num_open - 1,
        early=len(host._early),
        tasks=sum(each.get_coro().__name__ in OF_REQUESTS for each in asyncio.all_tasks()) - 1,  # type: ignore[union-attr]
        blocks=links[0]._memory.pool.blocks_in_use,
        lent=sum(each.blocks_held for each in statistics),
        backlog=sum(each.backlog for each in statistics),
        links=tuple(sorted(host.links)),
        descriptors=num_descriptors(),
        threads=len(os.listdir("/proc/self/task")),
        rss_bytes=rss_bytes(os.getpid()),
    )


def num_descriptors() -> int:
    """Open ones of this process, less those of shared memory: slabs are pooled."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found += not os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:")
    return found


def rss_bytes(pid: int) -> int:
    """Memory of a process, less what it shares: blocks of its neighbours come and go."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def build(restart: Restart | None = None, bound: int = 4) -> Graph:
    graph = Graph("paths")
    restart = restart or Restart("one_for_one", max_restarts=1_000_000, within_s=0.001)
    for side in SIDES:
        talk = graph.stage(f"{side}_talk", Talk, restart=restart)
        relay = graph.stage(f"{side}_pass", Pass, restart=restart)
        graph.stream(talk, relay, bound=bound)
        graph.input(**{side: talk})
        graph.output(**{f"{side}_pieces": relay})
    for name in HOSTS:
        look = graph.stage(f"look_{name}", Look, near=name)
        graph.input(**{f"look_{name}": look})
        graph.output(**{f"held_{name}": look})
    return graph


graph = build()
