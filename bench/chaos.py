"""Chaos: hosts die under load, streams are aborted, requests are cancelled; how soon is all as good as new?

    python bench/chaos.py [--rounds 100] [--seed 1] [--json FILE]

The scenes are those of tests/chaos, where each is a test; here they are longer, and what they measure is a table.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of kill -9")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the numbers (bench/results/chaos.json)")
    arguments = parser.parse_args()
    # Each host imports this file before it serves: what it needs is imported where it is used.
    import anyio

    logging.getLogger("omniflow.supervisor").setLevel(logging.CRITICAL)
    found = {**machine(), "seed": arguments.seed, **anyio.run(measure, arguments.rounds, random.Random(arguments.seed))}
    show(found)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


async def measure(num_rounds: int, dice: random.Random) -> dict[str, Any]:
    from tests.chaos import footprint, rounds, scenes
    from tests.graphs import paths

    async with scenes.watched(paths.build()) as runtime:
        await rounds.one_round(runtime, dice)
        before = footprint.Footprint.now()
        played = [await rounds.one_round(runtime, dice) for _ in range(num_rounds)]
        after = footprint.Footprint.now()
        times = {name: spread._asdict() for name, spread in rounds.spreads(played).items()}
        times["cancel -> quiet"] = rounds.Spread.of(await scenes.cancels(runtime, dice, 300))._asdict()
        times["deadline -> error"] = rounds.Spread.of(await scenes.late(runtime, 100))._asdict()
        growth = await scenes.growth(runtime, dice, 2000)
    gone = [scenes.kill_main(whole_group, dice) for whole_group in (False, True) * 10]
    times["kill of the main process -> no process left"] = rounds.Spread.of(gone)._asdict()
    return {
        "rounds": num_rounds,
        "requests": num_rounds * rounds.NUM_REQUESTS,
        "finished": sum(each.finished for each in played),
        "ended_by_a_death": sum(len(each.errors_s) for each in played),
        "times_ms": times,
        "descriptors": [before.descriptors, after.descriptors],
        "growth_of_memory": growth,
    }


def machine() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
    }


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{found['rounds']} rounds of kill -9 under {found['requests']} streaming requests")
    for column in ("from -> to", "number", "p50 ms", "p99 ms", "max ms"):
        table.add_column(column, justify="left" if column == "from -> to" else "right")
    for name, times in found["times_ms"].items():
        table.add_row(name, *(f"{times[key]:g}" for key in ("num", "p50_ms", "p99_ms", "max_ms")))
    console.print(table)
    console.print(f"{found['finished']} requests finished, {found['ended_by_a_death']} ended with StageDiedError")
    console.print(f"open descriptors before and after: {found['descriptors']}")
    worst = max(found["growth_of_memory"].values())
    console.print(f"memory after 2000 aborted streams of 200 KB pieces: {worst:+.2%} (the process that grew most)")


if __name__ == "__main__":
    sys.exit(main())
