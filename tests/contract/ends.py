"""Two ends of a link for the contract suite, and who listens at them."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import anyio.abc
import pytest

from omniflow.errors import ErrorInfo
from omniflow.messages import Message
from omniflow.transport.arrow_shm import ArrowShmLink, SharedMemory, socket_pair
from omniflow.transport.base import Link
from omniflow.transport.cuda_ipc import CudaIpcLane
from omniflow.transport.device_pool import DevicePool
from omniflow.transport.lane import Lane
from omniflow.transport.local_object import local_pair
from omniflow.transport.nccl import NcclLane
from tests.waiting import HANGS_S

KINDS = ["local_object", "arrow_shm", "cuda_ipc", "cuda_ipc of another GPU", "nccl"]
"""CUDA IPC runs on host memory here (host_memory.py), NCCL on gloo; on GPUs both do in tests/test_gpu_hosts.py."""


class Arrived(NamedTuple):
    """One item as a receiver saw it."""

    edge: int
    request: int
    seq: int
    value: Any


class Inbox:
    """A receiver that keeps what arrives."""

    def __init__(self) -> None:
        self.items: deque[Arrived] = deque()
        self.order: list[int | Message] = []
        """Everything, as it came: the number of an item, or the message."""
        self.messages: list[Message] = []
        self.descriptors: list[int] = []
        self.bad: list[tuple[int, int, ErrorInfo]] = []
        self.closed = anyio.Event()
        self._news = anyio.Event()

    def on_item(self, link: Link, edge: int, request: int, seq: int, value: object) -> None:
        self.items.append(Arrived(edge, request, seq, value))
        self.order.append(seq)
        self._tell()

    def on_bad_item(self, link: Link, edge: int, request: int, error: ErrorInfo) -> None:
        self.bad.append((edge, request, error))
        self._tell()

    def on_message(self, link: Link, message: Message, descriptors: Sequence[int]) -> None:
        self.messages.append(message)
        self.order.append(message)
        self.descriptors += descriptors
        self._tell()

    def on_closed(self, link: Link) -> None:
        self.closed.set()

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def news(self) -> None:
        """The next thing that arrives."""
        await self._news.wait()

    async def item(self) -> Arrived:
        """The oldest item that was not taken yet."""
        while not self.items:
            await self.news()
        return self.items.popleft()


def lane_of(kind: str, limit_bytes: int, *, apart: bool = False) -> Lane | None:
    """One end of a lane that a CPU has; `apart` where the other end is in another process."""
    if kind in ("local_object", "arrow_shm"):
        return None
    pytest.importorskip("torch")
    if kind.startswith("cuda_ipc"):
        from . import host_memory

        attach = host_memory.attach_apart if apart else host_memory.attach
        pool, far = DevicePool(limit_bytes, host_memory.take), kind.endswith("another GPU")
        return CudaIpcLane(pool, attach, sends=True, receives=True, far=far, device_type="cpu")
    return NcclLane("gloo", limit_bytes, sends=True, receives=True)


class Ends:
    """A link and what a test needs to look at: `a` sends, `b` receives (and the other way round).

    Lanes open in `opened`; until then tensors go through the host, as those on GPUs do.
    """

    def __init__(self, kind: str, limit_bytes: int = 2**26, *, keeps_views: bool = True) -> None:
        self.kind = kind
        self.types: dict[int, Any] = {}
        self.at_a, self.at_b = Inbox(), Inbox()
        self.memory_a, self.memory_b = SharedMemory(limit_bytes), SharedMemory(limit_bytes)
        self.lane_a: Lane | None = None
        self.lane_b: Lane | None = None
        self.a: Link
        self.b: Link
        if kind == "local_object":
            self.a, self.b = local_pair("a", "b", self.at_a, self.at_b)
        else:
            left, right = socket_pair()
            self.lane_a, self.lane_b = lane_of(kind, limit_bytes), lane_of(kind, limit_bytes)
            self.a = ArrowShmLink("b", self.at_a, left, self.memory_a, self.types, lane=self.lane_a)
            self.b = ArrowShmLink(
                "a", self.at_b, right, self.memory_b, self.types, keeps_views=keeps_views, lane=self.lane_b
            )

    @classmethod
    @asynccontextmanager
    async def opened(cls, kind: str, limit_bytes: int = 2**26) -> AsyncIterator[Ends]:
        """Two ends whose lanes are open, if they have any; closed in the end."""
        ends = cls(kind, limit_bytes)
        async with anyio.create_task_group() as tasks:
            for lane, link in ((ends.lane_a, ends.a), (ends.lane_b, ends.b)):
                if lane is not None:
                    tasks.start_soon(lane.serve, link)
            with anyio.fail_after(HANGS_S):
                while ends.lane_a is not None and not (ends.lane_a.is_open and ends.lane_b.is_open):
                    await anyio.sleep(0.001)
            yield ends
            ends.close()
            tasks.cancel_scope.cancel()

    async def send(self, value: object, hint: Any = None, *, edge: int = 1, seq: int = 0) -> None:
        """Send from `a`, waiting for room where there is none."""
        self.types[edge] = type(value) if hint is None else hint
        pending = self.a.send_item(edge, 7, seq, value)
        if pending is not None:
            await pending

    async def there(self, value: object, hint: Any = None) -> Any:
        """`value` as it arrives at `b`."""
        await self.send(value, hint)
        return (await self.at_b.item()).value

    async def returned(self) -> None:
        """Wait until all blocks of `a` are free again."""
        while self.memory_a.pool.blocks_in_use or self.a.statistics().blocks_held:
            await anyio.sleep(0)

    def close(self) -> None:
        self.a.close()
        self.b.close()
        self.memory_a.close()
        self.memory_b.close()
        for lane in (self.lane_a, self.lane_b):
            if isinstance(lane, CudaIpcLane):
                lane.pool.close()
        self.at_a.items.clear()
        self.at_b.items.clear()
