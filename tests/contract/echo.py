"""A process that sends every item back over the link that its socket (argument 1) makes; ends with its peer."""

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


async def main(descriptor: int) -> None:
    echo = Echo()
    memory = SharedMemory(2**26)
    ArrowShmLink("test", echo, socket.socket(fileno=descriptor), memory, TYPES)
    await echo.closed.wait()
    memory.close()


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]))
