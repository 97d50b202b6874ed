"""A process that sends every item back over the link that its socket (argument 1) makes; ends with its peer.

With a lane of the kind that argument 2 names; there edge 5 carries tensors.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import numpy as np

from omniflow.errors import ErrorInfo
from omniflow.messages import Message
from omniflow.transport.arrow_shm import ArrowShmLink, SharedMemory
from omniflow.transport.base import Link
from tests.contract.ends import lane_of


class Inner(msgspec.Struct, frozen=True):
    rows: np.ndarray
    names: tuple[str, ...]
    extra: dict[str, list[int]] | None


TYPES: dict[int, Any] = {1: Inner, 2: np.ndarray, 3: str, 4: bytes}


class Echo:
    def __init__(self) -> None:
        self.closed = anyio.Event()

    def on_item(self, link: Link, edge: int, request: int, seq: int, value: object) -> None:
        pending = link.send_item(edge, request, seq, value)
        assert pending is None

    def on_bad_item(self, link: Link, edge: int, request: int, error: ErrorInfo) -> None:
        raise AssertionError(error)

    def on_message(self, link: Link, message: Message, descriptors: Sequence[int]) -> None:
        raise AssertionError(message)

    def on_closed(self, link: Link) -> None:
        self.closed.set()


async def main(descriptor: int, kind: str) -> None:
    echo = Echo()
    memory = SharedMemory(2**26)
    lane = lane_of(kind, 2**24, apart=True) if kind else None
    if lane is not None:
        import torch

        TYPES[5] = torch.Tensor
    link = ArrowShmLink("test", echo, socket.socket(fileno=descriptor), memory, TYPES, lane=lane)
    async with anyio.create_task_group() as tasks:
        if lane is not None:
            tasks.start_soon(lane.serve, link)
        await echo.closed.wait()
        tasks.cancel_scope.cancel()
    memory.close()


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
