"""The documentation is true: snippets run, links lead somewhere, commands exist, generated pages are fresh."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.core
import typer.main

from omniflow import cluster_named, plan
from omniflow.cli.app import app
from omniflow.loader import load_graph

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
NEEDS_SERVER = "<!-- needs a running server -->\n"
BLOCK = re.compile(rf"({re.escape(NEEDS_SERVER)})?^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[tuple[str, bool]]:
    """The page's blocks in a language, and whether each needs a running server."""
    found = BLOCK.findall(page.read_text())
    return [(code, bool(marked)) for marked, language, code in found if language in languages]


def script(page: Path) -> str:
    """All Python of a page that can run by itself, as one program."""
    return "\n".join(code for code, needs_server in blocks(page, "python") if not needs_server)


@pytest.mark.parametrize("page", [page for page in PAGES if script(page)], ids=name_of)
def test_python_snippets_run(page: Path, tmp_path: Path) -> None:
    program = tmp_path / "snippets.py"
    program.write_text(script(page))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    for shown, _ in blocks(page, "text"):
        assert shown in ran.stdout


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_snippets_compile(page: Path) -> None:
    for code, _ in blocks(page, "python"):
        compile(code, str(page), "exec", dont_inherit=True)


def links(page: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors(page: Path) -> set[str]:
    """Headings as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{link}: {target.name} has no such heading"


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        local = [link.partition("#")[0] for link in links(page) if "://" not in link]
        todo += [(page.parent / place).resolve() for place in local if place]
    assert set(PAGES) <= seen


CODE_PATH = re.compile(r"`((?:omniflow|actors|graphs|tests|bench|docs)/[\w/.]*)`")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    for path in CODE_PATH.findall(page.read_text()):
        assert (ROOT / path).exists(), f"{name_of(page)} names {path}"


def commands(page: Path) -> list[list[str]]:
    """Command lines of ours that a page shows, in blocks and in the text."""
    shown = [line for code, _ in blocks(page, "bash") for line in code.splitlines()]
    shown += re.findall(r"`([^`\n]+)`", page.read_text())
    return [shlex.split(line, comments=True) for line in shown if line.startswith(("omniflow ", "make "))]


def check_omniflow(arguments: list[str]) -> None:
    command = typer.main.get_command(app)
    path = "omniflow"
    while isinstance(command, typer.core.TyperGroup):
        name = next(word for word in arguments if not word.startswith("-"))
        assert name in command.commands, f"no command {path} {name}"
        arguments = arguments[arguments.index(name) + 1 :]
        command, path = command.commands[name], f"{path} {name}"
    known = {option for parameter in command.params for option in parameter.opts}
    used = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    assert used <= known | {"--help"}, f"{path} has no {', '.join(sorted(used - known))}"


def check_make(arguments: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {word for word in arguments if "=" not in word} <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    for program, *arguments in commands(page):
        check_omniflow(arguments) if program == "omniflow" else check_make(arguments)


def test_what_is_generated_is_fresh() -> None:
    generate = runpy.run_path(str(ROOT / "docs/generate.py"))
    assert (ROOT / "docs/config.md").read_text() == generate["config_page"](), "run `make docs`"
    assert (ROOT / "README.md").read_text() == generate["readme_page"](), "run `make docs`"


def test_files_and_lines_are_as_counted() -> None:
    """Files exactly, lines within a tenth: not every line that comes has to be written down."""
    generate = runpy.run_path(str(ROOT / "docs/generate.py"))
    said, counted = generate["counts_in"]((ROOT / "docs/add_a_model.md").read_text()), generate["counted"]()
    assert said.keys() == counted.keys()
    for row, (files, lines) in counted.items():
        assert said[row] == (files, pytest.approx(lines, rel=0.1)), f"{row}: run `make docs`"


def test_the_schema_of_explain_is_documented() -> None:
    described = set(re.findall(r"`(\w+)`", (ROOT / "docs/explain.md").read_text()))
    made = plan(load_graph("ming_omni").spec(), cluster_named("cpu")).as_dict()
    keys = set(made) | set(made["cluster"])
    for table in ("hosts", "stages", "edges"):
        keys |= {key for row in made[table] for key in row}
    assert keys <= described
