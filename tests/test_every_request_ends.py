"""Whatever graphs and stages do: each request ends exactly once, in time, and leaves nothing behind.

Graphs and misbehaviour are data: hypothesis draws a graph of stages with every kind of port, and for each request
what each stage does with it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omniflow.actor import Actor, Context, Emit, Stream, batched
from omniflow.config import RuntimeConfig
from omniflow.errors import DeadlineError, GraphError, ProtocolError, RequestError, StageError
from omniflow.graph import Graph, GraphSpec
from omniflow.media import Options
from omniflow.planner import Cluster, Plan, plan
from omniflow.runtime import Runtime
from omniflow.validation import validate

from .running import CPU, INLINE, settled
from .waiting import HANGS_S

SHORT_S, LONG_S = 0.05, 200.0
HARMLESS = ["", "skip", "end early", "emit many", "emit nothing", "yield"]
HARMFUL = ["raise", "sleep", "wrong type", "wrong item"]
DEADLY = ["kill", "exit", "block"]
"""For stages that run in a process of their own: tests/chaos."""


class Value(msgspec.Struct, frozen=True):
    n: int = 0


class Scripted(Actor):
    """Base of all stages here: does what the request's script says for its name."""

    def __init__(self, *, name: str) -> None:
        self.name = name

    async def play(self, ctx: Context, streams: list[Stream[Value]], emit: Emit[Value] | None, skips: bool) -> Any:
        do = json.loads(ctx.options.voice or "{}").get(self.name, "")
        match do:
            case "raise":
                raise ZeroDivisionError("a bug")
            case "sleep":
                await anyio.sleep_forever()
            case "yield":
                for _ in range(7):
                    await anyio.sleep(0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
            case "block":
                block_the_event_loop()
        if do != "end early":
            for stream in streams:
                async for _value in stream:
                    pass
        if emit is not None:
            for number in range({"emit nothing": 0, "emit many": 40}.get(do, 2)):
                await emit.send("no value" if do == "wrong item" else Value(number))  # type: ignore[arg-type]
        if do == "wrong type":
            return "no value"
        return None if do == "skip" and skips else Value(1)


def block_the_event_loop() -> None:
    time.sleep(60)


class Result(Scripted):
    async def run(self, a: Value, ctx: Context) -> Value:
        return await self.play(ctx, [], None, False)


class Skipping(Scripted):
    async def run(self, a: Value, ctx: Context) -> Value | None:
        return await self.play(ctx, [], None, True)


class Loose(Scripted):
    async def run(self, a: Value | None, b: Value | None, ctx: Context) -> Value:
        return await self.play(ctx, [], None, False)


class Join(Scripted):
    async def run(self, a: Value, b: Value, ctx: Context) -> Value | None:
        return await self.play(ctx, [], None, True)


class Streams(Scripted):
    async def run(self, a: Value, out: Emit[Value], ctx: Context) -> Value:
        return await self.play(ctx, [], out, False)


class Through(Scripted):
    async def run(self, s: Stream[Value], out: Emit[Value], ctx: Context) -> None:
        await self.play(ctx, [s], out, False)


class Folds(Scripted):
    async def run(self, s: Stream[Value], more: Value | None, ctx: Context) -> Value | None:
        return await self.play(ctx, [s], None, True)


class Mixes(Scripted):
    async def run(self, s: Stream[Value] | None, a: Value, out: Emit[Value], ctx: Context) -> Value:
        return await self.play(ctx, [] if s is None else [s], out, False)


class Batches(Scripted):
    @batched(max_size=3)
    def run(self, a: list[Value]) -> list[Value]:
        return a


KINDS: list[type[Scripted]] = [Result, Skipping, Loose, Join, Streams, Through, Folds, Mixes, Batches]


@st.composite
def graphs(draw: st.DrawFn) -> GraphSpec:
    """2-7 stages; each port reads an earlier stage of its kind, or stays open where it may; sinks are outputs."""
    graph = Graph("g")
    values: list[Any] = []
    streams: list[Any] = []
    for index in range(draw(st.integers(2, 7))):
        kinds = [kind for kind in KINDS if index and (streams or not _needs_stream(kind))] or [Result, Streams]
        kind = draw(st.sampled_from(kinds))
        stage = graph.stage(f"s{index}", kind, name=f"s{index}")
        ports = stage.ports
        for port in ports.inputs:
            sources = values if port.kind == "value" else streams
            if index == 0:
                graph.input(ask=stage[port.name])
            elif sources and (not port.optional or draw(st.booleans())):
                connect = graph.result if port.kind == "value" else graph.stream
                connect(draw(st.sampled_from(sources)), stage[port.name])
        for port in ports.outputs:
            (values if port.kind == "value" else streams).append(stage[port.name])
    read = {(edge.source, edge.source_port) for edge in graph._edges}
    for opening in [*values, *streams]:
        if (opening.stage.name, opening.port) not in read or draw(st.integers(0, 3)) == 0:
            graph.output(**{f"{opening.stage.name}_{opening.port}": opening})
    return GraphSpec(
        "g", tuple(graph._stages.values()), tuple(graph._edges), tuple(graph._inputs), tuple(graph._outputs)
    )


def _needs_stream(kind: type[Scripted]) -> bool:
    return kind in (Through, Folds)


scripts = st.dictionaries(
    st.sampled_from([f"s{index}" for index in range(7)]), st.sampled_from(HARMLESS + HARMFUL), max_size=3
)


class Request(msgspec.Struct, frozen=True):
    """What one request asks for, how its stages behave, and what its caller does after some items."""

    script: dict[str, str]
    outputs: frozenset[int]
    leaves_after: int | None


requests = st.builds(
    Request,
    scripts,
    st.frozensets(st.integers(0, 5), max_size=3),
    st.one_of(st.none(), st.none(), st.integers(0, 5)),
)


def accepted(spec: GraphSpec, cluster: Cluster = INLINE) -> Plan | None:
    try:
        validate(spec)
    except GraphError:
        return None
    return plan(spec, cluster, RuntimeConfig(stream_bound=3))


async def end_of(runtime: Runtime, request: Request) -> str:
    """How a request ended: 'all', 'left', or the name of its error. A stage that sleeps may hold it to its deadline."""
    names = runtime.plan.outputs_of("ask")
    outputs = {names[number % len(names)] for number in request.outputs} or None
    options = Options(voice=json.dumps(request.script))
    deadline_s = SHORT_S if "sleep" in request.script.values() else LONG_S
    with anyio.fail_after(HANGS_S):
        reply = await runtime.submit("ask", Value(), outputs=outputs, options=options, deadline_s=deadline_s)
        number = 0
        async with reply:
            try:
                async for _output in reply:
                    number += 1
                    if number == request.leaves_after:
                        return "left"
            except RequestError as error:
                with pytest.raises(type(error)):
                    await anext(reply)  # it has ended, and stays so
                return type(error).__name__
        with pytest.raises(StopAsyncIteration):
            await anext(reply)
    return "all"


async def play(found: Plan, asked: list[Request]) -> list[str]:
    ends: list[str] = [""] * len(asked)
    async with Runtime(found, RuntimeConfig(stream_bound=3, max_in_flight=3, shm_bytes=2**20)) as runtime:

        async def one(index: int) -> None:
            ends[index] = await end_of(runtime, asked[index])

        async with anyio.create_task_group() as tasks:
            for index in range(len(asked)):
                tasks.start_soon(one, index)
        await settled(runtime)
    return ends


def check(asked: list[Request], ends: list[str]) -> None:
    """Each end is one that the request's script allows; without harm in it, all outputs came."""
    for request, end in zip(asked, ends, strict=True):
        harm = {do for do in request.script.values() if do in HARMFUL}
        possible = {"all", "left"}
        possible |= {StageError.__name__} if "raise" in harm else set()
        possible |= {ProtocolError.__name__} if harm & {"wrong type", "wrong item"} else set()
        possible |= {DeadlineError.__name__} if "sleep" in harm else set()
        assert end in possible, request


@settings(max_examples=150)
@given(graphs(), st.lists(requests, min_size=1, max_size=5))
def test_each_request_ends_once_and_leaves_nothing(spec: GraphSpec, asked: list[Request]) -> None:
    found = accepted(spec)
    if found is not None:
        check(asked, anyio.run(play, found, asked))


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(), st.lists(requests, min_size=3, max_size=8), st.lists(st.booleans(), min_size=7, max_size=7))
def test_the_same_in_many_processes(spec: GraphSpec, asked: list[Request], isolated: list[bool]) -> None:
    stages = zip(spec.stages, isolated, strict=False)
    apart = tuple(msgspec.structs.replace(stage, isolate=isolate) for stage, isolate in stages)
    found = accepted(msgspec.structs.replace(spec, stages=apart), CPU)
    if found is not None:
        check(asked, anyio.run(play, found, asked))
