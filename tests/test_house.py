"""The repository itself: what must be there, what must not, and what must agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def files() -> list[Path]:
    """Everything that is or would be committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in sorted(set(listed.stdout.split("\0")) - {""}) if (path := ROOT / name).is_file()]


def texts() -> Iterator[tuple[str, str]]:
    for path in files():
        try:
            yield str(path.relative_to(ROOT)), path.read_text()
        except UnicodeDecodeError:
            continue


@pytest.mark.parametrize(
    "name", ["README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", ".ci/run"]
)
def test_root_files_exist(name: str) -> None:
    assert (ROOT / name).stat().st_size > 0


def test_ci_runs_the_commands_of_the_readme() -> None:
    run = ROOT / ".ci/run"
    assert os.access(run, os.X_OK)
    assert "set -euo pipefail" in run.read_text()
    assert "make test" in run.read_text() and "make check" in run.read_text()
    assert "make test" in (ROOT / "README.md").read_text()


def test_the_licence_is_the_one_that_is_declared() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()


def test_the_changelog_has_this_version_and_its_order() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[([^\]]+)\]", text, flags=re.MULTILINE)
    assert PROJECT["version"] in versions[:2]  # the first may be what comes next
    order = ["Breaking", "Added", "Changed", "Fixed"]
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        headings = re.findall(r"^### (.+)$", part, flags=re.MULTILINE)
        assert headings == sorted(headings, key=order.index)


# Put together here, so that this file does not hold what it forbids.
FORBIDDEN = [
    "/" + "work/",
    "/" + "root/",
    "/opt/" + "wheels",
    "pypi" + ".org",
    "pythonhosted" + ".org",
    "npmjs" + ".org",
    "download.pytorch" + ".org",
    "registry." + "npm",
]


@pytest.mark.parametrize("word", FORBIDDEN)
def test_nothing_names_a_machines_path_or_a_registrys_host(word: str) -> None:
    assert [name for name, text in texts() if word in text] == []


def test_no_leftovers() -> None:
    marks = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b")
    assert [name for name, text in texts() if marks.search(text) and name != "LICENSE"] == []


def test_no_file_is_large_but_the_weights_of_a_data_package() -> None:
    packages = ROOT / "packages"
    others = [path for path in files() if not (path.suffix == ".safetensors" and packages in path.parents)]
    assert {str(path): path.stat().st_size for path in others if path.stat().st_size > 500_000} == {}


def test_no_test_says_that_something_is_fast() -> None:
    """The machine may be busy: times are measured in bench/. What never comes is waited for `HANGS_S` (waiting.py)."""
    timed = re.compile(
        r"assert .*(monotonic|perf_counter|process_time|current_time)\(\) - \w+ <|fail_after\(\d(\.\d+)?\)"
    )
    found = {f"{name}: {line.strip()}" for name, text in texts() for line in text.splitlines() if timed.search(line)}
    assert {each for each in found if each.startswith("tests/")} == set()


def test_graph_files_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "graphs").glob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 100} == {}


def test_every_requirement_is_pinned_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    wanted = [*PROJECT["dependencies"], *EXTRAS["server"], *EXTRAS["embedded"], *EXTRAS["dev"]]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name != "omniflow":
            found = {canonicalize_name(pin): version for pin, version in pins.items()}.get(name)
            assert found is not None, f"{name} is not pinned"
            assert requirement.specifier.contains(found), f"{name}=={found} is outside {requirement.specifier}"


def imported(folder: str) -> set[str]:
    """Top-level names that the files of a package import, at whatever depth."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        found |= set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), flags=re.MULTILINE))
    return found


DISTRIBUTIONS = {"PIL": "pillow", "prometheus_client": "prometheus-client", "gruut_lang_en": "gruut-lang-en"}
OURS = {"omniflow", "actors", "graphs"}
OPTIONAL = {"cuda", "sglang", "sniffio", "sounddevice", "triton"}
"""Used where they are there: torch for GPUs brings cuda; an error says how to get the others."""


def test_every_import_is_declared() -> None:
    """A package that only happens to be installed is missing in a fresh environment."""
    declared = {Requirement(line).name for line in [*PROJECT["dependencies"], *EXTRAS["embedded"], *EXTRAS["server"]]}
    names = {DISTRIBUTIONS.get(name, name).replace("_", "-") for name in imported("omniflow") | imported("actors")}
    standard = {name.replace("_", "-") for name in sys.stdlib_module_names}
    assert names - standard - OURS - declared - OPTIONAL == set()


def test_the_wheel_holds_the_three_packages(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == OURS
    assert {"omniflow/py.typed", "graphs/ming_omni.py"} <= set(names)
    assert any(name.endswith("entry_points.txt") for name in names)
