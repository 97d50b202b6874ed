"""A graph with a stage whose output depends on time: letters -> cut (every `every_s`) -> shout."""

from __future__ import annotations

import anyio

from omniflow.actor import Actor, Emit, Stream
from omniflow.graph import Graph
from omniflow.media import Segment, TextDelta


class Letters(Actor):
    """Sends its text letter by letter, with a pause after each."""

    def __init__(self, *, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s

    async def run(self, text: TextDelta, emit: Emit[TextDelta]) -> None:
        for letter in text.text:
            await emit.send(TextDelta(letter))
            await anyio.sleep(self.pause_s)


class Cut(Actor):
    """Cuts the text into what has come within `every_s`."""

    timed = True

    def __init__(self, *, every_s: float = 0.02) -> None:
        self.every_s = every_s

    async def run(self, text: Stream[TextDelta], emit: Emit[Segment]) -> None:
        number = 0
        due = anyio.current_time() + self.every_s
        buffer = ""
        async for delta in text:
            buffer += delta.text
            if anyio.current_time() >= due:
                await emit.send(Segment(buffer, number))
                buffer, number, due = "", number + 1, anyio.current_time() + self.every_s
        await emit.send(Segment(buffer, number))


class Shout(Actor):
    """A heavy stage, so that the graph has two processes."""

    heavy = True

    def __init__(self, *, mark: str = "!") -> None:
        self.mark = mark

    async def run(self, segments: Stream[Segment], emit: Emit[TextDelta]) -> None:
        async for segment in segments:
            await emit.send(TextDelta(segment.text.upper() + self.mark))


def build() -> Graph:
    graph = Graph("timed")
    letters = graph.stage("letters", Letters)
    cut = graph.stage("cut", Cut)
    shout = graph.stage("shout", Shout)
    graph.stream(letters, cut, bound=2)
    graph.stream(cut, shout, bound=2)
    graph.input(text=letters)
    graph.output(text=shout)
    return graph


graph = build()
