"""A program that serves the graph of tests/server/caller.py on the port that is its argument, until SIGTERM."""

from __future__ import annotations

import os
import signal
import sys

import anyio

from omniflow.config import ServerConfig
from omniflow.runtime import Runtime
from omniflow.server.app import build_app
from omniflow.server.serve import serve

from ..server.caller import caller_plan


async def main(port: int) -> None:
    config = ServerConfig(port=port, api_keys=tuple(os.environ["OMNIFLOW_API_KEYS"].split(",")))
    async with Runtime(caller_plan()) as runtime:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async with serve(build_app(runtime, model="caller", config=config), config):
                await anext(signals)


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]))
