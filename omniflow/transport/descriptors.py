"""Open files that travel with messages: whoever gets them closes them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence


def close_all(descriptors: Sequence[int]) -> None:
    """Close each of them."""
    for descriptor in descriptors:
        os.close(descriptor)


def duplicates(descriptors: Sequence[int]) -> tuple[int, ...]:
    """Another of each. Raises OSError where this process may open no more files, and leaves none then."""
    made: list[int] = []
    with contextlib.ExitStack() as unless_all:
        for descriptor in descriptors:
            made.append(os.dup(descriptor))
            unless_all.callback(os.close, made[-1])
        unless_all.pop_all()
    return tuple(made)


def descriptors_in(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """Those that came beside a datagram, as `recvmsg` has them."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found += memoryview(data[: len(data) - len(data) % 4]).cast("i").tolist()
    return found
