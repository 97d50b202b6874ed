"""A program with a stage of three processes: says 'up' on stdout, and goes on until it is killed."""

from __future__ import annotations

import anyio

from ..graphs import choir
from ..running import unstarted
from ..test_split import MACHINE


async def main() -> None:
    async with unstarted(choir.build(), MACHINE):
        print("up", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
