"""A way of `nccl.py` between two processes on CPUs, by torch.distributed: what tests without a GPU have."""

from __future__ import annotations

import contextlib
import datetime
from typing import TYPE_CHECKING, Any

from omniflow.transport.codec import bytes_of
from omniflow.transport.lane import Origin
from omniflow.transport.nccl_ways import OPEN_S, RECEIVER, SENDER, Notes, Way

if TYPE_CHECKING:
    import torch

CONNECT_S = 10.0
"""What gloo may take to connect the two, once each has said where it is: milliseconds. Nothing else ends that wait
where the other end goes meanwhile.
"""
_GLOO_WAITS = 5
"""Gloo waits this many times its timeout for a connection: 0.4 s took 2.00 s."""
_TRANSFER = datetime.timedelta(seconds=OPEN_S)


class GlooWay(Way):
    """See the module's docstring."""

    def __init__(self, rank: int, notes: Notes) -> None:
        super().__init__(rank, notes)
        self._group: Any = None
        self._aborted = False
        # Torch holds its part of a store, not ours, and asks it again when the first tensor is sent.
        self._store: Any = None

    def open(self) -> None:
        import torch

        self._store = _store_of(self.notes)
        group = self._group = _make_group(self._rank, self._store)
        if self._aborted:  # while there was no group that could have been aborted
            self.abort()
            raise RuntimeError("the communicator was closed")
        byte = torch.zeros(1, dtype=torch.uint8)
        if self._rank == SENDER:
            group.send([byte], RECEIVER, 0).wait(_TRANSFER)
        else:
            group.recv([byte], SENDER, 0).wait(_TRANSFER)

    def send(self, tensor: torch.Tensor, size: int) -> object:
        return self._group.send([bytes_of(tensor)], RECEIVER, 0)

    def receive(self, size: int, origin: Origin) -> torch.Tensor:
        import torch

        region = torch.empty(size, dtype=torch.uint8)
        self._group.recv([region], SENDER, 0).wait(_TRANSFER)
        return region

    def lost(self) -> list[Origin]:
        return []  # it waits for each

    def abort(self) -> None:
        self._aborted = True
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it has failed by itself already
                group.abort()


def _make_group(rank: int, store: Any) -> Any:
    import torch.distributed

    distributed: Any = torch.distributed
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = datetime.timedelta(seconds=CONNECT_S / _GLOO_WAITS)
    return distributed.ProcessGroupGloo(store, rank, 2, options)


def _store_of(notes: Notes) -> Any:
    """`notes` as torch's processes find each other by: without a port that others could reach, or a file."""
    import torch.distributed

    store: Any = torch.distributed

    class LinkStore(store.Store):  # type: ignore[misc]
        def set(self, key: str, value: bytes | str) -> None:
            notes.write(key, value.encode() if isinstance(value, str) else bytes(value))

        def get(self, key: str) -> bytes:
            return notes.read([key])[0]

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            notes.read(keys)

        def check(self, keys: list[str]) -> bool:
            return notes.known(keys)

        def set_timeout(self, timeout: Any) -> None:
            """Waits end when the link does, or after `OPEN_S`."""

        def clone(self) -> LinkStore:
            return self

    return LinkStore()
