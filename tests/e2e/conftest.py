"""One real server for the whole folder: `omniflow run graphs/ming_omni.py` with the embedded models."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.conftest import left_in_shared_memory, shared_memory
from tests.waiting import HANGS_S

ROOT = Path(__file__).parents[2]
_START_S = 240
"""The first start fetches and converts weights."""


class Server:
    """A running server and what tests ask about it."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def client(self, **kwargs: object) -> openai.OpenAI:
        """An unmodified client that does not retry, so that tests see every error."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **{"max_retries": 0, **kwargs})  # type: ignore[arg-type]

    def health(self) -> dict[str, object]:
        return httpx.get(f"{self.url}/health", timeout=HANGS_S).json()  # type: ignore[no-any-return]

    def pid_of(self, stage: str) -> int:
        """The process that runs `stage`."""
        stages = self.health()["stages"]
        assert isinstance(stages, list)
        return next(entry["pid"] for entry in stages if entry["name"] == stage)  # type: ignore[no-any-return]

    def wait_until(self, what: str, holds: object, within_s: float = HANGS_S) -> None:
        """Wait for something that other processes bring about."""
        assert callable(holds)
        end = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < end, f"not within {within_s} s: {what}"
            time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(folder: Path, *options: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """`omniflow run graphs/ming_omni.py` with `options`; its log is `folder/log.txt`. It must leave nothing behind."""
    port, log = free_port(), folder / "log.txt"
    shm_before = shared_memory()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "omniflow", "run", "graphs/ming_omni.py", "--port", str(port), *options],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
    running = Server(process, f"http://127.0.0.1:{port}")
    try:
        running.wait_until(f"the server is up; its log: {log}", lambda: _is_up(running, log), _START_S)
        yield running
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS_S) == 0, log.read_text()
        assert left_in_shared_memory(shm_before) == set()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


def _is_up(server: Server, log: Path) -> bool:
    assert server.process.poll() is None, log.read_text()
    try:
        return httpx.get(f"{server.url}/health", timeout=HANGS_S).status_code == 200
    except httpx.TransportError:
        return False
