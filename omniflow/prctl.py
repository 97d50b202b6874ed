"""What Linux lets a process ask about its own life: to die with its parent, to tell its end early, to have a name."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

_CLONE_FILES = 0x400
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
PARENT = "OMNIFLOW_PARENT_PID"
"""In the environment of the fork server: the process that starts it."""


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` (its pid) dies; end now if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def tell_end(fd: int) -> None:
    """Let `fd`, whose copies elsewhere the caller closes, be closed as soon as this process is ending: its memory, and
    what it has of a GPU, may take 0.2 s more.

    A thread that sleeps has it in a table of open files of its own, and is through at once when all threads are ended.
    Where that is not allowed (containers may forbid `unshare`) it is closed with all others.
    """
    held = os.dup(fd)
    # Those that are open, not all that may be: of a billion, as containers may allow, trying each takes minutes.
    others = {int(each) for each in os.listdir("/proc/self/fd")} - {held}
    own = threading.Event()
    begun = threading.Event()

    def hold() -> None:
        if _has_own_files():
            for each in others:
                with contextlib.suppress(OSError):  # the list's own is closed already
                    os.close(each)
            own.set()
        begun.set()
        threading.Event().wait()

    threading.Thread(target=hold, name="end", daemon=True).start()
    begun.wait()
    if own.is_set():
        os.close(held)


def can_tell_end() -> bool:
    """Whether `tell_end` may have a thread with files of its own here."""
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(_has_own_files).result()


def _has_own_files() -> bool:
    """Give this thread a table of open files of its own, a copy of the others'; False where that is not allowed."""
    return bool(ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FILES) == 0)


def name_process(name: str) -> None:
    """Show `name` (its first 15 characters) for this process in ps and top."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
