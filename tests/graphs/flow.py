"""A source and a reader of one stream edge, each in a process of its own; the policy of the edge is a parameter."""

from __future__ import annotations

import time
from typing import Literal

import anyio
import msgspec

from omniflow.actor import Actor, Emit, Stream
from omniflow.graph import Graph, Policy
from omniflow.mailbox import Mailbox


class Order(msgspec.Struct, frozen=True):
    """`num` items; the reader reads them at once, or only after the source has ended, or never."""

    num: int
    reads: Literal["at once", "late", "never"] = "at once"


class Drop(msgspec.Struct, frozen=True):
    """Item `number` left the source at `at_s` of the machine's monotonic clock."""

    number: int
    at_s: float
    order: Order


class Pour(Actor):
    """Gives what was ordered as fast as it may, and how many that were."""

    heavy = True

    async def run(self, order: Order, emit: Emit[Drop]) -> int:
        for number in range(order.num):
            await emit.send(Drop(number, time.monotonic(), order))
        return order.num


class Sip(Actor):
    """Passes on what it reads, and counts what it has missed."""

    heavy = True

    async def run(self, drops: Stream[Drop], emit: Emit[Drop]) -> int:
        drop = await anext(drops)
        assert isinstance(drops, Mailbox)
        while drop.order.reads == "late" and not drops.statistics().ended:
            await anyio.sleep(0.001)
        if drop.order.reads == "never":
            await anyio.sleep_forever()
        await emit.send(drop)
        async for drop in drops:
            await emit.send(drop)
        return drops.dropped


def build(policy: Policy, bound: int) -> Graph:
    graph = Graph("flow")
    pour, sip = graph.stage("pour", Pour), graph.stage("sip", Sip)
    graph.stream(pour, sip, bound=bound, policy=policy)
    graph.input(order=pour)
    graph.output(drops=sip["emit"], missed=sip["result"], num=pour["result"])
    return graph


graph = build("drop_oldest", 4)
