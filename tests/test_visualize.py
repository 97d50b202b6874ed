"""Mermaid drawings: every stage and edge is there, looks differ by kind, and no name breaks the syntax."""

from __future__ import annotations

import re

import pytest

from omniflow import Actor, Cluster, Emit, Graph, Stream, TextDelta, absent, bind, plan
from omniflow.visualize import draw_graph, draw_plan

from .graphs import flow, words

CLUSTER = Cluster("cpu", 2, 0)


class Odd(Actor):
    async def run(self, text: TextDelta) -> str | int:
        return text.text


class Spell(Actor):
    async def run(self, text: str | int, letters: Emit[TextDelta]) -> None:
        await letters.send(TextDelta(str(text)))


class End(Actor):
    async def run(self, letters: Stream[TextDelta]) -> str:
        return "".join([letter.text async for letter in letters])


def odd_graph() -> Graph:
    """Stages with names that are words of Mermaid's own."""
    graph = Graph("odd")
    first, second, third = graph.stage("graph", Odd), graph.stage("subgraph", Spell), graph.stage("end", End)
    graph.result(first, second)
    graph.stream(second, third)
    graph.input(style=first)
    graph.output(end=third, raw=first)
    graph.profile("all", "everything")
    graph.profile("short", "without the end", end=absent("no end here"))
    return graph


def arrows(drawing: str) -> list[tuple[str, str, str, str]]:
    """(source, arrow, label, target) of every link, in order."""
    return re.findall(r'^    (\w+) (-->|==>|--o)\|"([^"|]*)"\| (\w+)$', drawing, flags=re.MULTILINE)


def test_every_stage_and_edge_of_a_graph_is_drawn_once() -> None:
    spec = words.graph.spec()
    drawing = draw_graph(spec)
    assert drawing.startswith("flowchart LR\n")
    for stage in spec.stages:
        assert drawing.count(f'stage_{stage.name}["{stage.name}<br/>') == 1
    assert arrows(drawing) == [
        ("in_line", "-->", "Line", "stage_split"),
        ("in_speech", "==>", "TextDelta", "stage_echo"),
        ("stage_split", "-->", "Line", "stage_shout"),
        ("stage_split", "-->", "Line", "stage_count"),
        ("stage_split", "--o", "Line", "stage_join"),
        ("stage_shout", "--o", "Shouted", "stage_join"),
        ("stage_count", "--o", "Counted", "stage_join"),
        ("stage_join", "-->", "Joined", "stage_words"),
        ("stage_words", "==>", "TextDelta", "stage_echo"),
        ("stage_words", "==>", "TextDelta", "out_text"),
        ("stage_echo", "==>", "AudioChunk", "out_audio"),
        ("stage_words", "-->", "int", "out_num_words"),
    ]


def test_edges_of_a_kind_look_alike_and_every_edge_has_one_look() -> None:
    drawing = draw_graph(words.graph.spec())
    looks = re.findall(r"^    linkStyle ([\d,]+) (\S+)$", drawing, flags=re.MULTILINE)
    look_of = {int(number): look for numbers, look in looks for number in numbers.split(",")}
    kinds = [arrow for _, arrow, _, _ in arrows(drawing)]
    assert sorted(look_of) == list(range(len(kinds)))
    assert len({(kind, look_of[number]) for number, kind in enumerate(kinds)}) == len(set(kinds)) == 3


def test_inputs_and_outputs_are_rounded() -> None:
    drawing = draw_graph(words.graph.spec())
    assert 'in_line(["line"]):::port' in drawing and 'out_audio(["audio"]):::port' in drawing


def test_absent_stages_and_their_edges_are_dashed() -> None:
    drawing = draw_graph(odd_graph().spec("short"))
    assert 'stage_end["end<br/><small>absent</small>"]:::absent' in drawing
    assert re.search(r"classDef absent .*stroke-dasharray", drawing)
    assert re.search(r"linkStyle 2,3 stroke:#\w+,stroke-dasharray", drawing)
    assert "dasharray" not in draw_graph(odd_graph().spec("all")).split("classDef absent")[0]


@pytest.mark.parametrize("draw", [draw_graph, lambda spec: draw_plan(plan(spec, CLUSTER))])
def test_no_name_is_a_word_of_mermaid_and_no_label_ends_early(draw: object) -> None:
    drawing = draw(odd_graph().spec("all"))  # type: ignore[operator]
    nodes = {node for source, _, _, target in arrows(drawing) for node in (source, target)}
    assert nodes == {"in_style", "out_end", "out_raw", "stage_graph", "stage_subgraph", "stage_end"}
    assert any("str #124; int" in label for _, _, label, _ in arrows(drawing))
    assert len(arrows(drawing)) == 5


def test_a_plan_is_drawn_with_its_hosts_and_transports() -> None:
    made = plan(words.graph.spec(), CLUSTER)
    drawing = draw_plan(made)
    blocks = re.findall(r'^    subgraph host_(\w+)\["(.*?)"\]\n(.*?)^    end$', drawing, re.MULTILINE | re.DOTALL)
    assert {name: set(re.findall(r"stage_(\w+)", body)) for name, _, body in blocks} == {
        host.name: set(host.stages) for host in made.hosts
    }
    assert all(title == f"{name}: process, cpu" for name, title, _ in blocks)
    labels = {(source, target): label for source, _, label, target in arrows(drawing)}
    assert labels["stage_split", "stage_shout"] == "Line, local_object"
    assert labels["stage_words", "stage_echo"] == "TextDelta, arrow_shm"


def test_an_edge_that_does_not_block_says_what_it_does() -> None:
    spec = flow.build("drop_oldest", 4).spec()
    for drawing, label in ((draw_graph(spec), "Drop"), (draw_plan(plan(spec, CLUSTER)), "Drop, arrow_shm")):
        labels = {(source, target): text for source, _, text, target in arrows(drawing)}
        assert labels["stage_pour", "stage_sip"] == f"{label}, drop_oldest 4"
        assert labels["stage_sip", "out_drops"] == label


def test_a_plan_shows_what_is_left_out_and_what_needs_no_process() -> None:
    spec = odd_graph().spec("short")
    drawing = draw_plan(plan(spec, Cluster("cpu", 2, 0, single_process=True)))
    assert 'subgraph host_main["main: the runtime\'s process, cpu"]' in drawing
    assert "absent</small>" in drawing and "out_end" not in drawing


def test_a_binding_is_drawn_with_its_own_actor() -> None:
    class Other(Odd):
        pass

    graph = odd_graph()
    graph.profile("other", "another first", graph=bind(Other))
    assert "<small>Other</small>" in draw_graph(graph.spec("other"))
