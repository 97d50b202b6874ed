"""The runtime: admits requests, holds the one table of them, and ends each of them exactly once.

    async with Runtime(plan) as runtime:
        async with await runtime.submit("chat", chat, outputs={"text"}) as reply:
            async for name, value in reply:
                ...

A request ends in one of: all its outputs have ended, a typed error, cancelled, deadline exceeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Collection, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, NoReturn, TypeAlias

import anyio
import anyio.abc
import msgspec

from omniflow.admission import Admission, Place
from omniflow.cancellation import is_cancelled
from omniflow.config import RuntimeConfig
from omniflow.engine.stats import EngineStats
from omniflow.errors import (
    CancelledError,
    DeadlineError,
    ErrorInfo,
    InvalidInputError,
    OmniflowError,
    ProtocolError,
    RequestError,
    StageDiedError,
    StartError,
    UnavailableError,
    UnsupportedError,
    error_from_info,
)
from omniflow.host import Host, host_spec, hot_window_s
from omniflow.inputs import KeptInputs
from omniflow.media import Options
from omniflow.messages import (
    MAX_OPTIONS_BYTES,
    MAX_REQUEST_ID_CHARS,
    READER_GONE,
    Beat,
    Cancel,
    Closed,
    Credit,
    End,
    Failure,
    HostFailed,
    HostReady,
    Message,
    Open,
    Recorded,
    Skip,
    StageLoad,
    StageReady,
    Unconnected,
    Waiting,
)
from omniflow.planner.plan import FRONT, Plan, PlannedEdge
from omniflow.recording import Recorder
from omniflow.reply import Output, Reply, RequestPlan, fresh
from omniflow.supervisor import Supervisor
from omniflow.topology import nearest, route, type_name
from omniflow.transport.arrow_shm import SharedMemory
from omniflow.transport.base import Link
from omniflow.transport.local_object import local_pair
from omniflow.visit import accepts

log = logging.getLogger("omniflow.runtime")

State = Literal["starting", "ready", "draining", "failed", "stopped"]
_Items: TypeAlias = Sequence[object] | AsyncIterable[object]
_QUIET_S = 0.1
"""How long a deadline error waits to hear what was being waited for."""
_MOST_REPLAYS = 1
"""A request that was running at two deaths may well cause them: run again and again it would wear out the restarts."""


class StageStatus(NamedTuple):
    """One stage as `/ready` shows it."""

    name: str
    host: str
    state: str
    restarts: int
    in_flight: int
    pid: int | None
    """The process that runs it; None while it is down."""
    running: int = 0
    """Calls of `run` under way; this and `queued` as of the host's last heartbeat, at most 1 s ago."""
    queued: int = 0
    """Items in its mailboxes, and calls that wait for a batch or a turn."""
    engine: EngineStats | None = None
    """What its engine held at that heartbeat; None where it has none, or is not up."""


class EdgeStatus(NamedTuple):
    """A stream edge that may lose items, and how many its readers have missed."""

    name: str
    dropped: int


class RuntimeStatus(NamedTuple):
    """The runtime as `/health` and `/ready` show it."""

    state: State
    in_flight: int
    queued: int
    stages: tuple[StageStatus, ...]
    reason: str | None
    edges: tuple[EdgeStatus, ...] = ()
    """Those whose policy is to drop the oldest item."""


class Runtime:
    """Runs a plan. Use it as an async context manager: entering starts the hosts, leaving stops them."""

    def __init__(self, plan: Plan, config: RuntimeConfig | None = None, recorder: Recorder | None = None) -> None:
        self.plan = plan
        self.config = config or RuntimeConfig()
        self.state: State = "starting"
        self.stage_seconds: dict[str, float] = {}
        self._failure: StartError | None = None
        self._numbers = itertools.count(1)
        self._requests: dict[int, Reply] = {}
        config = self.config
        self._admission = Admission(config.max_in_flight, config.max_queued, config.max_wait_share)
        self._inputs = KeptInputs(self.config.replay_bytes)
        self._plans: dict[tuple[str, tuple[str, ...] | None], RequestPlan] = {}
        self._edges = {edge.id: edge for edge in plan.edges}
        self._dropped = {edge.id: 0 for edge in plan.edges if edge.policy == "drop_oldest"}
        self._memory = SharedMemory(self.config.shm_bytes, hot_window_s(plan, self.config))
        self._recorder = recorder
        self._observe = recorder.observe if recorder else None
        self._supervisor = Supervisor(plan, self.config, self, self, self._memory, self._observe)
        self._inline: dict[str, tuple[Host, Link]] = {}
        self._up: set[str] = set()
        self._loads: dict[str, tuple[StageLoad, ...]] = {}
        self._changed: anyio.Event | None = None
        self._tasks: anyio.abc.TaskGroup | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Runtime:
        _name_event_loop()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            self._start_inline()
            await self._supervisor.start(self._tasks)
            with anyio.move_on_after(self.config.start_timeout_s) as scope:
                await self._started()
            if scope.cancelled_caught:
                raise self._slow_start()
            self.state = "ready"
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._stop()
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._stop()
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)

    def _start_inline(self) -> None:
        """Hosts in this process: the same `Host`, behind a LOCAL_OBJECT link."""
        for planned in self.plan.hosts:
            if planned.process or self._tasks is None:
                continue
            config = self.config
            spec = host_spec(
                self.plan, planned.name, shm_bytes=config.shm_bytes, beat_s=config.hang_s, observe=self._observe
            )
            host = Host(spec)
            ours, theirs = local_pair(FRONT, planned.name, self, host)
            self._inline[planned.name] = (host, ours)
            self._tasks.start_soon(host.serve, theirs)

    async def _started(self) -> None:
        while len(self._up) < len(self.plan.hosts):
            if self._failure is not None:
                raise self._failure
            await self._wait_change()

    def _slow_start(self) -> StartError:
        stages = [stage for host in self.plan.hosts for stage in host.stages if stage not in self.stage_seconds]
        return StartError(
            f"not ready after {self.config.start_timeout_s:g} s (still setting up: {', '.join(stages)}); "
            f"raise runtime.start_timeout_s if it only needs longer",
            stage=stages[0] if stages else None,
        )

    async def drain(self) -> None:
        """Refuse new requests, wait for the running ones (at most `drain_s`)."""
        self.state = "draining"
        self._refuse_queued()
        self._notify()
        with anyio.move_on_after(self.config.drain_s):
            while self._requests:
                await self._wait_change()

    async def wait_failed(self) -> StartError:
        """Returns once the graph has failed for good, with the reason."""
        while self._failure is None:
            await self._wait_change()
        return self._failure

    async def _stop(self) -> None:
        self.state = "stopped" if self.state != "failed" else "failed"
        self._refuse_queued()
        self._notify()
        for reply in list(self._requests.values()):
            self.end_request(reply, UnavailableError("the runtime is stopping"))
        for host, _ in self._inline.values():
            host.stopped.set()
        await self._supervisor.stop()
        for link in list(self._memory.links):
            link.close()
        self._memory.close()
        for reply in list(self._requests.values()):
            reply.open_hosts.clear()
            self._forget_if_done(reply)

    def _refuse_queued(self) -> None:
        self._admission.refuse_all(UnavailableError(f"the runtime is {self.state}", retry_after_s=5.0))

    async def _wait_change(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    # -- requests --------------------------------------------------------------------------------------------------

    async def submit(
        self,
        entry: str,
        value: object,
        *,
        outputs: Collection[str] | None = None,
        options: Options | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
    ) -> Reply:
        """Start a request at input `entry`; `value` is of its port's type, or the items for a stream port.

        Items are a list, or an async iterable, from which they are taken as they come and as there is room for them;
        where it raises, the request ends with that error.

        Waits for a place, and for a stage that is restarting. Raises InvalidInputError, UnsupportedError,
        OverloadedError or UnavailableError before anything of it runs.
        """
        plan = self._plan_for(entry, outputs)
        items = _entering(plan.entry, value)
        _check_size(options, request_id)
        deadline = deadline_s or self.config.deadline_s
        waits_for = "a place"
        with anyio.move_on_after(deadline) as scope:
            place = await self._admit(plan, scope.deadline)
            waits_for = "room to enter"
            number = next(self._numbers)
            reply = Reply(self, number, request_id or uuid.uuid4().hex, plan, deadline, place)
            options = options or Options()
            if plan.replays and not isinstance(items, AsyncIterable):
                reply.kept = self._inputs.keep(items, options)
            await self._enter(reply, items, options, scope.deadline)
            return reply
        raise DeadlineError(f"the deadline of {deadline:g} s passed while the request waited for {waits_for}")

    async def _enter(self, reply: Reply, items: _Items, options: Options, expires: float) -> None:
        """Put the request into the table and into its hosts; where that fails, nothing of it is left."""
        self._requests[reply.number] = reply
        reply.expiry = asyncio.get_running_loop().call_at(expires, self._expire, reply)
        try:
            with anyio.CancelScope() as reply.taking:
                await self._open(reply, items, options)
        except BaseException as error:
            self.end_request(reply, CancelledError("the request could not enter the graph"))
            if isinstance(error, Exception) and not isinstance(error, OmniflowError):
                raise _cannot_travel(reply.plan.entry, error) from error
            raise
        if reply.error is not None and isinstance(reply.error, InvalidInputError):
            raise fresh(reply.error)

    async def _open(self, reply: Reply, items: _Items, options: Options) -> None:
        """Open the request in all its hosts and send its items."""
        plan = reply.plan
        names = tuple(exit.target_port for exit in plan.exits.values())
        if self._recorder is not None:
            options = self._recorder.seeded(options)
            self._recorder.begin(
                reply.number,
                reply.request_id,
                plan.entry.source_port,
                names,
                options,
                reply.deadline_s,
                () if isinstance(items, AsyncIterable) else items,
            )
        opening = Open(reply.number, reply.request_id, plan.entry.source_port, names, options, reply.deadline_s)
        for host in plan.hosts:
            # The entry's host comes last, and its items follow at once: it need not wake up twice.
            self._send(host, opening, more=host == plan.entry.target_host)
        if isinstance(items, AsyncIterable):
            if self._tasks is not None:
                self._tasks.start_soon(self._take_items, reply, items)
        elif len(items) <= plan.entry.bound:
            await self._enter_items(reply, items)
        elif self._tasks is not None:
            self._tasks.start_soon(self._enter_items, reply, items)

    async def _enter_items(self, reply: Reply, items: Sequence[object]) -> None:
        # Of this run: should a stage die, another run of the request has a number and credits of its own.
        edge, number, credits = reply.plan.entry, reply.number, reply.credits
        try:
            for item in items:
                seq = await credits.take()
                if seq < 0 or reply.ended:
                    return
                await self._send_item(edge, number, seq, item)
        except ProtocolError as error:
            # What the caller gave cannot travel; a task of its own must not end the runtime with it.
            self.end_request(reply, InvalidInputError(error.message, param=edge.source_port))
            return
        except RequestError as error:
            self.end_request(reply, error)
            return
        except Exception as error:  # a value of the caller's whose own code fails as it is encoded
            log.error("request %s: its input cannot travel", reply.request_id, exc_info=error)
            self.end_request(reply, _cannot_travel(edge, error))
            return
        if edge.kind == "stream":
            self._send(edge.target_host, End(edge.id, number, credits.seq))

    async def _take_items(self, reply: Reply, source: AsyncIterable[object]) -> None:
        """Let in what comes from `source`, until it ends or the request does."""
        edge = reply.plan.entry
        with anyio.CancelScope() as reply.taking:
            try:
                if reply.ended:  # before this task had begun
                    return
                async for item in source:
                    _check_item(edge, item)
                    seq = await reply.credits.take()
                    if seq < 0 or reply.ended:
                        break
                    if self._recorder is not None:
                        self._recorder.entered(reply.number, item)
                    await self._send_item(edge, reply.number, seq, item)
                else:
                    self._send(edge.target_host, End(edge.id, reply.number, reply.credits.seq))
            except RequestError as error:
                self.end_request(reply, error)
            except Exception as error:  # the caller's own code: it ends its request, not the runtime
                log.error("request %s: its input broke off", reply.request_id, exc_info=error)
                broken = f"input {edge.source_port!r} broke off: {type(error).__name__}: {error}"
                self.end_request(reply, InvalidInputError(broken, param=edge.source_port))
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                broken = f"input {edge.source_port!r} broke off: it was cancelled from within"
                self.end_request(reply, InvalidInputError(broken, param=edge.source_port))
            finally:
                if isinstance(source, AsyncGenerator):
                    with anyio.CancelScope(shield=True):
                        await _close_source(source, reply.request_id)

    def _plan_for(self, entry: str, outputs: Collection[str] | None) -> RequestPlan:
        key = (entry, None if outputs is None else tuple(sorted(outputs)))
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._checked_plan(entry, outputs)
        return found

    def _checked_plan(self, entry: str, outputs: Collection[str] | None) -> RequestPlan:
        if entry not in self.plan.inputs:
            self._refuse_entry(entry)
        possible = self.plan.outputs_of(entry)
        wanted = tuple(sorted(possible if outputs is None else outputs))
        if not wanted:
            raise InvalidInputError("a request must ask for at least one output")
        for name in wanted:
            if name not in possible:
                reason = self._absence(name) or f"input {entry!r} cannot give output {name!r}{nearest(name, possible)}"
                raise UnsupportedError(reason)
        return self._work_out(entry, wanted)

    def _refuse_entry(self, entry: str) -> NoReturn:
        spec = self.plan.graph
        for edge in spec.inputs:
            if edge.source_port == entry:
                raise UnsupportedError(spec.absent[edge.target], stage=edge.target)
        raise InvalidInputError(f"graph {spec.name!r} has no input {entry!r}{nearest(entry, self.plan.inputs)}")

    def _absence(self, output: str) -> str | None:
        """Why a declared output is missing, where its stage is absent in this profile."""
        spec = self.plan.graph
        stages = [edge.source for edge in spec.outputs if edge.target_port == output]
        return next((spec.absent[stage] for stage in stages if stage in spec.absent), None)

    def _work_out(self, entry: str, wanted: tuple[str, ...]) -> RequestPlan:
        part = route(self.plan.graph.all_edges, self.plan.graph.absent, entry, wanted)
        start = self.plan.inputs[entry]
        exits = {edge.id: edge for name, edge in self.plan.outputs.items() if name in wanted}
        hosts = [host.name for host in self.plan.hosts if any(stage in part.stages for stage in host.stages)]
        hosts.sort(key=lambda host: host == start.target_host)
        replays = {host.name for host in self.plan.hosts if host.restart.in_flight == "replay"}
        return RequestPlan(start, exits, tuple(hosts), part.stages, frozenset(replays.intersection(hosts)))

    async def _admit(self, plan: RequestPlan, expires: float) -> Place:
        """Take a place. Who waits for a restart holds none meanwhile: requests on other hosts do not notice."""
        while True:
            await self._wait_for_hosts(plan)
            place = await self._admission.take(expires - anyio.current_time())
            if self.state == "ready" and self._up.issuperset(plan.hosts):
                return place
            self._admission.free(place)

    async def _wait_for_hosts(self, plan: RequestPlan) -> None:
        self._refuse_if_not_serving()
        if self._up.issuperset(plan.hosts):
            return
        with self._admission.waiting(), anyio.move_on_after(self.config.restart_wait_s):
            while not self._up.issuperset(plan.hosts):
                await self._wait_change()
                self._refuse_if_not_serving()
            return
        missing = next(host for host in plan.hosts if host not in self._up)
        raise UnavailableError("it is restarting", stage=missing, retry_after_s=2.0)

    def _refuse_if_not_serving(self) -> None:
        if self._failure is not None:
            raise UnavailableError(f"the graph has failed: {self._failure}", stage=self._failure.stage)
        if self.state != "ready":
            raise UnavailableError(f"the runtime is {self.state}", retry_after_s=5.0)

    def give_credit(self, exit: PlannedEdge, request: int, count: int) -> None:
        """The caller has taken items of an output."""
        if request in self._requests:
            self._send(exit.source_host, Credit(exit.id, request, count))

    def end_request(self, reply: Reply, error: RequestError) -> None:
        """End a request early, in every host that it touched; does nothing once it has ended."""
        if reply.end(error):
            self._cancel_hosts(reply)
            self._forget_if_done(reply)

    def _cancel_hosts(self, reply: Reply) -> None:
        for host in list(reply.open_hosts):
            self._send(host, Cancel(reply.number))
        reply.credits.give(READER_GONE)

    def _expire(self, reply: Reply) -> None:
        """The deadline has passed: stop everything, hear what was being waited for, then end the request."""
        reply.expired = True
        self._cancel_hosts(reply)
        if not reply.ended:
            asyncio.get_running_loop().call_later(_QUIET_S, self._end_expired, reply)

    def _end_expired(self, reply: Reply) -> None:
        if reply.end(self._deadline_error(reply)):
            self._forget_if_done(reply)

    def _deadline_error(self, reply: Reply) -> DeadlineError:
        order = [stage.name for stage in self.plan.graph.stages]
        unfinished = sorted(reply.unfinished, key=lambda waiting: order.index(waiting.stage))
        running = [waiting.stage for waiting in unfinished if waiting.port is None]
        text = f"the deadline of {reply.deadline_s:g} s passed"
        if reply.restarting is not None:
            return DeadlineError(f"{text} while it was being restarted", stage=reply.restarting)
        if running:
            fan_in = self._fan_in_waiting(unfinished, running[0])
            return DeadlineError(f"{text} while stage {running[0]!r} was running{fan_in}", stage=running[0])
        for waiting in unfinished:
            sources = [e.source for e in self.plan.edges if (e.target, e.target_port) == (waiting.stage, waiting.port)]
            return DeadlineError(
                f"{text} while port {waiting.port!r} waited for {', '.join(sources) or 'its source'}",
                stage=waiting.stage,
            )
        silent = ", ".join(sorted(reply.open_hosts)) or "the caller took no output"
        return DeadlineError(f"{text}; waited for: {silent}")

    def _fan_in_waiting(self, unfinished: Sequence[Waiting], source: str) -> str:
        """Which port of a fan-in still waited for what `source` was to give; nothing where none did."""
        ends = {(e.target, e.target_port) for e in self.plan.edges if e.kind == "fan-in" and e.source == source}
        found = [f"port {w.port!r} of stage {w.stage!r}" for w in unfinished if (w.stage, w.port) in ends]
        return f", and {' and '.join(found)} waited for it" if found else ""

    def _forget_if_done(self, reply: Reply) -> None:
        if reply.ended and not reply.open_hosts and reply.number in self._requests:
            del self._requests[reply.number]
            if reply.expiry is not None:
                reply.expiry.cancel()
            self.forget_inputs(reply)
            if self._recorder is not None:
                self._recorder.finish(reply.number, reply.error)
            self._admission.finish(reply.place)
            self._notify()

    # -- what hosts say --------------------------------------------------------------------------------------------

    def on_item(self, link: Link, edge: int, request: int, seq: int, value: object) -> None:
        reply = self._requests.get(request)
        if reply is None:
            return
        try:
            reply.put(edge, seq, value)
        except ProtocolError as error:
            self.end_request(reply, error)
        if not reply.has_output:
            reply.has_output = True
            self._admission.first_output.add(reply.place.age_s)
        self._forget_if_done(reply)

    def on_bad_item(self, link: Link, edge: int, request: int, error: ErrorInfo) -> None:
        reply = self._requests.get(request)
        if reply is not None:
            self.end_request(reply, error_from_info(msgspec.structs.replace(error, stage=self._edges[edge].source)))

    def on_message(self, link: Link, message: Message, descriptors: Sequence[int]) -> None:
        match message:
            case StageReady() | HostReady() | HostFailed() | Beat() | Unconnected():
                self._heard(link.peer, message)
            case End() | Skip() | Credit() | Failure() | Closed():
                if isinstance(message, Closed):
                    self._count_dropped(message)
                reply = self._requests.get(message.request)
                if reply is not None:
                    self._heard_of_request(link.peer, reply, message)
            case Recorded():
                if self._recorder is not None:
                    self._recorder.heard(link.peer, message)
            case _:
                raise ProtocolError(f"the runtime cannot take a {type(message).__name__}")

    def _count_dropped(self, message: Closed) -> None:
        for edge, number in message.dropped:
            self._dropped[edge] += number

    def _heard_of_request(self, host: str, reply: Reply, message: End | Skip | Credit | Failure | Closed) -> None:
        match message:
            case End():
                try:
                    reply.end_stream(message.edge, message.count)
                except ProtocolError as error:
                    self.end_request(reply, error)
            case Skip():
                reply.end_exit(message.edge)
            case Credit():
                reply.credits.give(message.count)
            case Failure():
                self.end_request(reply, error_from_info(message.error))
            case Closed():
                reply.open_hosts.discard(host)
                reply.unfinished += message.unfinished
                if reply.expired and not reply.open_hosts:
                    self._end_expired(reply)
        self._forget_if_done(reply)

    def on_closed(self, link: Link) -> None:
        """A host's socket ended; its pidfd tells the supervisor, which tells us."""

    def _heard(self, host: str, message: Message) -> None:
        if host not in self._inline:
            if isinstance(message, Beat):
                self._loads[host] = message.load
            self._supervisor.heard(host, message)
            return
        match message:
            case StageReady():
                self.on_stage_ready(message.stage, message.seconds)
            case HostReady():
                self.on_ready(host)
            case HostFailed():
                self.on_down(host, message.message)
                self.on_failed(host, StartError(message.message, stage=message.stage, detail=message.detail))

    # -- what the supervisor says ----------------------------------------------------------------------------------

    def on_stage_ready(self, stage: str, seconds: float) -> None:
        self.stage_seconds[stage] = seconds
        self._notify()

    def on_ready(self, host: str) -> None:
        self._up.add(host)
        self._notify()

    def on_down(self, host: str, reason: str) -> None:
        self._up.discard(host)
        self._loads.pop(host, None)
        for reply in list(self._requests.values()):
            if host in reply.open_hosts:
                reply.open_hosts.discard(host)
                died = self._died(host, reason)
                if host in reply.plan.replays and self._may_run_again(reply):
                    self._take_back(reply, died)
                else:
                    self.end_request(reply, died)
                    self._forget_if_done(reply)
        self._notify()

    # -- running again after a death -------------------------------------------------------------------------------

    def _may_run_again(self, reply: Reply) -> bool:
        over = reply.ended or reply.expired
        return reply.kept is not None and not over and reply.num_replays < _MOST_REPLAYS

    def _take_back(self, reply: Reply, died: StageDiedError) -> None:
        """Stop what other hosts do for a request of which nobody has seen anything, and let it wait for the restart."""
        self._cancel_hosts(reply)
        reply.open_hosts.clear()
        reply.begin_again()
        reply.restarting = died.stage
        self._renumber(reply, died)
        if self._tasks is not None:
            self._tasks.start_soon(self._run_again, reply, died)

    def _renumber(self, reply: Reply, died: StageDiedError) -> None:
        """Nothing that hosts still say of its earlier run concerns a request from now on."""
        del self._requests[reply.number]
        if self._recorder is not None:
            self._recorder.finish(reply.number, died)
        reply.number = next(self._numbers)
        self._requests[reply.number] = reply

    async def _run_again(self, reply: Reply, died: StageDiedError) -> None:
        with anyio.move_on_after(self.config.restart_wait_s):
            while not (self._up.issuperset(reply.plan.hosts) or reply.ended or self._failure):
                await self._wait_change()
        if reply.ended or reply.expired or reply.kept is None:
            return
        if not self._up.issuperset(reply.plan.hosts):
            self.end_request(reply, died)
            return
        # Hosts are told of requests in the order of their numbers, so its turn is now.
        self._renumber(reply, died)
        reply.restarting = None
        reply.open_hosts.update(reply.plan.hosts)
        await self._open(reply, reply.kept.items, reply.kept.options)

    def forget_inputs(self, reply: Reply) -> None:
        """The caller has something of the request, or it has ended: it cannot run again."""
        if reply.kept is not None:
            self._inputs.drop(reply.kept)
            reply.kept = None

    def _died(self, host: str, reason: str) -> StageDiedError:
        """A host has the name of its heaviest stage, unless it is the runtime's own."""
        planned = next(planned for planned in self.plan.hosts if planned.name == host)
        stage = host if host in planned.stages else planned.stages[0]
        hope = "" if planned.restart.strategy == "stop" else "; it is being restarted"
        return StageDiedError(f"its process died ({reason}){hope}", stage=stage)

    def on_failed(self, host: str, error: StartError) -> None:
        self._failure = error
        self.state = "failed"
        self._refuse_queued()
        self._notify()

    # -- status ----------------------------------------------------------------------------------------------------

    def status(self) -> RuntimeStatus:
        """What runs now."""
        stages = []
        for host in self.plan.hosts:
            here = [reply.plan.stages for reply in self._requests.values() if host.name in reply.open_hosts]
            loads = {load.stage: load for load in self._load_of(host.name)}
            child = self._supervisor.children.get(host.name)
            state = child.state if child else "ready" if host.name in self._up else "starting"
            restarts = child.restarts if child else 0
            pid = child.pid if child else os.getpid()
            for stage in host.stages:
                in_flight = sum(stage in needed for needed in here)
                load = loads.get(stage, StageLoad(stage, 0, 0))
                said = (load.running, load.queued, load.engine)
                stages.append(StageStatus(stage, host.name, state, restarts, in_flight, pid, *said))
        reason = str(self._failure) if self._failure else None
        edges = tuple(EdgeStatus(str(self._edges[edge]), dropped) for edge, dropped in self._dropped.items())
        return RuntimeStatus(self.state, len(self._requests), self._admission.num_queued, tuple(stages), reason, edges)

    def _load_of(self, host: str) -> tuple[StageLoad, ...]:
        return self._inline[host][0].load() if host in self._inline else self._loads.get(host, ())

    def _link(self, host: str) -> Link | None:
        """The link to a host; None while it is down, when whatever would be sent is moot."""
        if host in self._inline:
            return self._inline[host][1]
        return self._supervisor.children[host].link

    def _send(self, host: str, message: Message, *, more: bool = False) -> None:
        link = self._link(host)
        if link is not None:
            link.send(message, more=more)

    async def _send_item(self, edge: PlannedEdge, request: int, seq: int, value: object) -> None:
        link = self._link(edge.target_host)
        pending = link.send_item(edge.id, request, seq, value) if link is not None else None
        if pending is not None:
            await pending


def _name_event_loop() -> None:
    """Tell sniffio, where there is one, which event loop runs. It sees that in tasks; anyio's `start_soon` asks it also
    where a host's death is heard, which is in no task, and an event loop that anyio has not begun has not told it.
    """
    with contextlib.suppress(ImportError):
        import sniffio

        sniffio.current_async_library_cvar.set("asyncio")


def _entering(edge: PlannedEdge, value: object) -> _Items:
    """The items that enter the graph. Raises InvalidInputError where one is not of the type of the input."""
    if edge.kind == "stream" and isinstance(value, AsyncIterable):
        return value
    items = list(value) if edge.kind == "stream" and isinstance(value, (list, tuple)) else [value]
    for item in items:
        _check_item(edge, item)
    return items


def _cannot_travel(edge: PlannedEdge, error: Exception) -> InvalidInputError:
    """A value of the caller's that fails as it is encoded: a view with holes, a field that was never set."""
    what = f"input {edge.source_port!r} cannot travel: {type(error).__name__}: {error}"
    return InvalidInputError(what, param=edge.source_port)


async def _close_source(source: AsyncGenerator[object], request_id: str) -> None:
    """Let the caller's own code clean up; what it raises is no matter of the runtime's."""
    try:
        await source.aclose()
    except Exception as error:
        log.error("request %s: its input failed as it was closed", request_id, exc_info=error)


def _check_size(options: Options | None, request_id: str | None) -> None:
    """Raises InvalidInputError, naming the largest option, where a request could not be opened in another process."""
    if request_id is not None and len(request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidInputError(f"a request_id may have {MAX_REQUEST_ID_CHARS} characters", param="request_id")
    options = options or Options()
    try:
        msgspec.msgpack.encode(request_id)
        size = len(msgspec.msgpack.encode(options))
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"request_id and options have to be whole characters: {error}") from None
    if size > MAX_OPTIONS_BYTES:
        sizes = {name: len(msgspec.msgpack.encode(value)) for name, value in msgspec.structs.asdict(options).items()}
        name = max(sizes, key=sizes.__getitem__)
        raise InvalidInputError(
            f"the options of a request may have {MAX_OPTIONS_BYTES} bytes; these have {size}, most of them {name}",
            param="response_format" if name == "json_schema" else name,
        )


def _check_item(edge: PlannedEdge, item: object) -> None:
    if not accepts(edge.type, item):
        raise InvalidInputError(
            f"input {edge.source_port!r} takes {type_name(edge.type)}, but got {type(item).__name__}",
            param=edge.source_port,
        )


__all__ = ["Output", "Reply", "Runtime", "RuntimeStatus", "StageStatus", "State"]
