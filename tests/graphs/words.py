"""A graph with every kind of edge: split -> shout / count -> join (fan-in) -> words (stream) -> echo (stream)."""

from __future__ import annotations

import os
import signal
import time

import anyio
import msgspec
import numpy as np

from omniflow.actor import Actor, Context, Emit, Outputs, Stream, batched
from omniflow.errors import InvalidInputError
from omniflow.graph import Graph, one_for_one
from omniflow.media import AudioChunk, Options, TextDelta


class Line(msgspec.Struct, frozen=True):
    text: str


class Shouted(msgspec.Struct, frozen=True):
    text: str


class Counted(msgspec.Struct, frozen=True):
    num_words: int
    samples: np.ndarray


class Joined(msgspec.Struct, frozen=True):
    words: list[str]
    num_words: int


class SplitOutputs(Outputs):
    line: Line
    question: Line | None


class Split(Actor):
    """Passes the line on, and on the second port where it is a question."""

    async def run(self, line: Line) -> SplitOutputs:
        if not line.text:
            raise InvalidInputError("the line is empty; send at least one word", param="line")
        return SplitOutputs(line, line if line.text.endswith("?") else None)


class Shout(Actor):
    heavy = True

    def __init__(self, *, mark: str = "!") -> None:
        self.mark = mark

    def run(self, line: Line) -> Shouted:
        if line.text == "kill shout":
            os.kill(os.getpid(), signal.SIGKILL)
        if line.text == "bug":
            raise ZeroDivisionError("a bug in run")
        return Shouted(line.text.upper() + self.mark)


class Count(Actor):
    heavy = True

    @batched(max_size=4)
    def run(self, lines: list[Line]) -> list[Counted]:
        if any(line.text.startswith("bad") for line in lines):
            raise InvalidInputError("a bad line")
        return [Counted(len(line.text.split()), np.ones(50_000, np.float32)) for line in lines]


class Join(Actor):
    async def run(self, line: Line, shouted: Shouted, counted: Counted | None) -> Joined:
        return Joined(shouted.text.split(), counted.num_words if counted else -1)


class Words(Actor):
    """Emits each word; 'slow' lines pause before each, 'hang' never ends."""

    async def run(self, joined: Joined, emit: Emit[TextDelta], ctx: Context) -> int:
        for word in joined.words:
            if word == "SLOW":
                await anyio.sleep(0.2)
            if word == "HANG":
                await anyio.sleep_forever()
            if word == "BLOCK":
                await self.offload(time.sleep, 0.3)
            for _ in range(100 if word == "MANY" else 1):
                await emit.send(TextDelta(word + " "))
        return joined.num_words


class Echo(Actor):
    """Turns text into 0.1 s of a constant sound a word; 'killecho' kills the process in the middle."""

    heavy = True

    async def run(self, text: Stream[TextDelta], emit: Emit[AudioChunk]) -> None:
        async for delta in text:
            if delta.text.startswith("KILLECHO"):
                os.kill(os.getpid(), signal.SIGKILL)
            if delta.text.startswith("STOP"):
                return
            await emit.send(AudioChunk(np.full(2400, len(delta.text) / 100, np.float32), 24000))


def build() -> Graph:
    graph = Graph("words")
    split = graph.stage("split", Split)
    shout = graph.stage("shout", Shout, restart=one_for_one(backoff_s=0.01))
    count = graph.stage("count", Count, restart=one_for_one(backoff_s=0.01))
    join = graph.stage("join", Join, near="shout")
    words = graph.stage("words", Words, near="shout")
    echo = graph.stage("echo", Echo, restart=one_for_one(backoff_s=0.01))
    graph.result(split["line"], shout)
    graph.result(split["question"], count)
    graph.fan_in(join, line=split["line"], shouted=shout, counted=count)
    graph.result(join, words)
    graph.stream(words, echo, bound=8)
    graph.input(line=split, speech=echo)
    graph.output(text=words["emit"], audio=echo, num_words=words["result"])
    return graph


graph = build()

__all__ = ["Options", "build", "graph"]
