"""Servers for clients of others: the real one with the embedded models, and one whose thinker calls tools by a script.

The clients have an environment of their own (`make test-clients`), so the servers run in the one that OMNIFLOW_PYTHON
names; by default in ours.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

ROOT = Path(__file__).parents[2]
KEY = "sk-clients"
START_S = 240
"""The first start fetches and converts weights."""


class Served(NamedTuple):
    """Where clients find a server; `base_url` ends in /v1, as they want it."""

    base_url: str
    model: str
    key: str = KEY


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`omniflow run ming_omni`."""
    port = free_port()
    command = ["-m", "omniflow", "run", "graphs/ming_omni.py", "--port", str(port)]
    with running(command, f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("real") / "log.txt"):
        yield Served(f"http://127.0.0.1:{port}/v1", "ming_omni")


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The stages of ming_omni around a thinker that calls `weather` for each city that it hears of."""
    port = free_port()
    command = ["-m", "tests.clients.serve_caller", str(port)]
    with running(command, f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("caller") / "log.txt"):
        yield Served(f"http://127.0.0.1:{port}/v1", "caller")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], url: str, log: Path, verify: ssl.SSLContext | bool = True) -> Iterator[None]:
    """A server process, from when it is ready until it has drained."""
    python = os.environ.get("OMNIFLOW_PYTHON", sys.executable)
    environment = os.environ | {"OMNIFLOW_API_KEYS": KEY, "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen([python, *command], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + START_S
        while not is_ready(url, verify):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def is_ready(url: str, verify: ssl.SSLContext | bool) -> bool:
    try:
        return httpx.get(f"{url}/ready", verify=verify).status_code == 200
    except httpx.TransportError:
        return False
