"""How long and with which dice chaos plays: CHAOS_ROUNDS and CHAOS_SEED, printed where a test fails."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator

import pytest

from omniflow import supervisor

SEED = int(os.environ.get("CHAOS_SEED", "1"))


def rounds(otherwise: int) -> int:
    """How many rounds a test plays."""
    return int(os.environ.get("CHAOS_ROUNDS", otherwise))


@pytest.fixture
def dice() -> Iterator[random.Random]:
    print(f"CHAOS_SEED={SEED}")  # pytest shows it where the test fails
    yield random.Random(SEED)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Whatever is in a reference cycle stays, and is seen."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Started before descriptors are counted: it outlives each runtime."""
    graphs = ["flow", "fork", "paths", "perils", "row", "words"]
    supervisor._start_forkserver(
        ["omniflow.forkserver_start", "omniflow.process", *(f"tests.graphs.{name}" for name in graphs)]
    )
