"""A thinker split over GPUs: `python -m bench.gpu.tp PART --json FILE`, for any number of GPUs.

    equal    greedy answers of a small float32 model, by each number of GPUs: equal up to a near tie
    rates    tokens/s by requests at once, by each number of GPUs; what idle ranks cost
    kills    kill -9 of ranks under load: until the first and the last request knows, until all is back, what is left

All of it as it is served: plan, a process a GPU, the actor, its engine. Weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.report import Report, need
from bench.gpu.tp_graph import dummy_folder, prompts, small_folder, thinker
from omniflow import Runtime, plan
from omniflow.cli.machine import this_machine
from omniflow.config import RuntimeConfig
from omniflow.errors import RequestError
from omniflow.media import Options, TokenLogprob, TokenPrompt

VOCAB = 100_000
MEMORY = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
APPS = ["nvidia-smi", "--query-compute-apps=gpu_bus_id,used_memory", "--format=csv,noheader"]


class Answer(NamedTuple):
    ids: list[int]
    logprobs: list[TokenLogprob]
    first_s: float


@asynccontextmanager
async def serving(folder: Path, tp: int, dtype: str) -> AsyncIterator[Runtime]:
    config = RuntimeConfig(start_timeout_s=300.0, deadline_s=300.0, restart_wait_s=120.0)
    planned = plan(thinker(folder, tp, dtype).spec(), this_machine(), config)
    began = time.perf_counter()
    async with Runtime(planned, config) as runtime:
        host = planned.hosts[0]
        print(f"tp={tp} on {', '.join(host.devices)}: up in {time.perf_counter() - began:.1f} s", flush=True)
        yield runtime
        ended = time.perf_counter()
    print(f"down in {time.perf_counter() - ended:.1f} s", flush=True)


async def answer(runtime: Runtime, ids: list[int], tokens: int, **options: Any) -> Answer:
    asked = Options(temperature=0.0, max_tokens=tokens, **options)
    found, began = Answer([], [], 0.0), time.perf_counter()
    async with await runtime.submit("ask", TokenPrompt(ids), options=asked) as reply:
        async for output in reply:
            if not found.ids:
                found = found._replace(first_s=time.perf_counter() - began)
            found.ids.extend(output.value.ids)
            found.logprobs.extend(output.value.logprobs)
    return found


async def together(runtime: Runtime, asked: list[list[int]], tokens: int, **options: Any) -> list[Answer]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(runtime, ids, tokens, **options)) for ids in asked]
    return [task.result() for task in tasks]


# -- equal -------------------------------------------------------------------------------------------------------------


async def equal(arguments: argparse.Namespace, report: Report) -> None:
    asked = prompts(arguments.prompts, 1, 8192)
    answers: dict[int, list[Answer]] = {}
    with tempfile.TemporaryDirectory() as folder:
        small_folder(Path(folder))
        for tp in arguments.tp:
            async with serving(Path(folder), tp, "float32") as runtime:
                answers[tp] = await together(runtime, asked, arguments.tokens, top_logprobs=2)
    first, *others = arguments.tp
    report.add({"prompts": len(asked), "tokens": arguments.tokens, "dtype": "float32"})
    for tp in others:
        ends = [parting(mine, theirs) for mine, theirs in zip(answers[tp], answers[first], strict=True)]
        parted = [end for end in ends if end is not None]
        report.add({"equal": len(ends) - len(parted), "parted": parted}, f"tp={tp} beside tp={first}")


def parting(mine: Answer, theirs: Answer) -> dict[str, float] | None:
    """Where two answers part, and how near the two likeliest tokens were there; None where they are equal."""
    pairs = zip(mine.ids, theirs.ids, theirs.logprobs, strict=False)
    for number, (mine_id, their_id, logprob) in enumerate(pairs):
        if mine_id != their_id:
            (_, likeliest), (_, second) = logprob.top
            return {"token": number, "margin": likeliest - second}
    return None if len(mine.ids) == len(theirs.ids) else {"token": min(len(mine.ids), len(theirs.ids)), "margin": -1.0}


# -- rates -------------------------------------------------------------------------------------------------------------


async def rates(arguments: argparse.Namespace, report: Report) -> None:
    for size in arguments.sizes:
        for tp in arguments.tp:
            with tempfile.TemporaryDirectory() as folder:
                async with serving(dummy_folder(size, Path(folder)), tp, "bfloat16") as runtime:
                    await rates_of(runtime, arguments, report, size, f"tp={tp}")


async def rates_of(runtime: Runtime, arguments: argparse.Namespace, report: Report, *path: str) -> None:
    number = 0
    for batch in arguments.batches:
        rows = []
        for _ in range(arguments.rounds + 1):
            number += 1
            asked, began = prompts(batch, number, VOCAB), time.perf_counter()
            answers = await together(runtime, asked, arguments.tokens)
            took = time.perf_counter() - began
            count = sum(len(each.ids) for each in answers)
            rows.append((count / took, 1e3 * statistics.median(each.first_s for each in answers)))
        speeds, firsts = zip(*rows[1:], strict=True)  # the first compiles and allocates
        found = {
            "tokens_per_s": round(statistics.median(speeds), 1),
            "slowest": round(min(speeds), 1),
            "first_ms": round(statistics.median(firsts), 1),
        }
        report.add(found, *path, str(batch))
    report.add({"idle_cores": await idle_cores(pids(runtime))}, *path)


def pids(runtime: Runtime) -> list[int]:
    """Of all ranks, in their order."""
    child = runtime._supervisor.children["thinker"]
    return [child.process.pid, *(follower.process.pid for follower in child.followers)]


async def idle_cores(processes: list[int], seconds: float = 3.0) -> list[float]:
    """What each rank takes of a core while nothing is asked."""
    await asyncio.sleep(0.5)
    before = [cpu_s(pid) for pid in processes]
    await asyncio.sleep(seconds)
    return [round((cpu_s(pid) - was) / seconds, 3) for pid, was in zip(processes, before, strict=True)]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- kills -------------------------------------------------------------------------------------------------------------


async def kills(arguments: argparse.Namespace, report: Report) -> None:
    size, tp = arguments.sizes[0], max(arguments.tp)
    report.add({"size": size, "tp": tp, "unused_mib": used_mib()})
    with tempfile.TemporaryDirectory() as folder:
        async with serving(dummy_folder(size, Path(folder)), tp, "bfloat16") as runtime:
            await together(runtime, prompts(8, 0, VOCAB), 32)
            report.add({"serving_mib": used_mib(), "processes_on_gpus": said(APPS)})
            for rank in (tp - 1, 0):
                report.add(await kill(runtime, rank), "kills", f"rank {rank}")
            report.add({"serving_again_mib": used_mib()})
            started = pids(runtime)
    report.add({"left": there(started), "unused_again_mib": used_mib()})


async def kill(runtime: Runtime, rank: int) -> dict[str, Any]:
    """Kill a rank while 8 requests run; milliseconds from then."""
    ends: list[tuple[float, str]] = []

    async def dies(ids: list[int]) -> None:
        try:
            await answer(runtime, ids, 4000)
        except RequestError as error:
            ends.append((time.perf_counter(), type(error).__name__))

    async with asyncio.TaskGroup() as group:
        for ids in prompts(8, 100 + rank, VOCAB):
            group.create_task(dies(ids))
        await asyncio.sleep(1.0)
        before = pids(runtime)
        began = time.perf_counter()
        os.kill(before[rank], signal.SIGKILL)
    child = runtime._supervisor.children["thinker"]
    gone_s = await when(lambda: not there(before))
    mib = used_mib() if child.state != "ready" else None
    ready_s = await when(lambda: child.state == "ready")
    answers = await together(runtime, prompts(8, 200 + rank, VOCAB), 32)
    return {
        "errors": sorted({kind for _, kind in ends}),
        "num_errors": len(ends),
        "first_error_ms": round(1e3 * (min(at for at, _ in ends) - began), 1),
        "last_error_ms": round(1e3 * (max(at for at, _ in ends) - began), 1),
        "all_ranks_gone_ms": round(1e3 * (gone_s - began), 1),
        "used_mib_then": mib,
        "ready_again_s": round(ready_s - began, 2),
        "answers_then": sum(len(each.ids) == 32 for each in answers),
    }


def there(processes: list[int]) -> list[int]:
    return [pid for pid in processes if Path(f"/proc/{pid}").exists()]


async def when(true: Callable[[], bool]) -> float:
    while not true():
        await asyncio.sleep(0.002)
    return time.perf_counter()


def used_mib() -> list[int]:
    return [int(line) for line in said(MEMORY)]


def said(command: list[str]) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


PARTS: dict[str, Callable[[argparse.Namespace, Report], Coroutine[Any, Any, None]]] = {
    "equal": equal,
    "rates": rates,
    "kills": kills,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="numbers of GPUs")
    parser.add_argument("--sizes", nargs="+", default=["8b"], choices=["1b", "8b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    need(max(arguments.tp), sglang=True)
    began = time.perf_counter()
    report = Report(arguments.json, arguments.part)
    asyncio.run(PARTS[arguments.part](arguments, report))
    report.add({"seconds": round(time.perf_counter() - began, 1)})


if __name__ == "__main__":
    main()
