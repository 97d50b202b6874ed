"""Recordings: what is in one, what becomes of its file, and how much of a disk they may take."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omniflow import observer
from omniflow.actor import Actor, Context
from omniflow.digest import EdgeRecord, pack
from omniflow.errors import CancelledError, InvalidInputError, RecordingError, RequestError, StageDiedError
from omniflow.graph import Graph
from omniflow.media import Options, Segment, TextDelta
from omniflow.planner import Cluster, plan
from omniflow.recording import (
    Recorder,
    Recording,
    RecordingFolder,
    Source,
    _checksum,
    encode_recording,
    read_recording,
)
from omniflow.runtime import Runtime

from .graphs import timed, tokens, words
from .graphs.words import Line
from .running import CPU, INLINE, running, settled, unstarted
from .waiting import HANGS_S

CLUSTERS = pytest.mark.parametrize("cluster", [INLINE, CPU], ids=["inline", "processes"])
LINE_EDGES = {
    "split.line -> shout.line",
    "split.line -> join.line",
    "split.question -> count.lines",
    "shout.result -> join.shouted",
    "count.result -> join.counted",
    "join.result -> words.joined",
    "words.emit -> echo.text",
    "words.emit -> client.text",
    "words.result -> client.num_words",
    "echo.emit -> client.audio",
}


async def recorded(
    *requests: Callable[[Runtime], Any], cluster: Cluster = INLINE, graph: Graph | None = None
) -> list[Recording]:
    """What is recorded of `requests`, one after the other, in the words graph."""
    found: list[Recording] = []
    made = unstarted(graph or words.build(), cluster)
    async with Runtime(made.plan, made.config, Recorder(made.plan, found.append)) as runtime:
        for request in requests:
            await request(runtime)
            await settled(runtime)
    return found


def asks(entry: str, value: object, **how: Any) -> Callable[[Runtime], Any]:
    async def ask(runtime: Runtime) -> None:
        try:
            await (await runtime.submit(entry, value, **how)).collect()
        except RequestError:
            pass

    return ask


def states(recording: Recording) -> dict[str, tuple[str, int]]:
    return {edge.edge: (edge.state, edge.size) for edge in recording.edges}


# -- what is recorded --------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@CLUSTERS
async def test_a_recording_holds_the_request_and_every_edge(cluster: Cluster) -> None:
    options = Options(seed=7, speed=1.5)
    (found,) = await recorded(asks("line", Line("a b c?"), options=options, request_id="mine"), cluster=cluster)
    assert (found.entry, found.outputs, found.request_id) == ("line", ("text", "audio", "num_words"), "mine")
    assert (found.options, found.deadline_s, found.error, found.profile) == (options, 200.0, None, None)
    assert found.items == ((msgspec.msgpack.encode(Line("a b c?")), b""),)
    assert msgspec.json.decode(found.plan) == msgspec.json.decode(plan(words.build().spec(), cluster).to_json())
    assert abs(datetime.now(UTC) - found.began) < timedelta(seconds=30)
    assert states(found) == dict.fromkeys(LINE_EDGES, ("ended", 1)) | {
        "words.emit -> echo.text": ("ended", len("A B C?! ")),
        "words.emit -> client.text": ("ended", len("A B C?! ")),
        "echo.emit -> client.audio": ("ended", 3 * 2400),
    }


@pytest.mark.anyio
@CLUSTERS
async def test_skips_and_pruned_edges(cluster: Cluster) -> None:
    plain, few = await recorded(
        asks("line", Line("no question")), asks("line", Line("a"), outputs=["num_words"]), cluster=cluster
    )
    assert states(plain)["split.question -> count.lines"] == ("skipped", 0)
    assert states(plain)["count.result -> join.counted"] == ("skipped", 0)
    assert few.outputs == ("num_words",)
    gone = {"words.emit -> echo.text", "words.emit -> client.text", "echo.emit -> client.audio"}
    assert set(states(few)) == LINE_EDGES - gone


@pytest.mark.anyio
async def test_a_request_without_a_seed_gets_one() -> None:
    ask = asks("line", Line("a"))
    found = await recorded(ask, ask, asks("line", Line("a"), options=Options(speed=2.0)))
    seeds = [recording.options.seed for recording in found]
    assert len({*seeds}) == 3 and None not in seeds
    assert found[2].options.speed == 2.0


@pytest.mark.anyio
async def test_the_stages_get_the_seed_that_is_recorded() -> None:
    class Seed(Actor):
        async def run(self, line: Line, ctx: Context) -> int:
            assert ctx.options.seed is not None
            return ctx.options.seed

    graph = Graph("seeds")
    stage = graph.stage("seed", Seed)
    graph.input(line=stage)
    graph.output(seed=stage)
    seen: list[int] = []

    async def ask(runtime: Runtime) -> None:
        seen.append((await (await runtime.submit("line", Line("a"))).collect())["seed"])

    (found,) = await recorded(ask, graph=graph)
    assert seen == [found.options.seed]


@pytest.mark.anyio
async def test_all_items_of_a_stream_input_are_recorded() -> None:
    items = [TextDelta(f"word {number} ") for number in range(40)]
    (found,) = await recorded(asks("speech", items))
    assert [msgspec.msgpack.decode(body, type=TextDelta) for body, _ in found.items] == items
    assert states(found) == {"echo.emit -> client.audio": ("ended", 40 * 2400)}


@pytest.mark.anyio
@CLUSTERS
async def test_a_failed_request_is_recorded_as_far_as_it_came(cluster: Cluster) -> None:
    (found,) = await recorded(asks("line", Line("bad?")), cluster=cluster)
    assert (found.error and found.error.kind, found.error and found.error.stage) == ("InvalidInputError", "count")
    assert states(found)["split.question -> count.lines"] == ("ended", 1)
    assert "join.result -> words.joined" not in states(found)


@pytest.mark.anyio
@CLUSTERS
async def test_a_cancelled_request_is_recorded_as_cut(cluster: Cluster) -> None:
    async def leave(runtime: Runtime) -> None:
        async with await runtime.submit("line", Line("a b hang c")) as reply:
            while (await anext(reply)).name != "audio":
                pass

    (found,) = await recorded(leave, cluster=cluster)
    assert found.error is not None and found.error.kind == CancelledError.__name__
    assert states(found)["words.emit -> client.text"] == ("cut", 4)
    assert states(found)["join.result -> words.joined"] == ("ended", 1)


@pytest.mark.anyio
async def test_a_reader_that_leaves_early_cuts_its_own_edge_only() -> None:
    (found,) = await recorded(asks("line", Line("a stop " + "more " * 50)))
    assert states(found)["words.emit -> client.text"][0] == "ended"
    assert states(found)["words.emit -> echo.text"][0] == "cut"
    assert found.error is None


@pytest.mark.anyio
async def test_what_a_dead_host_had_seen_is_unknown() -> None:
    (found,) = await recorded(asks("line", Line("a killecho")), cluster=CPU)
    assert found.error is not None and found.error.kind == StageDiedError.__name__
    assert "words.emit -> echo.text" in states(found)
    assert "echo.emit -> client.audio" not in states(found)


@pytest.mark.anyio
async def test_a_long_account_comes_in_parts() -> None:
    """20,000 tokens are 160 KB of digests on each edge; a control message holds 128 KB."""
    (found,) = await recorded(asks("number", 20_000), cluster=CPU, graph=tokens.build())
    assert states(found) == {
        "count.emit -> pass_on.tokens": ("ended", 20_000),
        "pass_on.emit -> client.tokens": ("ended", 20_000),
    }
    assert found.edges[0].digests == found.edges[1].digests
    assert len(found.edges[0].digests) == 160_000


@pytest.mark.anyio
async def test_what_a_stage_that_depends_on_time_gave_is_kept_whole() -> None:
    (found,) = await recorded(asks("text", TextDelta("abc")), graph=timed.build())
    kept = {edge.edge: edge.values for edge in found.edges if edge.values is not None}
    assert kept == {"cut.emit -> shout.segments": (pack(Segment("abc", 0)),)}


@pytest.mark.anyio
async def test_too_much_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "_MOST_VALUE_BYTES", 10)
    (found,) = await recorded(asks("text", TextDelta("abcdefghijkl")), graph=timed.build())
    assert [edge.values for edge in found.edges] == [None] * 3
    assert states(found)["cut.emit -> shout.segments"] == ("ended", 1)


@pytest.mark.anyio
async def test_values_without_a_wire_form_fail_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Inside one process anything may travel."""
    graph = Graph("opaque")
    first, second = graph.stage("first", Wrap), graph.stage("second", Unwrap)
    graph.result(first, second)
    graph.input(number=first, thing=second)
    graph.output(number=second)
    found = await recorded(asks("number", 3), asks("thing", Thing(4), request_id="mine"), graph=graph)
    assert len(found) == 1
    assert {edge.edge: edge.opaque for edge in found[0].edges} == {
        "first.result -> second.thing": "a value of type Thing cannot travel between processes",
        "second.result -> client.number": "",
    }
    assert caplog.messages == ["request mine is not recorded: a value of type Thing cannot travel between processes"]


def test_what_cannot_be_kept_fails_nothing() -> None:
    """A lone surrogate has a digest, but no wire form, which it needs nowhere inside one process."""
    edge = unstarted(timed.build()).plan.outputs["text"]
    seen = observer._Seen(edge, kept=True)
    seen.add(TextDelta("\ud800"))
    found = seen.record(edge, cut=False)
    assert (found.size, found.values, found.opaque) == (1, None, "")


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number


class Wrap(Actor):
    async def run(self, number: int) -> Thing:
        return Thing(number)


class Unwrap(Actor):
    async def run(self, thing: Thing) -> int:
        return thing.number


@pytest.mark.anyio
async def test_without_a_recorder_nothing_is_watched() -> None:
    async with running(words.build()) as runtime:
        await asks("line", Line("a"))(runtime)
        assert [host._observer for host, _ in runtime._inline.values()] == [None]


@pytest.mark.anyio
async def test_nothing_of_a_request_stays() -> None:
    found: list[Recording] = []
    runtime = unstarted(words.build())
    recorder = Recorder(runtime.plan, found.append)
    async with Runtime(runtime.plan, runtime.config, recorder) as runtime:
        for text in ("a b?", "bad?", "bug", ""):
            await asks("line", Line(text))(runtime)
        reply = await runtime.submit("line", Line("a hang"))
        await reply.cancel()
        await settled(runtime)
        (host, _), *_ = runtime._inline.values()
        assert host._observer is not None and host._observer._requests == {}
        assert recorder._open == recorder._parts == {}
    assert len(found) == 5


# -- files -------------------------------------------------------------------------------------------------------------


def a_recording(number: int = 0, size: int = 100, request_id: str | None = None) -> Recording:
    return Recording(
        source=Source(graph="/some/graph.py", settings={"a.b": 1, "a.c": "x"}, omniflow="0.1"),
        profile="loud",
        began=datetime(2026, 1, 2, tzinfo=UTC) + timedelta(seconds=number),
        request_id=request_id or f"request {number}/a",
        entry="line",
        outputs=("text",),
        options=Options(seed=5, stop=("x",)),
        deadline_s=3.0,
        items=((b"\x00" * size, bytes(8)),),
        plan="{}",
        edges=(EdgeRecord(edge="a.x -> b.y", state="cut", unit="token", block=1, size=2, digests=b"12345678"),),
        error=InvalidInputError("no", stage="a", param="b").info(),
    )


def written(folder: Path, *recordings: Recording, **limits: int) -> list[Path]:
    with RecordingFolder(folder, **limits) as open_folder:
        for recording in recordings:
            open_folder.keep(recording)
    return sorted(folder.iterdir())


def test_a_recording_comes_back_from_its_file(tmp_path: Path) -> None:
    (file,) = written(tmp_path / "new" / "folder", a_recording())
    assert file.name == "20260102T000000.000000Z-request_0_a.recording"
    assert read_recording(file) == a_recording()


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (file,) = written(tmp_path / "new", a_recording())
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def damaged(data: bytes) -> dict[str, tuple[bytes, str]]:
    middle = len(data) // 2
    return {
        "empty": (b"", "is no recording of omniflow"),
        "foreign": (b"RIFF\x00\x00\x00\x00WAVE", "is no recording of omniflow"),
        "no number": (data.replace(b"recording 1", b"recording x", 1), "is no recording of omniflow"),
        "cut": (data[:middle], "is damaged: it was cut short, or changed after it was written"),
        "cut head": (data[:25], "is damaged: it was cut short, or changed after it was written"),
        "flipped": (
            data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "is damaged: it was cut short, or changed after it was written",
        ),
        "longer": (data + b"x", "is damaged: it was cut short, or changed after it was written"),
        "newer": (
            data.replace(b"recording 1", b"recording 2", 1),
            "is a recording of format 2, and this omniflow reads format 1; replay it with the omniflow that wrote it",
        ),
        "other fields": (
            b"omniflow recording 1\n" + _checksum(b"\x80") + b"\x80",
            "cannot be read by this omniflow: Object missing required field `source`",
        ),
    }


@pytest.mark.parametrize("what", damaged(b"x" * 100))
def test_files_that_are_none(tmp_path: Path, what: str) -> None:
    bad, why = damaged(encode_recording(a_recording()))[what]
    file = tmp_path / "file"
    file.write_bytes(bad)
    with pytest.raises(RecordingError) as caught:
        read_recording(file)
    assert str(caught.value) == f"{file} {why}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"^cannot read .*nothing: No such file or directory$"):
        read_recording(tmp_path / "nothing")
    with pytest.raises(RecordingError, match=r"^cannot read .*: Is a directory$"):
        read_recording(tmp_path)


def test_the_newest_files_stay(tmp_path: Path) -> None:
    files = written(tmp_path, *(a_recording(number) for number in range(10)), max_files=3)
    assert [read_recording(file).request_id for file in files] == ["request 7/a", "request 8/a", "request 9/a"]
    files = written(tmp_path, a_recording(10), max_files=2)
    assert [read_recording(file).request_id for file in files] == ["request 9/a", "request 10/a"]


def test_their_bytes_are_bounded(tmp_path: Path) -> None:
    one = len(encode_recording(a_recording(0, 10_000)))
    files = written(tmp_path, *(a_recording(number, 10_000) for number in range(9)), max_bytes=3 * one + 100)
    assert [file.name[13:15] for file in files] == ["06", "07", "08"]
    files = written(tmp_path, a_recording(9, 20_000), max_bytes=3 * one + 100)
    assert [file.name[13:15] for file in files] == ["08", "09"]


def test_one_that_is_too_large_is_lost_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = written(tmp_path, a_recording(0), a_recording(1, 100_000), a_recording(2), max_bytes=50_000)
    assert [read_recording(file).request_id for file in files] == ["request 0/a", "request 2/a"]
    (message,) = caplog.messages
    assert message.startswith("a recording is lost: request request 1/a takes 100")


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    mine = {"notes.txt", "a.recording", "20260101T000000.recording", "20250101T000000.000000Z-x.recording.txt"}
    for name in mine:
        (tmp_path / name).write_text("mine")
    old = tmp_path / "20250101T000000.000000Z-x.recording.part"
    old.write_text("what a killed process left")
    files = written(tmp_path, a_recording(0), a_recording(1), max_files=1)
    assert {file.name for file in files} == mine | {"20260102T000001.000000Z-request_1_a.recording"}


def test_ids_of_callers_make_no_paths(tmp_path: Path) -> None:
    (file,) = written(tmp_path, a_recording(0, request_id="../../etc/passwd\n" + "x" * 500))
    assert file.name == f"20260102T000000.000000Z-______etc_passwd_{'x' * 23}.recording"


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RecordingError, match=r"^cannot record to .*file: File exists$"):
        RecordingFolder(tmp_path / "file")
    with pytest.raises(RecordingError, match=r"^cannot record to .*below: Not a directory$"):
        RecordingFolder(tmp_path / "file" / "below")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(RecordingError, match=r"^cannot record to .*: Permission denied$"):
        RecordingFolder(tmp_path)


def test_a_disk_that_fails_is_logged_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert written(tmp_path, a_recording(0)) == []
    assert caplog.messages == ["a recording is lost: [Errno 28] No space left on device"]
    assert len(written(tmp_path, a_recording(0))) == 1


def test_a_slow_disk_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(RecordingFolder, "_make_room", lambda *_: go_on.wait(HANGS_S))
    with RecordingFolder(tmp_path) as folder:
        for number in range(70):
            folder.keep(a_recording(number))
        go_on.set()
    assert len(list(tmp_path.iterdir())) == 64
    assert caplog.messages == [
        f"request request {number}/a is not recorded: the disk is too slow" for number in range(64, 70)
    ]


def test_a_disk_that_keeps_up_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RecordingFolder(tmp_path) as folder:
        for number in range(130):
            folder.keep(a_recording(number))
            if number % 50 == 0:
                folder._writer.submit(lambda: None).result()  # the thread has come so far
    assert len(list(tmp_path.iterdir())) == 130 and caplog.messages == []


@pytest.mark.anyio
@CLUSTERS
@pytest.mark.usefixtures("nothing_left")
async def test_from_a_request_to_its_file(cluster: Cluster, tmp_path: Path) -> None:
    found = unstarted(words.build(), cluster)
    with RecordingFolder(tmp_path) as folder:
        async with Runtime(found.plan, found.config, Recorder(found.plan, folder.keep)) as runtime:
            await asks("line", Line("a b?"), request_id="mine")(runtime)
            await runtime.drain()
    (name,) = os.listdir(tmp_path)
    assert set(states(read_recording(tmp_path / name))) == LINE_EDGES
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("recordings")] == []
