"""A graph that counts its payloads: each block that enters or is made is known by a weak reference.

enter -> thread (blocking, in a thread) -> batch -> asyncbatch -> sink, which reads the stream enter -> make as well
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import anyio
import msgspec

from omniflow.actor import Actor, Context, Emit, Outputs, Stream, batched
from omniflow.errors import InvalidInputError
from omniflow.graph import Graph

SIZE = 200_000


class Block(msgspec.Struct, frozen=True, weakref=True):
    """`do` happens in the stage `at`."""

    data: bytes
    at: str = ""
    do: str = ""

    def __repr__(self) -> str:
        return f"Block(at={self.at!r}, do={self.do!r})"


class Ledger:
    """All blocks of this process that are alive."""

    def __init__(self) -> None:
        self._blocks: list[weakref.ref[Block]] = []

    def block(self, at: str = "", do: str = "") -> Block:
        """A new one."""
        block = Block(bytes(SIZE), at, do)
        self._blocks.append(weakref.ref(block))
        return block

    def alive(self) -> list[Block]:
        found = [block for ref in self._blocks if (block := ref()) is not None]
        return found

    def forget(self) -> None:
        """Begin anew."""
        self._blocks.clear()


LEDGER = Ledger()
"""One for the process: graphs are made of classes, so there is no way to hand one in."""


class Moody(Actor):
    def __init__(self, *, name: str) -> None:
        self.name = name

    def do(self, block: Block) -> str:
        return block.do if block.at == self.name else ""


def fail(do: str, held: Any) -> None:
    match do:
        case "raise":
            raise ZeroDivisionError("a bug in run")
        case "raise from":
            try:
                fail("raise", held)
            except ZeroDivisionError as error:
                raise ValueError("another bug") from error
        case "refuse":
            raise InvalidInputError("no such thing", param="thing")
        case "block":
            time.sleep(0.02)


class EnterOutputs(Outputs):
    block: Block
    extra: Block | None


class Enter(Moody):
    async def run(self, block: Block) -> EnterOutputs:
        held = LEDGER.block()
        fail(self.do(block), held)
        return EnterOutputs(LEDGER.block(block.at, block.do), None if self.do(block) == "skip" else held)


class Make(Moody):
    """Eight blocks."""

    async def run(self, block: Block, out: Emit[Block], ctx: Context) -> None:
        do = self.do(block)
        held = LEDGER.block()
        for number in range(8):
            await out.send(LEDGER.block())
            if number == 4:
                fail(do, held)
                await self.wait(do, held)
        if do == "wrong item":
            await out.send(5)  # type: ignore[arg-type]

    async def wait(self, do: str, held: Block) -> None:
        match do:
            case "sleep":
                await anyio.sleep_forever()
            case "time out":
                with anyio.move_on_after(0.001):
                    await anyio.sleep_forever()
            case "fail in a group":
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(anyio.sleep_forever)
                    fail("raise", held)


class Thread(Moody):
    def run(self, block: Block) -> Block:
        held = LEDGER.block()
        fail(self.do(block), held)
        if self.do(block) == "wrong type":
            return 5  # type: ignore[return-value]
        return LEDGER.block(block.at, block.do)


class Batch(Moody):
    @batched(max_size=4)
    def run(self, blocks: list[Block]) -> list[Block]:
        held = LEDGER.block()
        for block in blocks:
            fail(self.do(block), held)
            if self.do(block) == "too few":
                return []
        return [LEDGER.block(block.at, block.do) for block in blocks]


class AsyncBatch(Moody):
    @batched(max_size=4)
    async def run(self, blocks: list[Block]) -> list[Block]:
        held = LEDGER.block()
        await anyio.sleep(0)
        for block in blocks:
            fail(self.do(block), held)
            if self.do(block) == "sleep":
                await anyio.sleep(0.05)
        return [LEDGER.block(block.at, block.do) for block in blocks]


class Sink(Moody):
    async def run(self, blocks: Stream[Block], whole: Block, extra: Block | None, out: Emit[Block]) -> Block:
        do = self.do(whole)
        held = [LEDGER.block()]
        number = 0
        async for block in blocks:
            number += 1
            if number == 3:
                fail(do, held)
                if do == "sleep":
                    await anyio.sleep_forever()
                if do == "leave":
                    return whole
            held.append(block)
            await out.send(block)
        return whole


def build() -> Graph:
    graph = Graph("payloads")
    enter, make, thread, batch, again, sink = (
        graph.stage(actor.__name__.lower(), actor, name=actor.__name__.lower())
        for actor in (Enter, Make, Thread, Batch, AsyncBatch, Sink)
    )
    graph.result(enter["block"], make)
    graph.result(enter["block"], thread)
    graph.result(thread, batch)
    graph.result(batch, again)
    graph.result(again, sink["whole"])
    graph.result(enter["extra"], sink["extra"])
    graph.stream(make["out"], sink["blocks"], bound=16)
    graph.input(block=enter)
    graph.output(blocks=sink["out"], whole=sink["result"])
    return graph


graph = build()
