"""An engine on several devices, a process each: rank 0 speaks, the others follow.

    Leader(engine, ranks)      rank 0: an `Engine` whose every call is made on all ranks, in the same order
    follow(engine, ranks)      the life of every other rank: make the calls that rank 0 makes, until it says `End`

All that decides what a rank computes (which requests there are, when a step runs, what was aborted) goes over a socket
before each step, once, so that all ranks decide alike; the tensors of a step go between the devices by the engine's own
collectives. Between steps a follower sleeps in `recv`: it costs no core, and no collective waits that could time out.
Who dies takes the others along: the supervisor sees to that.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import socket
import time
import typing
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from omniflow.engine.base import Engine, EngineOutput, EngineRequest
from omniflow.engine.ranks import Ranks
from omniflow.engine.stats import EngineStats
from omniflow.errors import ActorBrokenError

if TYPE_CHECKING:
    import torch

_TENSOR = 1
"""MessagePack's number for a tensor."""
_MEET_S = 600.0
"""How long a rank waits for the others to load: the supervisor gives up sooner (`runtime.start_timeout_s`)."""
_LOST_S = 1.0
"""How long after a broken step the death of another rank may show that has caused it: it shows at once."""
_KILLED_S = 5.0
"""How long a rank waits to be killed: 1 to 100 ms after another has died."""


def meet(ranks: Ranks, backend: str) -> None:
    """Make torch's default group of all ranks, on a port of the loopback interface that the kernel chose.

    Rank 0 listens before it tells the port, so that no other process can have taken it.
    """
    import torch.distributed

    distributed: Any = torch.distributed
    # One node: what the ranks tell each other beside NVLink stays inside it.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    timeout = datetime.timedelta(seconds=_MEET_S)
    if ranks.rank == 0:
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        ranks.tell(msgspec.msgpack.encode(port))
        listener = listening.detach()
        store = distributed.TCPStore("127.0.0.1", port, ranks.size, True, timeout, False, master_listen_fd=listener)
    else:
        port = msgspec.msgpack.decode(ranks.hear(), type=int)
        store = distributed.TCPStore("127.0.0.1", port, ranks.size, False, timeout, False)
    distributed.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`Engine.start`, with the fields of the request."""

    request: Any


class Feed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`Engine.feed`."""

    id: str
    rows: Any
    done: bool


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`Engine.abort`."""

    id: str


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`Engine.step`. `drawn` is what came of the steps before: ranks that disagree would wait for each other."""

    drawn: int


class End(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`Engine.close`: nothing follows."""


Call = Start | Feed | Abort | Step | End


class Leader:
    """An `Engine` for rank 0; see the module's docstring. A call that is refused here is not made elsewhere."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self._engine = engine
        self._ranks = ranks
        self._calls: list[Call] = []
        """Made here since the last step."""
        self._drawn = 0

    def start(self, request: EngineRequest) -> None:
        """`Engine.start`."""
        self._engine.start(request)
        self._calls.append(Start(request))

    def feed(self, request_id: str, rows: torch.Tensor, done: bool) -> None:
        """`Engine.feed`."""
        self._engine.feed(request_id, rows, done)
        self._calls.append(Feed(request_id, rows, done))

    def abort(self, request_id: str) -> None:
        """`Engine.abort`."""
        self._engine.abort(request_id)
        self._calls.append(Abort(request_id))

    def step(self) -> list[EngineOutput]:
        """`Engine.step`, on all ranks. Where one of them is gone this process is about to end, and nothing returns."""
        try:
            self._tell(Step(self._drawn))
            outputs = self._engine.step()
        except (OSError, RuntimeError):  # of a socket, of a collective
            if self._ranks.lost(_LOST_S):
                # The supervisor sees the death itself, and the requests fail of that: not of what it has caused here.
                time.sleep(_KILLED_S)
            raise
        self._drawn = drawn_after(self._drawn, outputs)
        return outputs

    def has_work(self) -> bool:
        """`Engine.has_work`."""
        return self._engine.has_work()

    def is_reading(self) -> bool:
        """`Engine.is_reading`."""
        return self._engine.is_reading()

    def stats(self) -> EngineStats:
        """`Engine.stats`."""
        return self._engine.stats()

    def close(self) -> None:
        """`Engine.close`, on all ranks that are there."""
        with contextlib.suppress(OSError):
            self._tell(End())
        self._engine.close()

    def _tell(self, last: Call) -> None:
        calls, self._calls = [*self._calls, last], []
        self._ranks.tell(*messages_of(calls))


def lead(engine: Engine, ranks: Ranks) -> Engine:
    """`engine` as rank 0 drives it: with all others, or by itself where there are none."""
    return Leader(engine, ranks) if ranks.size > 1 else engine


def follow(engine: Engine, ranks: Ranks) -> None:
    """Make on `engine` the calls that rank 0 makes; returns once it has closed its own, or is gone.

    Raises ActorBrokenError where this rank has drawn other tokens than rank 0.
    """
    drawn = 0
    for call in _calls(ranks):
        match call:
            case Start():
                engine.start(_request(call.request))
            case Feed():
                engine.feed(call.id, call.rows, call.done)
            case Abort():
                engine.abort(call.id)
            case Step():
                if call.drawn != drawn:
                    raise ActorBrokenError(f"rank {ranks.rank} has drawn other tokens than rank 0")
                drawn = drawn_after(drawn, engine.step())
            case End():
                engine.close()
                return


def _calls(ranks: Ranks) -> Iterator[Call]:
    while True:
        try:
            calls = calls_of(ranks.hear)
        except EOFError:
            return
        yield from calls


def drawn_after(drawn: int, outputs: Sequence[EngineOutput]) -> int:
    """`drawn` and what came of one more step, in 32 bits."""
    for output in outputs:
        drawn = zlib.crc32(repr((output.id, output.ids, output.finish_reason)).encode(), drawn)
    return drawn


def messages_of(calls: Sequence[Call]) -> list[bytes | memoryview]:
    """`calls` as one message, and one after it for each tensor in them, which is not copied."""
    contents: list[bytes | memoryview] = []

    def name(tensor: torch.Tensor) -> msgspec.msgpack.Ext:
        from omniflow.engine.content import bytes_of
        from omniflow.engine.streams import in_order

        with in_order(tensor):
            contents.append(bytes_of(tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode((dtype, tuple(tensor.shape))))

    return [msgspec.msgpack.encode(calls, enc_hook=name), *contents]


def calls_of(hear: Callable[[], bytes]) -> list[Call]:
    """The calls of `messages_of`, whose messages `hear` gives one by one."""

    def tensor(code: int, named: memoryview) -> torch.Tensor:
        import torch

        dtype, shape = msgspec.msgpack.decode(named, type=tuple[str, tuple[int, ...]])
        content = hear()
        if not content:
            return torch.empty(shape, dtype=vars(torch)[dtype])
        return torch.frombuffer(bytearray(content), dtype=vars(torch)[dtype]).reshape(shape)

    return msgspec.msgpack.Decoder(list[Call], ext_hook=tensor).decode(hear())


@functools.cache
def _types() -> dict[str, Any]:
    """The types of a request's fields: torch is not imported where that class is."""
    import torch

    return typing.get_type_hints(EngineRequest, localns={"torch": torch})


def _request(fields: dict[str, Any]) -> EngineRequest:
    import torch

    types = _types()
    values: dict[str, Any] = {
        name: value if isinstance(value, torch.Tensor) else msgspec.convert(value, types[name])
        for name, value in fields.items()
    }
    return EngineRequest(**values)
