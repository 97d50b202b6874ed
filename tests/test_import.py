"""`import omniflow` is light: looked at in a fresh interpreter. bench/test_speed.py measures its time."""

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
import sys
{statement}
modules = list(sys.modules)
import json
print(json.dumps(modules))
"""


def loaded(statement: str) -> list[str]:
    """All modules that are loaded in a new interpreter after a statement."""
    command = [sys.executable, "-c", FRESH.format(statement=statement)]
    modules: list[str] = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    return modules


def fresh(statement: str) -> set[str]:
    """The top-level modules that are loaded after a statement."""
    return {name.partition(".")[0] for name in loaded(statement)}


def test_import_brings_no_other_library() -> None:
    assert fresh("import omniflow") & HEAVY == set()


def test_import_takes_next_to_no_time() -> None:
    """30 modules of the standard library and one of ours, a few ms; 150 would be a library."""
    brought = set(loaded("import omniflow")) - set(loaded("pass"))
    assert {name for name in brought if name.partition(".")[0] not in sys.stdlib_module_names} == {"omniflow"}
    assert len(brought) <= 60


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
    assert fresh(statement) & {"sglang", "starlette", "torch", "transformers", "uvicorn"} == set()


def test_a_host_can_start_without_loading_the_command_line() -> None:
    """A host process imports the console script again: that must not cost it typer and rich."""
    assert fresh("from omniflow.cli import main") & {"rich", "typer"} == set()
