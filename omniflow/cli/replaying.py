"""`omniflow run --record` and `omniflow replay`: recordings from and to the command line."""

from __future__ import annotations

import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from omniflow import __version__
from omniflow.cli.chosen import choose, needs_of
from omniflow.cli.tables import new_table
from omniflow.config import Layer, convert
from omniflow.digest import EdgeRecord
from omniflow.errors import ConfigError, RecordingError
from omniflow.loader import from_anywhere
from omniflow.media import Options
from omniflow.planner import Cluster, Plan
from omniflow.planner import plan as make_plan
from omniflow.recording import Recorder, Recording, RecordingFolder, Source, read_recording
from omniflow.replay import Comparison, EdgeVerdict, changes, compare, replay
from omniflow.topology import CLIENT, nearest, parse_bytes
from omniflow.weights import fetch

_VERDICT_STYLES = {"same": "green", "given": "dim", "differs": "bold red", "gone": "bold red", "unknown": "yellow"}


class Keep(msgspec.Struct, frozen=True):
    """Where `run` records requests to, and how much it keeps there."""

    folder: Path
    max_files: int
    max_bytes: str


@contextmanager
def recorder_of(keep: Keep | None, plan: Plan, graph: str, layers: Sequence[Layer]) -> Iterator[Recorder | None]:
    """A recorder of all requests under `plan`, or None where none is wanted.

    Raises GraphError for what is no size, RecordingError for a folder that cannot be written.
    """
    if keep is None:
        yield None
        return
    settings: dict[str, Any] = {}
    for layer in layers:
        settings |= {key: value for key, value in layer.values.items() if not key.startswith("server.")}
    source = Source(graph=from_anywhere(graph), settings=settings, omniflow=__version__)
    with RecordingFolder(keep.folder, max_files=keep.max_files, max_bytes=parse_bytes(keep.max_bytes)) as folder:
        yield Recorder(plan, folder.keep, source=source)


class Changes(msgspec.Struct, frozen=True):
    """What `replay` does otherwise than the recording says."""

    graph: str | None
    settings: Layer
    options: tuple[str, ...]
    run_all: bool


def replay_file(file: Path, asked: Changes, cluster: Cluster, console: Console) -> bool:
    """Run the request in `file` again on `cluster` and print how it compares. True where nothing differs."""
    recorded = read_recording(file)
    reference = asked.graph or recorded.source.graph
    if not reference:
        raise RecordingError(f"{file} does not say which graph it is of; say so with --graph")
    # The settings of the recording, then those of this command: nothing else of today applies.
    chosen = choose(reference, recorded.profile, [Layer("recording", recorded.source.settings), asked.settings])
    options = changed_options(recorded.options, asked.options)
    config = chosen.configured.runtime
    plan = make_plan(chosen.spec, cluster, config)
    console.print(replay_headline(recorded, options, plan))
    fetch(need.weights for need in needs_of(chosen.spec))
    again = partial(replay, recorded, plan, config, options=options, run_all=asked.run_all)
    with console.status("running it again"):
        replayed = anyio.run(again)
    comparison = compare(recorded, replayed, plan, run_all=asked.run_all)
    console.print(comparison_view(comparison, recorded, replayed))
    console.print(conclusion(comparison), soft_wrap=True)
    return comparison.same


def changed_options(options: Options, pairs: Sequence[str]) -> Options:
    """`options` with `--option KEY=VALUE` applied. Raises ConfigError that names the key and what would pass."""
    hints = typing.get_type_hints(Options)
    values = msgspec.structs.asdict(options)
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--option {pair!r}: write it as KEY=VALUE")
        if key not in hints:
            raise ConfigError(f"a request has no option {key!r}{nearest(key, hints)}")
        values[key] = convert((text,) if key == "stop" else text, hints[key], key, "--option")
    return Options(**values)


# -- what is shown -----------------------------------------------------------------------------------------------------


def replay_headline(recording: Recording, options: Options, plan: Plan) -> RenderableType:
    """Which request this is, and what is not as it was."""
    lines = [
        Text.assemble(
            "request ", (recording.request_id, "bold"), f" of {plan.name}, {recording.began:%Y-%m-%d %H:%M:%S} UTC"
        ),
        Text(f"from {recording.entry} to {', '.join(recording.outputs)}, seed {options.seed}", style="dim"),
    ]
    if recording.source.omniflow not in ("", __version__):
        lines.append(Text(f"recorded by omniflow {recording.source.omniflow}; this is {__version__}", style="yellow"))
    given, now = msgspec.structs.asdict(recording.options), msgspec.structs.asdict(options)
    changed = [f"option {key} was {given[key]!r} and is {now[key]!r}" for key in now if given[key] != now[key]]
    lines += [Text(change, style="yellow") for change in (*changed, *changes(recording, plan))]
    return Group(*lines, "")


def comparison_view(comparison: Comparison, recorded: Recording, replayed: Recording) -> RenderableType:
    """One row an edge, in the order of the data flow; below them, how the request ended each time."""
    table = new_table("edge", "recorded", "replayed", "")
    for edge in comparison.edges:
        verdict = Text(_verdict(edge, ""), style=_VERDICT_STYLES[edge.verdict])
        table.add_row(shown(edge.edge), _carried(edge.recorded), _carried(edge.replayed), verdict)
    ends = Text.assemble(("the request ended with: ", "dim"), _end(recorded), ("; now with: ", "dim"), _end(replayed))
    given = any(edge.verdict == "given" for edge in comparison.edges)
    note = Text("given: this output depends on time, so it came from the recording; --all runs the stage", style="dim")
    return Group(table, *([note] if given else []), "", ends)


def conclusion(comparison: Comparison) -> Text:
    """The one line that says whether something differs, and where first."""
    first = comparison.first
    if first is not None:
        source = first.edge.partition(".")[0]
        unit = first.recorded.unit if first.recorded else ""
        text = f"first difference: {shown(first.edge)} {_verdict(first, unit)}"
        return Text(f"{text}; nothing before stage {source} differs", style="bold red")
    if not comparison.same_end:
        return Text("every edge carried the same, but the request ended in another way", style="bold red")
    counts = Counter(edge.verdict for edge in comparison.edges)
    text = f"no difference (edges compared: {counts['same']}, given: {counts['given']}, not comparable: "
    return Text(f"{text}{counts['unknown']})", style="bold green")


def shown(edge: str) -> str:
    """An edge as `explain` writes it."""
    source, _, target = edge.partition(" -> ")
    return f"{source} → ({target.partition('.')[2]})" if target.startswith(f"{CLIENT}.") else f"{source} → {target}"


def _carried(record: EdgeRecord | None) -> str:
    if record is None:
        return "-"
    if record.state == "skipped":
        return "skipped"
    text = f"{record.size} {record.unit}{'' if record.size == 1 else 's'}"
    return f"{text}, cut" if record.state == "cut" else text


def _verdict(edge: EdgeVerdict, unit: str) -> str:
    match edge.verdict:
        case "gone":
            return "carried nothing this time"
        case "unknown":
            opaque = (edge.recorded and edge.recorded.opaque) or (edge.replayed and edge.replayed.opaque)
            return f"cannot be compared: {opaque or 'not in the recording'}"
        case "differs" if edge.recorded is not None and edge.at is not None:
            block = edge.recorded.block
            where = f"{unit} {edge.at}" if block == 1 else f"{unit and f'{unit}s'} {edge.at}-{edge.at + block - 1}"
            return f"differs at {where.strip()}"
    return edge.verdict


def _end(recording: Recording) -> Text:
    if recording.error is None:
        return Text("all its outputs")
    stage = f" in {recording.error.stage}" if recording.error.stage else ""
    return Text(f"{recording.error.kind}{stage}: {recording.error.message}")
