"""The host's side of recording: digests what leaves its stages, and gives back what a recording holds.

A host has an observer only while requests are recorded or replayed; otherwise nothing of this is paid for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Sequence
from typing import Any

import anyio
import msgspec

from omniflow.actor import Ports
from omniflow.digest import EdgeDigest, EdgeRecord, Packed, State, pack, unpack
from omniflow.errors import ProtocolError, RecordingError
from omniflow.messages import End, Recorded, Skip
from omniflow.planner.plan import PlannedEdge
from omniflow.topology import Stage

_PART_BYTES = 64 * 1024
"""What one `Recorded` carries: half of what a control message may hold."""
_MOST_VALUE_BYTES = 4 * 2**20
"""What is kept of the output of a stage that depends on time; a stage that gave more is run again in a replay."""


class Observe(msgspec.Struct, frozen=True):
    """What hosts are asked to do beside their work. `given`: what stages gave in the recording that is replayed."""

    given: dict[str, tuple[Packed, ...]] = {}


class _Seen:
    """One edge of one request, so far."""

    def __init__(self, edge: PlannedEdge, kept: bool) -> None:
        self.digest = EdgeDigest(edge.type)
        self.state: State = "cut"
        self.values: list[Packed] | None = [] if kept else None
        self._value_bytes = 0

    def add(self, value: object) -> None:
        self.digest.add(value)
        if self.values is None:
            return
        try:
            packed = pack(value)
        except ProtocolError:
            self.values = None  # inside one process a value needs no wire form
            return
        self.values.append(packed)
        self._value_bytes += sum(map(len, packed))
        if self._value_bytes > _MOST_VALUE_BYTES:
            self.values = None

    def record(self, edge: PlannedEdge, cut: bool) -> EdgeRecord:
        return EdgeRecord(
            edge=edge_name(edge),
            state="cut" if cut else self.state,
            unit=self.digest.form.unit,
            block=self.digest.form.block,
            size=self.digest.size,
            digests=self.digest.digests(),
            opaque=self.digest.opaque,
            values=None if self.values is None else tuple(self.values),
        )


class Observer:
    """Watches the edges that leave the stages of one host."""

    def __init__(self, edges: Collection[PlannedEdge], stages: Collection[Stage]) -> None:
        timed = timed_stages(stages, edges)
        self._edges = {edge.id: edge for edge in edges}
        self._kept = {edge.id for edge in edges if edge.source in timed}
        self._requests: dict[int, dict[int, _Seen]] = {}

    def opened(self, request: int) -> None:
        """A request begins here; what is sent for others is not looked at."""
        self._requests[request] = {}

    def sent(self, edge: int, request: int, value: object, pending: Awaitable[None] | None) -> Awaitable[None] | None:
        """A value goes out, once `pending` is through; gives what the sender has to await instead."""
        if pending is not None:
            return self._sent_later(edge, request, value, pending)
        seen = self._seen(edge, request)
        if seen is not None:
            seen.add(value)
            if self._edges[edge].kind != "stream":
                seen.state = "ended"
        return None

    async def _sent_later(self, edge: int, request: int, value: object, pending: Awaitable[None]) -> None:
        await pending
        self.sent(edge, request, value, None)

    def told(self, message: object) -> None:
        """A control message goes out: the ends of edges are noted."""
        if isinstance(message, (End, Skip)) and (seen := self._seen(message.edge, message.request)) is not None:
            seen.state = "ended" if isinstance(message, End) else "skipped"

    def closed(self, request: int, gone: Collection[int]) -> Iterator[Recorded]:
        """Forget a request; gives what the runtime is to be told of it. The readers of edges `gone` left early."""
        found = self._requests.pop(request, {})
        records = [seen.record(self._edges[edge], edge in gone) for edge, seen in found.items()]
        data = msgspec.msgpack.encode(records)
        for start in range(0, len(data), _PART_BYTES):
            part = data[start : start + _PART_BYTES]
            yield Recorded(request, part, start + len(part) == len(data))

    def _seen(self, edge: int, request: int) -> _Seen | None:
        seen = self._requests.get(request)
        if seen is None:
            return None
        if edge not in seen:
            seen[edge] = _Seen(self._edges[edge], edge in self._kept)
        return seen[edge]


def edge_name(edge: PlannedEdge) -> str:
    """An edge by its ends: its number may change with the graph."""
    return f"{edge.source}.{edge.source_port} -> {edge.target}.{edge.target_port}"


def timed_stages(stages: Collection[Stage], edges: Collection[PlannedEdge]) -> set[str]:
    """The stages of which a recording holds what they gave: it depends on time, and is one stream.

    That is so by declaration (`Actor.timed`), or because the stage reads from an edge that drops items.
    """
    missing = {edge.target for edge in edges if edge.policy == "drop_oldest"}
    found = [stage for stage in stages if stage.actor.timed or stage.name in missing]
    return {stage.name for stage in found if [port.kind for port in stage.ports.outputs] == ["stream"]}


class Given:
    """Stands in for the `run` of a stage: gives what it gave in a recording, and reads its input to the end."""

    def __init__(self, stage: str, ports: Ports, packed: Sequence[Packed]) -> None:
        (self._output,) = ports.outputs
        self._inputs = [port.name for port in ports.inputs if port.kind == "stream"]
        try:
            self._values = [unpack(self._output.type, each) for each in packed]
        except (msgspec.ValidationError, TypeError) as error:
            raise RecordingError(f"what it gave is of another type now: {error}", stage=stage) from None

    async def run(self, arguments: dict[str, Any]) -> None:
        """As `Actor.run`. Input is read meanwhile, so that the stages before it never wait for it."""
        async with anyio.create_task_group() as tasks:
            for name in self._inputs:
                if arguments[name] is not None:
                    tasks.start_soon(_read_all, arguments[name])
            for value in self._values:
                await arguments[self._output.name].send(value)


async def _read_all(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass
