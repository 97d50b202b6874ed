"""The machine that the command runs on, as a cluster to plan for. Never imports torch: GPUs are asked of nvidia-smi."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from omniflow.engine.installed import torch_without_cuda
from omniflow.planner import Cluster, Gpu

_QUERY = ("index", "uuid", "name", "memory.total", "driver_version", "compute_cap")
_ANSWER_S = 10
"""nvidia-smi takes 0.1-2 s (longer without persistence mode); a sick driver lets it hang."""
_USABLE = 0.96
"""What contexts and fragmentation leave of a GPU's memory."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_FILES = 65_536
"""Open files that are enough: containers may allow a billion, and programs that close all that may be open, one by one,
then take minutes to start another.
"""


class GpuFacts(msgspec.Struct, frozen=True):
    """One GPU as nvidia-smi describes it."""

    index: int
    uuid: str
    model: str
    memory_bytes: int
    driver: str
    compute_capability: str


class GpuReport(msgspec.Struct, frozen=True):
    """The GPUs that this process may use. `problem` says why there are none where there should be some."""

    gpus: tuple[GpuFacts, ...] = ()
    problem: str | None = None


def this_machine() -> Cluster:
    """This machine: the cores and the memory that this process may use, and its visible GPUs."""
    found = visible_gpus(find_gpus().gpus, os.environ)
    gpus = tuple(Gpu(gpu.model, int(gpu.memory_bytes * _USABLE)) for gpu in found)
    models = {gpu.model for gpu in gpus}
    kind = models.pop().lower().replace(" ", "") if len(models) == 1 else "gpu"
    name = f"{len(gpus)}x{kind}" if gpus else "cpu"
    return Cluster(name, num_cores(), memory_bytes(), gpus, unshared=unshared() if gpus else "")


def unshared() -> str:
    """Why processes here cannot hand each other GPU memory, as far as what is installed tells; empty where they can.

    `omniflow doctor` tries it.
    """
    lacking = torch_without_cuda()
    if lacking is not None:
        return lacking
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    return ""


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Main memory, or what the container allows of it."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return installed
    return min(installed, int(limit)) if limit.isdigit() else installed


def open_files() -> int:
    """How many files this process may open once it has called `open_more_files`."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return max(soft, min(hard, _FILES))


def open_more_files() -> None:
    """Let this process, and all that it starts, open as many files as they may, 65,536 at most.

    Most systems say 1,024 to whoever does not ask, for the sake of programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files(), hard))


def find_gpus() -> GpuReport:
    """Ask nvidia-smi, if there is one."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return GpuReport()
    query = [command, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return GpuReport(problem=f"nvidia-smi gave no answer within {_ANSWER_S} s")
    except OSError as error:
        return GpuReport(problem=f"nvidia-smi cannot be run: {error.strerror}")
    if answer.returncode != 0:
        said = (answer.stdout + answer.stderr).strip().splitlines()
        return GpuReport(problem=f"nvidia-smi failed: {said[-1] if said else f'exit code {answer.returncode}'}")
    return parse_gpus(answer.stdout)


def parse_gpus(csv: str) -> GpuReport:
    """What the lines of nvidia-smi's CSV (`_QUERY`, no units) say."""
    gpus = []
    for line in filter(str.strip, csv.splitlines()):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(_QUERY) or not fields[0].isdigit() or not fields[3].isdigit():
            # Boards that share the machine's memory have no memory.total: it reads [N/A].
            return GpuReport(problem=f"nvidia-smi describes a GPU without memory of its own: {line.strip()}")
        index, uuid, name, mebibytes, driver, capability = fields
        gpus.append(
            GpuFacts(int(index), uuid, name.removeprefix("NVIDIA "), int(mebibytes) * 2**20, driver, capability)
        )
    return GpuReport(tuple(gpus))


def visible_gpus(gpus: tuple[GpuFacts, ...], environ: Mapping[str, str]) -> tuple[GpuFacts, ...]:
    """What CUDA_VISIBLE_DEVICES leaves of `gpus`, in its order; as in CUDA, what it does not know ends the list."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    visible = []
    for key in filter(None, (part.strip() for part in chosen.split(","))):
        match = next(
            (gpu for gpu in gpus if key == str(gpu.index) or (len(key) > 4 and gpu.uuid.startswith(key))), None
        )
        if match is None:
            break
        visible.append(match)
    return tuple(visible)
