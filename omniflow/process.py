"""The child's side of a host process: from the first instruction after the fork to the last."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import anyio
import msgspec

from omniflow.config import RuntimeConfig
from omniflow.devices import Gpus, Lanes, cap_memory, uses_gpu
from omniflow.engine.ranks import ALONE, Ranks
from omniflow.errors import DeviceError, StartError
from omniflow.host import Host, HostSpec, actor_of, failure_of
from omniflow.messages import Beat, HostFailed
from omniflow.planner.plan import FRONT
from omniflow.prctl import die_with_parent, name_process, tell_end
from omniflow.topology import Stage
from omniflow.transport.arrow_shm import ArrowShmLink, SharedMemory
from omniflow.transport.base import Link
from omniflow.transport.cuda_driver import cuda, has_bindings

if TYPE_CHECKING:
    from multiprocess.connection import Connection

_LAST_WORDS_S = 1.0
"""How long a host that ends waits for the runtime to take what it has said: why it has failed, for one."""
_GC_OBJECTS = 50_000
"""Requests leave no cycles for the garbage collector to find; with Python's 700, thousands of them in flight cost a
third more, because it looks at each of them again and again."""
_IMPORTED_IN = os.getpid()
"""In a host that was forked: the fork server, as a rule (one that somebody else has started has not imported this)."""
EXIT_BROKEN = 3
"""Exit code of a host whose stage failed in setup or broke for good."""


def runs_on_uvloop(config: RuntimeConfig) -> bool:
    """Whether event loops are uvloop's. Raises StartError where they must be and it is not installed."""
    installed = importlib.util.find_spec("uvloop") is not None
    if config.uvloop and not installed:
        raise StartError("runtime.uvloop is true, but uvloop is not installed: pip install uvloop")
    return installed if config.uvloop is None else config.uvloop


def host_main(
    spec: HostSpec,
    connection: socket.socket,
    parent: int,
    log_level: int,
    ranks: Ranks = ALONE,
    lifeline: Connection | None = None,
) -> None:
    """Run one host until its runtime says so or is gone. Never returns: exits with 0 or EXIT_BROKEN.

    `lifeline` is closed as soon as it is ending.
    """
    _begin(spec.name, parent, log_level, lifeline)
    broken = anyio.run(_serve, spec, connection, ranks, backend_options={"use_uvloop": spec.uvloop})
    _end(broken)


def follower_main(
    host: str,
    stage: Stage,
    gpus: Gpus,
    parent: int,
    log_level: int,
    ranks: Ranks,
    lifeline: Connection,
    last_words: Connection,
) -> None:
    """Run a rank of `stage` other than the first, until that says so or is gone. Never returns: exits as `host_main`,
    and says before what it has failed of, or that it ends well.
    """
    _begin(f"{host}:{ranks.rank}", parent, log_level, lifeline)
    failure: HostFailed | None = None
    try:
        cap_memory(gpus, (stage,), ranks.rank)
        actor_of(stage, ranks).follow()
    except Exception as error:  # noqa: BLE001 - the boundary to actor code: reported with rank and traceback
        failure = failure_of(stage.name, error)
    with contextlib.suppress(OSError):  # the runtime is gone
        last_words.send_bytes(msgspec.msgpack.encode(failure))
    _end(failure is not None)


def _begin(name: str, parent: int, log_level: int, lifeline: Connection | None) -> None:
    # Were the fork server dead already, the parent of this process would be another one.
    die_with_parent(parent or (_IMPORTED_IN if _IMPORTED_IN != os.getpid() else os.getppid()))
    if lifeline is not None:
        with lifeline:
            tell_end(lifeline.fileno())
    name_process(f"of:{name}")
    # Ctrl-C goes to the whole process group; the runtime drains and then tells the hosts to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=log_level, format=f"%(levelname)s [{name}] %(message)s", stream=sys.stderr)
    spare_the_collector()


def spare_the_collector() -> None:
    """Let the garbage collector of a host look rarely, and never at what was imported before its fork: that is no
    garbage, and its pages stay shared as long as nobody looks at them.
    """
    gc.freeze()
    gc.set_threshold(_GC_OBJECTS)


def _end(broken: bool) -> None:
    # Libraries of actors may leave threads behind that would keep the interpreter alive.
    sys.stderr.flush()
    os._exit(EXIT_BROKEN if broken else 0)


async def _serve(spec: HostSpec, connection: socket.socket, ranks: Ranks) -> bool:
    memory = SharedMemory(spec.shm_bytes, spec.hot_window_s)
    host = Host(spec, ranks)
    types = {edge.id: edge.type for edge in spec.edges}

    lanes = Lanes(spec.name, spec.gpus, spec.edges)
    home = "cuda" if spec.gpus.numbers else None

    def link_to(peer: str, descriptor: int) -> Link:
        lane = lanes.to(peer)
        link = ArrowShmLink(peer, host, socket.socket(fileno=descriptor), memory, types, lane=lane, home=home)
        if lane is not None:
            tasks.start_soon(lanes.serve, lane, link)
        return link

    async def settled() -> None:
        await lanes.settled()
        if spec.gpus.numbers:
            tasks.start_soon(watch_gpu, host, spec.beat_s)

    front = ArrowShmLink(FRONT, host, connection, memory, types, home=home)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_beat, host, front, spec.beat_s)
        await host.serve(front, link_to, settled)
        tasks.cancel_scope.cancel()
    with anyio.move_on_after(_LAST_WORDS_S):
        await front.flushed()
    for link in list(memory.links):
        link.close()
    lanes.close()
    memory.close()
    return host.broken


async def _beat(host: Host, front: Link, every_s: float) -> None:
    """Say that the event loop turns, how long the longest step has run in its thread, and what there is to do."""
    while True:
        front.send(Beat(*host.busiest(), host.load()))
        await anyio.sleep(every_s)


async def watch_gpu(host: Host, every_s: float) -> None:
    """End `host` once the context of its GPU is dead. A kernel that fails kills it, and no call says so until somebody
    waits for the GPU: who has only sent tensors on looks well, and whoever reads them would wait for ever.
    """
    if not has_bindings():
        return  # there are no lanes then, either
    while True:
        await anyio.sleep(every_s)
        try:
            if uses_gpu():
                cuda().look()
        except DeviceError as error:
            host.lose_gpu(error)
            return
