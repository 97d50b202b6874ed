"""Writes docs/gpu_transports.md from the runs of bench.gpu.transports: what is newest in full, the others a line each.

python -m bench.gpu.page [--note NOTE] [FILE ...]

FILES: JSONs of bench.gpu.transports under bench/results, which are added as one run; where several have the same parts,
they are its rounds. bench/results/gpu_transports.json lists the runs, the oldest first: the files of each, or all that
it found.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
RUNS = RESULTS / "gpu_transports.json"
PAGE = ROOT / "docs/gpu_transports.md"
SIZES = {str(2**16): "64 KB", str(2**20): "1 MB", str(2**22): "4 MB", str(2**24): "16 MB", str(2**26): "64 MB"}
SMALL, LARGE = list(SIZES)[:3], list(SIZES)[3:]
ONE, ONE_UVLOOP = "cuda_ipc, one GPU", "cuda_ipc, one GPU (uvloop)"
QUEUE, BOUNCE = "torch.multiprocessing, one GPU", "host bounce, one GPU"
IPC, NCCL, BARE = "cuda_ipc between GPUs", "nccl between GPUs", "bare torch.distributed"
EDGES = (IPC, NCCL)
FAR_BOUNCE, COPY = "host bounce between GPUs", "peer copy in one process"
HELD, READY, HALF, STREAM = "held_p50_us", "ready_p50_us", "half_round_trip_p50_us", "stream_gb_s"
DEATHS = ("first", "second", "third")
BY_NCCL, NOT_MET = "the same by NCCL", "**not met**"
Part = dict[str, Any]

HEAD = """\
# GPU transports

What an edge between two processes on GPUs costs, beside what else there is. Written by `python -m bench.gpu.page` from
what `python -m bench.gpu.transports` found on H200 that were lent for minutes, where others worked on the same hosts.
How the edges work: [transport](concepts/transport.md), [ADR 11](adr/0011-device-memory-between-hosts.md).

- One value is on its way at a time, from a tensor that is ready, but in *streams*: there one is sent behind the other.
- *held*: the receiver has the tensor, and may give its GPU work on it. *ready*: its GPU is through with the copies as
  well (that look itself takes 10-20 µs). *half round trip*: the tensor there and back, and the sender's GPU idle,
  halved.
- All are medians. Hosts are on uvloop where it is installed, and so are the rows that do not say otherwise.
"""
STREAMS = """\
In a stream bare NCCL takes {bare} µs for a value of 16 MB (newest run). On an edge of NCCL the two ends tell each other
of each value, and where that takes a processor longer, the stream waits for it; which end it is was not timed in a
stream. At 64 MB no round was slow. An edge of `cuda_ipc`, the default between GPUs, has nothing to meet for.

Not run: more than two GPUs, GPUs without NVLink.
"""
KILLED = """\
- *seen*: until the one that lives has been told. *goes on*: until what its GPU did for the other, or waited for, is
  over.
- *not back*: how much less of its GPU is free than before the first death, after each of them. One number means the
  same after each, which is no leak: CUDA and NCCL keep some for a process that has used them once. Below 0, more was
  free.
- A stream that waited for an interprocess event of a killed process had {events} 5 s later. That is why words in memory
  order streams, which the one that lives writes itself.
"""


class Run(NamedTuple):
    """One run: parts by name, a dict for each of its rounds; `link` leads to its numbers, from the page."""

    machine: Part
    commit: str
    note: str
    link: str
    rounds: tuple[Part, ...]

    def title(self) -> str:
        return f"{self.machine['date']}, commit {self.commit}"


class Found(NamedTuple):
    """A part in the newest run that has it, round by round."""

    run: Run
    rounds: tuple[Part, ...]

    def over(self, size: str, metric: str) -> float:
        """The median of the rounds."""
        return float(median(each[size][metric] for each in self.rounds))


def read(entry: Part) -> Run:
    """A run as `RUNS` has it."""
    files = [RESULTS / file for file in entry.get("files", ())]
    found = [json.loads(file.read_text()) for file in files]
    machine = entry["machine"] if not found else found[0]["machine"]
    rounds = _rounds([each["parts"] for each in found]) if found else (entry["parts"],)
    commit = entry.get("commit") or machine["commit"]
    place = files[0].parent if files else RUNS
    return Run(machine, commit, entry.get("note", ""), f"../{place.relative_to(ROOT)}", rounds)


def _rounds(files: list[Part]) -> tuple[Part, ...]:
    """Files that have a part which one before them has are the next round; the others belong to the round before."""
    rounds: list[Part] = []
    for parts in files:
        if rounds and not rounds[-1].keys() & parts.keys():
            rounds[-1] |= parts
        else:
            rounds.append(dict(parts))
    return tuple(rounds)


def newest(runs: list[Run], *names: str) -> Found:
    """The first of `names` that is there, of the newest run that has one; StopIteration where none has."""
    return next(
        Found(run, tuple(parts[name] for parts in run.rounds if works(parts, name)))
        for run in reversed(runs)
        for name in names
        if any(works(parts, name) for parts in run.rounds)
    )


def works(parts: Part, name: str) -> bool:
    return name in parts and "failed" not in parts[name]


def on_uvloop(name: str) -> tuple[str, str]:
    """A part on uvloop, else on asyncio's own loop."""
    return f"{name} (uvloop)", name


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return [line(head), line("---" for _ in head), *map(line, rows), ""]


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def between(values: Iterable[float], form: str = ",.0f") -> str:
    """'53 to 66', or '53' where there is one number to tell."""
    texts = list(dict.fromkeys(format(value, form) for value in sorted(values)))
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def times(name: str, found: Found, metric: str) -> list[str]:
    return [name, *(f"{found.over(size, metric):,.0f}" for size in SIZES)]


def one_gpu(runs: list[Run]) -> list[str]:
    ipc, plain, queue, bounce = (newest(runs, name) for name in (ONE_UVLOOP, ONE, QUEUE, BOUNCE))
    rows = [
        times("**cuda_ipc, held**", ipc, HELD),
        times("**cuda_ipc, ready**", ipc, READY),
        times("cuda_ipc, on asyncio's own loop, held", plain, HELD),
        times("cuda_ipc, on asyncio's own loop, ready", plain, READY),
        times("queue of torch.multiprocessing, ready", queue, READY),
        times("through the host's memory, ready", bounce, READY),
    ]
    message = ipc.rounds[-1]["message"][HELD]
    note = f"Of {said(ipc.run)}. A message without a tensor takes {message:.0f} µs."
    return ["## On one GPU", "", *table(["µs", *SIZES.values()], rows), note, ""]


def two_gpus(runs: list[Run]) -> list[str]:
    ipc, nccl, bare = newest(runs, *on_uvloop(IPC)), newest(runs, *on_uvloop(NCCL)), newest(runs, BARE)
    bounce, copy = newest(runs, FAR_BOUNCE), newest(runs, COPY)
    rows = [
        times("**cuda_ipc, ready**", ipc, READY),
        times("cuda_ipc, half round trip", ipc, HALF),
        times("**nccl, ready**", nccl, READY),
        times("nccl, half round trip", nccl, HALF),
        times("bare torch.distributed (NCCL), half round trip", bare, HALF),
        times("through the host's memory, ready", bounce, READY),
        times("a copy from GPU to GPU in one process", copy, "copy_p50_us"),
    ]
    streams = [
        [name, *(between(each[size][STREAM] for each in found.rounds) for size in LARGE)]
        for name, found in (("cuda_ipc", ipc), ("nccl", nccl), ("bare torch.distributed", bare))
    ]
    note = (
        f"Of {said(ipc.run)}, the median of {len(ipc.rounds)} rounds in turns; the last two rows of {said(bounce.run)}."
    )
    return [
        "## Between two GPUs",
        "",
        "`cuda_ipc` is the default; `runtime.between_gpus=nccl` is for GPUs that do not reach each other's memory.",
        "",
        *table(["µs", *SIZES.values()], rows),
        *table(["GB/s in a stream", *(SIZES[size] for size in LARGE)], streams),
        note,
        "",
    ]


def said(run: Run) -> str:
    return f"[{run.title()}]({run.link})"


class Beside(NamedTuple):
    """A round in which edges and bare NCCL streamed."""

    run: Run
    number: str
    bare: Part
    edges: dict[str, Part]

    def more_us(self, edge: str) -> list[float]:
        """How much longer a small value takes than half a round trip of bare NCCL."""
        return [self.edges[edge][size][READY] - self.bare[size][HALF] for size in SMALL]

    def ratio(self, edge: str, size: str) -> float:
        """Of GB/s in a stream, over those of bare NCCL."""
        return float(self.edges[edge][size][STREAM] / self.bare[size][STREAM])

    def ratio_alone(self, edge: str, size: str) -> float:
        """Of GB/s one value at a time: until it is ready, and half a round trip of bare NCCL."""
        return float(self.bare[size][HALF] / self.edges[edge][size][READY])


def rounds_beside(runs: list[Run]) -> Iterator[Beside]:
    for run in runs:
        for number, parts in enumerate(run.rounds, 1):
            edges = {}
            for name in EDGES:
                there = [parts[each] for each in on_uvloop(name) if works(parts, each)]
                if there:
                    edges[name] = there[0]
            if works(parts, BARE) and len(edges) == 2 and all(STREAM in each[LARGE[0]] for each in edges.values()):
                yield Beside(run, f", round {number}" if len(run.rounds) > 1 else "", parts[BARE], edges)


def ratios(rounds: list[Beside]) -> list[str]:
    rows = []
    for each in rounds:
        cells = [f"{each.run.title()}{each.number}", *(f"{each.bare[size][STREAM]:.0f}" for size in LARGE)]
        for edge in EDGES:
            cells += [f"{each.ratio(edge, size):.2f}" for size in LARGE]
        rows.append([*cells, *(between(each.more_us(edge)) for edge in EDGES)])
    head = ["round", "bare, GB/s: 16 MB", "64 MB", "cuda_ipc / bare: 16 MB", "64 MB", "nccl / bare: 16 MB", "64 MB"]
    head += ["cuda_ipc, µs more below 16 MB", "nccl, µs more"]
    last = [each for each in rounds if each.run is rounds[-1].run]
    bare = between(int(LARGE[0]) / each.bare[LARGE[0]][STREAM] / 1e3 for each in last)
    return ["Every round that had bare NCCL beside it:", "", *table(head, rows), STREAMS.format(bare=bare)]


def aims(runs: list[Run], rounds: list[Beside]) -> list[str]:
    rows = list(aims_of_one_gpu(runs))
    names = ("between two GPUs it adds 100 µs at most to bare NCCL below 16 MB", BY_NCCL)
    for name, edge in zip(names, EDGES, strict=True):
        found = f"{between(value for each in rounds for value in each.more_us(edge))} µs (ready)"
        rows.append([name, found, verdict(rounds, [max(each.more_us(edge)) <= 100 for each in rounds])])
    names = ("in a stream it has 0.9 of bare NCCL's GB/s from 16 MB up", BY_NCCL)
    for name, edge in zip(names, EDGES, strict=True):
        enough = [min(each.ratio(edge, size) for size in LARGE) >= 0.9 for each in rounds]
        rows.append([name, ranges(rounds, edge, Beside.ratio), verdict(rounds, enough)])
    names = ("the same one value at a time, until it is ready", BY_NCCL)
    for name, edge in zip(names, EDGES, strict=True):
        rows.append([name, ranges(rounds, edge, Beside.ratio_alone), "no aim"])
    return ["## Against the aims", "", *table(["aim", "found", ""], rows)]


def ranges(rounds: list[Beside], edge: str, ratio: Callable[[Beside, str, str], float]) -> str:
    return "; ".join(f"{SIZES[size]} {between((ratio(each, edge, size) for each in rounds), '.2f')}" for size in LARGE)


def aims_of_one_gpu(runs: list[Run]) -> Iterator[list[str]]:
    ipc, plain, queue, bounce = (newest(runs, name) for name in (ONE_UVLOOP, ONE, QUEUE, BOUNCE))
    hop = [each.over(size, READY) for each in (ipc, plain) for size in SIZES]
    faster = [queue.over(size, READY) / each.over(size, READY) for each in (ipc, plain) for size in SIZES]
    by_host = [bounce.over(LARGE[1], READY) / each.over(LARGE[1], READY) for each in (ipc, plain)]
    yield ["a hop by CUDA IPC takes 100 µs at most, flat from 64 KB to 64 MB", f"{between(hop)} µs (ready)",
           "met" if max(hop) <= 100 else NOT_MET]  # fmt: skip
    yield ["it is 4 times faster than torch.multiprocessing", f"{between(faster, '.1f')} times",
           "met" if min(faster) >= 4 else NOT_MET]  # fmt: skip
    yield ["it is 20 times faster than by the host's memory at 64 MB", f"{between(by_host)} times",
           "met" if min(by_host) >= 20 else NOT_MET]  # fmt: skip


def verdict(rounds: list[Beside], met: list[bool]) -> str:
    """In how many rounds it is so: of all, and of the newest run."""
    last = [good for each, good in zip(rounds, met, strict=True) if each.run is rounds[-1].run]
    if all(met):
        return "met"
    return f"**met in {sum(met)} of {len(met)} rounds**, in {sum(last)} of the newest {len(last)}"


def kills(runs: list[Run]) -> list[str]:
    names = {name for run in runs for parts in run.rounds for name in parts if name.startswith("kill")}
    rows = [deaths(name, newest(runs, name)) for name in sorted(names, key=lambda name: name.split(", ")[::-1])]
    found, hosts, queue = newest(runs, "events"), newest(runs, "hosts"), newest(runs, QUEUE)
    ended = found.rounds[-1]["through_within_5_s_of_kill"]
    up, again = (hosts.rounds[-1][key] for key in ("both_hosts_ready_s", "ready_again_s"))
    left = {name: part["left_in_dev_shm"] for name, part in queue.run.rounds[-1].items() if "left_in_dev_shm" in part}
    return [
        "## After kill -9",
        "",
        *table(["who is killed", "seen", "goes on", "communicator aborted", "not back", "deaths"], rows),
        KILLED.format(events="gone on" if ended else "not gone on"),
        f"Two hosts on a GPU are up after {up:.1f} s, and one is back {again:.1f} s after its `kill -9` "
        f"({said(hosts.run)}).",
        "",
        f"Left in /dev/shm by each part of that run: `{json.dumps(left)}`. `cuda.shm` and `torch_` are of torch's own "
        "way to share tensors, `sem.loky` of a progress bar where joblib is imported, most likely in the job beside.",
        "",
    ]


def deaths(name: str, found: Found) -> list[str]:
    part = found.rounds[-1]
    each = [part[death] for death in DEATHS if death in part]
    aborted = [death["aborted_after_s"] for death in each if death.get("aborted_after_s")]
    back = [death.get("memory_not_back_mb", part.get("memory_not_back_mb")) for death in each]
    return [
        name.removeprefix("kill -9 of the "),
        f"{between((death['seen_ms'] for death in each), '.1f')} ms",
        f"{between((death['our_gpu_idle_after_ms'] for death in each), '.1f')} ms",
        f"{between(aborted, '.1f')} s" if aborted else "",
        f"{between(back)} MB",
        f"{len(each)}, of {said(found.run)}",
    ]


def all_runs(runs: list[Run]) -> list[str]:
    """A line each, the newest first."""
    lines = ["## Runs", ""]
    for run in reversed(runs):
        machine = run.machine
        gpus = f"{len(machine['gpus'])} x {machine['gpus'][0].removeprefix('NVIDIA ')}"
        versions = f"torch {machine['torch'].partition('+')[0]}, NCCL {machine['nccl']}, driver {machine['driver']}"
        lines.append(f"- {said(run)}: {gpus}, {versions}. {run.note}".rstrip())
    return [*lines, ""]


def page(entries: list[Part]) -> str:
    """The page of runs as `RUNS` lists them."""
    runs = [read(entry) for entry in entries]
    rounds = list(rounds_beside(runs))
    parts = (aims(runs, rounds), one_gpu(runs), two_gpus(runs), ratios(rounds), kills(runs), all_runs(runs))
    return "\n".join([HEAD, *(line for part in parts for line in part)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="JSONs of bench.gpu.transports: one run")
    parser.add_argument("--note", default="", help="what is to be known of it, in a sentence")
    args = parser.parse_args()
    entries = json.loads(RUNS.read_text())
    if args.files:
        files = [str(file.resolve().relative_to(RESULTS)) for file in args.files]
        entries.append({"files": files, **({"note": args.note} if args.note else {})})
        RUNS.write_text(json.dumps(entries, indent=1) + "\n")
    PAGE.write_text(page(entries))


if __name__ == "__main__":
    main()
