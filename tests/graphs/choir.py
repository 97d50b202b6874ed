"""A stage of several processes: the first sings what it is asked for, the others hear it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import anyio
import msgspec

from omniflow.actor import Actor, Emit
from omniflow.errors import StartError
from omniflow.graph import Graph
from omniflow.topology import one_for_one

RANKS = 3


class Song(msgspec.Struct, frozen=True):
    """`tells` the others before it is sung, and then goes on for `holds_s`."""

    tells: str = ""
    holds_s: float = 0.0


class Singer(Actor):
    """`fails_in` is the rank that does not get through its setup."""

    owns_process = True

    def __init__(self, *, fails_in: int = -1) -> None:
        self.fails_in = fails_in

    @classmethod
    def refuses_tp(cls, settings: Mapping[str, Any]) -> str | None:
        return None

    def follow(self) -> None:
        self._begin()
        while True:
            try:
                heard = self.ranks.hear().decode()
            except EOFError:
                return
            if heard == f"{self.ranks.rank} dies":
                os._exit(7)
            if heard == f"{self.ranks.rank} fails":
                raise StartError("it has lost its voice")
            if heard in ("end", f"{self.ranks.rank} leaves"):
                return

    async def setup(self) -> None:
        self._begin()
        if self.fails_in > 0:
            await anyio.sleep_forever()  # as one that waits for the others

    def _begin(self) -> None:
        assert self.ranks.size == RANKS
        if self.fails_in == self.ranks.rank:
            raise StartError("it has no voice")

    async def close(self) -> None:
        self.ranks.tell(b"end")

    async def run(self, song: Song, emit: Emit[str]) -> None:
        self.ranks.tell(song.tells.encode())
        await emit.send("la")
        await anyio.sleep(song.holds_s)


def build(**settings: Any) -> Graph:
    graph = Graph("choir")
    restart = one_for_one(max_restarts=20, backoff_s=0.001)
    sing = graph.stage("sing", Singer, device="gpu", tp=RANKS, restart=restart, **settings)
    graph.input(ask=sing)
    graph.output(answer=sing)
    return graph
