"""Starts host processes, sees them die or hang, restarts them by their strategy, and wires their sockets.

Death is seen through a pidfd in the event loop (1-2 ms, no polling); a hang through a missing heartbeat. A process on a
GPU is dead only when the driver has freed all that it had, 0.2 s: such a one has a lifeline, which ends as that begins.

A host whose stage is split over GPUs is several processes: the one that runs it (rank 0) and its followers. All are
children of this process and watched alike. The death of any is the death of the host: the others may be in a collective
that never ends, so they are killed, and the host is started again once all are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import os
import signal
import socket
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import multiprocess
import multiprocess.forkserver

from omniflow.by_name import ByName
from omniflow.config import RuntimeConfig
from omniflow.devices import gpus_of
from omniflow.engine.ranks import Ranks
from omniflow.environment import environment
from omniflow.errors import StartError
from omniflow.host import HostSpec, host_spec, hot_window_s
from omniflow.messages import Beat, Connect, HostFailed, HostReady, Message, Shutdown, StageReady, Unconnected
from omniflow.observer import Observe
from omniflow.planner.plan import FRONT, Plan, PlannedHost
from omniflow.prctl import PARENT
from omniflow.process import follower_main, host_main, runs_on_uvloop
from omniflow.transport.arrow_shm import ArrowShmLink, SharedMemory, socket_pair
from omniflow.transport.base import Link, Receiver

if TYPE_CHECKING:
    from multiprocess.connection import Connection

log = logging.getLogger("omniflow.supervisor")

HostState = Literal["starting", "ready", "down", "failed", "stopped"]
_LONGEST_BACKOFF_S = 10.0
_BEAT_S = 1.0
"""The longest time between two heartbeats: the load that they report is at most so old."""
_TOLD_WITHIN_S = 0.05
"""How long the death of a host waits for its cause to be known: 1 ms on most machines, more on one that is too busy."""
_KILL_AFTER_S = 5.0
"""What a host gets to close its actors before it is killed, and the fork server to start one that nobody wants now."""
_CONNECT_AGAIN_S = 0.2
"""How soon a host that could not open a socket gets another."""
_MOST_CONNECTS = 25
"""Sockets that two hosts are given one after the other: 5 s, in which a host may have become able to open one."""
_UNTOLD = 255
"""The exit code that `multiprocess` gives a process whose parent, the fork server, died before it could tell one."""


_IMPORT_HINT = (
    " before it could say why; see its traceback above (a script that starts a Runtime does it under "
    "`if __name__ == '__main__':`, and defines its actors and types above that: each host imports the script)"
)


class SupervisorEvents(Protocol):
    """What the runtime is told; `on_down` comes before anything is restarted."""

    def on_stage_ready(self, stage: str, seconds: float) -> None:
        """A stage's setup has returned."""

    def on_ready(self, host: str) -> None:
        """All stages of a host are ready."""

    def on_down(self, host: str, reason: str) -> None:
        """A host has died; what it ran is lost."""

    def on_failed(self, host: str, error: StartError) -> None:
        """A host is given up: it cannot start, or has died too often, or its strategy is to stop."""


class Follower:
    """A process of a host beside the one that runs it. In `words` it says how it ends, unless it is killed."""

    def __init__(self, rank: int, process: Any, pidfd: int, lifeline: Connection, words: Connection) -> None:
        self.rank = rank
        self.process = process
        self.pidfd = pidfd
        self.lifeline = lifeline
        self.words = words
        self.ends_well = False
        self.said: HostFailed | None = None
        """What it has failed of."""

    def hear(self) -> None:
        """Take its last words, if there are any; it is dead, or ending."""
        if self.words.poll():
            with contextlib.suppress(EOFError, OSError):  # OSError: killed while it spoke
                said = msgspec.msgpack.decode(self.words.recv_bytes(), type=HostFailed | None)
                self.ends_well = said is None
                if said is not None:
                    self.said = msgspec.structs.replace(said, message=f"rank {self.rank}: {said.message}")

    def close(self) -> None:
        """Close what was its; it is dead, or nobody watches it yet."""
        self.lifeline.close()
        self.words.close()
        os.close(self.pidfd)


class Child:
    """One supervised host through all its restarts: its process, and its followers where it has any."""

    def __init__(self, host: PlannedHost) -> None:
        self.host = host
        self.state: HostState = "starting"
        self.link: Link | None = None
        self.process: Any = None
        self.pidfd: int | None = None
        self.lifeline: Connection | None = None
        """Our end of it, where it has one and is not known to be ending."""
        self.followers: list[Follower] = []
        """Those that are there."""
        self.restarts = 0
        self.deaths: deque[float] = deque()
        self.last_beat = 0.0
        self.failure: HostFailed | None = None
        self.swept = False
        """Killed because another host's strategy restarts it too; that is no death of its own."""
        self.silence: asyncio.TimerHandle | None = None
        """Ends the wait for how it died."""
        self.gone = anyio.Event()
        """Set unless one of its processes is there."""
        self.gone.set()
        self.started = 0.0
        self.launched = anyio.Event()
        """Set unless its process is being started right now."""
        self.launched.set()

    @property
    def pid(self) -> int | None:
        """The process that runs it, if there is one; a host that has lost a follower has none."""
        return self.process.pid if self.link is not None else None


class Wire(NamedTuple):
    """The latest connection that two hosts were given: its number, and how many there were since either started."""

    number: int
    tries: int


class Supervisor:
    """Owns the host processes of a plan. `run` is its task; everything else is called in the event loop."""

    def __init__(
        self,
        plan: Plan,
        config: RuntimeConfig,
        receiver: Receiver,
        events: SupervisorEvents,
        memory: SharedMemory,
        observe: Observe | None = None,
    ) -> None:
        self._plan = plan
        self._config = config
        self._receiver = receiver
        self._events = events
        self._memory = memory
        self._observe = observe
        self._types = {edge.id: edge.type for edge in plan.edges if edge.target_host == FRONT}
        self.children = {host.name: Child(host) for host in plan.hosts if host.process}
        self._tasks: anyio.abc.TaskGroup | None = None
        self._stopping = False
        self._specs: dict[str, ByName] = {}
        self._wires: dict[frozenset[Child], Wire] = {}
        self._numbers = itertools.count()
        self._untold: dict[Any, anyio.Event] = {}
        """Processes that are dead and whose parent has yet to say so: their descriptors stay open until then."""

    # -- start -----------------------------------------------------------------------------------------------------

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start all hosts, in parallel; they report by `SupervisorEvents`.

        Raises StartError where no host could be.
        """
        self._uvloop = runs_on_uvloop(self._config)
        self._specs = {name: ByName(self._spec_of(child.host)) for name, child in self.children.items()}
        self._tasks = tasks
        if any(child.host.start_method == "forkserver" for child in self.children.values()):
            _start_forkserver(self._preload())
        for child in self.children.values():
            tasks.start_soon(self._launch, child, 0.0)
        if self.children:
            tasks.start_soon(self._watch_beats)

    def _preload(self) -> list[str]:
        """Modules that the fork server imports once, so that a host starts (and restarts) in 20 ms, not seconds."""
        hosts = [child.host for child in self.children.values() if child.host.start_method == "forkserver"]
        stages = [self._plan.graph.stage(name) for host in hosts for name in host.stages]
        modules = sorted({stage.actor.__module__ for stage in stages} - {"__main__"})
        modules += sorted({module for stage in stages for module in stage.actor.preload})
        modules += ["uvloop"] if self._uvloop else []
        return ["omniflow.forkserver_start", "omniflow.process", *(m for m in modules if _importable(m))]

    async def _launch(self, child: Child, delay_s: float) -> None:
        if delay_s:
            await anyio.sleep(delay_s)
        # The memory of its devices is free once all of its processes are gone.
        await child.gone.wait()
        if self._stopping:
            return
        child.launched = anyio.Event()
        try:
            await self._start_process(child)
        except OSError as error:
            # The fork server died, or the process before it could be watched: a death like any other.
            if not self._stopping:
                self._decide(child, "starting", f"its process could not be started: {error}")
        finally:
            child.launched.set()
        if self._stopping:
            self._kill(child)
        self._connect_peers(child)

    async def _start_process(self, child: Child) -> None:
        ours, theirs = socket_pair()
        with contextlib.ExitStack() as unless_started, theirs, _Pipes(child.host.ranks) as pipes:
            unless_started.callback(ours.close)
            followers = self._start_followers(child.host, pipes, unless_started)
            lifeline, its_lifeline = pipes.one_way() if child.host.start_method == "spawn" else (None, None)
            if lifeline is not None:
                unless_started.callback(lifeline.close)
            process = self._process_of(child.host, theirs, pipes.ranks(0), its_lifeline)
            if child.host.start_method == "forkserver":
                # A new fork server (the old one may have been killed) must not be tied to the life of a worker thread.
                _ensure_forkserver()
                _refuse_few_files()
                failure = await self._start_forked(process)
            else:
                # In the environment from the first: a module that is imported may ask CUDA what there is.
                with environment(gpus_of(child.host).environment(os.environ)):
                    failure = _start(process)
            if failure is not None:
                raise OSError(failure)
            unless_started.callback(_forget_soon, process)
            pidfd = os.pidfd_open(process.pid)
            unless_started.pop_all()
        child.followers = followers
        child.process, child.failure, child.state, child.gone = process, None, "starting", anyio.Event()
        child.started = child.last_beat = time.monotonic()
        child.link = ArrowShmLink(child.host.name, self._receiver, ours, self._memory, self._types, keeps_views=False)
        child.pidfd, child.lifeline = pidfd, lifeline
        self._watch(child, pidfd)

    async def _start_forked(self, process: Any) -> str | None:
        """Waits until the fork server has imported its modules; one that never has (a disk that hangs) is killed."""
        late = asyncio.get_running_loop().call_later(self._config.start_timeout_s, _kill_forkserver)
        try:
            return await anyio.to_thread.run_sync(_start, process)
        finally:
            late.cancel()

    def _watch(self, child: Child, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, self._on_exit, child)
        if child.lifeline is not None:
            loop.add_reader(child.lifeline.fileno(), self._on_ending, child)
        for follower in child.followers:
            loop.add_reader(follower.pidfd, self._on_follower_exit, child, follower)
            loop.add_reader(follower.lifeline.fileno(), self._on_follower_ending, child, follower)

    def _start_followers(
        self, host: PlannedHost, pipes: _Pipes, unless_started: contextlib.ExitStack
    ) -> list[Follower]:
        """Start all ranks of a host but the first. Raises OSError where one cannot be; then none is left."""
        followers = []
        gpus = gpus_of(host)
        for rank in range(1, host.ranks):
            stage = next(stage for stage in map(self._plan.graph.stage, host.stages) if stage.tp > 1)
            (lifeline, its_lifeline), (words, its_words) = pipes.one_way(), pipes.one_way()
            told = (pipes.ranks(rank), its_lifeline, its_words)
            arguments = (host.name, ByName(stage), gpus, os.getpid(), log.getEffectiveLevel(), *told)
            context = multiprocess.get_context(host.start_method)
            process = context.Process(target=follower_main, args=arguments, name=f"{host.name}:{rank}", daemon=True)
            with environment(gpus.environment(os.environ)):
                failure = _start(process)
            if failure is not None:
                raise OSError(failure)
            followers.append(Follower(rank, process, os.pidfd_open(process.pid), lifeline, words))
            unless_started.callback(_drop, followers[-1])
        return followers

    def _process_of(
        self, host: PlannedHost, connection: socket.socket, ranks: Ranks, lifeline: Connection | None
    ) -> Any:
        parent = os.getpid() if host.start_method == "spawn" else 0
        arguments = (self._specs[host.name], connection, parent, log.getEffectiveLevel(), ranks, lifeline)
        context = multiprocess.get_context(host.start_method)
        return context.Process(target=host_main, args=arguments, name=host.name, daemon=True)

    def _spec_of(self, host: PlannedHost) -> HostSpec:
        config = self._config
        return host_spec(
            self._plan,
            host.name,
            shm_bytes=config.shm_bytes,
            beat_s=min(config.hang_s, config.step_s, 10 * _BEAT_S) / 10,
            observe=self._observe,
            hot_window_s=hot_window_s(self._plan, config),
            uvloop=self._uvloop,
        )

    def _connect_peers(self, child: Child) -> None:
        """Give the new process a fresh socket to each running host that it shares an edge with."""
        name = child.host.name
        for other in self.children.values():
            if (
                other is child
                or other.link is None
                or child.link is None
                or not self._share_edge(name, other.host.name)
            ):
                continue
            self._connect(child, other, 1)

    def _connect(self, child: Child, other: Child, tries: int) -> None:
        """Give two running hosts a fresh socket to each other; where there is none to be had, `child` dies of it."""
        try:
            a, b = socket_pair()
        except OSError as error:
            self._kill_for(child, f"it cannot be connected to {other.host.name!r}: {error.strerror}")
            return
        number = next(self._numbers)
        self._wires[frozenset((child, other))] = Wire(number, tries)
        for one, peer, end in ((child, other, a), (other, child, b)):
            if one.link is not None:
                one.link.send(Connect(peer.host.name, number), (end.detach(),))

    def _not_connected(self, child: Child, other: Child, number: int) -> None:
        """`child` could not take a socket; it gets another, unless it has one since, or there were too many."""
        wire = self._wires[frozenset((child, other))]
        if wire.number != number or self._tasks is None:
            return
        if wire.tries >= _MOST_CONNECTS:
            self._kill_for(child, f"it cannot be connected to {other.host.name!r}: it may open no more files")
        else:
            self._tasks.start_soon(self._connect_again, child, other, wire)

    async def _connect_again(self, child: Child, other: Child, wire: Wire) -> None:
        await anyio.sleep(_CONNECT_AGAIN_S)
        if self._wires[frozenset((child, other))] == wire and child.link is not None and other.link is not None:
            self._connect(child, other, wire.tries + 1)

    def _kill_for(self, child: Child, reason: str) -> None:
        """A death like any other, which says why."""
        child.failure = HostFailed(child.host.name, reason, "")
        self._kill(child)

    def _share_edge(self, a: str, b: str) -> bool:
        return any({edge.source_host, edge.target_host} == {a, b} for edge in self._plan.edges)

    # -- what hosts say --------------------------------------------------------------------------------------------

    def heard(self, host: str, message: Message) -> None:
        """A supervision message arrived from a host."""
        child = self.children[host]
        match message:
            case Beat():
                child.last_beat = time.monotonic()
                if child.state == "ready" and message.busy_s > self._config.step_s:
                    log.error("stage %s has been in one step for %.1f s: killed", message.stage, message.busy_s)
                    self._kill(child)
            case StageReady():
                self._events.on_stage_ready(message.stage, message.seconds)
            case HostReady():
                child.state = "ready"
                self._events.on_ready(host)
            case Unconnected():
                self._not_connected(child, self.children[message.peer], message.number)
            case HostFailed():
                child.failure = message
                if child.state == "ready":  # to close its actors may take it seconds
                    child.state = "down"
                    self._events.on_down(host, message.message)
                if self._tasks is not None:
                    self._tasks.start_soon(self._kill_if_it_stays, child, child.process)

    async def _watch_beats(self) -> None:
        while not self._stopping:
            due = time.monotonic() + self._config.hang_s / 10
            await anyio.sleep(self._config.hang_s / 10)
            now = time.monotonic()
            late_s = max(0.0, now - due)
            for child in self.children.values():
                # While this process was stopped (a paused container) it heard nobody, and they may have been, too.
                child.last_beat += late_s
                child.started += late_s
                if child.state == "ready" and now - child.last_beat > self._config.hang_s:
                    log.error("host %s has been silent for %.1f s: killed", child.host.name, now - child.last_beat)
                    self._kill(child)
                elif child.state == "starting" and child.link and now - child.started > self._config.start_timeout_s:
                    log.error("host %s is not ready after %.1f s: killed", child.host.name, now - child.started)
                    self._kill(child)

    async def _kill_if_it_stays(self, child: Child, process: Any) -> None:
        """A host that has failed, or that a follower has left, ends itself, unless closing its actors hangs."""
        await anyio.sleep(_KILL_AFTER_S)
        if child.process is process:
            self._kill(child)

    # -- death -----------------------------------------------------------------------------------------------------

    def _on_exit(self, child: Child) -> None:
        """The kernel says that it is dead; how it died its parent, the fork server, says a moment later."""
        assert child.pidfd is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(child.pidfd)
        if child.process.exitcode is None:
            loop.add_reader(child.process.sentinel, self._bury, child)
            child.silence = loop.call_later(_TOLD_WITHIN_S, self._bury, child)
        else:
            self._bury(child)

    def _bury(self, child: Child) -> None:
        assert child.pidfd is not None
        if child.silence is not None:
            child.silence.cancel()
            child.silence = None
        _drop_lifeline(child)
        os.close(child.pidfd)
        child.pidfd = None
        code = child.process.exitcode
        if code is None:
            self._untold[child.process] = anyio.Event()
            asyncio.get_running_loop().add_reader(child.process.sentinel, self._told, child.process)
        else:
            _forget(child.process)
        if child.link is not None:
            _hear_out(child.link)
            known = None if child.host.start_method == "forkserver" and code == _UNTOLD else code
            self._lose(child, child.failure.message if child.failure else _why(known))
        _say_gone(child)

    def _told(self, process: Any) -> None:
        _forget(process)
        self._untold.pop(process).set()

    def _on_ending(self, child: Child) -> None:
        """Its lifeline is closed: it ends now, and is dead when all that it had is freed."""
        _drop_lifeline(child)
        if child.link is not None and child.pidfd is not None:
            code = _ending(child.process.pid)
            _hear_out(child.link)
            self._lose(child, child.failure.message if child.failure else _why(code or None))

    def _on_follower_ending(self, child: Child, follower: Follower) -> None:
        """As `_on_ending`; one that ends well has heard that the first rank ends, which has yet to say why."""
        asyncio.get_running_loop().remove_reader(follower.lifeline.fileno())
        follower.hear()
        if not follower.ends_well:
            self._lose_by(child, follower, _ending(follower.process.pid) or None)

    def _on_follower_exit(self, child: Child, follower: Follower) -> None:
        """The kernel says that it is dead; its parent is this process, which knows how."""
        asyncio.get_running_loop().remove_reader(follower.pidfd)
        asyncio.get_running_loop().remove_reader(follower.lifeline.fileno())
        child.followers.remove(follower)
        code = follower.process.exitcode
        follower.hear()
        follower.close()
        _forget(follower.process)
        _say_gone(child)
        if not follower.ends_well:
            self._lose_by(child, follower, code)
        elif child.link is not None and self._tasks is not None:
            self._tasks.start_soon(self._kill_if_it_stays, child, child.process)

    def _lose_by(self, child: Child, follower: Follower, code: int | None) -> None:
        """A follower is dead or about to be, and with it the host."""
        if child.link is not None and not self._stopping:
            self._kill(child)  # the first rank may live, and send for as long as it is heard
            _hear_out(child.link)
            child.failure = follower.said
            self._lose(child, follower.said.message if follower.said else f"rank {follower.rank}: {_why(code)}")

    def _lose(self, child: Child, reason: str) -> None:
        """What it ran is lost; all of its processes are dead or about to be."""
        self._kill(child)
        if child.link is not None:
            child.link.close()
            child.link = None
        was, child.state = child.state, "down"
        if self._stopping:
            child.state = "stopped"
            return
        trace = f"\n{child.failure.detail}" if child.failure and child.failure.detail else ""
        log.warning("host %s died: %s%s", child.host.name, reason, trace)
        self._events.on_down(child.host.name, reason)
        self._decide(child, was, reason)

    def _decide(self, child: Child, was: HostState, reason: str) -> None:
        restart = child.host.restart
        if child.swept:
            child.swept = False
            self._relaunch(child, restart.backoff_s)
            return
        now = time.monotonic()
        child.deaths.append(now)
        while child.deaths and child.deaths[0] < now - restart.within_s:
            child.deaths.popleft()
        first_start = was == "starting" and child.restarts == 0
        if restart.strategy == "stop" or first_start or len(child.deaths) > restart.max_restarts:
            child.state = "failed"
            self._events.on_failed(child.host.name, self._given_up(child, first_start, reason))
            return
        for other in self._affected(child):
            other.swept = True
            self._kill(other)
        # Back-off doubles with each death in the window, so a host that cannot live does not burn the machine.
        doublings = min(len(child.deaths) - 1, 10)
        self._relaunch(child, min(restart.backoff_s * 2**doublings, max(restart.backoff_s, _LONGEST_BACKOFF_S)))

    def _relaunch(self, child: Child, delay_s: float) -> None:
        child.restarts += 1
        child.state = "starting"
        if self._tasks is not None:
            self._tasks.start_soon(self._launch, child, delay_s)

    def _affected(self, child: Child) -> list[Child]:
        """The other hosts that the strategy restarts as well: the later ones (in data flow), or all."""
        order = list(self.children.values())
        strategy = child.host.restart.strategy
        chosen = (
            order if strategy == "one_for_all" else order[order.index(child) :] if strategy == "rest_for_one" else []
        )
        return [other for other in chosen if other is not child and other.link is not None]

    def _given_up(self, child: Child, first_start: bool, reason: str) -> StartError:
        stage = child.failure.stage if child.failure else child.host.name
        detail = child.failure.detail if child.failure else ""
        if first_start:
            # A host that says nothing died on its imports: its traceback is on stderr, and one cause is common.
            hint = _IMPORT_HINT if child.failure is None and reason == _why(1) else ""
            return StartError(f"failed to start: {reason}{hint}", stage=stage, detail=detail)
        if child.host.restart.strategy == "stop":
            return StartError(f"died ({reason}), and its restart strategy is to stop", stage=stage, detail=detail)
        often = f"{len(child.deaths)} times within {child.host.restart.within_s:.0f} s"
        return StartError(f"died {often}, the last time: {reason}", stage=stage, detail=detail)

    def _kill(self, child: Child) -> None:
        """Kill all of its processes that are there."""
        for pidfd in (child.pidfd, *(follower.pidfd for follower in child.followers)):
            if pidfd is not None:
                _kill(pidfd)

    # -- stop ------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Tell all hosts to end; kill those that still start, and what has not ended after a few seconds.

        Returns when every process is gone, and what was open for them is closed.
        """
        self._stopping = True
        late = asyncio.get_running_loop().call_later(_KILL_AFTER_S, _kill_forkserver)
        for child in self.children.values():
            await child.launched.wait()
        late.cancel()
        running = [child for child in self.children.values() if not child.gone.is_set()]
        for child in running:
            if child.state == "starting":
                self._kill(child)
            elif child.link is not None:
                child.link.send(Shutdown())
        with anyio.move_on_after(_KILL_AFTER_S):
            for child in running:
                await child.gone.wait()
        for child in running:
            self._kill(child)
        for child in running:
            await child.gone.wait()
        with anyio.move_on_after(_KILL_AFTER_S):  # a fork server that is busy says it later, one that is stopped never
            for told in list(self._untold.values()):
                await told.wait()


class _Pipes(contextlib.ExitStack):
    """The connections of the processes of one host, while these are started: each then has its own ends."""

    def __init__(self, size: int) -> None:
        super().__init__()
        pairs = [multiprocess.Pipe() for _ in range(1, size)]
        self._ends = [tuple(first for first, _ in pairs), *((other,) for _, other in pairs)]
        for end in (end for pair in pairs for end in pair):
            self.callback(end.close)

    def ranks(self, rank: int) -> Ranks:
        """The place of one process."""
        return Ranks(rank, len(self._ends), self._ends[rank])

    def one_way(self) -> tuple[Connection, Connection]:
        """Our end, which outlives the start, of what one of them tells this process, and its end."""
        ours, theirs = multiprocess.Pipe(duplex=False)
        self.callback(theirs.close)
        return ours, theirs


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # dead, and about to be noticed
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _drop(follower: Follower) -> None:
    """End a follower that nobody watches yet."""
    _kill(follower.pidfd)
    follower.close()
    _forget_soon(follower.process)


def _ending(pid: int) -> int:
    """With what code a process is ending that is not dead yet, as the kernel knows it; 0 where it is not, or where the
    kernel (before 5.17) does not know yet.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return os.waitstatus_to_exitcode(int(stat.split()[-1]))


def _drop_lifeline(child: Child) -> None:
    if child.lifeline is not None:
        asyncio.get_running_loop().remove_reader(child.lifeline.fileno())
        child.lifeline.close()
        child.lifeline = None


def _say_gone(child: Child) -> None:
    if child.pidfd is None and not child.followers:
        child.gone.set()


def _why(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code is not None else "its process is gone"


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _start_forkserver(preload: list[str]) -> None:
    """Start the fork server from this thread: it dies with the thread that started it (see prctl.py)."""
    multiprocess.forkserver.set_forkserver_preload(preload)
    _ensure_forkserver()


def _ensure_forkserver() -> None:
    os.environ[PARENT] = str(os.getpid())
    try:
        multiprocess.forkserver.ensure_running()
    finally:
        del os.environ[PARENT]


def _refuse_few_files() -> None:
    """Raises OSError where this process may not open the 5 files that a start takes: the fork server would die of one
    that breaks off, and all hosts with it.
    """
    with contextlib.ExitStack() as held:
        for _ in range(3):
            for descriptor in os.pipe():
                held.callback(os.close, descriptor)


def _kill_forkserver() -> None:
    """Whoever waits for it hears that it is gone; so do the hosts that it has started, which die."""
    pid = multiprocess.forkserver._forkserver._forkserver_pid  # known to nobody else
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _start(process: Any) -> str | None:
    """Start it; gives what went wrong. The error itself would hold half of what was opened for the process, and would
    be held by the future that brings it out of a thread.
    """
    try:
        process.start()
    except EOFError:
        return "the fork server has died"
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _hear_out(link: Link) -> None:
    """Deliver all that a process that is dead has sent: what it had finished is finished."""
    before = -1
    while link.statistics().received > before:
        before = link.statistics().received
        link.poll()


def _forget(process: Any) -> None:
    """Close what belongs to a process that is dead, and whose parent has told so."""
    asyncio.get_running_loop().remove_reader(process.sentinel)
    process.close()


def _forget_soon(process: Any) -> None:
    process.join(_TOLD_WITHIN_S)
    with contextlib.suppress(ValueError):  # not told
        process.close()
