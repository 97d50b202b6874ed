"""What Linux lets a process ask about its own life: to die with its parent, and to have a name."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
PARENT = "OMNIFLOW_PARENT_PID"
"""In the environment of the fork server: the process that starts it."""


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` (its pid) dies; end now if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """Show `name` (its first 15 characters) for this process in ps and top."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
