"""What engines have in common that batch by themselves: their requests wait and run in a `RunQueue`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from omniflow.engine.base import EngineOutput, Sampling
from omniflow.engine.checks import check_length, check_rows, refuse_nothing
from omniflow.engine.queue import Reserving, RunQueue
from omniflow.engine.stats import EngineStats
from omniflow.errors import ProtocolError

if TYPE_CHECKING:
    import torch


class Row(Reserving, Protocol):
    """One request."""

    @property
    def available(self) -> int:
        """Inputs that can be computed now."""
        ...


class FedRow(Row, Protocol):
    """One request that may be open for more input."""

    open: bool
    sampling: Sampling

    @property
    def length(self) -> int:
        """Inputs so far."""
        ...

    def feed(self, rows: torch.Tensor, capacity: int) -> None:
        """Append input embeddings [n, hidden], and make room for `capacity` positions."""


R = TypeVar("R", bound=Row)
F = TypeVar("F", bound=FedRow)


class BatchingEngine(Generic[R]):
    """Base of such engines. Each has `start`, `feed` and `step` of its own, and begins a step with `_join`.

    `limit` are the positions that one request can have, prompt and answer together; `max_running`, `max_waiting` and
    `kv_tokens` are those of `RunQueue`.
    """

    counted, param = "inputs", "input"
    """What a prompt is made of, and the field of a user's request that it comes from: for errors."""

    def __init__(self, *, limit: int, max_running: int, max_waiting: int, kv_tokens: int) -> None:
        self._limit = limit
        self._queue: RunQueue[R] = RunQueue(max_running=max_running, max_waiting=max_waiting, kv_tokens=kv_tokens)

    def abort(self, request_id: str) -> None:
        """Drop a request at the next step; unknown ids are ignored."""
        self._queue.abort(request_id)

    def has_work(self) -> bool:
        """True while `step` would do something; an open request that waits for input is no work."""
        return self._queue.has_work() or any(row.available > 0 for row in self._queue.running)

    def is_reading(self) -> bool:
        """True where the next `step` reads prompts."""
        return self._queue.can_admit() or any(row.available > 1 for row in self._queue.running)

    def stats(self) -> EngineStats:
        """Counts for metrics and admission."""
        return self._queue.stats()

    def close(self) -> None:
        """Drop all requests and the model."""
        self._queue.clear()

    def _capacity(self, request_id: str, length: int, sampling: Sampling) -> int:
        """Positions that a request with a prompt of `length` may come to hold. Raises ContextLengthError."""
        check_length(request_id, length, self._limit - 1, self.counted, self.param)
        return min(length + sampling.max_tokens, self._limit)

    def _join(self) -> list[EngineOutput]:
        """Who was aborted leaves, and who waits and has room runs. What those who left are told."""
        dropped = self._queue.drop_aborted()
        for row in dropped:
            self._release(row)
        self._queue.admit()
        return [EngineOutput(row.id, (), "abort") for row in dropped]

    def _end(self, row: R) -> None:
        """`row`, which ran, is no more."""
        self._queue.end(row)
        self._release(row)

    def _release(self, row: R) -> None:
        """Free what belongs to `row` beside itself."""


class FeedingEngine(BatchingEngine[F]):
    """One whose requests may be open for more input: embeddings `width` wide."""

    def __init__(self, *, width: int, limit: int, max_running: int, max_waiting: int, kv_tokens: int) -> None:
        super().__init__(limit=limit, max_running=max_running, max_waiting=max_waiting, kv_tokens=kv_tokens)
        self._width = width

    def feed(self, request_id: str, rows: torch.Tensor, done: bool) -> None:
        """Append input embeddings [n, hidden]; `done` lets it generate. A request that has ended is ignored.

        Raises ContextLengthError where they do not fit into the model, OverloadedError where the KV cache is full.
        """
        row = self._queue.find(request_id)
        if row is None:
            return
        if not row.open:
            raise ProtocolError(f"request {request_id} is not open for more input", request_id=request_id)
        check_rows(request_id, rows, self._width)
        length = row.length + len(rows)
        if done:
            refuse_nothing(request_id, length)
        capacity = self._capacity(request_id, length, row.sampling)
        self._queue.check_growth(row, capacity)
        row.feed(rows, capacity)
        row.open = not done
