"""A program that keeps 8 streams of the graph `paths` running, says 'up' on stdout, and goes on until it is killed.

Argument 1, 'drain': drains after that; 'restart': kills a host again and again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import anyio

from omniflow.errors import RequestError
from omniflow.runtime import Runtime

from ..graphs import paths
from ..graphs.paths import SIDES, Ask
from ..running import CPU, pid_of, unstarted, up_again


async def stream(runtime: Runtime, side: str) -> None:
    while True:
        with contextlib.suppress(RequestError):
            await (await runtime.submit(side, Ask(num=1000))).collect()


async def main(then: str) -> None:
    async with unstarted(paths.build(), CPU, drain_s=60) as runtime, anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(stream, runtime, SIDES[number % 2])
        await anyio.sleep(0.1)
        print("up", flush=True)
        if then == "drain":
            tasks.start_soon(runtime.drain)
        while then == "restart":
            os.kill(pid_of(runtime, "left_pass"), signal.SIGKILL)
            await anyio.sleep(0.005)
            await up_again(runtime)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else "")
