"""The run queue, alone and against a model of it under any series of calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniflow.engine.queue import RunQueue
from omniflow.engine.stats import EngineStats
from omniflow.errors import OverloadedError, ProtocolError

PLACES, WAITING, POSITIONS = 2, 4, 10


@dataclass(eq=False)
class Row:
    id: str
    capacity: int = 1
    urgent: bool = False
    overtaken: int = 0


@dataclass
class Engine:
    """What an engine does with its queue, and what became of each request."""

    places: int = PLACES
    started: list[Row] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    ran: list[Row] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue: RunQueue[Row] = RunQueue(max_running=self.places, max_waiting=WAITING, kv_tokens=POSITIONS)

    def start(self, row: Row) -> None:
        self.queue.check_new(row.id)
        try:
            self.queue.check_room(row.id)
        except OverloadedError:
            self.refused.append(row.id)
        else:
            self.queue.wait(row, row.urgent)
            self.started.append(row)

    def step(self) -> None:
        self.aborted += [row.id for row in self.queue.drop_aborted()]
        for row in self.queue.admit():
            waiting = self.first_other()
            if row.urgent and waiting is not None:
                waiting.overtaken += 1
            self.ran.append(row)

    def end(self, index: int) -> None:
        if self.queue.running:
            row = self.queue.running[index % len(self.queue.running)]
            self.queue.end(row)
            self.ended.append(row.id)

    def first_other(self) -> Row | None:
        gone = {*self.ended, *self.aborted, *(row.id for row in (*self.ran, *self.queue.running))}
        return next((row for row in self.started if not row.urgent and row.id not in gone), None)


Op = tuple[str, int, bool]
CALLS = ["start", "start", "start", "step", "step", "end", "abort", "last"]
OPS = st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, POSITIONS - 1), st.booleans()), max_size=60)
"""What is called, how many positions (or which request) it is about, and whether that is urgent."""


def run(ops: list[Op], places: int) -> Engine:
    engine = Engine(places)
    for number, (what, size, urgent) in enumerate(ops):
        match what:
            case "start":
                engine.start(Row(f"r{number}", 1 + size, urgent))
            case "step":
                engine.step()
            case "end":
                engine.end(size)
            case "abort" if engine.started:
                engine.queue.abort(engine.started[-1 - size % len(engine.started)].id)
            case "last" if engine.queue.running:
                engine.queue.put_last(engine.queue.running[size % len(engine.queue.running)])
        check_bounds(engine)
    return engine


def check_bounds(engine: Engine) -> None:
    stats = engine.queue.stats()
    assert stats.num_running == len(engine.queue.running) <= engine.places
    assert stats.kv_tokens_used == sum(row.capacity for row in engine.queue.running) <= stats.kv_tokens_total
    assert stats.num_waiting <= WAITING
    gone = len(engine.ended) + len(engine.aborted)
    assert stats.num_running + stats.num_waiting + gone == len(engine.started)
    assert all(row.overtaken <= engine.places for row in engine.started)


@given(OPS, st.integers(1, 3))
def test_every_request_ends_once_within_the_bounds(ops: list[Op], places: int) -> None:
    engine = run(ops, places)
    while engine.queue.has_work() or engine.queue.running:
        engine.step()
        assert not engine.queue.has_work()
        engine.end(0)
        check_bounds(engine)
    assert sorted(engine.ended + engine.aborted) == sorted(row.id for row in engine.started)
    assert engine.queue.stats() == EngineStats(0, 0, 0, POSITIONS)


@given(OPS, st.integers(1, 3))
def test_a_line_keeps_its_order(ops: list[Op], places: int) -> None:
    engine = run(ops, places)
    ran = {row.id for row in engine.ran}
    for urgent in (False, True):
        line = [row.id for row in engine.started if row.urgent == urgent and row.id in ran]
        assert [row.id for row in engine.ran if row.urgent == urgent] == line


@given(OPS)
def test_who_is_aborted_leaves_at_the_next_step(ops: list[Op]) -> None:
    engine = run(ops, PLACES)
    held = [row.id for row in engine.started if row.id not in {*engine.ended, *engine.aborted}]
    for id in (*held, "nobody", *held):
        engine.queue.abort(id)
    assert engine.queue.has_work() == bool(held)
    engine.step()
    assert sorted(engine.ended + engine.aborted) == sorted(row.id for row in engine.started)
    assert not engine.queue.has_work()


def queue_of(*rows: Row, max_running: int = PLACES, max_waiting: int = WAITING) -> RunQueue[Row]:
    queue: RunQueue[Row] = RunQueue(max_running=max_running, max_waiting=max_waiting, kv_tokens=POSITIONS)
    for row in rows:
        queue.wait(row, row.urgent)
    return queue


def test_urgent_ones_run_first_until_as_many_as_there_are_places_have_overtaken() -> None:
    rows = [Row(id, POSITIONS, id.startswith("u")) for id in ("a", "b", "u0", "u1", "u2", "u3", "u4")]
    queue = queue_of(*rows, max_waiting=len(rows))
    order = []
    while queue.has_work():
        (row,) = queue.admit()
        order.append(row.id)
        queue.end(row)
    assert order == ["u0", "u1", "a", "u2", "u3", "b", "u4"]


def test_a_long_one_that_waits_for_room_is_not_passed_by_short_ones_behind_it() -> None:
    first, long, short = Row("first", 2), Row("long", 9), Row("short", 1)
    queue = queue_of(first, long, short)
    assert queue.admit() == [first] and not queue.has_work()
    queue.end(first)
    assert queue.admit() == [long, short]


def test_the_same_id_twice_and_more_than_may_wait_are_refused() -> None:
    queue = queue_of(Row("a"), Row("b"), max_waiting=2)
    with pytest.raises(ProtocolError, match="request a runs already"):
        queue.check_new("a")
    with pytest.raises(OverloadedError, match="2 generations are waiting already") as raised:
        queue.check_room("c")
    assert (raised.value.request_id, raised.value.retry_after_s) == ("c", 1.0)
    queue.admit()
    queue.check_room("c")
    with pytest.raises(ProtocolError, match="request a runs already"):
        queue.check_new("a")


def test_one_that_runs_grows_as_far_as_the_others_let_it() -> None:
    a, b, c = Row("a", 4), Row("b", 4), Row("c", 1)
    queue = queue_of(a, b, c)
    queue.admit()
    queue.check_growth(a, 6)
    queue.check_growth(c, POSITIONS)  # it waits, and reserves nothing yet
    with pytest.raises(OverloadedError, match="no room for more input in the KV cache"):
        queue.check_growth(a, 7)


def test_one_that_ended_since_it_was_to_leave_is_not_told_again() -> None:
    queue = queue_of(Row("a"))
    (row,) = queue.admit()
    queue.abort("a")
    queue.end(row)
    assert queue.has_work() and queue.drop_aborted() == [] and not queue.has_work()


def test_nothing_is_left_after_clear() -> None:
    queue = queue_of(Row("a"), Row("b", urgent=True), Row("c"), Row("d", urgent=True))
    queue.admit()
    queue.abort("c")
    queue.clear()
    assert queue.find("a") is None and not queue.has_work() and queue.stats() == EngineStats(0, 0, 0, POSITIONS)
