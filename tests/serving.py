"""A program that runs the words graph in host processes, says so on stdout, and serves until it is killed.

Argument 1, 'hang', makes it hang in the setup of a stage instead.
"""

from __future__ import annotations

import sys

import anyio

from omniflow.runtime import Runtime

from .graphs import row, words
from .running import CPU, unstarted


async def main(hang: bool) -> None:
    graph = row.row("one", "two", two={"in_setup": "hang"}) if hang else words.build()
    runtime: Runtime = unstarted(graph, CPU)
    if hang:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.__aenter__)
            while runtime._supervisor.children["two"].pid is None or "one" not in runtime._up:
                await runtime._wait_change()
            print("up", flush=True)
    async with runtime:
        reply = await runtime.submit("line", words.Line("a hang x"))
        await anext(reply)
        print("up", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1:] == ["hang"])
