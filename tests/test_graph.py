"""Graphs as values: every refusal with its words, skips, profiles, and the pruning of requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Union

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniflow.actor import Actor, Emit, Outputs, Stream
from omniflow.errors import GraphError
from omniflow.graph import Budget, Edge, Graph, GraphSpec, absent, bind
from omniflow.topology import (
    CHECKPOINT,
    CLIENT,
    Checkpoint,
    fits,
    nearest,
    parse_bytes,
    reachable_outputs,
    route,
    type_name,
)
from omniflow.validation import validate


class A(msgspec.Struct, frozen=True):
    n: int = 0


class SubA(A, frozen=True):
    pass


class B(msgspec.Struct, frozen=True):
    n: int = 0


class AtoA(Actor):
    async def run(self, a: A) -> A: ...


class AtoMaybeA(Actor):
    async def run(self, a: A) -> A | None: ...


class MaybeAtoA(Actor):
    async def run(self, a: A | None) -> A: ...


class AtoB(Actor):
    async def run(self, a: A) -> B: ...


class AtoNothing(Actor):
    async def run(self, a: A) -> None: ...


class NothingToA(Actor):
    async def run(self) -> A: ...


class AtoStream(Actor):
    async def run(self, a: A, emit: Emit[A]) -> None: ...


class StreamToStream(Actor):
    async def run(self, a: Stream[A], emit: Emit[A]) -> None: ...


class StreamToA(Actor):
    async def run(self, a: Stream[A]) -> A: ...


class StreamOfB(Actor):
    async def run(self, b: Stream[B]) -> A: ...


class Join(Actor):
    async def run(self, left: A, right: A) -> A: ...


class LooseJoin(Actor):
    async def run(self, left: A, right: A | None) -> A: ...


class JoinAB(Actor):
    async def run(self, a: A, b: B) -> A: ...


class AtoBoth(Actor):
    async def run(self, a: A, emit: Emit[A]) -> A: ...


class StreamAndValue(Actor):
    async def run(self, a: Stream[A], whole: A) -> A: ...


class NeedsMore(Actor):
    async def run(self, a: A, extra: B) -> A: ...


class TwoStreams(Actor):
    async def run(self, a: Stream[A], back: Stream[A] | None, emit: Emit[A], again: Emit[A]) -> None: ...


class Both(Outputs):
    first: A
    second: A | None
    third: B


class Splits(Actor):
    async def run(self, a: A) -> Both: ...


def chain(*actors: type[Actor]) -> tuple[Graph, list[Any]]:
    """A graph of stages s0 -> s1 -> ... by result edges, not closed by input and output."""
    graph = Graph("g")
    stages = [graph.stage(f"s{index}", actor) for index, actor in enumerate(actors)]
    for source, target in zip(stages, stages[1:], strict=False):
        graph.result(source, target)
    return graph, stages


def closed(*actors: type[Actor]) -> tuple[Graph, list[Any]]:
    graph, stages = chain(*actors)
    graph.input(ask=stages[0])
    graph.output(answer=stages[-1])
    return graph, stages


# -- refusals while building -------------------------------------------------------------------------------------------


def two_stages_of_one_name(graph: Graph) -> None:
    graph.stage("x", AtoA)
    graph.stage("x", AtoB)


def from_another_graph(graph: Graph) -> None:
    other = Graph("other").stage("s1", AtoA)
    graph.result(graph.stage("s0", AtoA), other)


def namesake_from_another_graph(graph: Graph) -> None:
    graph.stage("s1", AtoA)
    from_another_graph(graph)


def into(graph: Graph, source: type[Actor], target: type[Actor], kind: str = "result", **ports: str) -> None:
    first: Any = graph.stage("s0", source)
    second: Any = graph.stage("s1", target)
    first = first[ports["out"]] if "out" in ports else first
    second = second[ports["to"]] if "to" in ports else second
    getattr(graph, kind)(first, second)


BUILD: dict[str, tuple[Callable[[Graph], Any], str]] = {
    "duplicate name": (two_stages_of_one_name, "stage 'x' is declared twice; names are unique"),
    "reserved name": (
        lambda g: g.stage("client", AtoA),
        "'client' cannot name a stage; use an identifier other than client, runtime, server, front, main",
    ),
    "host name": (
        lambda g: g.stage("front", AtoA),
        "'front' cannot name a stage; use an identifier other than client, runtime, server, front, main",
    ),
    "no identifier": (
        lambda g: g.stage("my stage", AtoA),
        "'my stage' cannot name a stage; use an identifier other than client, runtime, server, front, main",
    ),
    "other graph": (from_another_graph, "stage 's1' is not of graph 'g'; known: s0"),
    "namesake": (namesake_from_another_graph, "stage 's1' is of another graph than 'g', which has one of that name"),
    "no stage": (
        lambda g: g.result(g.stage("s0", AtoA), "s1"),
        "an edge connects stages, not str; pass what graph.stage() returned",
    ),
    "type": (
        lambda g: into(g, AtoB, AtoA),
        "result edge s0 -> s1: port 'result' gives B, but port 'a' takes A; is a stage missing between them?",
    ),
    "stream type": (
        lambda g: into(g, AtoStream, StreamOfB, "stream"),
        "stream edge s0 -> s1: port 'emit' gives A, but port 'b' takes B; is a stage missing between them?",
    ),
    "stream into value": (
        lambda g: into(g, AtoStream, AtoA, "stream"),
        "stream edge s0 -> s1: a stream edge goes into stage 's1', whose port 'a' is a value port; did you mean "
        "graph.result?",
    ),
    "value into stream": (
        lambda g: into(g, AtoA, StreamToA),
        "result edge s0 -> s1: a result edge goes into stage 's1', whose port 'a' is a stream port; did you mean "
        "graph.stream?",
    ),
    "stream out of value": (
        lambda g: into(g, AtoA, StreamToA, "stream"),
        "stream edge s0 -> s1: a stream edge goes out of stage 's0', whose port 'result' is a value port; did you mean "
        "graph.result?",
    ),
    "value out of stream": (
        lambda g: into(g, AtoStream, AtoA),
        "result edge s0 -> s1: a result edge goes out of stage 's0', whose port 'emit' is a stream port; did you mean "
        "graph.stream?",
    ),
    "value out of a named stream": (
        lambda g: into(g, AtoStream, AtoA, out="emit"),
        "result edge s0 -> s1: a result edge goes out of stage 's0', whose port 'emit' is a stream port; did you mean "
        "graph.stream?",
    ),
    "into a stage without input": (
        lambda g: into(g, AtoA, NothingToA),
        "result edge s0 -> s1: stage 's1' takes no input",
    ),
    "out of a stage without output": (
        lambda g: into(g, AtoNothing, AtoA),
        "result edge s0 -> s1: stage 's0' gives no result and emits no stream",
    ),
    "unknown port to": (
        lambda g: into(g, AtoA, AtoA, to="b"),
        "result edge s0 -> s1: stage 's1' has no port 'b'; known: a",
    ),
    "unknown port from": (
        lambda g: into(g, AtoA, AtoA, out="reslt"),
        "result edge s0 -> s1: stage 's0' has no port 'reslt'; did you mean 'result'?",
    ),
    "several ports from": (
        lambda g: into(g, Splits, AtoA),
        "result edge s0 -> s1: stage 's0' has several ports ('first', 'second'); say which: s0['first']",
    ),
    "several ports to": (
        lambda g: into(g, AtoA, Join),
        "result edge s0 -> s1: stage 's1' has several ports ('left', 'right'); say which: s1['left']",
    ),
    "fan-in port": (
        lambda g: g.fan_in(g.stage("s1", Join), lefd=g.stage("s0", AtoA)),
        "fan-in edge s0 -> s1: stage 's1' has no port 'lefd'; did you mean 'left'?",
    ),
    "fan-in into a stream": (
        lambda g: g.fan_in(g.stage("s1", StreamToA), a=g.stage("s0", AtoA)),
        "fan-in edge s0 -> s1: a result edge goes into stage 's1', whose port 'a' is a stream port; did you mean "
        "graph.stream?",
    ),
    "no credit": (
        lambda g: g.stream(g.stage("s0", AtoStream), g.stage("s1", StreamToA), bound=0),
        "a stream edge with bound=0 carries nothing; bound is at least 1",
    ),
    "unknown policy": (
        lambda g: g.stream(g.stage("s0", AtoStream), g.stage("s1", StreamToA), policy="drop_newest"),  # type: ignore[arg-type]
        "a stream edge has no policy 'drop_newest'; did you mean 'drop_oldest'?",
    ),
    "no loop": (
        lambda g: g.stream(g.stage("s0", AtoStream), g.stage("s1", StreamToA), loop=-1),
        "a stream edge with loop=-1 carries nothing; loop is at least 1",
    ),
    "input port": (
        lambda g: g.input(ask=g.stage("s0", Join)["middle"]),
        "input 'ask': stage 's0' has no port 'middle'; known: left, right",
    ),
    "input of several": (
        lambda g: g.input(ask=g.stage("s0", Join)),
        "input 'ask': stage 's0' has several ports ('left', 'right'); say which: s0['left']",
    ),
    "input of none": (lambda g: g.input(ask=g.stage("s0", NothingToA)), "input 'ask': stage 's0' has no port for it"),
    "output of none": (
        lambda g: g.output(answer=g.stage("s0", AtoNothing)),
        "output 'answer': stage 's0' has no port for it",
    ),
    "output of another graph": (
        lambda g: g.output(answer=Graph("other").stage("s0", AtoA)),
        "stage 's0' is not of graph 'g'; known: none",
    ),
    "profile twice": (
        lambda g: [g.profile("p", "why"), g.profile("p", "why")],
        "profile 'p' is declared twice",
    ),
    "binding of an unknown stage": (
        lambda g: [g.stage("talker", AtoA), g.profile("p", "why", talkr=bind(AtoA))],
        "profile 'p' binds unknown stage 'talkr'; did you mean 'talker'?",
    ),
    "marker without a checkpoint": (
        lambda g: [g.stage("s0", AtoA), g.profile("p", "why", s0=bind(size=CHECKPOINT))],
        "profile 'p' has no checkpoint, but s0.size is CHECKPOINT; it takes both or neither",
    ),
    "checkpoint without a marker": (
        lambda g: [g.stage("s0", AtoA), g.profile("p", "why", Checkpoint("hf:o/r", {}), s0=bind(size=1))],
        "profile 'p' has a checkpoint, but no setting of it is CHECKPOINT; it takes both or neither",
    ),
}


@pytest.mark.parametrize("case", BUILD)
def test_refused_while_building(case: str) -> None:
    build, message = BUILD[case]
    with pytest.raises(GraphError) as caught:
        build(Graph("g"))
    assert str(caught.value) == message


# -- refusals of the whole graph ---------------------------------------------------------------------------------------


def no_input() -> Graph:
    graph, stages = chain(AtoA)
    graph.output(answer=stages[0])
    return graph


def no_output() -> Graph:
    graph, stages = chain(AtoA)
    graph.input(ask=stages[0])
    return graph


def input_twice() -> Graph:
    graph, stages = closed(AtoA, AtoA)
    graph.input(ask=stages[1])
    return graph


def output_twice() -> Graph:
    graph, stages = closed(AtoA, AtoA)
    graph.output(answer=stages[0])
    return graph


def two_sources() -> Graph:
    graph, stages = closed(AtoA, AtoA)
    other = graph.stage("other", AtoA)
    graph.result(stages[0], other)
    graph.result(other, stages[1])
    return graph


def same_edge_twice() -> Graph:
    graph, stages = closed(AtoA, AtoA)
    graph.result(*stages)
    return graph


def missing_source() -> Graph:
    graph = Graph("g")
    source = graph.stage("source", AtoA)
    target = graph.stage("target", Join)
    graph.fan_in(target, left=source)
    graph.input(ask=source)
    graph.output(answer=target)
    return graph


def unreachable() -> Graph:
    graph, stages = closed(AtoA)
    join = graph.stage("join", LooseJoin)
    graph.fan_in(join, left=stages[0], right=graph.stage("island", NothingToA))
    graph.output(joined=join)
    return graph


def unread() -> Graph:
    graph, stages = closed(AtoA, AtoA)
    graph.result(stages[0], graph.stage("sink", AtoNothing))
    return graph


def leads_nowhere() -> Graph:
    graph, stages = closed(AtoA, AtoA)
    first, second = graph.stage("first", AtoA), graph.stage("second", AtoNothing)
    graph.result(stages[0], first)
    graph.result(first, second)
    return graph


def loop_to_nowhere() -> Graph:
    graph, stages = closed(AtoStream)
    one, two = graph.stage("one", TwoStreams), graph.stage("two", TwoStreams)
    graph.stream(stages[0], one["a"])
    graph.stream(one["emit"], two["a"])
    graph.stream(two["again"], one["back"], loop=3)
    return graph


def cycle() -> Graph:
    graph, (first,) = closed(AtoA)
    join, back = graph.stage("join", LooseJoin), graph.stage("back", AtoA)
    graph.result(join, back)
    graph.fan_in(join, left=first, right=back)
    graph.output(joined=join)
    return graph


def self_cycle() -> Graph:
    graph = Graph("g")
    stage = graph.stage("s0", LooseJoin)
    graph.fan_in(stage, right=stage)
    graph.input(ask=stage["left"])
    graph.output(answer=stage)
    return graph


def value_after_its_stream() -> Graph:
    """Speech takes the thinker's words as they come, and the whole answer, which is there when no more words come."""
    graph = Graph("g")
    thinker, check = graph.stage("thinker", AtoBoth), graph.stage("check", AtoA)
    speech = graph.stage("speech", StreamAndValue)
    graph.result(thinker, check)
    graph.stream(thinker, speech)
    graph.result(check, speech)
    graph.input(ask=thinker)
    graph.output(answer=speech)
    return graph


def test_a_writer_that_does_not_wait_may_end_before_its_reader_starts() -> None:
    graph = Graph("g")
    thinker, speech = graph.stage("thinker", AtoBoth), graph.stage("speech", StreamAndValue)
    graph.stream(thinker, speech, policy="drop_oldest")
    graph.result(thinker, speech)
    graph.input(ask=thinker)
    graph.output(answer=speech)
    assert graph.spec()


def value_behind_a_stream_behind_its_stream() -> Graph:
    """The writer's words go through another stage, and the value comes from what counts them there."""
    graph = Graph("g")
    writer, through = graph.stage("writer", AtoStream), graph.stage("through", StreamToStream)
    count, speech = graph.stage("count", StreamToA), graph.stage("speech", StreamAndValue)
    graph.stream(writer, through)
    graph.stream(writer, count)
    graph.stream(through, speech)
    graph.result(count, speech)
    graph.input(ask=writer)
    graph.output(answer=speech)
    return graph


def required_behind_skippable() -> Graph:
    graph = Graph("g")
    source, skips, join = graph.stage("source", AtoA), graph.stage("skips", AtoMaybeA), graph.stage("join", Join)
    graph.result(source, skips)
    graph.fan_in(join, left=source, right=skips)
    graph.input(ask=source)
    graph.output(answer=join)
    return graph


def required_behind_skipped_chain() -> Graph:
    """The skip passes through a stage with one required port."""
    graph = Graph("g")
    source, skips, join = graph.stage("source", AtoA), graph.stage("skips", AtoMaybeA), graph.stage("join", Join)
    between = graph.stage("between", AtoA)
    graph.result(source, skips)
    graph.result(skips, between)
    graph.fan_in(join, left=source, right=between)
    graph.input(ask=source)
    graph.output(answer=join)
    return graph


def output_behind_skippable() -> Graph:
    return closed(AtoA, AtoMaybeA, AtoA)[0]


def unfed_from_one_input() -> Graph:
    graph = Graph("g")
    one, two, join = graph.stage("one", AtoA), graph.stage("two", AtoA), graph.stage("join", Join)
    graph.fan_in(join, left=one, right=two)
    graph.input(ask=one, other=two)
    graph.output(answer=join)
    return graph


def fed_twice_in_one_request() -> Graph:
    graph = Graph("g")
    source, looped = graph.stage("source", AtoStream), graph.stage("looped", TwoStreams)
    graph.stream(source, looped["a"])
    graph.stream(looped["again"], looped["back"], loop=3)
    graph.input(ask=source, back=looped["back"])
    graph.output(answer=looped["emit"])
    return graph


def blocking_stream() -> Graph:
    class Blocking(Actor):
        def run(self, a: A, emit: Emit[A]) -> None: ...

    Blocking.run.__annotations__ = AtoStream.run.__annotations__
    return closed(Blocking)[0]


def unknown_neighbour() -> Graph:
    graph = Graph("g")
    stage = graph.stage("talker", AtoA, near="thinkr")
    graph.stage("thinker", AtoA)
    graph.input(ask=stage)
    graph.output(answer=stage)
    return graph


def behind_an_absent_stage() -> Graph:
    graph, _ = closed(AtoA, AtoA)
    graph.profile("p", "why", s0=absent("no model"))
    return graph


def misfit(actor: type[Actor], stand_in: type[Actor]) -> Graph:
    graph, _ = closed(actor)
    graph.profile("p", "why", s0=bind(stand_in))
    return graph


WHOLE: dict[str, tuple[Callable[[], Graph], str]] = {
    "no input": (no_input, "graph 'g' has no input; name one with graph.input(chat=stage)"),
    "no output": (no_output, "graph 'g' has no output; name one with graph.output(text=stage)"),
    "empty": (lambda: Graph("g"), "graph 'g' has no input; name one with graph.input(chat=stage)"),
    "input twice": (input_twice, "input 'ask' is declared twice; names are unique"),
    "output twice": (output_twice, "output 'answer' is declared twice; names are unique"),
    "two sources": (
        two_sources,
        "stage 's1': port 'a' has two sources, 's0' and 'other'; give each its own port",
    ),
    "one edge twice": (same_edge_twice, "stage 's1': port 'a' has two sources, 's0' and 's0'; give each its own port"),
    "missing source": (
        missing_source,
        "stage 'target': port 'right' has no source; connect it with graph.fan_in(target, right=...), or make it "
        "optional",
    ),
    "unreachable": (unreachable, "stage 'island' cannot be reached from any input; is an edge into it missing?"),
    "unread": (
        unread,
        "nobody reads what stage 'sink' gives; connect it, or name it with graph.output(...)",
    ),
    "leads nowhere": (
        leads_nowhere,
        "nobody reads what stage 'second' gives; connect it, or name it with graph.output(...)",
    ),
    "leads into a loop": (
        loop_to_nowhere,
        "stage 'one' leads to no output; connect it to one, or leave it out",
    ),
    "cycle": (
        cycle,
        "edge join.result -> back.a closes a cycle; a feedback edge is a stream declared with a bound, "
        "graph.stream(join, back, loop=100)",
    ),
    "cycle of one": (
        self_cycle,
        "edge s0.result -> s0.right closes a cycle; a feedback edge is a stream declared with a bound, "
        "graph.stream(s0, s0, loop=100)",
    ),
    "value after its stream": (
        value_after_its_stream,
        "stage 'speech' would wait for ever: port 'whole' comes after the end of 'thinker', which cannot end before "
        "'speech' reads its stream; take the value in a stage of its own, or send it on the stream",
    ),
    "value behind a stream": (
        value_behind_a_stream_behind_its_stream,
        "stage 'speech' would wait for ever: port 'whole' comes after the end of 'writer', which cannot end before "
        "'speech' reads its stream; take the value in a stage of its own, or send it on the stream",
    ),
    "required behind skippable": (
        required_behind_skippable,
        "stage 'join': port 'right' is required, but 'skips' may skip it; declare it optional (`right: A | None`)",
    ),
    "required behind a skipped chain": (
        required_behind_skipped_chain,
        "stage 'join': port 'right' is required, but 'between' may skip it; declare it optional (`right: A | None`)",
    ),
    "output behind skippable": (
        output_behind_skippable,
        "output 'answer': stage 's2' may be skipped, so a request could end without it; put a stage with an optional "
        "port before it",
    ),
    "unfed from one input": (
        unfed_from_one_input,
        "stage 'join': port 'right' gets nothing from input 'ask'; connect it, or make it optional "
        "(`right: ... | None`)",
    ),
    "fed twice in one request": (
        fed_twice_in_one_request,
        "stage 'looped': port 'back' is fed by input 'back' and, in the same request, by 'looped'; give each its own "
        "port",
    ),
    "blocking stream": (
        blocking_stream,
        "stage 's0': Blocking.run() has stream ports, so it is an `async def`; blocking work in it goes to "
        "self.offload(...)",
    ),
    "unknown neighbour": (
        unknown_neighbour,
        "stage 'talker': near='thinkr' names no stage of graph 'g'; did you mean 'thinker'?",
    ),
    "behind an absent stage": (
        behind_an_absent_stage,
        "output 'answer': no request gets to stage 's1': every stage before it is absent; leave it out, too",
    ),
    "misfit input": (
        lambda: misfit(AtoA, StreamToA),
        "stage 's0' takes value port 'a' of A; StreamToA does not, so it cannot be bound to it",
    ),
    "misfit output": (
        lambda: misfit(AtoA, AtoB),
        "stage 's0' gives value port 'result' of A; AtoB does not, so it cannot be bound to it",
    ),
    "misfit with a port too many": (
        lambda: misfit(AtoA, NeedsMore),
        "stage 's0': port 'extra' has no source; connect it with graph.fan_in(s0, extra=...), or make it optional",
    ),
}


@pytest.mark.parametrize("case", WHOLE)
def test_refused_as_a_whole(case: str) -> None:
    build, message = WHOLE[case]
    with pytest.raises(GraphError) as caught:
        build().spec()
    assert str(caught.value) == message


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_edge_into_the_middle_of_a_required_fan_in(order: tuple[int, int]) -> None:
    """An input that reaches only one side of a join is found, whatever comes first."""
    graph = Graph("g")
    pair = [graph.stage("one", AtoA), graph.stage("two", AtoA)]
    join = graph.stage("join", LooseJoin)
    graph.fan_in(join, left=pair[order[0]], right=pair[order[1]])
    graph.input(ask=pair[0], other=pair[1])
    graph.output(answer=join)
    with pytest.raises(GraphError, match="port 'left' gets nothing from input"):
        graph.spec()


def test_unknown_profile() -> None:
    graph, _ = closed(AtoA)
    with pytest.raises(GraphError, match="graph 'g' declares no profiles, so --profile tiny means nothing"):
        graph.spec("tiny")
    graph.profile("embedded", "why")
    with pytest.raises(GraphError, match="graph 'g' has no profile 'embeded'; did you mean 'embedded'?"):
        graph.spec("embeded")


# -- what is accepted --------------------------------------------------------------------------------------------------


def test_a_spec_is_a_value() -> None:
    one, two = closed(AtoA, AtoA)[0].spec(), closed(AtoA, AtoA)[0].spec()
    assert one == two
    with pytest.raises(AttributeError):
        one.name = "other"  # type: ignore[misc]
    assert one.edges == (Edge("result", "s0", "result", "s1", "a"),)
    assert [str(edge) for edge in one.all_edges] == [
        "client.ask -> s0.a",
        "s0.result -> s1.a",
        "s1.result -> client.answer",
    ]
    assert one.input_type("ask").type is A


def test_ports_are_found_by_their_types() -> None:
    graph = Graph("g")
    source, to_b, join = graph.stage("source", AtoA), graph.stage("to_b", AtoB), graph.stage("join", JoinAB)
    graph.result(source, to_b)
    graph.result(source, join)
    graph.result(to_b, join)
    graph.input(ask=source)
    graph.output(answer=join)
    assert [(edge.source, edge.target_port) for edge in graph.spec().edges][1:] == [("source", "a"), ("to_b", "b")]


def test_a_source_may_be_chosen_by_port() -> None:
    graph = Graph("g")
    split, join = graph.stage("split", Splits), graph.stage("join", LooseJoin)
    graph.fan_in(join, left=split["first"], right=split["second"])
    graph.input(ask=split)
    graph.output(answer=join, third=split["third"])
    assert [edge.source_port for edge in graph.spec().edges] == ["first", "second"]


def test_a_declared_loop_is_accepted() -> None:
    graph, stages = closed(AtoStream)
    looped = graph.stage("looped", TwoStreams)
    graph.stream(stages[0], looped["a"], bound=4)
    graph.stream(looped["again"], looped["back"], loop=10)
    graph.output(looped=looped["emit"])
    edges = graph.spec().edges
    assert [(edge.bound, edge.loop) for edge in edges] == [(4, None), (None, 10)]


def test_a_value_beside_a_stream_is_accepted_where_it_does_not_wait_for_its_writer() -> None:
    graph = Graph("g")
    first, writer = graph.stage("first", AtoA), graph.stage("writer", AtoStream)
    voice, speech = graph.stage("voice", AtoA), graph.stage("speech", StreamAndValue)
    graph.result(first, writer)
    graph.result(first, voice)
    graph.stream(writer, speech)
    graph.result(voice, speech)
    graph.input(ask=first)
    graph.output(answer=speech)
    assert graph.spec()


def test_a_skip_may_end_at_an_optional_port() -> None:
    graph = Graph("g")
    source, skips = graph.stage("source", AtoA), graph.stage("skips", AtoMaybeA)
    between, join = graph.stage("between", AtoA), graph.stage("join", LooseJoin)
    graph.result(source, skips)
    graph.result(skips, between)
    graph.fan_in(join, left=source, right=between)
    graph.input(ask=source)
    graph.output(answer=join)
    assert graph.spec().stage("join").ports.inputs[1].optional


def test_an_output_may_itself_be_optional() -> None:
    """A skip of an output is an answer: the request has it, and it is None."""
    assert closed(AtoA, AtoMaybeA)[0].spec()


def test_one_stage_may_take_several_inputs_and_give_several_outputs() -> None:
    graph, stages = closed(AtoA, AtoA)
    graph.input(late=stages[1])
    graph.output(early=stages[0])
    spec = graph.spec()
    assert reachable_outputs(spec, "ask") == ("answer", "early")
    assert reachable_outputs(spec, "late") == ("answer",)


# -- profiles ----------------------------------------------------------------------------------------------------------


class Better(AtoA):
    def __init__(self, *, size: int = 1) -> None: ...


class Wider(Actor):
    """Takes more than it must, and has an optional port more."""

    async def run(self, a: A | B, extra: B | None) -> SubA: ...


def test_a_profile_binds_actors_settings_and_fields() -> None:
    graph, _ = closed(AtoA, AtoA)
    graph.profile("first", "the first is the default", s0=bind(Better, size=3, device="gpu"))
    graph.profile("second", "another", s1=bind(threads=2))
    stage = graph.spec().stage("s0")
    assert (stage.actor, stage.settings, stage.device) == (Better, {"size": 3}, "gpu")
    assert graph.spec("second").stage("s0").actor is AtoA
    assert graph.spec("second").stage("s1").threads == 2
    assert [profile.why for profile in graph.profiles.values()] == ["the first is the default", "another"]
    assert graph.spec("second").profile == graph.profiles["second"]


def test_settings_of_the_graph_hold_unless_the_profile_binds_another_actor() -> None:
    graph = Graph("g")
    stage = graph.stage("s0", Better, size=1)
    graph.input(ask=stage)
    graph.output(answer=stage)
    graph.profile("same", "why", s0=bind(device="gpu"))
    graph.profile("other", "why", s0=bind(AtoA))
    assert graph.spec("same").stage("s0").settings == {"size": 1}
    assert graph.spec("other").stage("s0").settings == {}


def test_an_actor_may_take_more_and_give_something_narrower() -> None:
    graph, _ = closed(AtoA)
    graph.profile("p", "why", s0=bind(Wider))
    assert graph.spec().stage("s0").actor is Wider


def test_a_profile_may_leave_a_stage_out() -> None:
    graph = Graph("g")
    source, image, join = graph.stage("source", Splits), graph.stage("image", AtoA), graph.stage("join", LooseJoin)
    graph.result(source["second"], image)
    graph.fan_in(join, left=source["first"], right=image)
    graph.input(ask=source)
    graph.output(answer=join, image=image, third=source["third"])
    graph.profile("p", "why", image=absent("no image model"))
    spec = graph.spec()
    assert spec.absent == {"image": "no image model"}
    assert reachable_outputs(spec, "ask") == ("answer", "third")
    part = route(spec.all_edges, spec.absent, "ask", ["answer"])
    assert part.stages == {"source", "join"}
    assert part.refusals == {("source", "second"): ("image", "no image model")}


@pytest.mark.parametrize(
    ("when", "config", "takes"),
    [
        ({}, {}, True),
        ({"model_type": "ming"}, {"model_type": "ming", "more": 1}, True),
        ({"model_type": "ming"}, {"model_type": "ring"}, False),
        ({"model_type": "ming"}, {}, False),
        ({"model_type": ("ming", "ring")}, {"model_type": "ring"}, True),
        ({"model_type": ("ming", None)}, {}, True),
        ({"llm.hidden": range(1, 65)}, {"llm": {"hidden": 64}}, True),
        ({"llm.hidden": range(1, 65)}, {"llm": {"hidden": 65}}, False),
        ({"llm.hidden": range(1, 65)}, {"llm": "small"}, False),
        ({"llm.hidden": 64, "model_type": "ming"}, {"llm": {"hidden": 64}}, False),
    ],
)
def test_a_checkpoint_takes_a_config_json(when: dict[str, Any], config: dict[str, Any], takes: bool) -> None:
    assert Checkpoint("hf:o/r", when).takes(config) is takes


def of_checkpoints() -> Graph:
    graph, _ = closed(AtoA, AtoA)
    graph.profile("plain", "why", s0=bind(Better))
    small = {"model_type": "ming", "llm.hidden": range(1, 65)}
    settings: dict[str, Any] = {"s0": bind(Better, size=CHECKPOINT), "s1": bind(Better, size=2)}
    graph.profile("small", "why", Checkpoint("tiny", small), **settings)
    graph.profile("large", "why", Checkpoint("hf:o/r", {"model_type": ("ming", None)}), **settings)
    return graph


def test_what_stands_for_the_checkpoint_becomes_it() -> None:
    graph = of_checkpoints()
    assert graph.spec("small").stage("s0").settings == {"size": "tiny"}
    assert graph.spec("large").stage("s0").settings == {"size": "hf:o/r"}
    assert graph.spec("large").stage("s1").settings == {"size": 2}
    assert graph.profiles["large"].of_checkpoint == ("s0.size",)
    assert graph.profiles["plain"].of_checkpoint == ()


def test_the_first_profile_that_takes_a_checkpoint_is_for_it() -> None:
    graph = of_checkpoints()
    assert graph.profile_for("x", {"model_type": "ming", "llm": {"hidden": 64}}).name == "small"
    assert graph.profile_for("x", {"model_type": "ming", "llm": {"hidden": 4096}}).name == "large"
    with pytest.raises(GraphError) as caught:
        graph.profile_for("x", {"model_type": "ring"})
    assert str(caught.value) == (
        "x: no profile of 'g' is for such a checkpoint. Its config.json has model_type ring. What they take: "
        "small: model_type ming, llm.hidden from 1 to 64; large: model_type ming or absent. "
        "Where one fits all the same, name it: --profile small"
    )
    with pytest.raises(GraphError, match="'g' has no profile that takes a checkpoint"):
        closed(AtoA)[0].profile_for("x", {})


def test_behind_absent_stages_that_nobody_gets_to_a_graph_still_serves() -> None:
    """A model that only speaks: what thinks is absent, and speech enters behind it."""
    graph = Graph("g")
    think, write, speak = (graph.stage(name, AtoA) for name in ("think", "write", "speak"))
    graph.result(think, write)
    graph.result(write, speak)
    graph.input(chat=think, speech=speak)
    graph.output(text=write, audio=speak)
    both = dict.fromkeys(("think", "write"), absent("it only speaks"))
    graph.profile("voice", "why", **both)
    spec = graph.spec()
    assert reachable_outputs(spec, "speech") == ("audio",)
    assert reachable_outputs(spec, "chat") == ()
    assert route(spec.all_edges, spec.absent, "speech", ["audio"]).stages == {"speak"}
    graph.profile("mute", "why", write=absent("it writes nothing"))
    with pytest.raises(GraphError, match="output 'audio': stage 'speak' may be skipped"):
        graph.spec("mute")


# -- routes ------------------------------------------------------------------------------------------------------------


def test_pruning_keeps_what_the_outputs_need() -> None:
    graph = Graph("g")
    thinker, talker = graph.stage("thinker", AtoStream), graph.stage("talker", StreamToStream)
    text = graph.stage("text", StreamToA)
    graph.stream(thinker, talker)
    graph.stream(thinker, text)
    graph.input(ask=thinker)
    graph.output(audio=talker, text=text)
    spec = graph.spec()

    def kept(*outputs: str) -> tuple[set[str], list[str]]:
        part = route(spec.all_edges, spec.absent, "ask", outputs)
        return set(part.stages), [str(edge) for edge in part.edges]

    assert kept("text") == (
        {"thinker", "text"},
        ["client.ask -> thinker.a", "thinker.emit -> text.a", "text.result -> client.text"],
    )
    assert kept("audio", "text")[0] == {"thinker", "talker", "text"}


@st.composite
def dags(draw: st.DrawFn) -> GraphSpec:
    """A random graph of 2-9 stages with 1-3 value ports each; some skip; a second input may enter in the middle.

    Most of them are accepted: a port is optional where what feeds it may be skipped or is not on every way.
    """
    count = draw(st.integers(2, 9))
    late = draw(st.one_of(st.none(), st.integers(1, count - 1)))
    careless = draw(st.integers(0, 9)) == 0
    graph = Graph("g")
    stages: list[Any] = []
    behind_late: set[int] = set()
    may_skip: list[bool] = []
    for index in range(count):
        sources = draw(st.lists(st.integers(0, index - 1), min_size=1, max_size=3)) if index else [0]
        if index == late or behind_late & set(sources):
            behind_late.add(index)
        loose = index in behind_late or any(may_skip[source] for source in sources if index)
        optional = tuple(draw(st.booleans()) if careless or not loose else True for _ in sources)
        skips = draw(st.integers(0, 3)) == 0
        may_skip.append(skips)
        stage = graph.stage(f"s{index}", stage_actor(optional + (True,) * (index == late), skips))
        for number, source in enumerate(sources):
            if index:
                graph.result(stages[source], stage[f"p{number}"])
        if index == late:
            graph.input(late=stage[f"p{len(sources)}"])
        stages.append(stage)
    graph.input(ask=stages[0])
    read = {edge.source for edge in graph._edges}
    more = draw(st.sets(st.integers(0, count - 1), max_size=2))
    graph.output(**{f"o{n}": stages[n] for n in range(count) if n in more or stages[n].name not in read})
    return GraphSpec("g", tuple(stages), tuple(graph._edges), tuple(graph._inputs), tuple(graph._outputs))


ACTORS: dict[tuple[tuple[bool, ...], bool], type[Actor]] = {}


def stage_actor(optional: tuple[bool, ...], skips: bool) -> type[Actor]:
    """An actor class with value ports p0, p1, ..., each optional or not, and a result that it may skip or not."""
    if (optional, skips) not in ACTORS:
        ports = ", ".join(f"p{number}: {'A | None' if free else 'A'}" for number, free in enumerate(optional))
        lines = f"async def run(self, {ports}) -> {'A | None' if skips else 'A'}: ..."
        scope: dict[str, Any] = {"A": A}
        exec(lines, scope)
        ACTORS[optional, skips] = type("Made", (Actor,), {"run": scope["run"]})
    return ACTORS[optional, skips]


def accepted(spec: GraphSpec) -> bool:
    try:
        validate(spec)
    except GraphError:
        return False
    return True


@given(dags())
def test_every_route_of_an_accepted_graph_is_fed_and_needed(spec: GraphSpec) -> None:
    if not accepted(spec):
        return
    for entry in spec.inputs:
        outputs = reachable_outputs(spec, entry.source_port)
        for wanted in [*([name] for name in outputs), list(outputs)]:
            part = route(spec.all_edges, {}, entry.source_port, wanted)
            fed = [(edge.target, edge.target_port) for edge in part.edges]
            assert len(fed) == len(set(fed))
            for stage in spec.stages:
                if stage.name in part.stages:
                    for port in stage.ports.inputs:
                        assert port.optional or (stage.name, port.name) in fed
                    assert stage.name in {edge.target for edge in part.edges}, "it is reached"
                    assert stage.name in {edge.source for edge in part.edges}, "it is needed"
                else:
                    assert stage.name not in {name for edge in part.edges for name in (edge.source, edge.target)}
            assert {edge.target_port for edge in part.edges if edge.target == CLIENT} == set(wanted)


@given(dags(), st.randoms())
def test_a_skip_never_stops_at_a_port_that_needs_a_value(spec: GraphSpec, random: Any) -> None:
    """Play any skips of an accepted graph: each stage runs or is skipped whole, and each output gets an answer."""
    if not accepted(spec):
        return
    for entry in spec.inputs:
        outputs = reachable_outputs(spec, entry.source_port)
        part = route(spec.all_edges, {}, entry.source_port, outputs)
        gives: dict[str, bool] = {CLIENT: True}
        for stage in spec.stages:
            if stage.name not in part.stages:
                continue
            arrived = {edge.target_port: gives[edge.source] for edge in part.edges if edge.target == stage.name}
            missing = [p for p in stage.ports.inputs if not p.optional and not arrived[p.name]]
            assert not missing or len(stage.ports.inputs) == 1
            skips = stage.ports.outputs[0].optional and random.random() < 0.5
            gives[stage.name] = not missing and not skips
        for exit in spec.outputs:
            if exit.target_port in outputs:
                optional = spec.stage(exit.source).ports.outputs[0].optional
                assert gives[exit.source] or optional


# -- types, sizes, names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (A, A, True),
        (SubA, A, True),
        (A, SubA, False),
        (A, B, False),
        (A, A | B, True),
        (A | B, A, False),
        (A | B, Union[B, A], True),  # noqa: UP007 - the old spelling works, too
        (A, Any, True),
        (A, object, True),
        (Any, A, False),
        (list[A], list[A], True),
        (list[A], list[B], False),
        (int, float, False),
    ],
)
def test_fits(source: Any, target: Any, expected: bool) -> None:
    assert fits(source, target) is expected


@pytest.mark.parametrize(
    ("text", "size"),
    [(5, 5), ("5", 5), ("1 KB", 1000), ("1.5 GiB", 3 * 2**29), ("2gib", 2**31), ("80 MB", 80 * 10**6), ("7 b", 7)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1 TB", "lots", "1 2 GiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(
        GraphError, match=re.escape(f"{text!r} is no size; write a number of bytes or text like '4 GiB'")
    ):
        parse_bytes(text)


def test_a_budget_adds_up() -> None:
    assert Budget("1 KiB", 1, kv_tokens=10, kv_bytes_per_token="1 KB").total_bytes == 1024 + 1 + 10_000


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("tlaker", ["talker", "x"], "; did you mean 'talker'?"),
        ("q", ["b", "a"], "; known: a, b"),
        ("q", [], "; known: none"),
    ],
)
def test_nearest(name: str, known: Iterable[str], text: str) -> None:
    assert nearest(name, known) == text


@pytest.mark.parametrize(
    ("hint", "text"), [(A, "A"), (list[A], f"list[{A.__module__}.A]"), (A | None, f"{A.__module__}.A | None")]
)
def test_type_names(hint: Any, text: str) -> None:
    assert type_name(hint) == text


def test_an_unknown_stage_is_named_with_the_nearest() -> None:
    with pytest.raises(GraphError, match="graph 'g' has no stage 's9'; known: s0, s1"):
        closed(AtoA, AtoA)[0].spec().stage("s9")
