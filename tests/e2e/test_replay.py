"""Speech with the embedded models is recorded, and comes out the same when it is replayed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from omniflow import cluster_named, plan
from omniflow.loader import load_graph
from omniflow.recording import read_recording
from omniflow.replay import compare
from tests.e2e.conftest import Server, free_port

ROOT = Path(__file__).parents[2]
TEXT = "First things first. Then, after a while, comes the second sentence."


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Recordings of four requests: with seed 7, the same, with seed 8, and faster."""
    folder = tmp_path_factory.mktemp("recordings")
    log, port = folder / "log.txt", free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "omniflow", "run", "ming_omni", "--port", str(port), "--record", str(folder)],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}")
    try:
        server.wait_until(f"the server is up; its log: {log}", lambda: "is ready at" in log.read_text(), 240)
        for change in ({}, {}, {"seed": 8}, {"speed": 1.5}):
            body = {"model": "ming_omni", "input": TEXT, "response_format": "pcm", "seed": 7} | change
            assert len(httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=60).content) > 48_000
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
        yield sorted(folder.glob("*.recording"))
    finally:
        process.kill()
        process.wait()


def test_the_same_seed_gives_the_same_on_every_edge_and_another_does_not(files: list[Path]) -> None:
    made = plan(load_graph("ming_omni").spec(), cluster_named("cpu"))
    first, same, seed, speed = map(read_recording, files)
    found = compare(first, same, made, run_all=True)
    assert found.same
    assert [edge.edge for edge in found.edges] == [
        "segment.emit -> talker.segments",
        "talker.emit -> vocoder.latents",
        "vocoder.emit -> client.audio",
    ]
    for other in (seed, speed):
        difference = compare(first, other, made, run_all=True).first
        assert difference is not None
        assert (difference.edge, difference.at) == ("talker.emit -> vocoder.latents", 0)


def test_replay_gives_the_same(files: list[Path], tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "omniflow", "replay", str(files[0]), "--all"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.endswith("no difference (edges compared: 3, given: 0, not comparable: 0)\n")
    assert re.search(r"^vocoder.emit → \(audio\) +(\d+ samples) +\1 +same *$", ran.stdout, re.MULTILINE)
