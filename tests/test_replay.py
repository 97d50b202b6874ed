"""Replay: the same request gives the same, and what was changed is found at the first edge that shows it."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from omniflow.actor import Actor, Stream
from omniflow.config import RuntimeConfig, configure, set_layer
from omniflow.errors import ErrorInfo, RecordingError, RequestError
from omniflow.graph import Graph
from omniflow.media import Options, TextDelta
from omniflow.planner import Cluster, Plan, plan
from omniflow.recording import Recorder, Recording
from omniflow.replay import Comparison, changes, compare, given_values, replay
from omniflow.runtime import Runtime

from .graphs import timed, words
from .graphs.words import Line
from .running import CPU, INLINE

pytestmark = pytest.mark.anyio
CLUSTERS = pytest.mark.parametrize("cluster", [INLINE, CPU], ids=["inline", "processes"])
CONFIG = RuntimeConfig(deadline_s=200.0, start_timeout_s=100.0, shm_bytes=2**24)


def planned(graph: Graph, *pairs: str, cluster: Cluster = INLINE) -> Plan:
    configured = configure(graph.spec(), [set_layer(pairs)])
    return plan(configured.spec, cluster, CONFIG)


async def record(made: Plan, entry: str, value: object, **how: Any) -> Recording:
    found: list[Recording] = []
    async with Runtime(made, CONFIG, Recorder(made, found.append)) as runtime:
        try:
            await (await runtime.submit(entry, value, **how)).collect()
        except RequestError:
            pass
        await runtime.drain()
    return found[0]


async def again(recording: Recording, made: Plan, **how: Any) -> Comparison:
    replayed = await replay(recording, made, CONFIG, **how)
    return compare(recording, replayed, made, run_all=how.get("run_all", False))


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {edge.edge: edge.verdict for edge in comparison.edges}


def first(comparison: Comparison) -> tuple[str, str, int | None]:
    assert comparison.first is not None
    return comparison.first.edge, comparison.first.verdict, comparison.first.at


# -- the same ----------------------------------------------------------------------------------------------------------


@CLUSTERS
async def test_the_same_request_gives_the_same(cluster: Cluster) -> None:
    made = planned(words.build(), cluster=cluster)
    recording = await record(made, "line", Line("how are you?"), options=Options(seed=3))
    found = await again(recording, made)
    assert (found.same, found.first) == (True, None)
    assert set(verdicts(found).values()) == {"same"} and len(found.edges) == 10


async def test_placement_changes_nothing() -> None:
    recording = await record(planned(words.build()), "line", Line("a b c"))
    assert (await again(recording, planned(words.build(), cluster=CPU))).same


async def test_edges_are_in_the_order_of_the_data() -> None:
    made = planned(words.build())
    found = await again(await record(made, "line", Line("a b?")), made)
    sources = [edge.edge.partition(".")[0] for edge in found.edges]
    assert list(dict.fromkeys(sources)) == ["split", "shout", "count", "join", "words", "echo"]


async def test_streams_enter_again_item_by_item() -> None:
    made = planned(words.build())
    recording = await record(made, "speech", [TextDelta("a"), TextDelta("bc")] * 20, outputs=["audio"])
    found = await again(recording, made)
    assert found.same
    assert [(edge.recorded.size, edge.replayed.size) for edge in found.edges if edge.recorded and edge.replayed] == [
        (96_000, 96_000)
    ]


# -- what differs ------------------------------------------------------------------------------------------------------


@CLUSTERS
async def test_a_changed_setting_shows_at_the_stage_that_it_changes(cluster: Cluster) -> None:
    recording = await record(planned(words.build(), cluster=cluster), "line", Line("how are you?"))
    made = planned(words.build(), "shout.mark=?", cluster=cluster)
    found = await again(recording, made)
    assert first(found) == ("shout.result -> join.shouted", "differs", 0)
    assert not found.same
    assert verdicts(found) == dict.fromkeys(verdicts(found), "differs") | dict.fromkeys(
        [
            "split.line -> shout.line",
            "split.line -> join.line",
            "split.question -> count.lines",
            "count.result -> join.counted",
            "words.result -> client.num_words",
        ],
        "same",
    ) | {"echo.emit -> client.audio": "same"}
    assert list(changes(recording, made)) == ["shout.mark was not set and is '?'"]


async def test_a_difference_late_in_a_stream_is_found_where_it_is() -> None:
    recording = await record(planned(words.build()), "speech", [TextDelta("aaaa")] * 10)
    changed = msgspec.structs.replace(
        recording, items=(*recording.items[:7], *(await record_of("bbbbbb")).items, *recording.items[8:])
    )
    found = compare(recording, await replay(changed, planned(words.build()), CONFIG), planned(words.build()))
    # The chunks before have 7 x 2,400 samples; a digest is of 2,048.
    assert first(found) == ("echo.emit -> client.audio", "differs", 7 * 2400 // 2048 * 2048)


async def record_of(text: str) -> Recording:
    return await record(planned(words.build()), "speech", TextDelta(text))


async def test_other_options_can_be_tried() -> None:
    made = planned(words.build())
    recording = await record(made, "line", Line("a"))
    replayed = await replay(recording, made, CONFIG, options=Options(seed=1, speed=2.0))
    assert replayed.options == Options(seed=1, speed=2.0)
    assert compare(recording, replayed, made).same


# -- requests that did not end well ------------------------------------------------------------------------------------


async def test_the_same_error_is_the_same() -> None:
    made = planned(words.build())
    for text, kind in (("bad?", "InvalidInputError"), ("bug", "StageError"), ("", "InvalidInputError")):
        recording = await record(made, "line", Line(text))
        assert recording.error is not None and recording.error.kind == kind
        assert (await again(recording, made)).same


async def test_another_end_is_a_difference() -> None:
    made = planned(words.build())
    recording = await record(made, "line", Line("a b"))
    crashed = msgspec.structs.replace(recording, error=ErrorInfo("StageDiedError", "it died", "echo"))
    found = await again(crashed, made)
    assert (found.first, found.same_end, found.same) == (None, False, False)


async def test_a_caller_that_left_is_no_difference() -> None:
    made = planned(words.build())
    recordings: list[Recording] = []
    async with Runtime(made, CONFIG, Recorder(made, recordings.append)) as runtime:
        async with await runtime.submit("line", Line("a b slow c"), outputs=["text"]) as reply:
            assert [(await anext(reply)).value.text for _ in range(2)] == ["A ", "B "]
        await runtime.drain()
    (recording,) = recordings
    assert recording.error is not None and recording.error.kind == "CancelledError"
    found = await again(recording, made)
    assert found.same
    cut = {
        edge.edge: (edge.recorded.size, edge.replayed.size) for edge in found.edges if edge.recorded and edge.replayed
    }
    assert cut["words.emit -> client.text"] == (4, 12)


async def test_a_host_that_died_leaves_edges_that_cannot_be_compared() -> None:
    made = planned(words.build())
    recording = await record(made, "line", Line("a b"))
    kept = tuple(edge for edge in recording.edges if not edge.edge.startswith("echo"))
    found = await again(msgspec.structs.replace(recording, edges=kept), made)
    assert found.same
    assert verdicts(found)["echo.emit -> client.audio"] == "unknown"


@CLUSTERS
async def test_stages_that_outlast_the_outputs_are_heard(cluster: Cluster) -> None:
    """The sound has ended at 'stop', and `words` goes on for 0.2 s."""
    made = planned(words.build(), cluster=cluster)
    recording = await record(made, "line", Line("a stop slow b"), outputs=["audio"])
    found = await again(recording, made)
    assert found.same and "unknown" not in verdicts(found).values()
    assert len(found.edges) == 8


# -- graphs that have changed ------------------------------------------------------------------------------------------


async def test_an_edge_that_is_gone_is_a_difference() -> None:
    made = planned(words.build())
    recording = await record(made, "line", Line("a b"))
    extra = msgspec.structs.replace(recording.edges[0], edge="split.line -> whisper.line")
    found = await again(msgspec.structs.replace(recording, edges=(*recording.edges, extra)), made)
    assert first(found) == ("split.line -> whisper.line", "gone", None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entry": "lin"}, "graph 'words' has no input 'lin'; did you mean 'line'?"),
        ({"outputs": ("txt",)}, "the request was refused: input 'line' cannot give output 'txt'; did you mean 'text'?"),
        ({"items": ((b"\xa5wrong", b""),)}, "input 'line' is of another type now: Expected `object`, got `str`"),
    ],
)
async def test_a_graph_that_cannot_take_the_request_any_more(change: dict[str, Any], message: str) -> None:
    made = planned(words.build())
    recording = msgspec.structs.replace(await record(made, "line", Line("a")), **change)
    with pytest.raises(RecordingError) as caught:
        await replay(recording, made, CONFIG)
    assert str(caught.value) == message


def test_changes_name_actors_settings_and_new_stages() -> None:
    before = planned(words.build(), "shout.mark=1", "echo.device=cpu")
    recording = msgspec.structs.replace(RECORDING, plan=before.to_json().decode())
    assert list(changes(recording, before)) == []
    graph = words.build()
    graph._stages["echo"] = msgspec.structs.replace(graph._stages["echo"], actor=Mute)
    assert list(changes(recording, planned(graph, "shout.mark=2"))) == [
        "shout.mark was '1' and is '2'",
        "echo.actor was 'tests.graphs.words:Echo' and is 'tests.test_replay:Mute'",
    ]
    assert next(changes(recording, planned(timed.build()))) == "stage letters is new"


class Mute(words.Echo):
    """Another actor with the same ports."""


# -- stages whose output depends on time -------------------------------------------------------------------------------


@CLUSTERS
async def test_what_depends_on_time_is_given_again(cluster: Cluster) -> None:
    """Recorded while text came slowly, replayed while it comes at once: without it, everything behind would differ."""
    slow = planned(timed.build(), "letters.pause_s=0.01", cluster=cluster)
    recording = await record(slow, "text", TextDelta("abcdefghij"))
    num_segments = next(edge.size for edge in recording.edges if edge.edge == "cut.emit -> shout.segments")
    assert num_segments > 1
    fast = planned(timed.build(), cluster=cluster)
    found = await again(recording, fast)
    assert found.same
    assert verdicts(found) == {
        "letters.emit -> cut.text": "same",
        "cut.emit -> shout.segments": "given",
        "shout.emit -> client.text": "same",
    }


async def test_a_stage_that_depends_on_time_can_be_run_as_well() -> None:
    recording = await record(planned(timed.build(), "letters.pause_s=0.01"), "text", TextDelta("abcdefghij"))
    found = await again(recording, planned(timed.build()), run_all=True)
    assert first(found) == ("cut.emit -> shout.segments", "differs", 0)
    assert verdicts(found)["letters.emit -> cut.text"] == "same"


async def test_a_change_behind_it_is_found_behind_it() -> None:
    recording = await record(planned(timed.build(), "letters.pause_s=0.01"), "text", TextDelta("abcdefghij"))
    found = await again(recording, planned(timed.build(), "shout.mark=?"))
    assert first(found)[:2] == ("shout.emit -> client.text", "differs")


async def test_the_stages_before_it_are_not_held_up() -> None:
    """It is given at once, but what comes in is still read: 100 letters go through an edge with 2 credits."""
    made = planned(timed.build())
    recording = await record(made, "text", TextDelta("x" * 100))
    found = await again(recording, made)
    assert found.same
    (letters,) = [edge.replayed for edge in found.edges if edge.edge == "letters.emit -> cut.text"]
    assert letters is not None and (letters.state, letters.size) == ("ended", 100)


async def test_what_it_gave_may_be_of_another_type_now() -> None:
    made = planned(timed.build())
    recording = await record(made, "text", TextDelta("abc"))
    edges = tuple(
        msgspec.structs.replace(edge, values=((b"\x01", b""),)) if edge.values else edge for edge in recording.edges
    )
    changed = msgspec.structs.replace(recording, edges=edges)
    with pytest.raises(RecordingError, match=r"^stage 'cut': what it gave is of another type now: Expected"):
        given_values(changed, made)


async def test_a_stage_behind_an_edge_that_drops_is_given_as_well() -> None:
    graph = Graph("dropping")
    letters, join = graph.stage("letters", timed.Letters), graph.stage("shout", Slow)
    graph.stream(letters, join, bound=1, policy="drop_oldest")
    graph.input(text=letters)
    graph.output(text=join)
    made = planned(graph)
    recording = await record(made, "text", TextDelta("abcdefghij"))
    sizes = {edge.edge: edge.size for edge in recording.edges}
    assert sizes["letters.emit -> shout.letters"] == 10 > sizes["shout.emit -> client.text"]
    found = await again(recording, made)
    assert found.same and verdicts(found)["shout.emit -> client.text"] == "given"


class Slow(Actor):
    async def run(self, letters: Stream[TextDelta], emit: timed.Emit[TextDelta]) -> None:
        async for letter in letters:
            await anyio.sleep(0.005)
            await emit.send(letter)


RECORDING = msgspec.convert(
    {
        "source": {},
        "profile": None,
        "began": "2026-01-01T00:00:00Z",
        "request_id": "x",
        "entry": "line",
        "outputs": [],
        "options": {},
        "deadline_s": 1.0,
        "items": [],
        "plan": "{}",
    },
    Recording,
)
"""One that nobody made."""


def test_a_request_that_never_ran_has_nothing_to_compare() -> None:
    assert compare(RECORDING, RECORDING, planned(words.build())) == Comparison((), True)
