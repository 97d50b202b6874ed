"""A fan-in of two stages that misbehave on demand: start -> left, right -> join, each in a process of its own."""

from __future__ import annotations

from omniflow.actor import Actor
from omniflow.graph import Graph, one_for_one

from .row import Job, Step


class Join(Actor):
    heavy = True

    async def run(self, left: Job, right: Job) -> Job:
        return Job(left.at, left.do, (*left.seen, *right.seen))


def build() -> Graph:
    graph = Graph("fork")
    again = one_for_one(backoff_s=0.01)
    start, left, right = (graph.stage(name, Step, name=name, restart=again) for name in ("start", "left", "right"))
    join = graph.stage("join", Join, restart=again)
    graph.result(start, left)
    graph.result(start, right)
    graph.fan_in(join, left=left, right=right)
    graph.input(job=start)
    graph.output(job=join)
    return graph


graph = build()
