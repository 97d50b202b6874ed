"""A program that has just begun to start a fork server, whose modules take long to import."""

from __future__ import annotations

import time

from omniflow import supervisor

if __name__ == "__main__":
    supervisor._start_forkserver(["omniflow.forkserver_start", "tests.chaos.slow_import"])
    print("up", flush=True)
    time.sleep(60)
