"""The answer to one request: its outputs as they arrive, its one end, and what is still open for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import anyio

from omniflow.admission import Place
from omniflow.errors import CancelledError, ProtocolError, RequestError, error_from_info
from omniflow.inputs import Kept
from omniflow.mailbox import Credits
from omniflow.messages import Waiting
from omniflow.planner.plan import PlannedEdge


class Output(NamedTuple):
    """One item of a named output."""

    name: str
    value: Any


class RequestPlan(NamedTuple):
    """What one kind of request needs, worked out once."""

    entry: PlannedEdge
    exits: dict[int, PlannedEdge]
    hosts: tuple[str, ...]
    stages: frozenset[str]
    replays: frozenset[str] = frozenset()
    """Hosts whose death makes it run again."""


class RequestTable(Protocol):
    """What a reply needs of the runtime."""

    def give_credit(self, exit: PlannedEdge, request: int, count: int) -> None:
        """The caller has taken items of an output."""

    def forget_inputs(self, reply: Reply) -> None:
        """The caller has something of the request, so it cannot run again."""

    def end_request(self, reply: Reply, error: RequestError) -> None:
        """End a request early, in every host that it touched; does nothing once it has ended."""


class Reply(AsyncIterator[Output]):
    """The answer to one request: iterate over its outputs; leave `async with` early to cancel it."""

    def __init__(
        self,
        table: RequestTable,
        number: int,
        request_id: str,
        plan: RequestPlan,
        deadline_s: float,
        place: Place,
    ) -> None:
        self.request_id = request_id
        self.number = number
        self.deadline_s = deadline_s
        self.plan = plan
        self.open_hosts: set[str] = set(plan.hosts)
        self.credits = Credits(plan.entry.bound)
        self.error: RequestError | None = None
        self.ended = False
        self.expired = False
        self.place = place
        self.has_output = False
        self.expiry: asyncio.TimerHandle | None = None
        self.kept: Kept | None = None
        """What it entered with, as long as it may run again."""
        self.taking: anyio.CancelScope | None = None
        """In which its input is taken from the caller, where that comes bit by bit."""
        self.num_replays = 0
        self.restarting: str | None = None
        """The stage whose restart it waits for, to run again."""
        self._table = table
        self._items: deque[tuple[int, Any]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._expect_everything()

    def _expect_everything(self) -> None:
        self._open_exits = set(self.plan.exits)
        self._received = dict.fromkeys(self.plan.exits, 0)
        self._taken = dict.fromkeys(self.plan.exits, 0)
        self.unfinished: list[Waiting] = []

    # -- the runtime's side ----------------------------------------------------------------------------------------

    def begin_again(self) -> None:
        """Drop all that has arrived, of which nothing was taken: the request will run again."""
        self.num_replays += 1
        self._items.clear()
        self._expect_everything()
        self.credits = Credits(self.plan.entry.bound)

    def put(self, edge: int, seq: int, value: object) -> None:
        """An item of an output arrived."""
        if self.ended:
            return
        exit = self.plan.exits[edge]
        if seq != self._received[edge]:
            raise ProtocolError(
                f"output {exit.target_port!r}: item {seq} where {self._received[edge]} was due", stage=exit.source
            )
        if edge not in self._open_exits:
            raise ProtocolError(f"output {exit.target_port!r}: item {seq} came after its end", stage=exit.source)
        self._received[edge] += 1
        self._items.append((edge, value))
        self._wake()
        if exit.kind != "stream":
            self.end_exit(edge)

    def end_stream(self, edge: int, count: int) -> None:
        """A stream output has ended after `count` items. Raises ProtocolError where some were lost on the way."""
        exit = self.plan.exits[edge]
        if not self.ended and count != self._received[edge]:
            raise ProtocolError(
                f"output {exit.target_port!r} ended after {count} items, but {self._received[edge]} arrived",
                stage=exit.source,
            )
        self.end_exit(edge)

    def end_exit(self, edge: int) -> None:
        """An output has ended; the request has, once all have."""
        self._open_exits.discard(edge)
        if not self._open_exits:
            self.end(None)

    def end(self, error: RequestError | None) -> bool:
        """End the request, once. False if it had ended before."""
        if self.ended:
            return False
        self.ended = True
        if error is not None:
            self.error = fresh(error)
            self.error.request_id = self.request_id
            self._items.clear()
        if self.taking is not None:
            self.taking.cancel()
        self._wake()
        return True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the caller's side -----------------------------------------------------------------------------------------

    async def __anext__(self) -> Output:
        while not self._items:
            if self.error is not None:
                raise fresh(self.error)
            if self.ended:
                raise StopAsyncIteration
            if self._waiter is not None and not self._waiter.done():
                raise RuntimeError("a reply has one reader, and another task waits for its next output already")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        edge, value = self._items.popleft()
        if self.kept is not None:
            self._table.forget_inputs(self)
        exit = self.plan.exits[edge]
        if exit.kind == "stream":
            self._taken[edge] += 1
            if self._taken[edge] * 2 >= exit.bound:
                self._table.give_credit(exit, self.number, self._taken[edge])
                self._taken[edge] = 0
        return Output(exit.target_port, value)

    async def collect(self) -> dict[str, Any]:
        """All outputs: a list for a stream, the value (or None where it was skipped) for a result."""
        exits = self.plan.exits.values()
        found: dict[str, Any] = {exit.target_port: [] if exit.kind == "stream" else None for exit in exits}
        kinds = {exit.target_port: exit.kind for exit in exits}
        async with self:
            async for name, value in self:
                if kinds[name] == "stream":
                    found[name].append(value)
                else:
                    found[name] = value
        return found

    async def cancel(self) -> None:
        """Cancel the request in every stage; does nothing once it has ended."""
        self._table.end_request(self, CancelledError("the request was cancelled"))

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._table.end_request(self, CancelledError("the caller left before the end"))


def fresh(error: RequestError) -> RequestError:
    """A copy of `error` to raise or to keep: one that was raised holds the frames that it passed, and all that is in
    them. A reply that raised the error it keeps would live, with the values of its caller, until a garbage collection.
    """
    return error_from_info(error.info())
