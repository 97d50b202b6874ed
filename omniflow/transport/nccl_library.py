"""NCCL's library itself, as far as two processes need it to send each other bytes: nine of its C functions.

Its send is one kernel in a stream of ours. torch.distributed puts a stream of its own, events and a watchdog around
each: with it a value took 309 us from GPU to GPU, and takes 160 without.

What this relies on was read in NCCL 2.28.9: a communicator orders by itself what it is given on several streams, and
one that does not block (`blocking=0`) starts a thread for each send.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

ID_BYTES = 128
_BYTES = 1
"""ncclUint8"""
_IN_PROGRESS = 7
"""ncclInProgress"""
_UNDEFINED = -(2**31)
"""NCCL_CONFIG_UNDEF_INT: NCCL's own choice, or what its environment says."""
_LOOK_S = 0.01
"""NCCL does not tell when a communicator is made, which takes 1-3 s: it wants to be asked."""
_FAILS_S = 1.0
"""What a call that waits for another end which has died may take to fail by itself."""


class _Id(ctypes.Structure):
    """ncclUniqueId"""

    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.17; later ones take it by its size and version."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    )


def _config(*, blocking: bool) -> _Config:
    size, version = ctypes.sizeof(_Config), 21700
    return _Config(size, 0xCAFEBEEF, version, int(blocking), _UNDEFINED, _UNDEFINED, _UNDEFINED, None)


@functools.cache
def _library() -> Any:
    """The one that torch has loaded. Raises RuntimeError where there is none."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RuntimeError(f"NCCL is not installed: {error}") from None
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_Id)]
    config, handle = ctypes.POINTER(_Config), ctypes.POINTER(pointer)
    library.ncclCommInitRankConfig.argtypes = [handle, number, _Id, number, config]
    library.ncclCommSplit.argtypes = [pointer, number, number, handle, config]
    library.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(number)]
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
    """One of two ends, on this thread's GPU. What fails raises RuntimeError.

    Two of NCCL's: the ends meet in one that does not block, because only such a one can be given up while the other end
    has yet to come, and has died; a second that blocks is split from it, and is what they send by.
    """

    def __init__(self, name: bytes, rank: int) -> None:
        self._rank = rank
        self._peer = 1 - rank
        self._meeting, self._handle = ctypes.c_void_p(), ctypes.c_void_p()
        self._using = threading.Lock()
        self._aborted = threading.Event()
        wanted, config = _Id.from_buffer_copy(name), _config(blocking=False)
        error = _library().ncclCommInitRankConfig(ctypes.byref(self._meeting), 2, wanted, rank, ctypes.byref(config))
        _check(error, "ncclCommInitRankConfig")
        self._send, self._receive = _library().ncclSend, _library().ncclRecv

    def open(self) -> None:
        """Wait for the other end. Raises RuntimeError once `abort` was called, from another thread, as well."""
        self._settle("ncclCommInitRankConfig")
        config = _config(blocking=True)
        with self._using:
            self._refuse_aborted()
            error = _library().ncclCommSplit(
                self._meeting, 0, self._rank, ctypes.byref(self._handle), ctypes.byref(config)
            )
        _check(error, "ncclCommSplit")
        self._settle("ncclCommSplit")

    def _settle(self, name: str) -> None:
        """Wait until NCCL is through with `name`."""
        state = ctypes.c_int(_IN_PROGRESS)
        while state.value == _IN_PROGRESS:
            with self._using:
                self._refuse_aborted()
                _check(_library().ncclCommGetAsyncError(self._meeting, ctypes.byref(state)), "ncclCommGetAsyncError")
            if state.value == _IN_PROGRESS:
                self._aborted.wait(_LOOK_S)
        _check(state.value, name)

    def _refuse_aborted(self) -> None:
        if self._aborted.is_set():
            raise RuntimeError("the communicator was closed")

    def connect(self, address: int, stream: int) -> None:
        """Let a stream send the byte at `address`, or receive it: the first one from rank 0 to rank 1 makes their
        connection, and waits for the other end.
        """
        with self._using:
            self._refuse_aborted()
            (self.receive if self._rank else self.send)(address, 1, stream)

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
        """End what its streams, `open` and `connect` wait for; it is of no use after that. Waits for the GPU."""
        self._aborted.set()
        # What NCCL is in the middle of should not be freed under it. It fails at once where its other end has died.
        is_unused = self._using.acquire(timeout=_FAILS_S)
        # The second may have come to be while the first was aborted.
        for handle in (self._handle, self._meeting, self._handle):
            if handle.value is not None:
                _library().ncclCommAbort(handle)
                handle.value = None
        if is_unused:
            self._using.release()


def _check(error: int, name: str) -> None:
    if error not in (0, _IN_PROGRESS):
        said = (_library().ncclGetLastError(None) or b"").decode(errors="replace").strip()
        raise RuntimeError(f"{name}: {_library().ncclGetErrorString(error).decode()}{said and f' ({said})'}")
