"""Five times as many requests as there is capacity for: who is admitted, when they hear something, who is refused when.

    python bench/overload.py [--seconds 20] [--json FILE]

The graph is scripted: a request gets its first sound after 0.4 s and its last after 2 s, and the machine does nothing
meanwhile. So capacity is exact: 8 places give 4 requests a second. The server is the real one, with its host in a
process of its own. Clients come at random (exponential gaps) and do not come back when they are refused. TTFA counts
from a client's request, the wait for a place included; definitions are in omniflow/telemetry.py.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import anyio
import httpx
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from omniflow import Actor, AudioChunk, Emit, Graph, Stream, TextDelta

PLACES, FIRST_S, SERVICE_S = 8, 0.4, 2.0
PORT = 8972
URL = f"http://127.0.0.1:{PORT}"


class Paced(Actor):
    """0.1 s of sound every 0.1 s, from `FIRST_S` on until `SERVICE_S`."""

    heavy = True

    async def run(self, text: Stream[TextDelta], audio: Emit[AudioChunk]) -> None:
        async for _delta in text:
            pass
        began = anyio.current_time()
        for number in range(round((SERVICE_S - FIRST_S) / 0.1) + 1):
            await anyio.sleep_until(began + FIRST_S + 0.1 * number)
            await audio.send(AudioChunk(np.zeros(2400, np.float32), 24000))


graph = Graph("overload")
paced = graph.stage("paced", Paced)
graph.input(speech=paced)
graph.output(audio=paced)


class Answer(msgspec.Struct):
    """What one client got: the sound, or a refusal with its `Retry-After`."""

    status: int
    ttfa_s: float
    seconds: float
    retry_after_s: int | None


class Row(msgspec.Struct):
    load: str
    requests: int
    served: int
    refused: int
    served_per_s: float
    ttfa_p50_s: float
    ttfa_p95_s: float
    refused_max_s: float
    answered_max_s: float
    retry_after_s: float | None


async def ask(client: httpx.AsyncClient, answers: list[Answer]) -> None:
    began = time.monotonic()
    body = {"model": "overload", "input": "Hello.", "response_format": "pcm"}
    async with client.stream("POST", f"{URL}/v1/audio/speech", json=body) as response:
        first_s = 0.0
        async for _piece in response.aiter_bytes():
            first_s = first_s or time.monotonic() - began
        after = response.headers.get("retry-after")
        answers.append(Answer(response.status_code, first_s, time.monotonic() - began, int(after) if after else None))


async def all_places(client: httpx.AsyncClient, seconds: float, answers: list[Answer]) -> None:
    """As many clients as places, each asking again once it has its answer: nobody ever waits."""
    until = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < until:
            await ask(client, answers)

    async with anyio.create_task_group() as tasks:
        for _ in range(PLACES):
            tasks.start_soon(one)


async def arrivals(client: httpx.AsyncClient, factor: float, seconds: float, answers: list[Answer]) -> None:
    """Clients that come at `factor` times the rate that can be served."""
    dice = random.Random(7)
    at = began = time.monotonic()
    async with anyio.create_task_group() as tasks:
        while at < began + seconds:
            tasks.start_soon(ask, client, answers)
            at += dice.expovariate(factor * PLACES / SERVICE_S)
            await anyio.sleep(max(0.0, at - time.monotonic()))


def row(load: str, answers: list[Answer], wall_s: float) -> Row:
    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == 429]
    assert len(served) + len(refused) == len(answers), "an answer that is neither sound nor a refusal"
    ttfa = sorted(answer.ttfa_s for answer in served)
    return Row(
        load=load,
        requests=len(answers),
        served=len(served),
        refused=len(refused),
        served_per_s=len(served) / wall_s,
        ttfa_p50_s=statistics.median(ttfa),
        ttfa_p95_s=ttfa[int(0.95 * len(ttfa))],
        refused_max_s=max((answer.seconds for answer in refused), default=0.0),
        answered_max_s=max(answer.seconds for answer in answers),
        retry_after_s=statistics.mean([a.retry_after_s or 0 for a in refused]) if refused else None,
    )


async def measure(seconds: float) -> list[Row]:
    rows = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        for load in ("all places taken", "1x", "2x", "5x"):
            answers: list[Answer] = []
            began = time.monotonic()
            if load.endswith("x"):
                await arrivals(client, float(load[:-1]), seconds, answers)
            else:
                await all_places(client, seconds, answers)
            rows.append(row(load, answers, time.monotonic() - began))
    return rows


def report(rows: list[Row]) -> None:
    table = Table(title=f"{PLACES} places, first sound {FIRST_S} s, last {SERVICE_S} s")
    for column in ("load", "requests", "served", "refused", "served/s", "TTFA p50 s", "p95 s", "p95 ratio"):
        table.add_column(column, justify="right")
    for column in ("refusal max s", "answer max s", "Retry-After s"):
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(
            r.load, str(r.requests), str(r.served), str(r.refused), f"{r.served_per_s:.2f}", f"{r.ttfa_p50_s:.3f}",
            f"{r.ttfa_p95_s:.3f}", f"{r.ttfa_p95_s / rows[0].ttfa_p95_s:.2f}x", f"{r.refused_max_s:.3f}",
            f"{r.answered_max_s:.2f}", "-" if r.retry_after_s is None else f"{r.retry_after_s:.1f}",
        )  # fmt: skip
    Console(width=130).print(table)


def start_server(options: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "omniflow", "run", __file__, "--port", str(PORT)]
    command += ["--set", f"runtime.max_in_flight={PLACES}", "--set", "server.access_log=false", *options]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL)
    while True:
        try:
            if httpx.get(f"{URL}/ready").status_code == 200:
                return process
        except httpx.TransportError:
            pass
        if process.poll() is not None:
            raise SystemExit("the server did not start")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", type=Path)
    options, others = parser.parse_known_args()
    server = start_server(others)
    try:
        rows = anyio.run(measure, options.seconds)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    report(rows)
    if options.json:
        options.json.write_text(json.dumps(msgspec.to_builtins(rows), indent=2))


if __name__ == "__main__":
    main()
