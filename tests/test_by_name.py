"""A script with all that it needs in itself, as one begins: what its hosts find of it, and what they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from omniflow.actor import Actor
from omniflow.by_name import ByName
from omniflow.errors import StartError
from omniflow.graph import Graph

from .waiting import HANGS_S

SCRIPT = """
import enum
import anyio, msgspec
from omniflow import Actor, Graph, Runtime, plan
from omniflow.planner import Cluster, Gpu

class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"

class Word(msgspec.Struct, frozen=True):
    text: str
    mood: Mood = Mood.GOOD

class Words(msgspec.Struct, frozen=True):
    words: list[Word]

def same(words):
    return all(type(word) is Word and word.mood is Mood.GOOD for word in words)

class Twice(Actor):
    heavy = True
    async def run(self, words: Words) -> list[Word]:
        assert type(words) is Words and same(words.words)
        return words.words * 2

class Count(Actor):
    async def run(self, words: list[Word]) -> Words:
        assert same(words)
        return Words([Word(str(len(words)), Mood.BAD)])

async def main():
    graph = Graph("mine")
    twice, count = graph.stage("twice", Twice), graph.stage("count", Count, device="gpu")
    graph.result(twice, count)
    graph.input(words=twice)
    graph.output(num=count)
    made = plan(graph.spec(), Cluster("gpus", 2, 0, gpus=(Gpu("any", 2**36),)))
    assert [host.start_method for host in made.hosts] == ["forkserver", "spawn"]
    async with Runtime(made) as runtime:
        found = await (await runtime.submit("words", Words([Word("a"), Word("b")]))).collect()
        assert found == {"num": Words([Word("4", Mood.BAD)])}
        print("done")

if __name__ == "__main__":
    anyio.run(main)
"""


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[1])
    environ = os.environ | {"PYTHONPATH": root}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=HANGS_S, env=environ, check=False
    )


def test_a_script_may_hold_its_types_and_actors_itself(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    found = ran(str(script))
    assert (found.stdout, found.stderr) == ("done\n", "")


@pytest.mark.parametrize("where", ["prompt", "package"])
def test_what_no_process_imports_is_refused_with_what_would_do(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is typed at a prompt, and the `__main__` of a package."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__main__.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    found = ran("-c", SCRIPT) if where == "prompt" else ran("-m", "mine")
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith(
        "omniflow.errors.StartError: the type 'Words' cannot be found by the processes of hosts: "
        "define it at the top of a script, or of a module that it imports"
    )


def test_a_type_within_a_function_is_refused_and_an_actor_there_is_not() -> None:
    class Hidden(msgspec.Struct):
        text: str

    class Local(Actor):
        async def run(self, text: str) -> str:
            return text

    graph = Graph("local")
    local = graph.stage("local", Local)
    graph.input(text=local)
    graph.output(text=local)
    ByName(graph.spec())
    with pytest.raises(StartError, match="the type 'Hidden' cannot be found"):
        ByName((graph.spec(), Hidden))
