"""A graph whose edges carry many tokens: count (tokens 0, 1, 2, ...) -> pass on, in a process of its own."""

from __future__ import annotations

from omniflow.actor import Actor, Emit, Stream
from omniflow.graph import Graph
from omniflow.media import Tokens


class Count(Actor):
    async def run(self, number: int, emit: Emit[Tokens]) -> None:
        for start in range(0, number, 1000):
            await emit.send(Tokens(tuple(range(start, min(number, start + 1000)))))


class PassOn(Actor):
    heavy = True

    async def run(self, tokens: Stream[Tokens], emit: Emit[Tokens]) -> None:
        async for each in tokens:
            await emit.send(each)


def build() -> Graph:
    graph = Graph("tokens")
    count, pass_on = graph.stage("count", Count), graph.stage("pass_on", PassOn)
    graph.stream(count, pass_on)
    graph.input(number=count)
    graph.output(tokens=pass_on)
    return graph
