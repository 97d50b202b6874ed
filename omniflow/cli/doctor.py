"""What `omniflow doctor` finds on this machine and in this installation, and what each finding means."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec
from rich.table import Table
from rich.text import Text

from omniflow import __version__
from omniflow.cli.chosen import Chosen, Need, lacking, needs_of
from omniflow.cli.gpu_probe import try_sharing
from omniflow.cli.machine import find_gpus, memory_bytes, num_cores, open_files, unshared, visible_gpus
from omniflow.cli.tables import new_table, size_text
from omniflow.errors import PlanError, WeightsError
from omniflow.planner import Cluster, plan
from omniflow.prctl import can_tell_end
from omniflow.weights import HubWeights, PackagedWeights, Weights, cache_folder

Verdict = Literal["ok", "note", "missing"]
"""`missing` is something that omniflow cannot run without."""
_STYLES: dict[Verdict, str] = {"ok": "green", "note": "yellow", "missing": "bold red"}
_FILES_OF_OURS = 256
"""Sockets, memfds and libraries of a large graph; the rest is for connections."""
_FEW_CONNECTIONS = 512
SGLANG_VERSIONS = ("0.5.17", "0.5.23")
"""As omniflow/engine/sglang_start.py has them, which imports SGLang."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    topic: str
    found: str
    verdict: Verdict
    meaning: str


def examine() -> list[Finding]:
    """Look at everything; takes as long as nvidia-smi does, and 5-20 s for what is tried on each GPU."""
    return [
        _python(),
        *_packages(),
        _cores(),
        _memory(),
        *_kernel(),
        _files(),
        _cache(),
        *_gpus(),
    ]


def examine_graph(chosen: Chosen, cluster: Cluster) -> list[Finding]:
    """Whether a graph under its profile fits onto this machine, what is not installed, and which weights are here."""
    missing = [Finding(str(error.stage), "not complete", "missing", error.message) for error in lacking(chosen.spec)]
    return [_plan(chosen, cluster), *missing, *map(_weights, needs_of(chosen.spec))]


def _plan(chosen: Chosen, cluster: Cluster) -> Finding:
    spec = chosen.spec
    topic = f"profile {spec.profile.name}" if spec.profile is not None else spec.name
    try:
        made = plan(spec, cluster, chosen.configured.runtime)
    except PlanError as error:
        return Finding(topic, "does not fit", "missing", str(error))
    total = sum(host.budget_bytes for host in made.hosts)
    budgets = f"its stages have budgets of {size_text(total)} in all" if total else "its stages name no budgets"
    meaning = f"{budgets}; `omniflow explain` shows where they would run"
    return Finding(topic, "fits", "ok", meaning)


def _weights(need: Need) -> Finding:
    state, stages = need.weights.state(), ", ".join(need.stages)
    if state.status == "present":
        found = f"{state.path}: {size_text(state.size_bytes or 0)}"
        return Finding(state.name, found, "ok", f"weights of {stages}")
    if not isinstance(need.weights, PackagedWeights | HubWeights):
        return Finding(state.name, state.status, "missing", f"weights of {stages}; {_remedy(need.weights)}")
    size = f", {size_text(state.size_bytes)}" if state.size_bytes else ""
    return Finding(state.name, f"{state.status}{size}", "note", f"weights of {stages}; `omniflow run` fetches them")


def _remedy(weights: Weights) -> str:
    try:
        return f"found in {weights.path()}"
    except WeightsError as error:
        return str(error)


def findings_table(findings: list[Finding]) -> Table:
    """One row a finding."""
    table = new_table("", "found", "meaning")
    table.columns[2].no_wrap = False
    for finding in findings:
        topic = Text.assemble((finding.topic, "bold"), "\n", (finding.verdict, _STYLES[finding.verdict]))
        table.add_row(topic, finding.found, finding.meaning)
    return table


def _python() -> Finding:
    found = f"{platform.python_version()} in {sys.prefix}"
    return Finding("python", found, "ok", f"runs omniflow {__version__} from {Path(__file__).parents[2]}")


def _packages() -> Iterator[Finding]:
    """One finding for the core and one an extra: the versions that are installed, and what is missing."""
    try:
        requirements = importlib.metadata.requires("omniflow") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "omniflow is not installed", "note", "run `pip install -e .` where its source lies")
        return
    groups: dict[str, list[str]] = {}
    for requirement in requirements:
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if name != "omniflow":
            groups.setdefault(extra[1] if extra else "core", []).append(name)
    for group, names in groups.items():
        yield _package_group(group, names)


def _package_group(group: str, names: list[str]) -> Finding:
    versions = {name: _version(name) for name in names}
    present = [f"{name} {version}" for name, version in versions.items() if version]
    missing = [name for name, version in versions.items() if not version]
    found = ", ".join(present) or "none"
    if not missing:
        return Finding(group, found, "ok", "all packages are here")
    if group == "core":
        return Finding(group, found, "missing", f"without {', '.join(missing)} nothing runs: `pip install omniflow`")
    absent = ", ".join(missing) if present else "none of its packages is here"
    return Finding(group, found, "note", f"not complete ({absent}): `pip install 'omniflow[{group}]'` if you want it")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> Finding:
    usable, installed = num_cores(), os.cpu_count() or 1
    found = f"{usable} of {installed}" if usable < installed else str(usable)
    if usable < 2:
        return Finding("cores", found, "note", "one core: stages take turns, so speech may not keep up")
    return Finding("cores", found, "ok", "stages run at the same time, one thread each")


def _memory() -> Finding:
    size = memory_bytes()
    if size < 2 * 2**30:
        return Finding("memory", size_text(size), "note", "the embedded models of ming_omni need 1.5 GiB")
    return Finding("memory", size_text(size), "ok", "the planner refuses CPU stages whose budgets exceed it")


def _kernel() -> Iterator[Finding]:
    """What processes and shared memory of ours are built on."""
    yield _works("memfd", "shared memory that nothing can leave behind in /dev/shm", "Linux 3.17", _try_memfd)
    yield _works("pidfd", "the death of a process is seen within 2 ms", "Linux 5.3", _try_pidfd)
    yield _works("seqpacket", "processes talk in whole messages", "Linux 2.6", _try_seqpacket)


def _works(topic: str, meaning: str, since: str, attempt: Callable[[], None]) -> Finding:
    try:
        attempt()
    except OSError as error:
        reason = f"omniflow cannot start processes without it; it needs {since}, and a sandbox that allows it"
        return Finding(topic, error.strerror or str(error), "missing", reason)
    return Finding(topic, "works", "ok", meaning)


def _try_memfd() -> None:
    descriptor = os.memfd_create("omniflow-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 4096)
    finally:
        os.close(descriptor)


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _try_seqpacket() -> None:
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
        end.close()


def _files() -> Finding:
    files = open_files()
    room = max(files - _FILES_OF_OURS, 0)
    if room < _FEW_CONNECTIONS:
        advice = "raise the hard limit: LimitNOFILE= of systemd, --ulimit nofile= of a container, `ulimit -Hn` as root"
        return Finding("open files", str(files), "note", f"about {room} connections at once; {advice}")
    return Finding("open files", str(files), "ok", f"about {room} connections at once")


def _cache() -> Finding:
    folder = cache_folder()
    exists = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = size_text(shutil.disk_usage(exists).free)
    if not os.access(exists, os.W_OK):
        return Finding("cache", str(folder), "missing", "it cannot be written; set OMNIFLOW_CACHE to a folder that can")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.exists() else 0
    found = f"{folder}: {size_text(size) if size else 'empty'}, {free} free"
    return Finding("cache", found, "ok", "weights are kept here (OMNIFLOW_CACHE moves it)")


def _gpus() -> Iterator[Finding]:
    report = find_gpus()
    if report.problem is not None:
        yield Finding("GPUs", report.problem, "note", "graphs are planned for the CPU")
    elif not report.gpus:
        yield Finding("GPUs", "none (no nvidia-smi)", "ok", "graphs are planned for the CPU")
    visible = visible_gpus(report.gpus, os.environ)
    for gpu in report.gpus:
        found = f"{gpu.model}, {size_text(gpu.memory_bytes)}, compute {gpu.compute_capability}, driver {gpu.driver}"
        if gpu in visible:
            yield Finding(f"GPU {gpu.index}", found, "ok", f"stages may use it as gpu:{visible.index(gpu)}")
        else:
            yield Finding(f"GPU {gpu.index}", found, "note", "CUDA_VISIBLE_DEVICES hides it")
    if visible:
        yield _lifelines()
        yield from _sharing([gpu.uuid for gpu in visible])
        yield _sglang()


def _lifelines() -> Finding:
    """Whether the death of a process on a GPU can be told before the driver has freed what it had (prctl.py)."""
    if can_tell_end():
        return Finding("lifelines", "work", "ok", "the death of a process on a GPU is seen within 2 ms")
    meaning = "the death of a process on a GPU is seen 0.1 s later; let the container's seccomp profile allow it"
    return Finding("lifelines", "unshare is forbidden", "note", meaning)


def _sharing(gpus: Sequence[str]) -> Iterator[Finding]:
    """Whether processes can hand each other GPU memory: on one GPU, and from the first to each of the others."""
    lacking = unshared()
    tried: list[str | None] = [lacking] * len(gpus)
    if not lacking:
        with ThreadPoolExecutor(max_workers=4) as threads:  # each takes 8 s, most of it on a core of its own
            tried = list(threads.map(try_sharing, [gpus[0]] * len(gpus), gpus))
    for number, problem in enumerate(tried):
        topic = "CUDA IPC" if number == 0 else f"GPU 0 to {number}"
        if problem and (lacking or number == 0):
            yield Finding(topic, problem, "note", "tensors between processes go through the host's memory")
        elif problem:
            advice = "tensors go through the host's memory, unless NCCL has a way: --set runtime.between_gpus=nccl"
            yield Finding(topic, problem, "note", advice)
        elif number == 0:
            yield Finding(topic, "works", "ok", "tensors between processes stay on their GPU")
        else:
            yield Finding(topic, "reached", "ok", "tensors are copied from GPU to GPU")


def _sglang() -> Finding:
    version = _version("sglang")
    if version is None:
        return Finding("SGLang", "none", "note", "AR stages run on transformers; `pip install 'omniflow[sglang]'`")
    if version in SGLANG_VERSIONS:
        return Finding("SGLang", version, "ok", "a version that AR stages are tested with")
    tested = " and ".join(SGLANG_VERSIONS)
    return Finding("SGLang", version, "note", f"AR stages are tested with {tested}; others may have changed too much")
