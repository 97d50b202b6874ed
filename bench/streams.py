"""What audio streams cost the server, beyond the models: 32 at a time, in real time, in each format.

    python -m bench.streams [--streams 32] [--seconds 8] [--rounds 3] [--write]

Starts `omniflow run bench/streams.py`, whose only stage says recorded speech again and again, as fast as it is spoken,
in a process of its own. What is counted is CPU time of the server's process (all its threads) and of the stage's
process, while all streams run. Formats take turns in each round, and the best round counts: others who use the machine
can only add to it. `--write` keeps the result as bench/results/streams.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import soxr

from omniflow import Actor, AudioChunk, Emit, Graph, Stream, TextDelta
from tests.speech import samples_of

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "bench/results/streams.json"
PORT = 8973
RATE_HZ = 24_000
CHUNK_S = 0.2
FORMATS = ("pcm", "wav", "flac", "opus", "aac", "mp3")
GOAL_PERCENT = 15.0
"""Of a core, for 32 streams."""


class Speaker(Actor):
    """As many chunks as the text has characters, each at its time."""

    heavy = True

    async def setup(self) -> None:
        sound = soxr.resample(samples_of("fox"), 16_000, RATE_HZ)
        self._chunks = np.array_split(sound, len(sound) / RATE_HZ / CHUNK_S)

    async def run(self, texts: Stream[TextDelta], audio: Emit[AudioChunk]) -> None:
        async for text in texts:
            began = anyio.current_time()
            for number in range(len(text.text)):
                await audio.send(AudioChunk(self._chunks[number % len(self._chunks)], RATE_HZ))
                await anyio.sleep_until(began + (number + 1) * CHUNK_S)


graph = Graph("streams")
speaker = graph.stage("speaker", Speaker)
graph.input(speech=speaker)
graph.output(audio=speaker)


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def listen(client: httpx.AsyncClient, format: str, seconds: float, started: list[float]) -> int:
    """One stream; the bytes of it."""
    body = {"model": "streams", "input": "x" * round(seconds / CHUNK_S), "response_format": format, "stream": True}
    count = 0
    async with client.stream("POST", f"http://127.0.0.1:{PORT}/v1/audio/speech", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for piece in reply.aiter_raw():
            if not count:
                started.append(time.monotonic())
            count += len(piece)
    return count


async def measure(client: httpx.AsyncClient, format: str, streams: int, seconds: float, pids: list[int]) -> list[float]:
    """Percent of a core that each process takes while `streams` run."""
    started: list[float] = []
    async with anyio.create_task_group() as tasks:
        for _ in range(streams):
            tasks.start_soon(listen, client, format, seconds + 2, started)
        while len(started) < streams:
            await anyio.sleep(0.05)
        before, began = [cpu_s(pid) for pid in pids], time.monotonic()
        await anyio.sleep(seconds)
        took = time.monotonic() - began
        found = [100 * (cpu_s(pid) - was) / took for pid, was in zip(pids, before, strict=True)]
    return found


async def rounds(streams: int, seconds: float, count: int, server: int) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=streams + 2)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        health = (await client.get(f"http://127.0.0.1:{PORT}/health")).json()
        pids = [server, health["stages"][0]["pid"]]
        best: dict[str, list[float]] = {}
        for _ in range(count):
            for format in FORMATS:
                found = await measure(client, format, streams, seconds, pids)
                best[format] = min(best.get(format, found), found)
    return [
        {
            "format": format,
            "server_percent": round(best[format][0], 1),
            "stage_percent": round(best[format][1], 1),
            "against_pcm": round(best[format][0] / best["pcm"][0], 2),
        }
        for format in FORMATS
    ]


def start_server() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "omniflow", "run", str(Path(__file__)), "--port", str(PORT)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{PORT}/ready").status_code == 200:
                return process
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise SystemExit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    server = start_server()
    try:
        rows = asyncio.run(rounds(options.streams, options.seconds, options.rounds, server.pid))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    for row in rows:
        print(json.dumps(row))
    if options.write:
        found = {"streams": options.streams, "chunk_s": CHUNK_S, "goal_percent": GOAL_PERCENT, "load": os.getloadavg()}
        RESULT.write_text(json.dumps(found | {"cores": os.cpu_count(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
