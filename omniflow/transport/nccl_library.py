"""NCCL's library itself, as far as two processes need it to send each other bytes: seven of its C functions.

Its send is one kernel in a stream of ours. torch.distributed puts a stream of its own, events and a watchdog around
each: with it a value took 309 us from GPU to GPU, and takes 160 without.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

ID_BYTES = 128
_BYTES = 1
"""ncclUint8"""


class _Id(ctypes.Structure):
    """ncclUniqueId"""

    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


@functools.cache
def _library() -> Any:
    """The one that torch has loaded. Raises RuntimeError where there is none."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RuntimeError(f"NCCL is not installed: {error}") from None
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_Id)]
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _Id, number]
    library.ncclSend.argtypes = library.ncclRecv.argtypes = [pointer, size, number, number, pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    library.ncclGetLastError.argtypes = [pointer]
    library.ncclGetLastError.restype = library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def new_id() -> bytes:
    """A name for a communicator to be, by which its two ends find each other; they are on one machine."""
    found = _Id()
    _check(_library().ncclGetUniqueId(ctypes.byref(found)), "ncclGetUniqueId")
    return ctypes.string_at(ctypes.byref(found), ID_BYTES)


class Communicator:
    """One of two ends, on this thread's GPU; waits for the other end. What fails raises RuntimeError."""

    def __init__(self, name: bytes, rank: int) -> None:
        self._peer = 1 - rank
        self._handle = ctypes.c_void_p()
        wanted = _Id.from_buffer_copy(name)
        _check(_library().ncclCommInitRank(ctypes.byref(self._handle), 2, wanted, rank), "ncclCommInitRank")
        self._send, self._receive = _library().ncclSend, _library().ncclRecv

    def send(self, address: int, size: int, stream: int) -> None:
        """Let a stream send `size` bytes; it goes on once the other end has them."""
        error = self._send(address, size, _BYTES, self._peer, self._handle, stream)
        if error:
            _check(error, "ncclSend")

    def receive(self, address: int, size: int, stream: int) -> None:
        """Let a stream receive `size` bytes."""
        error = self._receive(address, size, _BYTES, self._peer, self._handle, stream)
        if error:
            _check(error, "ncclRecv")

    def abort(self) -> None:
        """End what its streams wait for; it is of no use after that. Waits for the GPU. Call it once."""
        _library().ncclCommAbort(self._handle)


def _check(error: int, name: str) -> None:
    if error:
        said = (_library().ncclGetLastError(None) or b"").decode(errors="replace").strip()
        raise RuntimeError(f"{name}: {_library().ncclGetErrorString(error).decode()}{said and f' ({said})'}")
