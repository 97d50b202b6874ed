"""Runs a recorded request again, and finds the first edge that carries something else than it did."""

from __future__ import annotations

import graphlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from omniflow.config import RuntimeConfig
from omniflow.digest import EdgeRecord, Packed, first_difference, unpack
from omniflow.errors import RecordingError, RequestError
from omniflow.media import Options
from omniflow.observer import Given, edge_name, timed_stages
from omniflow.planner.plan import CLIENT, Plan
from omniflow.recording import Recorder, Recording
from omniflow.runtime import Runtime
from omniflow.topology import nearest

Verdict = Literal["same", "given", "differs", "gone", "unknown"]


class EdgeVerdict(NamedTuple):
    """How one edge compares. `at`: the unit from which on it differs, exact to `recorded.block` units.

    `given`: its source was not run, because its output depends on time. `gone`: nothing was recorded of it this time.
    `unknown`: nothing was recorded of it the first time, or it carries what has no wire form.
    """

    edge: str
    verdict: Verdict
    recorded: EdgeRecord | None
    replayed: EdgeRecord | None
    at: int | None = None


class Comparison(NamedTuple):
    """Two runs of a request. `edges` are in the order of the data flow; `same_end`: both ended well, or alike."""

    edges: tuple[EdgeVerdict, ...]
    same_end: bool

    @property
    def first(self) -> EdgeVerdict | None:
        """The first edge that differs: its source got the same as before, and gave something else."""
        return next((edge for edge in self.edges if edge.verdict in ("differs", "gone")), None)

    @property
    def same(self) -> bool:
        """True where nothing differs."""
        return self.first is None and self.same_end


async def replay(
    recording: Recording,
    plan: Plan,
    config: RuntimeConfig | None = None,
    *,
    options: Options | None = None,
    run_all: bool = False,
) -> Recording:
    """Run the request of `recording` under `plan`, alone; gives the recording of this run.

    `options` replace the recorded ones. Stages whose output depends on time (`Actor.timed`) give what they gave in the
    recording, unless `run_all`. Raises RecordingError where the graph cannot take the request any more.
    """
    items = _items(recording, plan)
    found: list[Recording] = []
    given = {} if run_all else given_values(recording, plan)
    recorder = Recorder(plan, found.append, source=recording.source, given=given)
    refused: RequestError | None = None
    async with Runtime(plan, config, recorder) as runtime:
        try:
            reply = await runtime.submit(
                recording.entry,
                items,
                outputs=recording.outputs,
                options=options or recording.options,
                deadline_s=max(recording.deadline_s, runtime.config.deadline_s),
                request_id=recording.request_id,
            )
            async with reply:
                async for _ in reply:
                    pass
        except RequestError as error:
            refused = error
        await runtime.drain()  # hosts tell what left them when they have closed the request
    if not found:
        raise RecordingError(f"the request was refused: {refused}")
    return found[0]


def given_values(recording: Recording, plan: Plan) -> dict[str, tuple[Packed, ...]]:
    """What stages whose output depends on time gave, by stage. Raises RecordingError where the type is another now."""
    found: dict[str, tuple[Packed, ...]] = {}
    records = {record.edge: record for record in recording.edges}
    timed = timed_stages(plan.graph.stages, plan.edges)
    for edge in plan.edges:
        record = records.get(edge_name(edge))
        if edge.source not in timed or record is None or record.values is None:
            continue
        # Readers of the same port may have left at different times: the longest record is the whole.
        if len(record.values) >= len(found.get(edge.source, ())):
            found[edge.source] = record.values
            Given(edge.source, plan.graph.stage(edge.source).ports, record.values)
    return found


def compare(recorded: Recording, replayed: Recording, plan: Plan, *, run_all: bool = False) -> Comparison:
    """Compare two runs, edge by edge, in the order of the data flow of `plan`."""
    given = {} if run_all else given_values(recorded, plan)
    before = {record.edge: record for record in recorded.edges}
    after = {record.edge: record for record in replayed.edges}
    verdicts = [
        _compare_edge(edge, before.get(edge), after.get(edge), source in given)
        for edge, source in _in_order(plan)
        if edge in before or edge in after
    ]
    known = {verdict.edge for verdict in verdicts}
    verdicts += [_compare_edge(edge, record, None, False) for edge, record in before.items() if edge not in known]
    return Comparison(tuple(verdicts), _same_end(recorded, replayed))


def changes(recorded: Recording, plan: Plan) -> Iterator[str]:
    """What of the stages is not as it was when the request was recorded, a line each."""
    before = {stage["name"]: stage for stage in msgspec.json.decode(recorded.plan)["stages"]}
    for stage in plan.as_dict()["stages"]:
        old = before.get(stage["name"])
        if old is None:
            yield f"stage {stage['name']} is new"
            continue
        values = [(key, old.get(key), stage[key]) for key in ("actor", "device", "tp", "absent")]
        settings = sorted(old["settings"].keys() | stage["settings"].keys())
        values += [(key, old["settings"].get(key), stage["settings"].get(key)) for key in settings]
        yield from (
            f"{stage['name']}.{key} was {_text(was)} and is {_text(now)}" for key, was, now in values if was != now
        )


def _text(value: Any) -> str:
    return "not set" if value is None else repr(value)


def _items(recording: Recording, plan: Plan) -> list[Any]:
    edge = plan.inputs.get(recording.entry)
    if edge is None:
        raise RecordingError(
            f"graph {plan.name!r} has no input {recording.entry!r}{nearest(recording.entry, plan.inputs)}"
        )
    try:
        items = [unpack(edge.type, each) for each in recording.items]
    except (msgspec.ValidationError, TypeError) as error:
        raise RecordingError(f"input {recording.entry!r} is of another type now: {error}") from None
    return items if edge.kind == "stream" else items[0]


def _in_order(plan: Plan) -> list[tuple[str, str]]:
    """Name and source of every edge, those first whose source depends on nothing that follows."""
    sources: dict[str, list[str]] = {stage.name: [] for stage in plan.graph.stages}
    for edge in plan.graph.edges:
        if edge.loop is None:
            sources[edge.target].append(edge.source)
    ranks = {name: rank for rank, name in enumerate(graphlib.TopologicalSorter(sources).static_order())}
    edges = sorted((edge for edge in plan.edges if edge.source != CLIENT), key=lambda edge: ranks[edge.source])
    return [(edge_name(edge), edge.source) for edge in edges]


def _compare_edge(edge: str, recorded: EdgeRecord | None, replayed: EdgeRecord | None, given: bool) -> EdgeVerdict:
    if recorded is None or recorded.opaque or (replayed is not None and replayed.opaque):
        return EdgeVerdict(edge, "unknown", recorded, replayed)
    if replayed is None:
        return EdgeVerdict(edge, "gone", recorded, None)
    if (recorded.unit, recorded.block) != (replayed.unit, replayed.block):
        return EdgeVerdict(edge, "differs", recorded, replayed, 0)
    at = first_difference(recorded, replayed)
    if at is not None:
        return EdgeVerdict(edge, "differs", recorded, replayed, at)
    return EdgeVerdict(edge, "given" if given else "same", recorded, replayed)


def _same_end(recorded: Recording, replayed: Recording) -> bool:
    """A caller that went away, or a deadline, is no result of the graph: nothing can be compared then."""
    before, after = recorded.error, replayed.error
    if before is not None and before.kind in ("CancelledError", "DeadlineError"):
        return True
    return (before and (before.kind, before.stage)) == (after and (after.kind, after.stage))
