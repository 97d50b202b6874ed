"""Writes docs/gpu_transports.md from bench/results/gpu_transports.json: a list of what bench.gpu.transports found.

python -m bench.gpu.page [FILE ...]     FILES: JSONs of bench.gpu.transports, which are added as one run
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results/gpu_transports.json"
PAGE = ROOT / "docs/gpu_transports.md"
SIZES = {str(2**16): "64 KB", str(2**20): "1 MB", str(2**22): "4 MB", str(2**24): "16 MB", str(2**26): "64 MB"}
ALONE = ("bare torch.distributed", "NCCL's calls", "NCCL's calls, registered")
NCCL_WITH = "nccl between GPUs, "
"""Begins the names of parts that had settings of their own, as on uvloop."""
HEAD = """\
# GPU transports

Written by `python -m bench.gpu.page` from what `python -m bench.gpu.transports` found on machines that were at hand
for minutes: one run each, other work on the host unknown. One value is on its way at a time, from a tensor that is
ready. *held*: the receiver has the tensor and may give its GPU work on it. *ready*: its GPU is through with the copies
as well (that look itself takes 10-20 µs). *half round trip*: the tensor there and back, and the sender's GPU idle,
halved. Medians in µs. How it works: [transport](concepts/transport.md).
"""

AIMS = """\
## Against the aims

As of the last run below, and of those before it for what it has not measured.

| aim | found |
|---|---|
| CUDA IPC hop at most 100 µs and flat, 64 KB to 64 MB | held 60-66 µs, ready 71-95 µs; on uvloop 53-66 and 67-81 |
| at least 4 times faster than torch.multiprocessing | 4.5 to 6.6 times (ready) |
| at least 20 times faster than through the host at 64 MB | 853 times |
| edge between two GPUs at most 100 µs more than bare torch.distributed below 16 MB | -10 to 31 µs more (ready), six runs |
| edge between two GPUs at least 0.9 times bare GB/s from 16 MB up | in a stream 1.13 to 1.17 times, but for 0.87 at 16 MB in one run of six; one value at a time 0.86 to 1.05 at 16 MB, 0.97 to 1.11 at 64 |
| the same two by NCCL (`runtime.between_gpus=nccl`) | 35 to 115 µs more, 125 once (ready). In a stream 0.99 to 1.01 times at 64 MB, at 16 MB 1.00, 0.99, **0.75, 0.74, 0.63** in five runs on two machines, and 292 GB/s on a third (1.03 times what bare NCCL had on the others); one value at a time **0.47 to 0.78** and 0.75 to 0.90 |
| `kill -9`: seen; streams go on; memory back | 0.3-4 ms; 1-23 ms; all of it |
| two hosts on GPUs up; back after `kill -9` | 2.9-5.5 s; 3.6-4.6 s |

A value of 16 MB takes bare NCCL 80 µs, or 57 in a stream. On an edge of NCCL the two ends tell each other of each value: that takes 105 to 184 µs one value at a
time. In a stream the slow runs took 78 to 94 µs a value, and the others 57 to 60. What is slow there is taken to be the processor of the receiving end, which was not
timed in a stream: one value at a time its calls took 48 to 63 µs, with the clocks around them. At 64 MB none was slow. An edge of `cuda_ipc`, the default between GPUs, has nothing to meet for. Since these runs a receive
by NCCL makes fewer calls (no new event, no look at each event before), which was not run on GPUs.

What was not run on GPUs: more than two of them; GPUs without NVLink. Streams are 40 values long, and 200 in `gpu_2026-11-30/nccl_rounds`, the four
runs in turns with bare NCCL that are counted above, in which NCCL was on uvloop.
"""  # noqa: E501 - rows of a table


def table(title: str, rows: list[tuple[str, dict[str, Any], str]]) -> list[str]:
    """One table: rows are (name, a part, the metric)."""
    lines = [f"| {title} | " + " | ".join(SIZES.values()) + " |", "|---|" + "---|" * len(SIZES)]
    for name, part, metric in rows:
        cells = [f"{part[size][metric]:,.0f}" if size in part else "" for size in SIZES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def ratio(part: dict[str, Any], of: dict[str, Any], a: str, b: str) -> str:
    """How many times longer `of` takes, from the smallest size to the largest."""
    found = [of[size][b] / part[size][a] for size in SIZES if size in part and size in of]
    return f"{min(found):.1f} to {max(found):.1f} times"


def one_gpu(parts: dict[str, Any]) -> list[str]:
    names = {
        "omniflow, cuda_ipc": "cuda_ipc, one GPU",
        "the same on uvloop": "cuda_ipc, one GPU (uvloop)",
        "torch.multiprocessing queue": "torch.multiprocessing, one GPU",
        "through the host's memory": "host bounce, one GPU",
    }
    there = {name: parts[key] for name, key in names.items() if key in parts and "failed" not in parts[key]}
    lines: list[str] = []
    for metric in ("held", "ready") if there else ():
        lines += table(metric, [(name, part, f"{metric}_p50_us") for name, part in there.items()])
    ipc = there.get("omniflow, cuda_ipc")
    for name, part in there.items():
        if ipc is not None and name.startswith(("torch", "through")):
            lines.append(f"- {name}: {ratio(ipc, part, 'ready_p50_us', 'ready_p50_us')} as long as cuda_ipc (ready)")
    if ipc is not None and "message" in ipc:
        lines.append(f"- a message without a tensor: {ipc['message']['held_p50_us']} µs")
    return [*lines, ""]


def two_gpus(parts: dict[str, Any]) -> list[str]:
    names = {
        "omniflow, cuda_ipc between GPUs": "cuda_ipc between GPUs",
        "omniflow, nccl": "nccl between GPUs",
        "omniflow, nccl on uvloop": "nccl between GPUs (uvloop)",
        **{f"the same, {name.removeprefix(NCCL_WITH)}": name for name in parts if name.startswith(NCCL_WITH)},
        "omniflow, cuda_ipc between GPUs, on uvloop": "cuda_ipc between GPUs (uvloop)",
        "through the host's memory": "host bounce between GPUs",
    }
    there = {name: parts[key] for name, key in names.items() if key in parts and "failed" not in parts[key]}
    rows = [(f"{name}, ready", part, "ready_p50_us") for name, part in there.items()]
    rows += [(f"{name}, half round trip", part, "half_round_trip_p50_us") for name, part in there.items()]
    bare, copy = parts.get("bare torch.distributed"), parts.get("peer copy in one process")
    alone = {name: parts[name] for name in ALONE if name in parts and "failed" not in parts[name]}
    rows += [(f"{name}, half round trip", part, "half_round_trip_p50_us") for name, part in alone.items()]
    if copy is not None:
        rows.append(("a copy from GPU to GPU in one process", copy, "copy_p50_us"))
    lines = table("between two GPUs", rows) if rows else []
    for name, part in {**there, **alone}.items():
        found = [f"{SIZES[size]} {part[size]['stream_gb_s']}" for size in SIZES if "stream_gb_s" in part.get(size, {})]
        if found:
            lines.append(f"- GB/s of {name}, one value behind the other: {', '.join(found)}")
    for name in ("omniflow, cuda_ipc between GPUs", "omniflow, nccl", "omniflow, nccl on uvloop"):
        if name in there and bare is not None:
            for metric in ("ready", "half_round_trip"):
                found = [
                    f"{SIZES[size]} {bare[size]['half_round_trip_p50_us'] / there[name][size][f'{metric}_p50_us']:.2f}x"
                    for size in SIZES
                ]
                lines.append(f"- GB/s of {name} ({metric.replace('_', ' ')}) over bare: {', '.join(found)}")
    return [*lines, ""]


def facts(parts: dict[str, Any]) -> list[str]:
    """The parts that are no tables, as they were found."""
    lines = []
    for name, found in parts.items():
        if name.startswith("kill") or name in ("events", "hosts", "steps of a hop") or "failed" in found:
            lines.append(f"- **{name}**: `{json.dumps(found)}`")
    return [*lines, ""]


def left_by(run: dict[str, Any]) -> dict[str, list[str]]:
    """What parts have left in /dev/shm."""
    found = {name: part["left_in_dev_shm"] for name, part in run["parts"].items() if "left_in_dev_shm" in part}
    return found | run.get("left_in_dev_shm", {})


def main() -> None:
    lines = [HEAD, AIMS]
    runs = json.loads(RESULTS.read_text())
    if len(sys.argv) > 1:
        added = [json.loads(Path(file).read_text()) for file in sys.argv[1:]]
        runs.append({**added[0], "parts": {name: part for each in added for name, part in each["parts"].items()}})
        RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
    for run in runs:
        machine = run["machine"]
        commit = run.get("commit") or machine.get("commit", "unknown")
        lines.append(f"## {machine['date']}, {len(machine['gpus'])} x {machine['gpus'][0]}, commit {commit}\n")
        lines.append(
            f"Driver {machine['driver']}, torch {machine['torch']}, NCCL {machine['nccl']}, "
            f"Python {machine['python']}, {machine['cores']} cores. {run.get('note', '')}\n"
        )
        lines += [*one_gpu(run["parts"]), *two_gpus(run["parts"]), *facts(run["parts"])]
        left = left_by(run)
        lines.append(f"Left in /dev/shm, by part: `{json.dumps(left)}`\n" if left else "Left in /dev/shm: nothing.\n")
    PAGE.write_text("\n".join(line for line in lines))


if __name__ == "__main__":
    main()
