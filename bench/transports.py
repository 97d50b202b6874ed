"""omniflow's transports beside other ways to move messages and arrays between processes, in one run.

    python -m bench.transports [--rounds 3] [--only NAME ...] [--write]

Each system is a program of its own that prints what it measured (bench/workload.py). In each round all of them run one
after the other; what counts is the median of the rounds. Before each, the machine is given a few seconds to become
quiet, and how busy others kept it is part of the result. Peers are taken from .venv-bench (`make bench-peers`); what is
not installed there, or fails, is left out with the reason. With --write, docs/benchmarks.md, its picture and
bench/results/transports.json are written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench import report

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv-bench/bin/python"
QUIET = 0.25
"""Less than so much of the machine used by others is quiet."""


class Case(NamedTuple):
    """A program to run, and the package that it needs where it is a peer."""

    module: str
    package: str | None = None


CASES = (
    Case("bench.limits"),
    Case("bench.anatomy"),
    Case("bench.local"),
    Case("bench.links"),
    Case("bench.stages"),
    Case("bench.peers.zeromq", "pyzmq"),
    Case("bench.peers.iceoryx", "iceoryx2"),
    Case("bench.peers.torch_queue", "torch"),
    Case("bench.peers.dora_flow", "dora-rs"),
    Case("bench.peers.xoscar_actors", "xoscar"),
    Case("bench.peers.ray_graph", "ray"),
)


def times_of_all() -> tuple[int, int]:
    """Jiffies of all cores so far: all of them, and the idle ones."""
    values = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(values), values[3] + values[4]


def busy(seconds: float = 0.3) -> float:
    """The share of the machine that others use while we sleep."""
    all_before, idle_before = times_of_all()
    time.sleep(seconds)
    all_after, idle_after = times_of_all()
    return 1 - (idle_after - idle_before) / max(1, all_after - all_before)


def become_quiet(patience_s: float) -> float:
    """Wait for a quiet moment; gives how busy the machine is."""
    until = time.monotonic() + patience_s
    while True:
        found = busy()
        if found < QUIET or time.monotonic() > until:
            return found


def installed(package: str) -> str | None:
    """The version of a package in the environment of the peers; None where it is not there."""
    if not PEERS.exists():
        return None
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    ran = subprocess.run([PEERS, "-c", code], capture_output=True, text=True)
    return ran.stdout.strip() or None


def run(case: Case, timeout_s: float) -> tuple[list[dict[str, Any]], str | None]:
    """What a program measured, and why it failed, if it did."""
    python = str(PEERS) if case.package else sys.executable
    command = [python, "-m", case.module]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
            failure = errors.strip().splitlines()[-1] if process.returncode else None
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            failure = f"it did not end within {timeout_s:.0f} s"
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")], failure


def measure(cases: list[Case], rounds: int, patience_s: float) -> dict[str, Any]:
    """All measurements: by system and metric, the values of the rounds."""
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    versions: dict[str, str] = {}
    for case in cases:
        version = installed(case.package) if case.package else ""
        if version is None:
            skipped[case.package or case.module] = "not installed: run `make bench-peers`"
        elif case.package:
            versions[case.package] = version
    for number in range(rounds):
        for case in cases:
            if case.package in skipped:
                continue
            others = become_quiet(patience_s)
            print(f"round {number + 1}: {case.module} (others use {others:.0%})", file=sys.stderr, flush=True)
            found, failure = run(case, 240)
            rows += [{**row, "round": number, "others": round(others, 2)} for row in found]
            if failure is not None:
                print(f"  failed: {failure}", file=sys.stderr, flush=True)
                if not found:
                    skipped[case.package or case.module] = failure[:200]
    return {
        "machine": report.machine(),
        "versions": versions,
        "skipped": skipped,
        "rounds": rounds,
        "load": [round(each, 2) for each in os.getloadavg()],
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of the programs to run")
    parser.add_argument("--patience", type=float, default=15.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md and bench/results")
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.only or any(part in case.module for part in arguments.only)]
    found = measure(cases, arguments.rounds, arguments.patience)
    if arguments.write:
        results = ROOT / "bench/results"
        results.mkdir(exist_ok=True)
        (results / "transports.json").write_text(json.dumps(found, indent=1) + "\n")
        report.write(ROOT)
    else:
        print(report.tables(found))


if __name__ == "__main__":
    main()
