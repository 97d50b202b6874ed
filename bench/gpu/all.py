"""All tests and measurements that want GPUs, in one go: `python -m bench.gpu.all --into FOLDER`; `--list` shows them.

Each job is a process of its own, on a GPU of its own if it is timed. What is untimed runs first, and shares GPUs; then
what is timed, the longest first; then what wants several GPUs at once. A job that fails, or takes too long, is told in
its row, and the others go on. FOLDER has a log and a JSON of each and `all.json` of all: run again with the same FOLDER
(and the same `--work`), it does what is not done.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fnmatch
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import anyio.abc
import msgspec
from rich.console import Console
from rich.table import Table

from actors.catalogue import PACKAGED
from bench.gpu.jobs import JOBS, Job
from bench.gpu.report import ROOT, machine, replace
from omniflow.cli.machine import find_gpus, visible_gpus
from omniflow.errors import WeightsError
from omniflow.weights import fetch, resolve

SHARERS = 6
"""Untimed jobs on a GPU at most: each takes some cores, and a few GB."""
TAIL = 800
"""Characters of the log of a job that failed, printed at the end."""


class Row(msgspec.Struct):
    """What became of a job."""

    name: str
    outcome: str
    """`ok`, `all skipped` (of tests), `exit 1`, `killed after 90 s`, `cut off after 9 s`, or why it did not run."""
    seconds: float = 0.0
    gpus: str = ""
    last: str = ""
    """The last line of its log that says something."""

    @property
    def is_ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def has_failed(self) -> bool:
        return self.gpus != "" and not self.is_ok


class Runner:
    """Gives jobs to GPUs, named as in CUDA_VISIBLE_DEVICES; after `within_s` nothing of them runs any more.

    `words` are put in for {work}, {smollm2} and {piper} of commands.
    """

    def __init__(
        self, jobs: Sequence[Job], gpus: Sequence[str], into: Path, words: Mapping[str, str], within_s: float = math.inf
    ) -> None:
        self._on: dict[str, list[Job]] = {gpu: [] for gpu in gpus}
        self._into = into
        self._words = words
        self._within_s = within_s
        self._began = 0.0
        self._changed = anyio.Event()
        self._file = into / "all.json"
        into.mkdir(parents=True, exist_ok=True)
        self._machine = machine()
        known = msgspec.convert(json.loads(self._file.read_text())["jobs"], list[Row]) if self._file.exists() else []
        todo = {job.name for job in jobs} - {row.name for row in known if row.is_ok}
        self.rows = {row.name: row for row in known if row.name not in todo}
        self._failed = {row.name for row in known if row.has_failed and not row.outcome.startswith("cut")}
        self._waiting = sorted(
            (job for job in jobs if job.name in todo), key=lambda job: (self._group(job), *turn(job))
        )

    async def run(self) -> None:
        """Run all that is not done and may still end in time; then `rows` say what became of each."""
        self._began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            while True:
                self._leave_out()
                while found := self._next():
                    job, gpus = found
                    self._waiting.remove(job)
                    for gpu in gpus:
                        self._on[gpu].append(job)
                    tasks.start_soon(self._one, job, gpus)
                if not any(self._on.values()):
                    break
                await self._changed.wait()
        assert not self._waiting

    def _next(self) -> tuple[Job, list[str]] | None:
        """The first job that may start now, and its GPUs."""
        able = [job for job in self._waiting if not job.after or job.after in self.rows]
        for job in able:
            if self._group(job) > self._group(able[0]):
                break
            gpus = place(job, self._on)
            if gpus:
                return job, gpus
        return None

    def _group(self, job: Job) -> int:
        """A group begins once all of those before it have begun; what failed in an earlier run is the last."""
        return 2 if job.name in self._failed else int(job.late)

    def _leave_out(self) -> None:
        """Say of jobs that cannot run any more why."""
        while left_out := [(job, reason) for job in self._waiting if (reason := self._why_not(job))]:
            for job, reason in left_out:
                self._waiting.remove(job)
                self._tell(Row(job.name, reason))

    def _why_not(self, job: Job) -> str:
        if job.after in self.rows and not self.rows[job.after].is_ok:
            return f"{job.after} did not end well"
        if job.gpus != "1" and len(self._on) < 2:
            return "needs two GPUs"
        left_s = self._began + self._within_s - time.monotonic()
        return f"takes {job.seconds} s, {max(0, left_s):.0f} s are left" if job.seconds > left_s else ""

    async def _one(self, job: Job, gpus: list[str]) -> None:
        began, log, names = time.monotonic(), self._into / f"{job.name}.log", ",".join(gpus)
        self._say(f"{job.name}: on GPU {names}, {job.seconds} s")
        try:
            outcome = await self._process(job, names, log, min(job.limit_s, self._began + self._within_s - began))
        except OSError as error:
            outcome = f"did not start: {error}"
        for gpu in gpus:
            self._on[gpu].remove(job)
        last = last_line(log)
        if outcome == "ok" and " skipped" in last and " passed" not in last:
            outcome = "all skipped"
        self._tell(Row(job.name, outcome, round(time.monotonic() - began, 1), names, last))
        self._changed.set()
        self._changed = anyio.Event()

    async def _process(self, job: Job, gpus: str, log: Path, limit_s: float) -> str:
        """Run a job's process, and end all that it leaves. Its output is a file: nothing waits for who holds a pipe."""
        words = {**self._words, "gpus": str(gpus.count(",") + 1), "json": str(self._into / f"{job.name}.json")}
        command = [sys.executable if word == "python" else word.format(**words) for word in shlex.split(job.command)]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment(gpus),
                process_group=0,
            )
        try:
            with anyio.move_on_after(limit_s):
                code = await process.wait()
                return "ok" if code == 0 else f"exit {code}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):
                await process.wait()
        return f"{'killed' if limit_s == job.limit_s else 'cut off'} after {limit_s:.0f} s"

    def _tell(self, row: Row) -> None:
        self.rows[row.name] = row
        self._say(f"{row.name}: {row.outcome}" + (f" after {row.seconds:.0f} s" if row.gpus else ""))
        replace(self._file, {"machine": self._machine, "jobs": msgspec.to_builtins(list(self.rows.values()))})

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:4.0f} s  {text}", flush=True)


def turn(job: Job) -> tuple[bool, int, int]:
    """By what jobs are sorted: those that share GPUs, those that want one, those that want more; the longest first."""
    kind = 0 if not job.timed else 1 if job.gpus == "1" else 2
    return job.late, kind, -job.seconds


def place(job: Job, on: Mapping[str, Sequence[Job]]) -> list[str]:
    """The emptiest GPUs for a job, beside those that run; none where it has to wait."""
    fit = [gpu for gpu, others in on.items() if may_join(job, others)]
    wanted = len(on) if job.gpus == "all" else int(job.gpus)
    emptiest = sorted(fit, key=lambda gpu: len(on[gpu]))[:wanted]
    return [gpu for gpu in on if gpu in emptiest] if len(fit) >= wanted else []


def may_join(job: Job, others: Sequence[Job]) -> bool:
    if job.timed or not others:
        return not others
    return len(others) < SHARERS and not any(other.timed for other in others)


def environment(gpus: str) -> dict[str, str]:
    """Of a job: what is set here already stays, but for its GPUs."""
    defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    return {**defaults, **os.environ, "CUDA_VISIBLE_DEVICES": gpus, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def last_line(log: Path) -> str:
    """The last line of a log that has letters and is no progress bar."""
    lines = re.split(r"[\r\n]+", log.read_bytes()[-8000:].decode(errors="replace"))
    return next((line.strip() for line in reversed(lines) if re.search(r"[a-z]", line) and "it/s" not in line), "")


def chosen(only: Sequence[str], without: Sequence[str], jobs: Sequence[Job] = JOBS) -> list[Job]:
    """Jobs by names or patterns (`tests.*`), and those whose files they read. ValueError names one that fits none."""
    for pattern in (*only, *without):
        if not any(fnmatch.fnmatch(job.name, pattern) for job in jobs):
            raise ValueError(f"no job is called {pattern}: --list shows all")

    def is_named(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    found = [job for job in jobs if (not only or is_named(job.name, only)) and not is_named(job.name, without)]
    wanted = {job.after for job in found} | {job.name for job in found}
    return [job for job in jobs if job.name in wanted]


def listed(jobs: Sequence[Job]) -> Table:
    table = Table("job", "GPUs", "alone", "s", "after", "shows", title=f"{len(jobs)} jobs")
    for job in sorted(jobs, key=turn):
        table.add_row(job.name, job.gpus, "yes" if job.timed else "", str(job.seconds), job.after, job.shows)
    return table


def summed_up(rows: Sequence[Row]) -> Table:
    table = Table("job", "GPUs", "ended", "s", "last line", title=f"{sum(row.is_ok for row in rows)} of {len(rows)} ok")
    for row in rows:
        style = "" if row.is_ok else "red" if row.gpus else "yellow"
        took = f"{row.seconds:.0f}" if row.gpus else ""
        table.add_row(row.name, row.gpus, row.outcome, took, row.last[:75], style=style)
    return table


def found_gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES has for them."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    gpus = visible_gpus(find_gpus().gpus, os.environ)
    return named[: len(gpus)] if named else [str(gpu.index) for gpu in gpus]


def fetched(weights: Mapping[str, str], jobs: Sequence[Job], console: Console) -> dict[str, str]:
    """Folders of the weights that `jobs` name, by their words in commands: so no job waits for the network.

    What cannot be had keeps its name, and its jobs fail of that.
    """
    found = dict(weights)
    for word in weights:
        if any(f"{{{word}}}" in job.command for job in jobs):
            try:
                found[word] = str(fetch([resolve(weights[word], PACKAGED)])[0])
            except WeightsError as error:
                console.print(f"--{word}: {error}", style="yellow", markup=False)
    return found


async def until_told(runner: Runner) -> None:
    """Run all; SIGTERM and SIGINT end what runs."""
    async with anyio.create_task_group() as tasks:

        async def listen() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    tasks.cancel_scope.cancel()

        tasks.start_soon(listen)
        await runner.run()
        tasks.cancel_scope.cancel()


def arguments_of(command_line: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = ROOT / "bench/results/gpu" / time.strftime("%Y-%m-%d", time.gmtime())
    parser.add_argument("--into", type=Path, default=results, help="folder of logs and results")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir(), "omniflow_gpu"), help="what jobs share"
    )
    parser.add_argument("--only", nargs="+", default=[], help="names of jobs, or patterns")
    parser.add_argument("--without", nargs="+", default=[], help="names of jobs, or patterns")
    parser.add_argument("--within", type=float, default=math.inf, help="seconds after which all has ended")
    parser.add_argument("--gpus", help="as in CUDA_VISIBLE_DEVICES; without: those that nvidia-smi shows")
    parser.add_argument("--smollm2", default="smollm2-135m-instruct", help="folder of a small thinker, or its name")
    parser.add_argument("--piper", default="piper-joe", help="folder of a Piper voice, or its name")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    return parser.parse_args(command_line)


def main(command_line: Sequence[str] | None = None) -> int:
    arguments = arguments_of(command_line)
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        jobs = chosen(arguments.only, arguments.without)
    except ValueError as error:
        console.print(str(error))
        return 2
    if arguments.list:
        console.print(listed(jobs))
        return 0
    gpus = arguments.gpus.split(",") if arguments.gpus else found_gpus()
    if not gpus:
        console.print("There is no GPU here, or none is visible: omniflow doctor says more.")
        return 2
    arguments.work.mkdir(parents=True, exist_ok=True)
    weights = fetched({"smollm2": arguments.smollm2, "piper": arguments.piper}, jobs, console)
    words = {"work": str(arguments.work), **weights}
    runner = Runner(jobs, gpus, arguments.into.resolve(), words, arguments.within)
    anyio.run(until_told, runner)
    rows = [runner.rows[job.name] for job in jobs if job.name in runner.rows]
    for row in rows:
        if row.has_failed:
            log = arguments.into / f"{row.name}.log"
            console.rule(row.name)
            print(log.read_bytes()[-TAIL:].decode(errors="replace"))
    console.print(summed_up(rows))
    return 1 if any(row.has_failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
