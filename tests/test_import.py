"""`import omniflow` is light: measured in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {
    "anyio",
    "dill",
    "msgspec",
    "multiprocess",
    "numpy",
    "rich",
    "sglang",
    "starlette",
    "torch",
    "typer",
    "uvicorn",
}

FRESH = """
import json, sys, time
began = time.perf_counter()
{statement}
print(json.dumps([time.perf_counter() - began, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


def fresh(statement: str) -> tuple[float, set[str]]:
    """Run a statement in a new interpreter: its seconds, and the top-level modules that are loaded after it."""
    command = [sys.executable, "-c", FRESH.format(statement=statement)]
    seconds, modules = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    return seconds, set(modules)


def test_import_brings_no_other_library() -> None:
    _, modules = fresh("import omniflow")
    assert modules & HEAVY == set()


def test_import_takes_less_than_150_ms() -> None:
    # The best of three: a busy machine can only make it slower.
    assert min(fresh("import omniflow")[0] for _ in range(3)) < 0.150


@pytest.mark.parametrize(
    "statement",
    [
        "from omniflow import Actor, Graph, plan",
        "import omniflow.runtime",
        "import omniflow.cli",
        "import omniflow.loader",
    ],
)
def test_the_core_needs_neither_tensors_nor_a_web_server(statement: str) -> None:
    _, modules = fresh(statement)
    assert modules & {"sglang", "starlette", "torch", "transformers", "uvicorn"} == set()


def test_a_host_can_start_without_loading_the_command_line() -> None:
    """A host process imports the console script again: that must not cost it typer and rich."""
    _, modules = fresh("from omniflow.cli import main")
    assert modules & {"rich", "typer"} == set()
