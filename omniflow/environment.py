"""Environment variables for a moment: for a process that is started in it, or a library that reads them once."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

_ONE_AT_A_TIME = threading.Lock()
"""The environment is one of the whole process, and threads change it, too."""


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set `values` meanwhile, then put back what was there."""
    with _ONE_AT_A_TIME:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
