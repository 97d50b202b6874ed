"""Each import contract catches what it is there for: one planted violation a time, in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

PLANTED = [
    ("packages", "omniflow/media.py", "import actors.roles"),
    ("packages", "actors/roles.py", "import graphs.ming_omni"),
    ("rooms", "omniflow/errors.py", "import omniflow.media"),
    ("rooms", "omniflow/graph.py", "def late():\n    import omniflow.config"),
    ("rooms", "omniflow/messages.py", "import typing\nif typing.TYPE_CHECKING:\n    import omniflow.mailbox"),
    ("rooms", "omniflow/planner/plan.py", "import omniflow.transport.base"),
    ("rooms", "omniflow/unplaced.py", "ROOM = 'new'"),
    ("transports", "omniflow/transport/local_object.py", "import omniflow.transport.arrow_shm"),
    ("routes", "omniflow/server/models.py", "import omniflow.server.chat"),
    ("light-core", "omniflow/host.py", "import torch"),
    ("light-core", "omniflow/runtime.py", "def late():\n    import starlette.routing"),
    ("pure-planning", "omniflow/planner/place.py", "import anyio"),
    ("pure-planning", "omniflow/graph.py", "import socket"),
    ("realtime-machine", "omniflow/server/realtime/protocol.py", "import anyio"),
    ("actor-api", "actors/roles.py", "from omniflow.runtime import Runtime"),
    ("declarations", "graphs/ming_omni.py", "import omniflow.runtime"),
    ("model-systems", "actors/piper/voice.py", "import actors.smollm2"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    for package in ("omniflow", "actors", "graphs"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def broken_contracts(tree: Path) -> set[str]:
    """The names of the broken contracts."""
    program = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"}
    ran = subprocess.run([program, "--no-logo"], cwd=tree, env=environment, capture_output=True, text=True, timeout=60)
    broken = set(re.findall(r"^(.+) BROKEN", ran.stdout, flags=re.MULTILINE))
    assert (ran.returncode == 0) == (not broken), ran.stdout + ran.stderr
    return broken


def test_the_tree_keeps_all_contracts(tree: Path) -> None:
    assert broken_contracts(tree) == set()


@pytest.mark.parametrize(("contract", "file", "code"), PLANTED)
def test_a_planted_violation_is_caught(tree: Path, contract: str, file: str, code: str) -> None:
    (name,) = [each["name"] for each in CONTRACTS if each["id"] == contract]
    path = tree / file
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{code}\n")
    try:
        assert name in broken_contracts(tree)
    finally:
        path.unlink() if before is None else path.write_text(before)


def test_every_contract_is_tried() -> None:
    assert {contract for contract, _, _ in PLANTED} == {contract["id"] for contract in CONTRACTS}
