"""From measurements to docs/benchmarks.md: tables, targets, ratios, and a picture.

    python -m bench.report

writes the page again from bench/results/*.json.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.loops import ASYNCIO
from bench.plot import bars
from bench.targets import TARGETS, Target
from bench.workload import PAYLOADS, percentile

PAGE = "docs/benchmarks.md"
PICTURE = "docs/benchmarks.svg"


def machine() -> dict[str, str]:
    """What was measured on, and with which versions."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "")
    found = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": f"{len(os.sched_getaffinity(0))} cores of {model or platform.machine()}",
        "system": f"Linux {platform.release()}, Python {platform.python_version()}",
    }
    names = ("msgspec", "numpy", "anyio", "uvloop")
    return found | {name: importlib.metadata.version(name) for name in names if _there(name)}


def _there(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class Results:
    """The medians of the rounds: quiet ones where there are any."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found
        self._values: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for row in found["rows"]:
            key = (row["system"], row["metric"])
            self._values.setdefault(key, []).append((row["value"], row.get("p99", 0.0), row["others"]))

    @property
    def systems(self) -> list[str]:
        return list(dict.fromkeys(system for system, _ in self._values))

    def metrics(self, system: str) -> list[str]:
        """What was measured of a system."""
        return [metric for name, metric in self._values if name == system]

    def get(self, system: str, metric: str) -> float | None:
        """The median, or None where that was not measured."""
        return self._median(system, metric, 0)

    def p99(self, system: str, metric: str) -> float | None:
        """The median of the 99th percentiles."""
        return self._median(system, metric, 1)

    def _median(self, system: str, metric: str, which: int) -> float | None:
        values = self._values.get((system, metric))
        if values is None:
            return None
        quiet = [value for value in values if value[2] < 0.25] or values
        return percentile([value[which] for value in quiet], 0.5)

    def best(self, metric: str, *, most: bool, asyncio: bool) -> tuple[str, float] | None:
        """The peer that is best at something; on asyncio's own loop only where omniflow runs on it, too."""
        peers = [
            s
            for s in self.systems
            if not s.startswith(("omniflow", "limit", "anatomy")) and (asyncio or ASYNCIO not in s)
        ]
        found = [(value, peer) for peer in peers if (value := self.get(peer, metric)) is not None]
        if not found:
            return None
        value, peer = max(found) if most else min(found)
        return peer, value


def shown(value: float | None, unit: str = "µs") -> str:
    """A value with three digits and its unit."""
    if value is None:
        return "-"
    if unit == "µs" and value >= 1e6:
        return f"{value / 1e6:.3g} s"
    if unit == "µs" and value >= 1000:
        return f"{value / 1e3:.3g} ms"
    if unit == "/s":
        return f"{value / 1e6:.2f} M/s" if value >= 1e6 else f"{value / 1e3:.3g} k/s"
    return f"{value:.3g} {unit}".strip()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def bound_of(results: Results, target: Target) -> float | None:
    """The strictest of a target's bounds, of those that were measured."""
    found = []
    for bound in target.bounds:
        if isinstance(bound, tuple):
            value = results.get(bound[0], bound[2] if len(bound) == 3 else target.metric)
            found += [value * bound[1]] if value is not None else []
        else:
            found.append(bound)
    return (max if target.most else min)(found, default=None)


def targets(results: Results) -> str:
    rows = []
    for target in TARGETS:
        ours, bound = results.get(target.system, target.metric), bound_of(results, target)
        met = "not measured"
        if ours is not None and bound is not None:
            met = "yes" if (ours >= bound if target.most else ours <= bound) else "**no**"
        peer = results.best(target.metric, most=target.most, asyncio=ASYNCIO in target.system)
        best, ratio = "-", "-"
        if ours is not None and peer is not None:
            best, ratio = f"{shown(peer[1], target.unit)} ({peer[0]})", f"{ours / peer[1]:.2f}x"
        limit = results.get("limit", target.limit) if target.limit else None
        says = f"{'≥' if target.most else '≤'} {target.says}"
        if any(isinstance(each, tuple) for each in target.bounds):
            says += f" = {shown(bound, target.unit)}"
        rows.append([target.part, shown(ours, target.unit), says, met, shown(limit, target.unit), best, ratio])
    head = ["part", "omniflow", "target", "met", "limit here", "best peer here", "omniflow / best peer"]
    return table(head, rows)


def messages(results: Results) -> str:
    rows = []
    for system in results.systems:
        trip = results.get(system, "round trip hot")
        if trip is None:
            continue
        rows.append(
            (
                trip,
                [
                    system,
                    shown(trip),
                    shown(results.p99(system, "round trip hot")),
                    shown(results.get(system, "round trip idle")),
                    shown(results.p99(system, "round trip idle")),
                    shown(results.get(system, "rate"), "/s"),
                    shown(results.get(system, "start of 8")),
                ],
            )
        )
    head = ["system", "round trip, hot", "p99", "idle", "p99", "one way", "8 processes up"]
    return table(head, [row for _, row in sorted(rows, key=lambda row: row[0])])


def in_process(results: Results) -> str:
    rows = []
    for system in results.systems:
        hop = results.get(system, "hop in a process")
        if hop is not None:
            p99, rate = results.p99(system, "hop in a process"), results.get(system, "rate in a process")
            rows.append((hop, [system, shown(hop), shown(p99), shown(rate, "/s")]))
    return table(["system", "hop", "p99", "rate (CPU time)"], [row for _, row in sorted(rows, key=lambda row: row[0])])


def payloads(results: Results) -> str:
    names = [*PAYLOADS, "64 KB idle", "1 MB idle"]
    rows = []
    for system in results.systems:
        values = [results.get(system, f"payload {name}") for name in names]
        if any(value is not None for value in values):
            stream = shown(results.get(system, "stream 64 MB"), "GB/s")
            rows.append((values[1] or 0.0, [system, *map(shown, values), stream]))
    limit = [results.get("limit", f"copy {name}") for name in PAYLOADS]
    stream = shown(results.get("limit", "stream 64 MB"), "GB/s")
    rows.append((0.0, ["limit: one copy", *map(shown, limit), "-", "-", stream]))
    head = ["system", *PAYLOADS, "64 KB, idle", "1 MB, idle", "64 MB, streaming"]
    return table(head, [row for _, row in sorted(rows, key=lambda row: row[0])])


ANATOMY = """
A hop of a small message is a datagram sent and received, encoded and decoded, and a turn of the receiver's loop, which
asks epoll what is ready: {floor} of CPU time that no Python code can avoid. The link itself takes {link} without a
loop, {trip} a way within a round trip back to back, and {stages} from stage to stage, with credits, order, types and
cancellation.

Where rows are missed, this is why:

- *Hot control, hot payloads*: a hop needs two turns of the loop, one to notice and one to run who waited, of {turn}
  each on asyncio. Ray's compiled graph keeps a core busy for each reader, idle or not; omniflow's window closes after
  200 µs without traffic.
- *Control rate*, *fan-in*: pyzmq batches in C++ threads of its own; here a message is {rate} of Python in one thread.
- *Mailbox*: asyncio.Queue itself needs {queue} a hop, so that it is {anyio} quicker than AnyIO and {xoscar} quicker
  than xoscar. Beyond a queue, a hop of ours checks order, type, bound and credits.
- *Own CPU*: a payload is two messages, the value and its release: {two} of system calls, encoding and copying. The rest
  is Python: taking a block, making a view and watching its life, giving it back.
- *Idle*: two sleeping processes must be woken, which takes {idle} blocking here, and between runs up to half as much
  again; an event loop adds its two turns at each end. What keeps a core busy while it waits is quicker.
- *1 MB*: the copy alone takes {copy}; iceoryx2 copies once, too.
- *Eight stages up*: eight forks of a process that has imported everything, one after the other, and eight handshakes.
"""


def anatomy(results: Results) -> str:
    """Where the time of a hop goes, and why that keeps some targets out of reach."""

    def of(metric: str, system: str = "anatomy") -> float:
        return results.get(system, metric) or 0.0

    floor = of("send and receive") + of("epoll") + of("encode and decode")
    rows = [[part, shown(of(part))] for part in results.metrics("anatomy")]
    trip, stages = of("round trip hot", "omniflow link"), of("round trip hot", "omniflow")
    return table(["part of a hop", "CPU time"], rows) + ANATOMY.format(
        floor=shown(floor),
        link=shown(of("link, without a loop")),
        trip=shown(trip / 2),
        stages=shown(stages / 2),
        turn=shown(of("turn of the loop")),
        rate=shown(1e6 / max(1.0, of("rate", "omniflow link"))),
        queue=shown(of("hop in a process", "asyncio.Queue")),
        anyio=f"{of('hop in a process', 'AnyIO stream') / max(0.01, of('hop in a process', 'asyncio.Queue')):.1f}x",
        xoscar=f"{of('hop in a process', 'xoscar') / max(0.01, of('hop in a process', 'asyncio.Queue')):.1f}x",
        two=shown(2 * of("send and receive") + 2 * of("encode and decode") + of("copy 64 KB")),
        copy=shown(of("copy 1 MB", "limit")),
        idle=shown(of("round trip idle", "limit")),
    )


def graph(overhead: dict[str, Any]) -> str:
    """What a graph of stages that do nothing costs."""
    rows = {row["name"]: row for row in overhead["rows"]}
    lines = []
    for name, says, bound in (("fused", "7 stages in one process", 300), ("processes", "7 stages, 7 processes", 2000)):
        row = rows[name]
        flights = [shown(value) for value in row["each_us"].values()]
        cpu = [shown(value) for value in row["cpu_us"].values()]
        met = "yes" if row["median_us"] <= bound else "**no**"
        lines.append([says, shown(row["median_us"]), shown(row["p99_us"]), f"≤ {shown(bound)}", met, *flights])
        lines.append([f"{says}, CPU time of all", "", "", "", "", *cpu])
    scaling = rows["scaling"]
    head = ["graph", "a request", "p99", "target", "met", *(f"{each} in flight" for each in rows["fused"]["each_us"])]
    return table(head, lines) + (
        f"\nTwo stages that compute for {scaling['busy_us'] / 1000:g} ms each: {scaling['one_process']:.0f} requests/s "
        f"in one process, {scaling['two_processes']:.0f} in two ({scaling['ratio']:.2f}x).\n"
    )


def tables(found: dict[str, Any]) -> str:
    """All tables of one run of bench/transports.py."""
    results = Results(found)
    parts = [
        "### Targets\n\n" + targets(results),
        "### Small messages between processes\n\n" + messages(results),
        "### Hops inside a process\n\n" + in_process(results),
        "### Payloads, one way\n\n" + payloads(results),
        "### Where the time of a hop goes\n\n" + anatomy(results),
    ]
    if found["skipped"]:
        parts.append("### Not measured\n\n" + "".join(f"- {name}: {why}\n" for name, why in found["skipped"].items()))
    return "\n".join(parts)


def picture(found: dict[str, Any]) -> str:
    results = Results(found)
    panels = []
    for title, metric in (
        ("Round trip of a typed 198-byte message, back to back", "round trip hot"),
        ("1 MB array, one way, back to back", "payload 1 MB"),
        ("64 MB array, one way, back to back", "payload 64 MB"),
    ):
        values = {system: value for system in results.systems if (value := results.get(system, metric)) is not None}
        values.pop("limit", None)
        panels.append((title, dict(sorted(values.items(), key=lambda entry: entry[1]))))
    return bars(panels, lambda value: shown(value), lambda name: name.startswith("omniflow"))


INTRODUCTION = """\
# Benchmarks

Written by `make bench` on {date}; the peers come from `make bench-peers`. {processor}; {system}.
Versions: {versions}.

{rounds} rounds, each system once a round; shown are medians, of quiet rounds where there were any. Others used
{others:.0%} of the machine (median; {least:.0%} to {most:.0%}), the load average at the end was {load}. Compare within
this run only.

![Round trips and payloads](benchmarks.svg)

"""


def write(root: Path) -> None:
    """Write the page and its picture from the results."""
    found = json.loads((root / "bench/results/transports.json").read_text())
    others = sorted(row["others"] for row in found["rows"])
    machine_ = found["machine"]
    versions = {name: value for name, value in machine_.items() if name not in ("date", "processor", "system")}
    text = INTRODUCTION.format(
        date=machine_["date"],
        processor=machine_["processor"],
        system=machine_["system"],
        versions=", ".join(f"{name} {version}" for name, version in (versions | found["versions"]).items()),
        rounds=found["rounds"],
        others=others[len(others) // 2],
        least=others[0],
        most=others[-1],
        load=found["load"][0],
    )
    text += "## Transports\n\n" + tables(found)
    overhead = root / "bench/results/overhead.json"
    if overhead.exists():
        text += "\n## Whole graphs\n\n" + graph(json.loads(overhead.read_text()))
    notes = root / "bench/notes.md"
    text += "\n" + notes.read_text()
    (root / PAGE).write_text(text)
    (root / PICTURE).write_text(picture(found))


if __name__ == "__main__":
    write(Path(__file__).parents[1])
