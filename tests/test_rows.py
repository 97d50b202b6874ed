"""Stages that only wait for each other's value run in a row, in one task; to everybody else they are stages as any."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import anyio
import pytest

from omniflow.actor import Actor, Context, Emit, Outputs, Stream
from omniflow.errors import DeadlineError, ProtocolError, StageError
from omniflow.graph import Graph
from omniflow.media import TextDelta
from omniflow.planner import Cluster

from .graphs.row import Sum
from .running import CPU, INLINE, running

pytestmark = pytest.mark.anyio
CLUSTERS = pytest.mark.parametrize("cluster", [INLINE, CPU], ids=["inline", "processes"])


class Label(Actor):
    """Gives the total as text, after a while."""

    async def run(self, total: int) -> TextDelta:
        await anyio.sleep(0.05)
        return TextDelta(str(total))


class Spell(Actor):
    async def run(self, text: TextDelta, emit: Emit[TextDelta], ctx: Context) -> int:
        for letter in text.text:
            await emit.send(TextDelta(letter))
        return len(text.text)


def labelled() -> Graph:
    """numbers (stream) -> total -> label -> spell: a row of three behind a stream."""
    graph = Graph("labelled")
    total = graph.stage("total", Sum)
    label = graph.stage("label", Label, near="total")
    spell = graph.stage("spell", Spell, near="total")
    graph.result(total, label)
    graph.result(label, spell)
    graph.input(numbers=total)
    graph.output(letters=spell["emit"], length=spell["result"])
    return graph


async def ask(graph: Graph, cluster: Cluster, entry: str, value: Any, **how: Any) -> Any:
    async with running(graph, cluster) as runtime:
        return await (await runtime.submit(entry, value, **how)).collect()


@CLUSTERS
async def test_a_row_behind_a_stream_and_before_one(cluster: Cluster) -> None:
    found = await ask(labelled(), cluster, "numbers", [100, 20, 3])
    assert found == {"letters": [TextDelta("1"), TextDelta("2"), TextDelta("3")], "length": 3}


@CLUSTERS
async def test_what_still_comes_for_a_stage_that_has_gone_on_is_ignored(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """`total` returns at -1; more items and the end arrive while `label` runs in the same task."""
    with caplog.at_level(logging.ERROR):
        found = await ask(labelled(), cluster, "numbers", [7, -1, *range(200)])
    assert found["length"] == 1
    assert caplog.records == []


class Here(Actor):
    """Notes the task that it runs in."""

    async def run(self, tasks: list[int]) -> list[int]:
        return [*tasks, id(asyncio.current_task())]


class Fork(Outputs):
    left: list[int]
    right: list[int]


class Split(Actor):
    async def run(self, tasks: list[int]) -> Fork:
        mine = [*tasks, id(asyncio.current_task())]
        return Fork(mine, mine)


class Join(Actor):
    async def run(self, left: list[int], right: list[int]) -> list[int]:
        return [*left, *right, id(asyncio.current_task())]


async def test_a_row_is_one_task_and_a_fork_is_not() -> None:
    graph = Graph("fork")
    first, second = graph.stage("first", Here), graph.stage("second", Here)
    split, join = graph.stage("split", Split), graph.stage("join", Join)
    left, right = graph.stage("left", Here), graph.stage("right", Here)
    graph.result(first, second)
    graph.result(second, split)
    graph.result(split["left"], left)
    graph.result(split["right"], right)
    graph.fan_in(join, left=left, right=right)
    graph.input(tasks=first)
    graph.output(tasks=join)
    found = (await ask(graph, INLINE, "tasks", []))["tasks"]
    *row, at_left = found[:4]
    assert len(set(row)) == 1
    assert found[4:7] == row
    assert len({row[0], at_left, found[7]}) == 3


class Wrong(Actor):
    def __init__(self, *, do: str = "") -> None:
        self.do = do

    async def run(self, total: int) -> TextDelta:
        if self.do == "raise":
            raise ZeroDivisionError("in the middle")
        if self.do == "sleep":
            await anyio.sleep_forever()
        return 5  # type: ignore[return-value]


def with_wrong(do: str) -> Graph:
    graph = Graph("wrong")
    total = graph.stage("total", Sum)
    wrong = graph.stage("wrong", Wrong, near="total", do=do)
    spell = graph.stage("spell", Spell, near="total")
    graph.result(total, wrong)
    graph.result(wrong, spell)
    graph.input(numbers=total)
    graph.output(letters=spell["emit"])
    return graph


@CLUSTERS
@pytest.mark.parametrize(
    ("do", "kind", "message"),
    [
        ("raise", StageError, "ZeroDivisionError: in the middle"),
        ("type", ProtocolError, "port 'result' gives TextDelta, but got int"),
    ],
)
async def test_an_error_names_the_stage_of_the_row_that_made_it(
    cluster: Cluster, do: str, kind: type[StageError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        await ask(with_wrong(do), cluster, "numbers", [1])
    assert (caught.value.stage, caught.value.message) == ("wrong", message)


@pytest.mark.usefixtures("heard_out")
@CLUSTERS
async def test_a_deadline_names_the_stage_of_the_row_that_runs(cluster: Cluster) -> None:
    with pytest.raises(DeadlineError, match="while stage 'wrong' was running"):
        await ask(with_wrong("sleep"), cluster, "numbers", [1], deadline_s=0.4)


class Perhaps(Outputs):
    text: TextDelta | None


class Maybe(Actor):
    async def run(self, total: int) -> Perhaps:
        return Perhaps(TextDelta("x") if total else None)


class Echo(Actor):
    async def run(self, text: TextDelta) -> TextDelta:
        return text


class Came(Actor):
    async def run(self, text: TextDelta | None) -> bool:
        return text is not None


@CLUSTERS
@pytest.mark.parametrize(("number", "expected"), [(1, True), (0, False)])
async def test_a_skip_passes_a_row_by(cluster: Cluster, number: int, expected: bool) -> None:
    """maybe -> (perhaps nothing) -> one -> two -> came: where nothing comes, neither runs, and the reader is told."""
    graph = Graph("skipped")
    maybe = graph.stage("maybe", Maybe)
    one, two = graph.stage("one", Echo, isolate=True), graph.stage("two", Echo, near="one")
    graph.result(maybe["text"], one)
    graph.result(one, two)
    came = graph.stage("came", Came)
    graph.result(two, came)
    graph.input(number=maybe)
    graph.output(came=came)
    assert (await ask(graph, cluster, "number", number))["came"] == expected


class Many(Actor):
    """Sends numbers for as long as they are wanted."""

    async def run(self, job: int, emit: Emit[int]) -> None:
        while emit.wanted:
            await emit.send(job)
        await emit.send(job)


class First(Actor):
    async def run(self, numbers: Stream[int]) -> int:
        return await anext(numbers)


@CLUSTERS
async def test_a_writer_goes_on_after_its_reader_has_gone_on(cluster: Cluster) -> None:
    graph = Graph("early")
    many, first = graph.stage("many", Many), graph.stage("first", First)
    label = graph.stage("label", Label, near="first")
    graph.stream(many, first)
    graph.result(first, label)
    graph.input(job=many)
    graph.output(text=label)
    assert (await ask(graph, cluster, "job", 3))["text"] == TextDelta("3")
