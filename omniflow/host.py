"""A host: runs the actors of one process in one task group, and moves values between them and its links.

    Open (from the runtime) -> Visit -> values arrive by `on_item` -> a stage has all it needs -> Actor.run
    -> Emit.send and results -> the link of each edge -> the next host, or the runtime -> Closed

A host in the runtime's own process is the same object behind a LOCAL_OBJECT link.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from omniflow.actor import Actor, Context, Ports, ports_of
from omniflow.batcher import Batcher
from omniflow.cancellation import is_cancelled
from omniflow.config import RuntimeConfig, arguments_of
from omniflow.devices import Gpus, cap_memory, gpus_of
from omniflow.engine.ranks import ALONE, Ranks
from omniflow.errors import (
    ActorBrokenError,
    DeviceError,
    ErrorInfo,
    InvalidInputError,
    OmniflowError,
    ProtocolError,
    RequestError,
    StageDiedError,
    StageError,
    StartError,
    UnavailableError,
)
from omniflow.mailbox import Credits, Mailbox
from omniflow.messages import (
    Cancel,
    Connect,
    Credit,
    End,
    Failure,
    HostFailed,
    HostReady,
    Message,
    Open,
    Shutdown,
    Skip,
    StageLoad,
    StageReady,
    Unconnected,
)
from omniflow.observer import Given, Observe, Observer
from omniflow.planner.plan import FRONT, Plan, PlannedEdge
from omniflow.topology import CLIENT, Edge, Refusal, Stage, route
from omniflow.transport.base import Link
from omniflow.transport.local_object import loopback
from omniflow.turns import progress
from omniflow.visit import (
    EdgeFull,
    PortEmit,
    Reader,
    Run,
    SendItem,
    StageRoute,
    Visit,
    in_rows,
    refuse_wrong_type,
    results_of,
)

log = logging.getLogger("omniflow.host")

_MAX_TEXT = 8000
"""Characters of an error's text that travel: a control message has 128 KB, whatever a stage raises."""


class HostSpec(msgspec.Struct, frozen=True):
    """What a host must know: its stages, the edges that touch it, and the graph's topology for pruning."""

    name: str
    stages: tuple[Stage, ...]
    edges: tuple[PlannedEdge, ...]
    topology: tuple[Edge, ...]
    absent: dict[str, str]
    shm_bytes: int
    beat_s: float
    observe: Observe | None = None
    hot_window_s: float = 0.0
    uvloop: bool = False
    gpus: Gpus = Gpus()


def host_spec(
    plan: Plan,
    name: str,
    *,
    shm_bytes: int,
    beat_s: float,
    observe: Observe | None = None,
    hot_window_s: float = 0.0,
    uvloop: bool = False,
) -> HostSpec:
    """The part of `plan` that concerns the host `name`."""
    host = next(host for host in plan.hosts if host.name == name)
    return HostSpec(
        name,
        tuple(plan.graph.stage(stage) for stage in host.stages),
        tuple(edge for edge in plan.edges if name in (edge.source_host, edge.target_host)),
        plan.graph.all_edges,
        plan.graph.absent,
        shm_bytes,
        beat_s,
        observe,
        hot_window_s,
        uvloop,
        gpus_of(host),
    )


def hot_window_s(plan: Plan, config: RuntimeConfig) -> float:
    """How long the processes of `plan` look for more traffic before they sleep: not at all where cores are scarce."""
    cores = plan.cluster.cpu_cores
    spare = cores > 1 and sum(host.ranks for host in plan.hosts if host.process) <= cores
    return config.hot_window_us / 1e6 if spare else 0.0


def actor_of(stage: Stage, ranks: Ranks) -> Actor:
    """A stage's actor, before `setup`. It knows of `ranks` where it is the stage that is split.

    Raises StartError where something is not installed that it needs.
    """
    lacking = stage.actor.lacks(stage.settings, stage.device)
    if lacking is not None:
        raise StartError(lacking)
    actor = stage.actor(**arguments_of(stage))
    if stage.tp > 1:
        actor.ranks = ranks
    return actor


class _LocalStage:
    """One actor of this host, with what never changes about it."""

    def __init__(self, stage: Stage, observe: Observe | None, ranks: Ranks) -> None:
        self.stage = stage
        self.actor: Actor = actor_of(stage, ranks)
        self.ports: Ports = ports_of(stage.actor)
        self.is_async = inspect.iscoroutinefunction(stage.actor.run)
        self.batcher = Batcher(stage.name, self.actor.batch, self._call_batch) if self.actor.batch else None
        given = observe.given.get(stage.name) if observe else None
        self.given = Given(stage.name, self.ports, given) if given is not None else None
        self._plain = self.is_async and self.batcher is None and self.given is None

    def call(self, arguments: dict[str, Any]) -> Awaitable[Any]:
        """One `run`."""
        if self._plain:
            found: Awaitable[Any] = self.actor.run(**arguments)
            return found
        return self._call(arguments)

    async def _call(self, arguments: dict[str, Any]) -> Any:
        if self.given is not None:
            return await self.given.run(arguments)
        if self.batcher is not None:
            (value,) = arguments.values()
            return await self.batcher.run(value)
        if self.is_async:
            return await self.actor.run(**arguments)
        return await self.actor.offload(functools.partial(self.actor.run, **arguments))

    async def _call_batch(self, values: list[Any]) -> list[Any]:
        if self.is_async:
            found: list[Any] = await self.actor.run(values)
            return found
        return await self.actor.offload(self.actor.run, values)


def failure_of(stage: str, error: BaseException) -> HostFailed:
    """What a process says of the error that it dies of."""
    detail = "" if isinstance(error, OmniflowError) else "".join(traceback.format_exception(error))
    message = str(error) if isinstance(error, OmniflowError) else _text_of(error)
    return HostFailed(stage, _sendable(message), _sendable(detail[-2 * _MAX_TEXT :], 2 * _MAX_TEXT))


def _text_of(error: BaseException) -> str:
    """Its type and what it says, which is code of the actor's and may fail as well."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the boundary to actor code
        return type(error).__name__


def _sendable(text: str, most: int = _MAX_TEXT) -> str:
    """`text` as a message takes it: cut, and without the half characters that UTF-8 does not have."""
    return text[:most].encode(errors="backslashreplace").decode()[:most]


def _told(error: RequestError) -> ErrorInfo:
    """What the runtime is told of `error`."""
    info = error.info()
    param = None if info.param is None else _sendable(info.param)
    return msgspec.structs.replace(info, message=_sendable(error.message), param=param)


def _is_of_gpu(error: BaseException) -> bool:
    """Whether it is an error of CUDA's, which most often all later calls of this process meet, too; also where a task
    group of the actor's raised it. Memory that is full is none (torch.OutOfMemoryError), and torch before 2.8 has no
    type for it.
    """
    if isinstance(error, ExceptionGroup):
        return any(map(_is_of_gpu, error.exceptions))
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, vars(torch).get("AcceleratorError", ()))


class Host:
    """See the module's docstring. `stopped` is set once the host is to end."""

    def __init__(self, spec: HostSpec, ranks: Ranks = ALONE) -> None:
        self.spec = spec
        self._ranks = ranks
        self.stopped = anyio.Event()
        self.links: dict[str, Link] = {}
        self._unconnected: set[str] = set()
        """Peers whose sockets could not be taken: what needs them is refused until there is another."""
        self.broken = False
        self._visits: dict[int, Visit] = {}
        self._last_opened = 0
        self._early: list[tuple[int, Callable[[], None]]] = []
        self._stages: dict[str, _LocalStage] = {}
        self._edges = {edge.id: edge for edge in spec.edges}
        self._numbers = {(edge.source, edge.source_port, edge.target, edge.target_port): edge.id for edge in spec.edges}
        self._routes: dict[tuple[str, tuple[str, ...]], list[StageRoute]] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self._runs: asyncio.TaskGroup | None = None
        self._done: list[Visit] = []
        self._connect: Callable[[str, int], Link] | None = None
        self._settled: Callable[[], Awaitable[None]] | None = None
        self._observer = Observer(spec.edges, spec.stages) if spec.observe else None

    # -- life ------------------------------------------------------------------------------------------------------

    async def serve(
        self,
        front: Link,
        connect: Callable[[str, int], Link] | None = None,
        settled: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Set the actors up, serve until `stopped`, close them. `connect` makes the link of a `Connect` message.

        The host is ready once its actors are, and `settled` has returned.
        """
        self._settled = settled
        self.links = {FRONT: front, self.spec.name: loopback(self.spec.name, self)}
        self._connect = connect
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                # Also while a stage is set up the runtime may be gone, or want no more of it.
                tasks.start_soon(self._set_up)
                await self._serve_runs()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                for local in self._stages.values():
                    await self._close_actor(local)

    async def _serve_runs(self) -> None:
        """Let stages run until `stopped`, then cancel them. A task of this group costs 7 us, one of AnyIO's 32."""
        async with asyncio.TaskGroup() as self._runs:
            try:
                await self.stopped.wait()
            finally:
                self._runs = None
                for visit in tuple(self._visits.values()):
                    # Its end is that of this process: `Closed` would take the request from those that hear of it.
                    visit.cut_off = not visit.over
                    visit.stop()

    async def _set_up(self) -> None:
        if self.spec.gpus.cap_bytes:
            try:
                await anyio.to_thread.run_sync(cap_memory, self.spec.gpus, self.spec.stages)
            except RuntimeError as error:  # of CUDA's: there is no such GPU, or it cannot be had
                self._break(self.spec.stages[0].name, error)
                return
        for stage in self.spec.stages:
            began = time.perf_counter()
            try:
                local = _LocalStage(stage, self.spec.observe, self._ranks)
                await local.actor.setup()
            except Exception as error:  # noqa: BLE001 - the boundary to actor code: reported with stage and traceback
                self._break(stage.name, error)
                return
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                self._break(stage.name, StartError("setup() was cancelled from within"))
                return
            self._stages[stage.name] = local
            if local.batcher is not None:
                self._spawn(local.batcher.serve)
            self.links[FRONT].send(StageReady(stage.name, time.perf_counter() - began))
        if self._settled is not None:
            await self._settled()
        self.links[FRONT].send(HostReady())

    async def _close_actor(self, local: _LocalStage) -> None:
        try:
            await local.actor.close()
        except (Exception, asyncio.CancelledError):  # the boundary to actor code: the other actors are closed, too
            log.exception("stage %s failed in close", local.stage.name)

    def _spawn(self, call: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(call, *arguments)

    def _break(self, stage: str, error: BaseException) -> None:
        """This host cannot go on: say why, then end."""
        self.broken = True
        self.links[FRONT].send(failure_of(stage, error))
        self.stopped.set()

    def lose_gpu(self, error: DeviceError) -> None:
        """The GPU does nothing any more of what it was given."""
        stage = next(stage for stage in self.spec.stages if stage.device != "cpu")
        self._break(stage.name, ActorBrokenError(f"the GPU has failed for this process: {error}"))

    # -- what links deliver ----------------------------------------------------------------------------------------

    def on_message(self, link: Link, message: Message, descriptors: Sequence[int]) -> None:
        match message:
            case Credit() | End() | Skip() if message.request > self._last_opened:
                self._hold(message.request, functools.partial(self.on_message, link, message, descriptors))
            case Credit():
                visit = self._visits.get(message.request)
                if visit is not None and message.edge in visit.credits:
                    visit.credits[message.edge].give(message.count)
            case End():
                self._on_end(message)
            case Skip():
                self._on_skip(message.edge, message.request)
            case Open():
                self._open(message)
                if self._early:
                    self._deliver_early()
            case Cancel():
                visit = self._visits.get(message.request)
                if visit is not None:
                    visit.stop()
                    self._close_if_done(visit)
            case Connect():
                self._on_connect(message, descriptors)
            case Shutdown():
                self.stopped.set()
            case _:
                raise ProtocolError(f"host {self.spec.name} cannot take a {type(message).__name__}")

    def on_closed(self, link: Link) -> None:
        if link is self.links.get(FRONT):
            self.stopped.set()
        elif self.links.get(link.peer) is link:
            del self.links[link.peer]

    def on_bad_item(self, link: Link, edge: int, request: int, error: ErrorInfo) -> None:
        if request > self._last_opened:
            self._hold(request, functools.partial(self.on_bad_item, link, edge, request, error))
            return
        visit = self._visit(request)
        planned = self._edges[edge]
        if error.kind == StageDiedError.__name__:
            died = StageDiedError(error.message, stage=planned.source)
            if visit is not None:
                self._fail(visit, died)
            else:  # its tensors were given to the GPU, and what comes of them on to other hosts
                self.links[FRONT].send(Failure(request, died.info()))
        elif visit is not None:
            if error.kind == UnavailableError.__name__:  # nobody's fault: no more files, or no memory
                self._fail(visit, UnavailableError(error.message, stage=planned.source))
            elif planned.source == CLIENT:
                self._fail(visit, InvalidInputError(error.message, param=planned.source_port))
            else:
                self._fail(visit, ProtocolError(error.message, stage=planned.source))

    def on_item(self, link: Link, edge: int, request: int, seq: int, value: object) -> None:
        visit = self._visits.get(request)
        if visit is None or visit.over:
            if request > self._last_opened:
                self._hold(request, functools.partial(self.on_item, link, edge, request, seq, value))
            return
        planned = self._edges[edge]
        run = visit.run_of(planned.target)
        if run is None:
            return
        mailbox = run.streams.get(planned.target_port)
        if mailbox is not None:
            self._put(visit, run, mailbox, edge, request, seq, value)
            return
        run.values[planned.target_port] = value
        run.missing.discard(planned.target_port)
        self._start_if_ready(visit, run)

    def _on_connect(self, message: Connect, descriptors: Sequence[int]) -> None:
        if not descriptors:  # the kernel drops what a process may not open
            self._unconnected.add(message.peer)
            self.links[FRONT].send(Unconnected(message.peer, message.number))
        elif self._connect is not None:
            self._unconnected.discard(message.peer)
            self.links[message.peer] = self._connect(message.peer, descriptors[0])

    def _on_end(self, message: End) -> None:
        visit = self._visit(message.request)
        planned = self._edges[message.edge]
        run = visit.run_of(planned.target) if visit is not None else None
        if visit is None or run is None:
            return
        try:
            run.streams[planned.target_port].end(message.count)
        except ProtocolError as error:
            error.stage = planned.source
            self._fail(visit, error)
            return
        self._start_if_ready(visit, run)

    def _on_skip(self, edge: int, request: int) -> None:
        visit = self._visit(request)
        planned = self._edges[edge]
        run = visit.run_of(planned.target) if visit is not None else None
        if visit is None or run is None:
            return
        port = next(port for port in run.route.ports.inputs if port.name == planned.target_port)
        if not port.optional:
            self._skip_stage(visit, run)
            return
        if run.started:
            run.streams[port.name].end(0)
            return
        run.values[port.name] = None
        run.streams.pop(port.name, None)
        run.missing.discard(port.name)
        self._start_if_ready(visit, run)

    def _visit(self, request: int) -> Visit | None:
        """The visit of a request, unless it is over."""
        visit = self._visits.get(request)
        return None if visit is None or visit.over else visit

    def _hold(self, request: int, deliver: Callable[[], None]) -> None:
        """Keep what another host sent for a request whose `Open` is still under way on the runtime's own link."""
        self._early.append((request, deliver))

    def _deliver_early(self) -> None:
        """Requests are opened in the order of their numbers: what is older than the last one will not come."""
        early = self._early
        self._early = [(request, deliver) for request, deliver in early if request > self._last_opened]
        for request, deliver in early:
            if request == self._last_opened:
                deliver()

    # -- requests --------------------------------------------------------------------------------------------------

    def _open(self, message: Open) -> None:
        context = Context(message.request_id, message.options, message.deadline_s, f"{message.request:016x}")
        visit = self._visits[message.request] = Visit(message.request, context)
        self._last_opened = message.request
        if self._observer is not None:
            self._observer.opened(message.request)
        routes = self._route(message.entry, message.outputs)
        if self._unconnected and self._refuse_unconnected(visit, routes):
            return
        for stage_route in routes:
            for edge in stage_route.row_edges():
                visit.credits[edge] = Credits(self._edges[edge].bound)
        for stage_route in routes:
            run = visit.runs[stage_route.stage] = Run(stage_route)
            for port, edge in stage_route.streams:
                planned = self._edges[edge]
                run.streams[port] = Mailbox(planned.bound, self._way_back(visit, edge), planned.policy)
            if not stage_route.inputs:
                # Everything that could feed it is absent from this profile: nothing will arrive to start it.
                self._start_if_ready(visit, run)

    def _refuse_unconnected(self, visit: Visit, routes: Sequence[StageRoute]) -> bool:
        """Fail a request that needs a peer which this host is not connected to, or no longer, or not yet."""
        for stage_route in routes:
            for edge in map(self._edges.__getitem__, stage_route.edges()):
                for peer in self._unconnected.intersection((edge.source_host, edge.target_host)):
                    text = f"its process is not connected to that of {peer!r} yet: it may open no more files"
                    stage = edge.target if edge.source_host == peer else edge.source
                    self._fail(visit, UnavailableError(text, stage=stage, retry_after_s=1.0))
                    return True
        return False

    def _route(self, entry: str, outputs: tuple[str, ...]) -> list[StageRoute]:
        found = self._routes.get((entry, outputs))
        if found is None:
            part = route(self.spec.topology, self.spec.absent, entry, outputs)
            names = [name for name in self._stages if name in part.stages]
            here = {name: self._stage_route(name, part.edges, part.refusals) for name in names}
            # Who watches what edges carry needs them all.
            watched = self._observer is not None
            found = list(here.values()) if watched else in_rows(here, {e: self._edges[e].target for e in self._edges})
            self._routes[entry, outputs] = found
        return found

    def _stage_route(self, name: str, edges: Sequence[Edge], refusals: dict[tuple[str, str], Refusal]) -> StageRoute:
        ports = self._stages[name].ports
        inputs = {edge.target_port: self._number(edge) for edge in edges if edge.target == name}
        outputs: dict[str, tuple[int, ...]] = {}
        for port in ports.outputs:
            readers = [e for e in edges if e.source == name and e.source_port == port.name]
            outputs[port.name] = tuple(self._number(edge) for edge in readers)
        refused = {port: refusal for (stage, port), refusal in refusals.items() if stage == name}
        return StageRoute(name, ports, inputs, outputs, refused)

    def _number(self, edge: Edge) -> int:
        return self._numbers[edge.source, edge.source_port, edge.target, edge.target_port]

    def _start_if_ready(self, visit: Visit, run: Run) -> None:
        if not run.missing and not run.started and not visit.over:
            run.started = True
            visit.num_running += 1
            if self._runs is not None:
                self._runs.create_task(self._run_stage(visit, run))

    async def _run_stage(self, visit: Visit, run: Run) -> None:
        """A row of `Actor.run` for one request: the only place that catches what actor code raises."""
        scope = anyio.CancelScope()
        visit.scopes.add(scope)
        progress.set(run.progress)
        try:
            with scope:
                if visit.over:
                    scope.cancel()
                result = await self._stages[run.route.stage].call(self._arguments(visit, run))
                while (following := run.route.follow) is not None:
                    if not isinstance(result, run.route.gives):
                        refuse_wrong_type(run.route.stage, run.route.ports.outputs[0], result)
                    if run.streams:
                        visit.leave(run)
                    run.follow(following, result)
                    result = await self._stages[run.route.stage].call(self._arguments(visit, run))
                await self._finish_stage(visit, run, result)
        except RequestError as error:
            error.stage = error.stage or run.route.stage
            self._fail(visit, error)
        except ActorBrokenError as error:
            self._fail(visit, StageError(error.message, stage=run.route.stage), more=True)
            self._break(run.route.stage, error)
        except (Exception, SystemExit) as error:  # a bug in `run` ends its own request only (docs/adr/0004)
            log.exception("stage %s failed for request %s", run.route.stage, visit.context.request_id)
            breaks = bool(self.spec.gpus.numbers) and _is_of_gpu(error)
            self._fail(visit, StageError(_text_of(error), stage=run.route.stage), more=breaks)
            if breaks:
                self._break(run.route.stage, error)
        except asyncio.CancelledError:
            # Not ours, unless the request is over: `run` has awaited something that was cancelled.
            self._fail(visit, StageError("run() was cancelled from within", stage=run.route.stage))
            raise
        finally:
            visit.scopes.discard(scope)
            visit.num_running -= 1
            self._close_if_done(visit)

    def _arguments(self, visit: Visit, run: Run) -> dict[str, Any]:
        if run.route.takes_values_only:
            return run.values
        arguments = {**run.values, **run.streams}
        for port in run.route.emits:
            readers = [self._reader(visit, edge) for edge in run.route.outputs[port.name]]
            refusal = run.route.refusals.get(port.name)
            arguments[port.name] = PortEmit(run.route.stage, port, visit.request, readers, refusal, run.progress)
        if run.route.ports.context is not None:
            arguments[run.route.ports.context] = self._context(visit, run.route)
        return arguments

    def _context(self, visit: Visit, route: StageRoute) -> Context:
        """What a stage may know, with the memory of the first link over which its values leave this host."""
        for edge in itertools.chain.from_iterable(route.outputs.values()):
            link = self.links.get(self._edges[edge].target_host)
            if link is not None and self._edges[edge].transport == "arrow_shm":
                return msgspec.structs.replace(visit.context, room=link.allocate)
        return visit.context

    def _reader(self, visit: Visit, edge: int) -> Reader:
        planned = self._edges[edge]
        full = None
        if planned.policy == "fail":
            text = f"stream edge {planned} is full: its reader has not taken the {planned.bound} items under way"
            full = EdgeFull(text, planned.target)
        return Reader(edge, self._way_out(visit, planned), visit.credits[edge], planned.loop, full)

    def _way_out(self, visit: Visit, edge: PlannedEdge) -> SendItem:
        """How items of a stream edge leave their stage: as directly as may be."""
        link = self.links.get(edge.target_host)
        if link is None or self._observer is not None:
            return self._send_item
        run = visit.run_of(edge.target)
        if run is not None and edge.target_host == self.spec.name:
            return functools.partial(self._put, visit, run, run.streams[edge.target_port])
        # A link serves the requests that were opened while it was there: after a restart there is another one.
        return link.send_item

    def _put(
        self, visit: Visit, run: Run, mailbox: Mailbox[Any], edge: int, request: int, seq: int, value: object
    ) -> None:
        """An item of a stream arrives at a stage of this host."""
        if visit.over:
            return
        try:
            mailbox.put(seq, value)
        except ProtocolError as error:
            error.stage = self._edges[edge].source
            self._fail(visit, error)
            return
        if not run.started:
            self._start_if_ready(visit, run)

    async def _finish_stage(self, visit: Visit, run: Run, result: Any) -> None:
        """Send what the stage gave, end its streams, and forget it."""
        # A result that breaks the contract is found before a reader is told that its stream has ended well.
        values = results_of(run.route, result)
        visit.leave(run)
        for port in run.route.ports.outputs:
            for edge in run.route.outputs[port.name]:
                if port.kind == "stream":
                    self._send(edge, End(edge, visit.request, visit.credits[edge].seq))
                elif port.optional and values[port.name] is None:
                    self._send(edge, Skip(edge, visit.request))
                else:
                    pending = self._send_item(edge, visit.request, 0, values[port.name])
                    if pending is not None:
                        await pending
        visit.runs.pop(run.head, None)

    def _skip_stage(self, visit: Visit, run: Run) -> None:
        """A required port of a one-port stage gets nothing: its row does not run, and the readers are told."""
        last = run.route
        while last.follow is not None:
            last = last.follow
        for edges in last.outputs.values():
            for edge in edges:
                self._send(edge, Skip(edge, visit.request))
        visit.runs.pop(run.head, None)
        self._close_if_done(visit)

    def _fail(self, visit: Visit, error: RequestError, *, more: bool = False) -> None:
        """End the request with `error`. `more`: that this host ends follows at once, and is heard with it."""
        if not visit.over:
            error.request_id = visit.context.request_id
            self.links[FRONT].send(Failure(visit.request, _told(error)), more=more)
            visit.stop()
            self._close_if_done(visit)

    def _close_if_done(self, visit: Visit) -> None:
        if visit.num_running == 0 and (visit.over or not visit.runs) and visit.request in self._visits:
            del self._visits[visit.request]
            self._done.append(visit)
            if len(self._done) == 1:
                asyncio.get_running_loop().call_soon(self._say_done)

    def _say_done(self) -> None:
        """Tell the runtime of all requests that have nothing here any more, in one message, at the end of a turn."""
        done, self._done = self._done, []
        behind = [link for link in self.links.values() if link.peer != FRONT and not link.push()]
        for visit in done:
            if behind and not visit.over:
                self._spawn(self._close_when_sent, visit, behind)
            else:
                self._say_closed(visit)

    async def _close_when_sent(self, visit: Visit, links: Sequence[Link]) -> None:
        """What has not left this process is lost if it dies: until then the request has something here."""
        for link in links:
            await link.flushed()
        self._say_closed(visit)

    def _say_closed(self, visit: Visit) -> None:
        if visit.cut_off:
            return
        if self._observer is not None:
            gone = {edge for edge, reader in visit.credits.items() if reader.gone}
            for part in self._observer.closed(visit.request, gone):
                self.links[FRONT].send(part)
        self.links[FRONT].send(visit.closed())

    # -- ways out --------------------------------------------------------------------------------------------------

    def _send_item(self, edge: int, request: int, seq: int, value: object) -> Awaitable[None] | None:
        link = self.links.get(self._edges[edge].target_host)
        # Without a link the reader's host has died, and the runtime is about to cancel this request.
        if link is None:
            return None
        pending = link.send_item(edge, request, seq, value)
        return pending if self._observer is None else self._observer.sent(edge, request, value, pending)

    def _send(self, edge: int, message: Message) -> None:
        link = self.links.get(self._edges[edge].target_host)
        if link is not None:
            link.send(message)
            if self._observer is not None:
                self._observer.told(message)

    def _way_back(self, visit: Visit, edge: int) -> Callable[[int], None]:
        """How the reader of a stream gives credit to its writer."""
        writer = visit.credits.get(edge)
        return writer.give if writer is not None else functools.partial(self._give_credit, edge, visit.request)

    def _give_credit(self, edge: int, request: int, count: int) -> None:
        link = self.links.get(self._edges[edge].source_host)
        if link is not None:
            link.send(Credit(edge, request, count))

    def busiest(self) -> tuple[str, float]:
        """The stage whose present step has run longest, and for how many seconds."""
        busy = ((name, local.actor.busy_s()) for name, local in self._stages.items())
        return max(busy, key=lambda entry: entry[1], default=("", 0.0))

    def load(self) -> tuple[StageLoad, ...]:
        """What each stage has to do now."""
        running, queued = dict.fromkeys(self._stages, 0), dict.fromkeys(self._stages, 0)
        for visit in self._visits.values():
            for run in visit.runs.values():
                running[run.route.stage] += run.started
                queued[run.route.stage] += sum(mailbox.statistics().queued for mailbox in run.streams.values())
        for name, local in self._stages.items():
            queued[name] += local.actor.num_waiting() + (local.batcher.num_waiting if local.batcher else 0)
        return tuple(
            StageLoad(name, running[name], queued[name], local.actor.engine_stats())
            for name, local in self._stages.items()
        )

    @property
    def num_open(self) -> int:
        """Requests that have something here."""
        return len(self._visits)
