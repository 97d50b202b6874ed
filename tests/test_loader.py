"""From what a user types to a Graph: every way that works, and every way that does not, as one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omniflow import GraphError
from omniflow.loader import load_graph, shipped_graphs

ROOT = Path(__file__).parents[1]

GRAPH = """\
from omniflow import Actor, Graph, TextDelta

class Repeat(Actor):
    async def run(self, text: TextDelta) -> TextDelta:
        return text

def build(name="made"):
    graph = Graph(name)
    repeat = graph.stage("repeat", Repeat)
    graph.input(chat=repeat)
    graph.output(text=repeat)
    return graph
"""


@pytest.fixture(autouse=True)
def unchanged_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What loading adds to this process is taken back; the current folder is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = vars(sys.modules[name]).get("__file__")
        if file and file.startswith(str(tmp_path)):
            del sys.modules[name]


def message(reference: str) -> str:
    with pytest.raises(GraphError) as caught:
        load_graph(reference)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(name: str, text: str) -> Path:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


# -- what works ----------------------------------------------------------------------------------------------------


def test_a_file_gives_its_attribute_graph() -> None:
    write("alpha.py", GRAPH + "graph = build('one')\nother = build('two')\n")
    assert load_graph("alpha.py").name == "one"
    assert load_graph("alpha.py:other").name == "two"
    assert load_graph("./alpha.py").name == "one"


def test_a_function_without_arguments_is_called() -> None:
    write("beta.py", GRAPH)
    assert load_graph("beta.py:build").name == "made"


def test_a_file_anywhere_imports_its_neighbours_and_gives_its_folder_to_children() -> None:
    write("deep/er/shared.py", "NAME = 'from beside'\n")
    write("deep/er/gamma.py", "from shared import NAME\n" + GRAPH + "graph = build(NAME)\n")
    assert load_graph("deep/er/gamma.py").name == "from beside"
    assert str(Path("deep/er").absolute()) in os.environ["PYTHONPATH"].split(os.pathsep)
    assert load_graph("deep/er/gamma.py").stage  # loading twice finds the same module


def test_a_file_in_a_package_has_its_dotted_name() -> None:
    write("outer/__init__.py", "")
    write("outer/inner/__init__.py", "")
    write("outer/names.py", "NAME = 'packaged'\n")
    write("outer/inner/delta.py", "from outer.names import NAME\n" + GRAPH + "graph = build(NAME)\n")
    graph = load_graph("outer/inner/delta.py")
    assert graph.name == "packaged"
    assert graph.spec().stage("repeat").actor.__module__ == "outer.inner.delta"


def test_a_name_with_a_hyphen_works() -> None:
    write("my-graph.py", GRAPH + "graph = build('hyphen')\n")
    assert load_graph("my-graph.py").name == "hyphen"


def test_shipped_graphs_are_known_by_name() -> None:
    assert "ming_omni" in shipped_graphs()
    assert all(not name.startswith("_") for name in shipped_graphs())


ACTORS = """\
import os
from pathlib import Path
from omniflow import Actor, Graph, TextDelta

with open(Path(__file__).with_name("imports.txt"), "a") as file:
    file.write(f"{os.getpid()}\\n")

class Mine(Actor):
    heavy = True
    async def run(self, text: TextDelta) -> TextDelta:
        return TextDelta(f"{text.text} {os.getpid()} {type(self).__module__}")

graph = Graph("mine")
first, second = graph.stage("first", Mine), graph.stage("second", Mine)
graph.result(first, second)
graph.input(chat=first)
graph.output(text=second)
"""

PROGRAM = """\
import anyio, sys
from omniflow import Cluster, Runtime, TextDelta, plan
from omniflow.loader import load_graph

async def main() -> None:
    async with Runtime(plan(load_graph(sys.argv[1]).spec(), Cluster("cpu", 2, 0))) as runtime:
        reply = await (await runtime.submit("chat", TextDelta("hello"))).collect()
        print(reply["text"].text)

if __name__ == "__main__":
    anyio.run(main)
"""


def test_host_processes_find_actors_of_a_users_file_and_do_not_import_it_again() -> None:
    """The fork server imports the file once; its hosts (two here) are forks that have it."""
    write("users/folder/epsilon.py", ACTORS)
    write("elsewhere/program.py", PROGRAM)
    ran = subprocess.run(
        [sys.executable, "program.py", "../users/folder/epsilon.py"],
        cwd="elsewhere",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.returncode == 0, ran.stderr
    hello, first, module, second, also = ran.stdout.split()
    assert (hello, module, also) == ("hello", "epsilon", "epsilon")
    importers = Path("users/folder/imports.txt").read_text().split()
    assert len(importers) == 2  # the program, and the fork server
    assert len({first, second, *importers}) == 4


# -- what does not -------------------------------------------------------------------------------------------------


def test_unknown_names_suggest_what_was_meant() -> None:
    assert "no graph is called 'ming_onmi'; did you mean 'ming_omni'?" in message("ming_onmi")
    assert f"known: {', '.join(shipped_graphs())}" in message("zzz")
    write("zzz.py", GRAPH)
    assert "did you mean the file ./zzz.py?" in message("zzz")


def test_missing_files_and_folders() -> None:
    assert message("nowhere/x.py") == "there is no file nowhere/x.py"
    write("words.py", GRAPH)
    assert message("wrods.py") == "there is no file wrods.py; did you mean 'words.py'?"
    write("folder/one.py", "")
    assert message("./folder") == "./folder is a folder; give a file: one.py"
    write("notes.txt", "")
    assert message("./notes.txt") == "./notes.txt is no Python file; its name has to end in .py"
    assert message("words.py:") == "'words.py:' ends in a colon; write words.py:NAME, or words.py for its 'graph'"


def test_missing_attributes_name_the_graphs_that_there_are() -> None:
    write("zeta.py", GRAPH + "a = build()\nb = build()\n")
    assert message("zeta.py") == "zeta.py has no 'graph'; its graphs are: zeta.py:a, zeta.py:b"
    assert message("zeta.py:c") == "zeta.py has no 'c'; its graphs are: zeta.py:a, zeta.py:b"
    write("empty.py", "")
    assert "empty.py has no 'graph', and no Graph at all; assign one" in message("empty.py")


def test_attributes_that_are_no_graph() -> None:
    write(
        "eta.py", GRAPH + "graph = 3\ndef wrong(): return 'x'\ndef needs(a): pass\ndef fails(): raise KeyError('k')\n"
    )
    assert message("eta.py") == "eta.py:graph is no Graph but of type int"
    assert message("eta.py:wrong") == "eta.py:wrong is no Graph but of type str"
    assert message("eta.py:needs") == "eta.py:needs needs arguments; a function that makes a graph takes none"
    assert message("eta.py:fails") == "eta.py:16: KeyError: 'k'"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\ngraph = Grpah(\n", "theta.py:2: SyntaxError: '(' was never closed"),
        ("x = 1\n  y = 2\n", "theta.py:2: IndentationError: unexpected indent"),
        ("\nimport not_there\n", "theta.py:2: ModuleNotFoundError: No module named 'not_there'"),
        ("from omniflow import Grahp\n", "theta.py:1: ImportError: cannot import name 'Grahp' from 'omniflow'"),
        ("def f():\n    1 / 0\nf()\n", "theta.py:2: ZeroDivisionError: division by zero"),
        ("raise ValueError('first\\nsecond')\n", "theta.py:1: ValueError: first"),
        ("raise SystemExit('bye')\n", "theta.py:1: SystemExit: bye"),
        (
            GRAPH + "graph = build()\ngraph.stage('repeat', Repeat)\n",
            "theta.py:14: stage 'repeat' is declared twice; names are unique",
        ),
    ],
)
def test_a_file_that_raises_is_one_line_that_says_where(text: str, expected: str) -> None:
    write("theta.py", text)
    assert message("theta.py").startswith(expected)


def test_an_error_in_what_a_file_imports_points_at_the_import() -> None:
    write("helper_iota.py", "\n\nraise OSError('no disk')\n")
    write("iota.py", "\nimport helper_iota\n")
    assert message("iota.py") == "iota.py:2: OSError: no disk"


def test_names_that_python_would_not_import_from_there() -> None:
    write("json.py", GRAPH)
    assert message("json.py") == "json.py: 'json' is the name of a module of Python itself; rename it"
    write("pytest.py", GRAPH)
    assert message("pytest.py").startswith("pytest.py: the name 'pytest' is taken by ")
    write("v1.2.py", GRAPH)
    assert message("v1.2.py") == "v1.2.py cannot be imported: a dot stands inside its name; rename it"
    write("one/kappa.py", GRAPH + "graph = build()")
    write("two/kappa.py", GRAPH + "graph = build()")
    load_graph("one/kappa.py")
    assert "the name 'kappa' is taken by" in message("two/kappa.py")


def test_a_folder_of_the_same_name_is_not_taken_for_the_file() -> None:
    write("lam/__init__.py", "")
    write("lam.py", GRAPH + "graph = build()")
    said = message("lam.py")
    assert "Python finds" in said and "rename the file" in said
