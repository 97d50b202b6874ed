"""`sgl.Engine`, which streams through processes of its own, in rounds that another process asks for.

`python -m bench.gpu.sgl_engine SETTINGS` (a JSON) says a line once it stands. Each further line of its input, a JSON of
`batch`, `tokens` and the `number` of the round, is one round, and answered by a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from bench.gpu.report import ROOT
from bench.gpu.rounds import prompts, summary

SAYS = "says "
"""Begins the lines that are answers; SGLang prints others."""


class SglEngine:
    """The process, as the one that asks sees it: while it works this one sleeps, and between rounds it is stopped.

    Its scheduler looks for work as fast as it can, which slowed whoever else was measured by up to a fifth.
    """

    def __init__(self, model: Mapping[str, Any], *, kv_tokens: int, max_running: int) -> None:
        settings = {"model": dict(model), "kv_tokens": kv_tokens, "max_running": max_running}
        command = [sys.executable, "-m", "bench.gpu.sgl_engine", json.dumps(settings)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, process_group=0
        )

    async def answer(self) -> dict[str, float]:
        """What it says next; then it is stopped. Raises RuntimeError where it has ended."""
        assert self._process.stdout is not None
        while line := await asyncio.to_thread(self._process.stdout.readline):
            if line.startswith(SAYS):
                self._tell_all(signal.SIGSTOP)
                found: dict[str, float] = json.loads(line.removeprefix(SAYS))
                return found
        raise RuntimeError(f"sgl.Engine ended with exit code {self._process.wait()}")

    async def round(self, batch: int, tokens: int, number: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._tell_all(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"batch": batch, "tokens": tokens, "number": number}) + "\n")
        return await self.answer()

    def _tell_all(self, word: signal.Signals) -> None:
        os.killpg(self._process.pid, word)  # its own processes, too

    def close(self) -> None:
        """It shuts down by itself once nothing more is asked."""
        assert self._process.stdin is not None
        self._tell_all(signal.SIGCONT)
        self._process.stdin.close()
        self._process.wait(30)


def built(settings: Mapping[str, Any]) -> Any:
    import sglang as sgl

    from omniflow.engine.sglang_settings import PROMPT_GRAPHS, graph_sizes

    return sgl.Engine(
        **settings["model"],
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_tokenizer_init=True,
        max_total_tokens=settings["kv_tokens"],
        max_running_requests=settings["max_running"],
        mem_fraction_static=0.95,
        cuda_graph_bs_decode=graph_sizes(settings["max_running"]),
        cuda_graph_bs_prefill=list(PROMPT_GRAPHS),
        log_level="error",
    )


async def one_round(engine: Any, batch: int, tokens: int, number: int) -> dict[str, float]:
    first: list[float] = []
    asked = prompts(batch, number)
    begin = time.perf_counter()

    async def read(ids: list[int]) -> None:
        seen = False
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        async for _ in await engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True):
            if not seen:
                first.append(time.perf_counter() - begin)
            seen = True

    async with asyncio.TaskGroup() as group:
        for ids in asked:
            group.create_task(read(ids))
    return summary(first, time.perf_counter() - begin, batch, tokens)


def main() -> None:
    engine = built(json.loads(sys.argv[1]))
    print(SAYS + "{}", flush=True)
    for line in sys.stdin:
        found = engine.loop.run_until_complete(one_round(engine, **json.loads(line)))
        print(SAYS + json.dumps(found), flush=True)
    engine.shutdown()


if __name__ == "__main__":  # SGLang's own processes import this module
    main()
