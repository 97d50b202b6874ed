"""The requests of an engine that batches by itself: those that run, and those that wait for a place.

    check_new, check_room      may one more wait?
    wait(row), admit()         it waits; it runs once there is room
    abort(id), drop_aborted()  it is to leave; it left, at the next step
    end(row)                   it ran to its end

First come, first served, but urgent ones first; once `max_running` of those have overtaken others, one of the others
runs. Nobody overtakes within a line: a long prompt that waits for room gets it.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from omniflow.engine.stats import EngineStats
from omniflow.errors import OverloadedError, ProtocolError


class Reserving(Protocol):
    """One request."""

    @property
    def id(self) -> str:
        """That of the request."""
        ...

    @property
    def capacity(self) -> int:
        """Positions that it reserves while it runs; no more than `kv_tokens`."""
        ...


R = TypeVar("R", bound=Reserving)


class RunQueue(Generic[R]):
    """See the module's docstring. `kv_tokens` bounds the positions that all running requests reserve together,
    `max_running` and `max_waiting` their number.
    """

    def __init__(self, *, max_running: int, max_waiting: int, kv_tokens: int) -> None:
        self._max_running, self._max_waiting, self._kv_tokens = max_running, max_waiting, kv_tokens
        self.running: list[R] = []
        """In the order in which they are served."""
        self._urgent: deque[R] = deque()
        self._others: deque[R] = deque()
        self._overtakings = 0
        """Urgent requests that ran since others wait, or one of them ran."""
        self._aborted: dict[str, None] = {}
        """Ids, in order."""

    def find(self, request_id: str) -> R | None:
        """The request of that id that runs or waits."""
        rows = (*self.running, *self._urgent, *self._others)
        return next((row for row in rows if row.id == request_id), None)

    def check_new(self, request_id: str) -> None:
        """Raises ProtocolError where a request of that id runs or waits already."""
        if self.find(request_id) is not None:
            raise ProtocolError(f"request {request_id} runs already", request_id=request_id)

    def check_room(self, request_id: str) -> None:
        """Raises OverloadedError where no further request may wait."""
        num_waiting = self._num_waiting()
        if num_waiting >= self._max_waiting:
            raise OverloadedError(
                f"{num_waiting} generations are waiting already", request_id=request_id, retry_after_s=1.0
            )

    def check_growth(self, row: R, capacity: int) -> None:
        """Raises OverloadedError where `row` runs and there is no room for it to reserve `capacity` positions."""
        if row in self.running and self._reserved() - row.capacity + capacity > self._kv_tokens:
            raise OverloadedError("no room for more input in the KV cache", request_id=row.id, retry_after_s=1.0)

    def wait(self, row: R, urgent: bool) -> None:
        """`row` waits from now on; `check_new` and `check_room` have passed it."""
        (self._urgent if urgent else self._others).append(row)

    def can_admit(self) -> bool:
        """True while `admit` would do something."""
        waiting = self._next()
        return (
            bool(waiting)
            and len(self.running) < self._max_running
            and self._reserved() + waiting[0].capacity <= self._kv_tokens
        )

    def admit(self) -> list[R]:
        """Let those run that there is room for; returns them."""
        admitted = []
        while self.can_admit():
            waiting = self._next()
            self._overtakings = self._overtakings + 1 if waiting is self._urgent and self._others else 0
            admitted.append(waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def put_last(self, row: R) -> None:
        """`row`, which runs, is served after all others that run."""
        self.running.remove(row)
        self.running.append(row)

    def end(self, row: R) -> None:
        """`row`, which ran, is no more."""
        self.running.remove(row)

    def abort(self, request_id: str) -> None:
        """It is to leave with the next `drop_aborted`; unknown ids are ignored."""
        if self.find(request_id) is not None:
            self._aborted[request_id] = None

    def drop_aborted(self) -> list[R]:
        """Those that were to leave and have not ended since: they are no more."""
        dropped = [row for row in map(self.find, self._aborted) if row is not None]
        self._aborted.clear()
        for row in dropped:
            next(rows for rows in (self.running, self._urgent, self._others) if row in rows).remove(row)
        return dropped

    def has_work(self) -> bool:
        """True where the next step has someone to drop or to admit."""
        return bool(self._aborted) or self.can_admit()

    def stats(self) -> EngineStats:
        """Counts for metrics and admission."""
        return EngineStats(len(self.running), self._num_waiting(), self._reserved(), self._kv_tokens)

    def clear(self) -> None:
        """Forget all."""
        for rows in (self.running, self._urgent, self._others, self._aborted):
            rows.clear()

    def _num_waiting(self) -> int:
        return len(self._urgent) + len(self._others)

    def _reserved(self) -> int:
        return sum(row.capacity for row in self.running)

    def _next(self) -> deque[R]:
        """Whose first is to run next; empty where nobody waits."""
        overtakes = self._urgent and (not self._others or self._overtakings < self._max_running)
        return self._urgent if overtakes else self._others
