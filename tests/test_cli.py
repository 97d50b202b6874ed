"""The command line as a user meets it: what it prints, on which stream, in how many lines, with which exit code."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import httpx
import msgspec
import pytest
import trustme
import typer.testing
from huggingface_hub import constants

from omniflow import __version__
from omniflow.cli import doctor, gpu_probe, machine
from omniflow.cli.app import app, run_command_line
from omniflow.cli.models import weights_named
from omniflow.cli.tables import size_text
from omniflow.config import RuntimeConfig, ServerConfig
from omniflow.planner import cluster_named
from omniflow.weights import InstalledWeights, PackagedWeights
from tests.files import soft_limit
from tests.waiting import HANGS_S

ROOT = Path(__file__).parents[1]
PARROT = str(ROOT / "tests/graphs/parrot.py")
WORDS = str(ROOT / "tests/graphs/words.py")
TUNED = str(ROOT / "tests/graphs/tuned.py")

USER_GRAPH = """\
from omniflow import Actor, Graph, TextDelta

class Repeat(Actor):
    heavy = True
    def __init__(self, *, times: int = 1):
        self.times = times
    async def setup(self):
        {setup}
    async def run(self, text: TextDelta) -> TextDelta:
        return TextDelta(text.text * self.times)

graph = Graph("mine")
repeat = graph.stage("repeat", Repeat)
again = graph.stage("again", Repeat)
graph.result(repeat, again)
graph.input(chat=repeat)
graph.output(text=again)
"""


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Ran]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs one command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments: str) -> Ran:
        capfd.readouterr()
        code = run_command_line(list(arguments))
        return Ran(code, *capfd.readouterr())

    return run


def refused(ran: Ran, code: int = 1) -> str:
    """The one line of a command that was refused."""
    assert ran.code == code, ran
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


# -- the plain commands --------------------------------------------------------------------------------------------


def test_version_and_help(cli: Cli) -> None:
    assert cli("--version").out == f"omniflow {__version__}\n"
    for arguments in ([], ["--help"]):
        ran = cli(*arguments)
        assert ran.code == 0
        for command in ("run", "replay", "check", "explain", "draw", "models", "doctor"):
            assert f" {command} " in ran.out


def test_typers_own_runner_sees_the_same_commands() -> None:
    result = typer.testing.CliRunner().invoke(app, ["check", PARROT])
    assert result.exit_code == 0
    assert "parrot is sound" in result.output


@pytest.mark.parametrize(
    ("arguments", "begins", "command"),
    [
        (["rnu"], "No such command 'rnu'", "omniflow"),
        (["run"], "Missing argument 'GRAPH'", "omniflow run"),
        (["check", "a", "b"], "Got unexpected extra argument", "omniflow check"),
        (["explain", "ming_omni", "--jsno"], "No such option: --jsno", "omniflow explain"),
        (["run", "ming_omni", "--port", "x"], "Invalid value for '--port'", "omniflow run"),
        (["models", "lsit"], "No such command 'lsit'", "omniflow models"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    cli: Cli, arguments: list[str], begins: str, command: str
) -> None:
    line = refused(cli(*arguments), code=2)
    assert line.startswith(begins) and line.endswith(f"; see `{command} --help`")


def test_check_says_what_a_graph_can_do(cli: Cli) -> None:
    assert cli("check", PARROT).out.splitlines() == [
        "parrot is sound (2 stages, 6 edges)",
        "  profile quiet: says what it hears",
        "  profile loud: two processes",
        "  profile mute: text only",
        "  input chat gives text, usage, audio",
        "  input speech gives audio",
    ]
    assert cli("check", PARROT, "--profile", "mute").out.splitlines()[-3:] == [
        "  input chat gives text, usage",
        "  input speech gives nothing under this profile",
        "  without hum: this parrot cannot hum",
    ]


def test_the_shipped_graph_is_sound(cli: Cli) -> None:
    ran = cli("check", "ming_omni")
    assert (ran.code, ran.err) == (0, "")
    assert "ming_omni is sound" in ran.out and "input speech gives audio" in ran.out


def test_draw_prints_mermaid(cli: Cli) -> None:
    assert cli("draw", PARROT).out.startswith("flowchart LR\n    in_chat")
    assert "<small>Loud</small>" in cli("draw", PARROT, "--profile", "loud").out
    assert 'subgraph host_hum["hum: process, cpu"]' in cli("draw", PARROT, "--hosts").out


# -- explain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.parametrize("graph", [PARROT, WORDS, "ming_omni"])
def test_a_plan_fits_and_no_edge_breaks(cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: int, graph: str) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = cli("explain", graph, "--cluster", "cpu").out.splitlines()
    assert max(map(len, lines)) <= columns
    if columns == 80 and graph == "ming_omni":
        return  # its longest edge needs 87 columns
    edges = json.loads(cli("explain", graph, "--cluster", "cpu", "--json").out)["edges"]
    for edge in edges:
        source, target = (re.sub(r"client\.(\w+)", r"(\1)", edge[end]) for end in ("source", "target"))
        (line,) = [line for line in lines if line.startswith(f"{source} → {target} ")]
        assert edge["transport"] in line and edge["type"] in line and edge["kind"] in line


def test_explain_gives_every_reason_once_under_its_number(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = cli("explain", WORDS, "--cluster", "cpu").out
    for edge in json.loads(cli("explain", WORDS, "--cluster", "cpu", "--json").out)["edges"]:
        assert out.count(edge["reason"]) == 1
        source, target = (re.sub(r"client\.(\w+)", r"(\1)", edge[end]) for end in ("source", "target"))
        number = re.search(rf"^{re.escape(f'{source} → {target}')} .* (\d+) *$", out, re.MULTILINE)
        assert number and re.search(rf"^{number[1]}  {re.escape(edge['reason'])} *$", out, re.MULTILINE)


@pytest.mark.parametrize("policy", ["block", "drop_oldest", "fail"])
def test_explain_says_what_a_full_edge_does(cli: Cli, policy: str) -> None:
    file = f"flow_{policy}.py"
    Path(file).write_text(f"from tests.graphs.flow import build\n\ngraph = build({policy!r}, 4)\n")
    out = cli("explain", file, "--cluster", "cpu").out
    shown = "stream 4" if policy == "block" else f"stream 4 {policy}"
    assert re.search(rf"^pour.emit → sip.drops +Drop +{shown} +arrow_shm", out, re.MULTILINE)
    assert out.count("stream N: at most N items") == 1
    assert out.count(f"stream N {policy}: once N items") == (policy != "block")
    edges = json.loads(cli("explain", file, "--cluster", "cpu", "--json").out)["edges"]
    policies = {edge["source"]: edge["policy"] for edge in edges}
    assert policies == {
        "client.order": None,
        "pour.emit": policy,
        "sip.emit": "block",
        "sip.result": None,
        "pour.result": None,
    }


def test_a_pipe_gets_100_columns_and_no_colours(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out = cli("explain", "ming_omni").out
    assert "\x1b" not in out
    assert 80 < max(map(len, out.splitlines())) <= 100


def test_explain_says_which_profile_and_why(cli: Cli) -> None:
    assert (
        "profile quiet (the default; --profile takes loud, mute too): says what it hears" in cli("explain", PARROT).out
    )
    assert "profile mute (by --profile): text only" in cli("explain", PARROT, "--profile", "mute").out
    assert "words has no profiles" in cli("explain", WORDS).out
    assert "without hum: this parrot cannot hum" in cli("explain", PARROT, "--profile", "mute").out


def test_explain_says_where_each_setting_comes_from(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weakest first: profile, file, environment, command line."""
    Path("own.toml").write_text(
        "[parrot]\nprefix = 'file'\nrepeat = 2\nthreads = 2\n[server]\nport = 1\n[runtime]\ndeadline_s = 9\n"
    )
    monkeypatch.setenv("OMNIFLOW__PARROT__REPEAT", "3")
    monkeypatch.setenv("OMNIFLOW__PARROT__THREADS", "3")
    out = cli("explain", PARROT, "--profile", "loud", "--config", "own.toml", "--set", "parrot.threads=4").out
    rows = dict(re.findall(r"^(\w+\.\w+) +(.*?) *$", out, flags=re.MULTILINE))
    assert rows["parrot.restart"].split() == ["one_for_one", "profile", "loud"]
    assert rows["parrot.prefix"].split() == ["file", "file", "own.toml"]
    assert rows["parrot.repeat"].split() == ["3", "environment"]
    assert rows["parrot.threads"].split() == ["4", "command", "line"]
    assert rows["runtime.deadline_s"].split()[0] == "9.0"


def settings_rows(out: str) -> dict[str, list[str]]:
    """Key -> value and origin, as words."""
    rows = re.findall(r"^(\w+\.\w+) +(.*?) *$", out.partition("\nsetting ")[2], flags=re.MULTILINE)
    return {key: rest.split() for key, rest in rows}


def test_explain_config_shows_every_setting(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIFLOW__RUNTIME__DRAIN_S", "3")
    chosen = settings_rows(cli("explain", WORDS, "--set", "shout.mark=?").out)
    assert chosen == {"runtime.drain_s": ["3.0", "environment"], "shout.mark": ["?", "command", "line"]}
    rows = settings_rows(cli("explain", WORDS, "--set", "shout.mark=?", "--config").out)
    assert rows.items() >= chosen.items()
    fields = ["device", "tp", "memory", "isolate", "near", "restart", "threads"]
    stages = ["split", "shout", "count", "join", "words", "echo"]
    own = {f"{stage}.{field}" for stage in stages for field in fields} | {"shout.mark"}
    assert {key for key in rows if not key.startswith(("runtime.", "server."))} == own
    assert {key.partition(".")[2] for key in rows if key.startswith("server.")} == set(ServerConfig.__struct_fields__)
    assert {key.partition(".")[2] for key in rows if key.startswith("runtime.")} == set(RuntimeConfig.__struct_fields__)
    assert rows["shout.restart"] == ["one_for_one", "graph"]
    assert rows["join.near"] == ["shout", "graph"]
    assert rows["split.device"] == ["cpu", "default"]
    assert rows["split.near"] == ["-", "default"]
    assert rows["server.port"] == ["8000", "default"]
    assert list(rows)[:2] == ["split.device", "split.tp"]  # in the graph's order, not the alphabet's


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "--cluster", "cpu", PARROT],
        [PARROT, "--config"],
        [PARROT, "--config="],
        [PARROT, "--config", "own.toml"],
    ],
)
def test_explain_config_with_and_without_a_file(cli: Cli, arguments: list[str]) -> None:
    Path("own.toml").write_text("[parrot]\nrepeat = 2\n")
    rows = settings_rows(cli("explain", *arguments).out)
    assert rows["parrot.repeat"] == (["2", "file", "own.toml"] if "own.toml" in arguments else ["1", "default"])
    assert rows["server.port"] == ["8000", "default"]


def test_explain_config_leaves_absent_stages_out(cli: Cli) -> None:
    rows = settings_rows(cli("explain", PARROT, "--profile", "mute", "--config").out)
    assert "parrot.device" in rows and "hum.device" not in rows


def test_explain_plans_for_machines_that_are_not_here(cli: Cli) -> None:
    out = cli("explain", PARROT, "--cluster", "8xh200", "--set", "hum.device=gpu:3").out
    assert "8xh200: 128 cores, 8 x H200 with 134 GiB" in out
    assert "gpu:3" in out
    line = refused(cli("explain", PARROT, "--cluster", "8xh2000"))
    assert line.startswith("unknown cluster '8xh2000'; write cpu, or NxGPU")
    assert "it wants a GPU (device='gpu'), and cluster 'cpu' has none" in refused(
        cli("explain", PARROT, "--cluster", "cpu", "--set", "hum.device=gpu")
    )


class PlanHost(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    stages: list[str]
    devices: list[str]
    budget_bytes: int
    device_bytes: int
    pool_bytes: int
    process: bool
    start_method: str
    restart: str
    in_flight: str
    reason: str


class PlanStage(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    actor: str
    host: str | None
    device: str
    tp: int
    memory_bytes: int
    kv_tokens: int
    settings: dict[str, str | int | float | bool | None]
    absent: str | None


class PlanEdge(msgspec.Struct, forbid_unknown_fields=True):
    id: int
    kind: str
    source: str
    target: str
    type: str
    transport: str
    bound: int
    policy: str | None
    reason: str


class PlanGpu(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    memory_bytes: int
    planned_bytes: int


class PlanCluster(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    cpu_cores: int
    gpus: list[PlanGpu]


class PlanSchema(msgspec.Struct, forbid_unknown_fields=True):
    """Schema 1, as docs/explain.md describes it. A key that is renamed, removed or of another type fails here."""

    schema: int
    graph: str
    profile: str | None
    cluster: PlanCluster
    hosts: list[PlanHost]
    stages: list[PlanStage]
    edges: list[PlanEdge]


@pytest.mark.parametrize(
    "arguments", [["ming_omni"], [WORDS], [PARROT, "--profile", "mute"], [PARROT, "--cluster", "1xh200"]]
)
def test_the_json_of_explain_keeps_its_schema(cli: Cli, arguments: list[str]) -> None:
    out = cli("explain", *arguments, "--json").out
    made = msgspec.json.decode(out, type=PlanSchema)
    assert made.schema == 1
    assert out.startswith('{\n  "schema": 1,\n')
    hosts = {host.name for host in made.hosts}
    assert all((stage.host in hosts) != (stage.absent is not None) for stage in made.stages)
    ends = {end.partition(".")[0] for edge in made.edges for end in (edge.source, edge.target)}
    assert ends <= {stage.name for stage in made.stages} | {"client"}


# -- what can be wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "check", "explain", "draw"])
def test_every_command_refuses_a_broken_graph_with_one_line(cli: Cli, command: str) -> None:
    Path("bad_syntax.py").write_text("graph = (\n")
    assert refused(cli(command, "bad_syntax.py")) == "bad_syntax.py:1: SyntaxError: '(' was never closed"
    file = f"bad_cycle_{command}.py"  # modules keep their names
    Path(file).write_text(
        USER_GRAPH.format(setup="pass")
        + "graph._inputs.clear()\ngraph.result(again, repeat)\ngraph.input(chat=repeat)\n"
    )
    assert refused(cli(command, file)).startswith("edge repeat.result -> again.text closes a cycle; a feedback edge is")
    assert refused(cli(command, "nothing")).startswith("no graph is called 'nothing'")
    assert (
        refused(cli(command, PARROT, "--profile", "lod")) == "graph 'parrot' has no profile 'lod'; did you mean 'loud'?"
    )
    assert "declares no profiles" in refused(cli(command, WORDS, "--profile", "x"))


@pytest.mark.parametrize("command", ["run", "check", "explain"])
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("parrot.repaet=2", "command line: stage 'parrot' has no setting 'repaet'; did you mean 'repeat'?"),
        ("parrto.repeat=2", "command line: unknown key 'parrto.repeat'; did you mean 'parrot'?"),
        ("parrot.repeat=two", "command line: parrot.repeat='two': Expected `int`, got `str`"),
        ("parrot.repeat", "--set 'parrot.repeat': write it as stage.field=value"),
        ("server.prot=1", "command line: unknown key server.prot; did you mean 'port'?"),
        ("server.port=70000", "command line: server.port='70000': Expected `int` <= 65535"),
        ("runtime.drain_s=-1", "command line: runtime.drain_s='-1': Expected `float` >= 0.0"),
    ],
)
def test_settings_that_are_wrong(cli: Cli, command: str, setting: str, expected: str) -> None:
    assert refused(cli(command, PARROT, "--set", setting)) == expected


def test_config_files_that_are_wrong(cli: Cli) -> None:
    assert refused(cli("check", PARROT, "--config", "no.toml")) == "cannot read no.toml: No such file or directory"
    Path("bad.toml").write_text("[parrot\n")
    assert refused(cli("check", PARROT, "--config", "bad.toml")).startswith("bad.toml is no valid TOML: ")
    Path("flat.toml").write_text("port = 1\n")
    assert "flat.toml: 'port' stands outside a table" in refused(cli("run", PARROT, "--config", "flat.toml"))
    Path("typo.toml").write_text("[parrot]\nrepaet = 1\n")
    assert refused(cli("run", PARROT, "--config", "typo.toml")).startswith("file typo.toml: stage 'parrot' has no")


def test_the_environment_is_checked_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIFLOW__PARROT__REPEAT", "many")
    assert refused(cli("check", PARROT)) == "environment: parrot.repeat='many': Expected `int`, got `str`"


def test_a_traceback_only_with_debug_wherever_it_stands(cli: Cli) -> None:
    Path("bad_value.py").write_text("raise ValueError('no')\n")
    for arguments in (["check", "bad_value.py", "--debug"], ["--debug", "check", "bad_value.py"]):
        ran = cli(*arguments)
        assert ran.code == 1
        assert "Traceback (most recent call last)" in ran.err
        assert ran.err.splitlines()[-1] == "error: bad_value.py:1: ValueError: no"


def test_a_bug_of_ours_is_one_line_as_well(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("lost")

    monkeypatch.setattr("omniflow.cli.app.this_machine", broken)
    line = refused(cli("explain", PARROT))
    assert line.startswith("KeyError: 'lost'; this is a bug in omniflow")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = (
        f"{shlex.quote(sys.executable)} -m omniflow explain {shlex.quote(WORDS)} --json | true; exit ${{PIPESTATUS[0]}}"
    )
    ran = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S)
    assert ran.stderr == ""


# -- models --------------------------------------------------------------------------------------------------------

NEEDY = """\
from pathlib import Path
from omniflow import Actor, Graph, TextDelta
from omniflow.weights import LocalWeights

class Needy(Actor):
    def __init__(self, *, model: str = "here"):
        self.model = model
    def weights(self):
        return [LocalWeights(self.model)]
    async def run(self, text: TextDelta) -> TextDelta:
        return text

graph = Graph("needy")
a, b = graph.stage("a", Needy), graph.stage("b", Needy)
graph.result(a, b)
graph.input(chat=a)
graph.output(text=b)
graph.profile("here", "where they lie")
"""


def test_models_of_a_users_graph(cli: Cli) -> None:
    Path("needy_graph.py").write_text(NEEDY)
    Path("here").mkdir()
    Path("here/file.bin").write_bytes(bytes(3000))
    lines = cli("models", "list", "needy_graph.py").out.splitlines()
    (row,) = [line for line in lines if line.startswith("here")]
    assert row.split() == ["here", "local", "folder", "present", "2.9", "KiB"]
    assert any(line.startswith("for a, b") for line in lines)
    assert cli("models", "fetch", "needy_graph.py").out.split() == ["here", str(Path("here").absolute())]
    assert cli("models", "list", PARROT).out == "no weights are needed\n"


def test_run_refuses_missing_weights_and_actors_that_cannot_say_theirs(cli: Cli) -> None:
    Path("needy_away.py").write_text(NEEDY.replace('"here"', '"away"'))
    ran = cli("run", "needy_away.py", "--port", "0")
    assert ran.code == 1 and "away: there is no such folder" in ran.err
    Path("needy_broken.py").write_text(NEEDY.replace("[LocalWeights(self.model)]", "1 / 0"))
    line = refused(cli("models", "list", "needy_broken.py"))
    assert line == "stage 'a': Needy cannot say what weights it needs: ZeroDivisionError: division by zero"


def test_what_is_not_installed_is_told_before_weights_are_looked_at(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    lacks = """
    @classmethod
    def lacks(cls, settings, device):
        return "install fast-engine" if settings.get("model") == "fast" else None

    def weights(self):"""
    Path("needy_lacks.py").write_text(NEEDY.replace("\n    def weights(self):", lacks))
    model = ("--set", "a.model=fast")
    assert refused(cli("run", "needy_lacks.py", "--port", "0", *model)) == "stage 'a': install fast-engine"
    assert cli("explain", "needy_lacks.py", *model).code == 0
    told = cli("doctor", "needy_lacks.py", *model)
    assert told.code == 1 and re.search(r"^a +not complete +install fast-engine", told.out, re.MULTILINE)
    assert "fast-engine" not in cli("doctor", "needy_lacks.py").out
    assert "its stages name no budgets" in told.out


def test_models_of_all_shipped_graphs(cli: Cli) -> None:
    out = cli("models", "list").out
    assert "smollm2-135m-instruct" in out and "piper-joe" in out
    assert "unknown weights 'smollm2-135m'; did you mean smollm2-135m-instruct?" in refused(
        cli("models", "fetch", "smollm2-135m")
    )
    assert "ming-tiny" in out and "hf:inclusionAI/Ming-flash-omni-2.0" in out
    # Without a name nothing of the hub is fetched: that can be 200 GB.
    assert {type(weights) for weights in weights_named([], None)} == {PackagedWeights, InstalledWeights}


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tuned(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """A command about a graph with profiles for checkpoints; `own` and `other` are folders of such."""
    monkeypatch.setenv("COLUMNS", "300")
    for name, config in (
        ("own", '{"model_type": "ming", "size": 64}'),
        ("other", '{"model_type": "ring", "size": 3}'),
        ("broken", "{"),
    ):
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(config)
    Path("empty").mkdir()
    return lambda command, *arguments: cli(*command.split(), TUNED, *arguments)


def test_a_checkpoint_chooses_its_profile(tuned: Callable[..., Ran]) -> None:
    own = Path("own").absolute()
    out = tuned("explain", "--model", "own", "--config").out
    said = " ".join(out.split())
    assert f"profile small ({own} is such a checkpoint: model_type ming, size from 1 to 64): a small one" in said
    rows = dict(re.findall(r"^(\w+\.\w+) +(.*?) *$", out, flags=re.MULTILINE))
    assert rows["first.model"].split() == [str(own), "--model"]
    assert rows["second.model"].split() == ["here", "default"]
    assert f"{own}" in tuned("models list", "--model", "own").out
    assert "profile large (hf:own/er is its checkpoint)" in tuned("explain", "--model", "hf:own/er").out
    assert tuned("check", "--model", "here").code == 0


def test_a_named_profile_serves_the_checkpoint_that_is_named(tuned: Callable[..., Ran]) -> None:
    out = tuned("explain", "--model", "other", "--profile", "large", "--set", "second.model=else", "--config").out
    rows = dict(re.findall(r"^(\w+\.\w+) +(.*?) *$", out, flags=re.MULTILINE))
    assert "profile large (by --profile)" in out
    assert rows["first.model"].split() == [str(Path("other").absolute()), "--model"]
    assert rows["second.model"].split() == ["else", "command", "line"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("other", "Its config.json has model_type ring, size 3. What they take: small: model_type ming, size from 1"),
        ("empty", "has no config.json"),
        ("broken", "is broken"),
        ("./away", "there is no such folder"),
        ("ourn", "'ourn' is no folder; a checkpoint is that, or hf:owner/repo; known: here, hf:own/er"),
        ("hf:no", "hf:no: not the name of a repository; write hf:owner/repo or hf:owner/repo@revision"),
        ("hf:own/no", "hf:own/no: "),
        ("", "the name of the checkpoint is empty; give a folder (. is this one), or hf:owner/repo"),
    ],
)
def test_checkpoints_that_no_profile_takes(
    tuned: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, model: str, expected: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert expected in refused(tuned("explain", "--model", model))


def test_a_profile_without_a_checkpoint_takes_none(tuned: Callable[..., Ran], cli: Cli) -> None:
    assert refused(tuned("run", "--model", "own", "--profile", "plain")) == (
        "profile plain takes no --model: its stages name their models themselves; these take one: small, large"
    )
    Path("none").mkdir()
    Path("none/config.json").write_text("{}")
    assert "has no profile that takes a checkpoint" in refused(cli("check", PARROT, "--model", "none"))
    assert "name it, too" in refused(cli("models", "list", "--model", "own"))


# -- the machine ---------------------------------------------------------------------------------------------------


def test_doctor_says_what_each_finding_means(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIFLOW_CACHE", str(Path("cache").absolute()))
    ran = cli("doctor")
    assert (ran.code, ran.err) == (0, "")
    for topic in ("python", "cores", "memory", "memfd", "pidfd", "seqpacket", "open files", "cache", "GPU"):
        assert re.search(rf"^{topic}", ran.out, re.MULTILINE), topic
    assert f"omniflow {__version__}" in ran.out


def test_doctor_fails_where_something_needed_is_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    ran = cli("doctor")
    assert ran.code == 1
    assert re.search(r"^pidfd +Operation not permitted", ran.out, re.MULTILINE)
    assert re.search(r"^missing ", ran.out, re.MULTILINE)


def test_doctor_looks_at_what_a_graph_needs_too(tuned: Callable[..., Ran], cli: Cli) -> None:
    Path("here").mkdir()
    here = tuned("doctor", "--model", "own")
    assert here.code == 0 and re.search(r"^profile small +fits ", here.out, re.MULTILINE)
    assert re.search(rf"^{Path('own').absolute()} .*weights of first", here.out, re.MULTILINE)
    away = tuned("doctor", "--profile", "large")
    assert away.code == 1
    assert re.search(r"^hf:own/er +missing +weights of first; .*there is no such folder", away.out, re.MULTILINE)
    assert "name it, too" in refused(cli("doctor", "--profile", "large"))
    assert "name it, too" in refused(cli("doctor", "--set", "a.b=c"))
    assert tuned("doctor", "--profile", "small", "--set", "first.device=gpu").code == 1
    assert "the name of the checkpoint is empty" in refused(tuned("doctor", "--model", ""))


def test_doctor_fails_where_a_profile_does_not_fit(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "hub")
    monkeypatch.setattr(
        "omniflow.cli.app.this_machine", lambda: cluster_named("cpu", cpu_cores=2, memory_bytes=8 * 2**30)
    )
    ran = cli("doctor", "ming_omni", "--profile", "ming-omni-tts")
    assert ran.code == 1
    assert re.search(r"^profile ming-omni-tts +does not fit +.*wants a GPU", ran.out, re.MULTILINE)
    assert re.search(r"^hf:inclusionAI/Ming-omni-tts-0.5B +missing +weights of talker, .*fetches them", ran.out, re.M)


def test_stages_that_are_absent_for_one_reason_share_a_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for command in ("check", "explain"):
        cluster = ["--cluster", "1xh200"] if command == "explain" else []
        lines = cli(command, "ming_omni", "--profile", "ming-omni-tts", *cluster).out.splitlines()
        (line,) = [line.strip() for line in lines if "only speaks:" in line]
        assert line.startswith("without preprocess, audio_encoder, ") and "painter, transcribe: Ming-omni-tts" in line


def test_doctor_tells_a_missing_extra_from_a_missing_core(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["anyio>=4", "no-such-core>=1", "no-such-extra>=1; extra == 'server'", 'anyio>=4; extra == "dev"']
    monkeypatch.setattr("importlib.metadata.requires", lambda _: requires)
    core, server, dev = doctor._packages()
    assert (core.topic, core.verdict) == ("core", "missing") and "no-such-core" in core.meaning
    assert (server.topic, server.verdict) == ("server", "note") and "pip install 'omniflow[server]'" in server.meaning
    assert (dev.topic, dev.verdict) == ("dev", "ok")


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, 4096),
        (1024, 2**30, 65_536),
        (1024, resource.RLIM_INFINITY, 65_536),
        (100_000, 200_000, 100_000),
        (256, 256, 256),
    ],
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, expected: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    assert machine.open_files() == expected


@pytest.mark.parametrize(("hard", "meaning"), [(700, "about 444 connections at once; raise"), (4096, "about 3840 ")])
def test_doctor_says_where_few_files_may_be_open(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, hard: int, meaning: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, hard))
    assert re.search(rf"^open files +{hard} +{meaning}", cli("doctor").out, re.MULTILINE)


def test_this_machine_is_what_this_process_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5})
    assert machine.num_cores() == 3
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_CGROUP_LIMIT", limit)
    installed = machine.memory_bytes()
    limit.write_text("max\n")
    assert machine.memory_bytes() == installed
    limit.write_text("1048576\n")
    assert machine.memory_bytes() == 2**20


NVIDIA_SMI = """\
0, GPU-aaaa1111-0000, NVIDIA H200, 143771, 570.86.15, 9.0
1, GPU-bbbb2222-0000, NVIDIA H200, 143771, 570.86.15, 9.0
"""


def fake_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_gpus_are_found_and_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvidia_smi(tmp_path, f"cat <<END\n{NVIDIA_SMI}END", monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = machine.this_machine()
    assert found.name == "2xh200"
    assert [gpu.model for gpu in found.gpus] == ["H200", "H200"]
    assert found.gpus[0].memory_bytes == int(143771 * 2**20 * 0.96)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.this_machine().name == "1xh200"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.this_machine().name == "cpu"


def test_a_cluster_says_why_its_gpu_memory_cannot_be_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvidia_smi(tmp_path, f"cat <<END\n{NVIDIA_SMI}END", monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = tmp_path / "torch"
    fake.mkdir()
    (fake / "__init__.py").touch()
    found = importlib.util.spec_from_file_location("torch", fake / "__init__.py")
    there: dict[str, object] = {}
    monkeypatch.setattr(importlib.util, "find_spec", there.get)
    assert machine.this_machine().unshared == "torch is not installed"
    there["torch"] = found
    (fake / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert machine.this_machine().unshared == "torch is built without CUDA"
    (fake / "version.py").write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    assert machine.this_machine().unshared == "cuda-bindings is not installed"
    there["cuda"] = there["cuda.bindings"] = found
    assert machine.this_machine().unshared == ""


def test_explain_sums_up_what_is_planned_for_each_gpu(cli: Cli, tmp_path: Path) -> None:
    text = USER_GRAPH.format(setup="pass").replace("import Actor", "import Budget, Actor")
    text = text.replace('"repeat", Repeat', '"repeat", Repeat, device="gpu", memory=Budget("100 GiB")')
    kv = 'Budget(kv_tokens=1000, kv_bytes_per_token="1 MiB")'
    text = text.replace('"again", Repeat', f'"again", Repeat, device="gpu", memory={kv}')
    file = tmp_path / "mine.py"
    file.write_text(text)
    ran = cli("explain", str(file), "--cluster", "2xh200")
    assert ran.code == 0, ran.err
    assert "gpu:0   100 GiB of 134 GiB: repeat 100 GiB" in ran.out
    assert "gpu:1  1000 MiB of 134 GiB: again 1000 MiB (1000 KV tokens)" in ran.out


def test_doctor_tries_what_gpus_can_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvidia_smi(tmp_path, f"cat <<END\n{NVIDIA_SMI}END", monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "unshared", lambda: "")
    tried: list[tuple[str, str]] = []

    def try_sharing(source: str, target: str) -> str | None:
        tried.append((source[:6], target[:6]))
        return None if source == target else "cuMemSetAccess failed: CUDA_ERROR_INVALID_DEVICE"

    monkeypatch.setattr(doctor, "try_sharing", try_sharing)
    found = {finding.topic: finding for finding in doctor._gpus()}
    assert tried == [("GPU-aa", "GPU-aa"), ("GPU-aa", "GPU-bb")]
    assert "driver 570.86.15" in found["GPU 1"].found
    assert (found["CUDA IPC"].found, found["CUDA IPC"].verdict) == ("works", "ok")
    assert (found["GPU 0 to 1"].found, found["GPU 0 to 1"].verdict) == (
        "cuMemSetAccess failed: CUDA_ERROR_INVALID_DEVICE",
        "note",
    )
    assert found["SGLang"].verdict == "note"


@pytest.mark.parametrize(("allowed", "verdict"), [(True, "ok"), (False, "note")])
def test_doctor_knows_whether_deaths_on_gpus_are_told_early(
    monkeypatch: pytest.MonkeyPatch, allowed: bool, verdict: str
) -> None:
    monkeypatch.setattr(doctor, "can_tell_end", lambda: allowed)
    assert doctor._lifelines().verdict == verdict


@pytest.mark.parametrize(
    ("version", "verdict"), [("0.5.17", "ok"), ("0.5.23", "ok"), ("0.4.1", "note"), (None, "note")]
)
def test_doctor_knows_which_sglang_fits(monkeypatch: pytest.MonkeyPatch, version: str | None, verdict: str) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: version)
    assert doctor._sglang().verdict == verdict


def test_doctor_and_the_engine_mean_the_same_sglang() -> None:
    source = (ROOT / "omniflow/engine/sglang_start.py").read_text()
    assert f"VERSIONS = {doctor.SGLANG_VERSIONS}".replace("'", '"') in source


def test_sharing_is_tried_by_two_processes() -> None:
    if torch_sees_a_gpu():
        assert gpu_probe.try_sharing("0", "0") is None
    else:
        assert gpu_probe.try_sharing("0", "0") in ("torch is built without CUDA", "torch is not installed")


def torch_sees_a_gpu() -> bool:
    return machine.find_gpus().gpus != () and machine.unshared() == ""


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [(None, [0, 1]), ("1,0", [1, 0]), ("GPU-bbbb2222", [1]), ("0,7,1", [0]), ("-1", []), ("", []), (" 1 ", [1])],
)
def test_visible_gpus_as_cuda_reads_them(chosen: str | None, expected: list[int]) -> None:
    gpus = machine.parse_gpus(NVIDIA_SMI).gpus
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert [gpu.index for gpu in machine.visible_gpus(gpus, environ)] == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'NVIDIA-SMI has failed'; exit 9", "nvidia-smi failed: NVIDIA-SMI has failed"),
        ("exit 3", "nvidia-smi failed: exit code 3"),
        ("echo '0, GPU-1, NVIDIA GB10, [N/A], 580.1, 12.1'", "describes a GPU without memory of its own"),
    ],
)
def test_a_sick_driver_is_a_finding_and_no_crash(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, expected: str
) -> None:
    fake_nvidia_smi(tmp_path, script, monkeypatch)
    report = machine.find_gpus()
    assert report.gpus == () and expected in (report.problem or "")
    ran = cli("doctor")
    assert ran.code == 0 and "graphs are planned for the CPU" in " ".join(ran.out.split())


def test_sizes() -> None:
    assert [size_text(size) for size in (0, 5, 1500, 2**20, 25 * 2**20, 2**31, 200 * 2**30)] == [
        "-", "5 B", "1.5 KiB", "1.0 MiB", "25 MiB", "2.0 GiB", "200 GiB",
    ]  # fmt: skip


# -- run -----------------------------------------------------------------------------------------------------------


class Running:
    """`omniflow run` in a process of its own."""

    def __init__(self, *arguments: str, cwd: Path = ROOT) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "omniflow", "run", *arguments],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out: list[str] = []
        self.err: list[str] = []  # less the line that every request has
        self.url = ""
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines))
            for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[str] | None, lines: list[str]) -> None:
        assert stream is not None
        for line in stream:
            if " INFO omniflow.access: " not in line:
                lines.append(line.rstrip("\n"))

    def wait_for(self, text: str, within_s: float = HANGS_S) -> str:
        """The first line of stdout that holds `text`."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            for line in list(self.out):
                if text in line:
                    return line
            assert self.process.poll() is None or self._readers[0].is_alive(), self.err
            time.sleep(0.01)
        raise AssertionError(f"no {text!r} within {within_s} s: {self.out} {self.err}")

    def wait_ready(self) -> Running:
        self.url = self.wait_for(" is ready at ").split()[4]
        return self

    def end(self, within_s: float = HANGS_S) -> int:
        code = self.process.wait(within_s)
        for reader in self._readers:
            reader.join()
        return code

    def chat(self, text: str, stream: bool = False) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        body = {"model": "parrot", "messages": messages, "stream": stream}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=HANGS_S)


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts commands; none outlives the test."""
    running: list[Running] = []

    def begin(*arguments: str, cwd: Path = ROOT) -> Running:
        running.append(Running(*arguments, cwd=cwd))
        return running[-1]

    yield begin
    for each in running:
        each.process.kill()
        each.end()


def call_as_printed(line: str) -> httpx.Response:
    """Do what a printed curl line does."""
    words = shlex.split(line)
    assert words[:2] == ["curl", "-s"]
    body, header = words[words.index("-d") + 1], words[words.index("-H") + 1].split(": ")
    return httpx.post(words[2], content=body, headers=[tuple(header)], timeout=HANGS_S)  # type: ignore[list-item]


def test_run_serves_what_it_prints_and_drains(start: Start, cli: Cli) -> None:
    with soft_limit(1024):
        server = start(PARROT, "--profile", "loud", "--port", "0").wait_ready()
    server.wait_for("curl -s " + server.url + "/v1/chat")
    assert "profile loud (by --profile): two processes" in server.out
    assert any(re.match(r"parrot.text → hum.texts .*arrow_shm", line) for line in server.out)
    assert any(re.match(r"hum +ready in \d+\.\d s +process \d+", line) for line in server.out)
    speech, chat = (line for line in server.out if line.startswith("curl "))
    assert call_as_printed(speech).content.startswith(b"RIFF") and speech.endswith("-o hello.wav")
    assert call_as_printed(chat).json()["choices"][0]["message"]["content"] == "HEY Who are you? "

    # It and its hosts may open as many files as there may be.
    stages = httpx.get(f"{server.url}/health", timeout=HANGS_S).json()["stages"]
    pids = {server.process.pid, *(stage["pid"] for stage in stages)}
    assert len(pids) == 3
    assert {resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] for pid in pids} == {machine.open_files()}

    # A second server is refused before it prints, fetches or loads anything.
    port = server.url.rpartition(":")[2]
    assert refused(cli("run", PARROT, "--port", port)) == (
        f"127.0.0.1:{port} is in use; stop what listens there, or choose another --port (0 takes a free one)"
    )

    # A request that runs may end; then the process does.
    replies: list[httpx.Response] = []
    caller = threading.Thread(target=lambda: replies.append(server.chat("one " + "wait " * 6 + "two", stream=True)))
    caller.start()
    wait_until(lambda: httpx.get(f"{server.url}/health", timeout=HANGS_S).json()["in_flight"] == 1)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("SIGTERM: 1 under way")
    assert server.chat("hello").json()["error"]["message"] == "the runtime is draining"
    assert server.end() == 0
    caller.join()
    assert replies[0].text.endswith("data: [DONE]\n\n") and "two" in replies[0].text
    assert server.err == []


def wait_until(holds: Callable[[], Any], within_s: float = HANGS_S) -> None:
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_second_signal_stops_at_once(start: Start) -> None:
    server = start(PARROT, "--port", "0", "--set", "runtime.drain_s=100").wait_ready()
    replies: list[httpx.Response] = []
    caller = threading.Thread(target=lambda: replies.append(server.chat("one " + "wait " * 200, stream=True)))
    caller.start()
    wait_until(lambda: httpx.get(f"{server.url}/health", timeout=HANGS_S).json()["in_flight"] == 1)
    server.process.send_signal(signal.SIGINT)
    server.wait_for("SIGINT: 1 under way, which may end within 100 s; a second signal stops now")
    server.process.send_signal(signal.SIGINT)
    assert server.end() == 0
    caller.join()
    assert "[DONE]" not in replies[0].text and "the runtime is stopping" in replies[0].text


def test_keys_a_certificate_and_a_log_for_programs(start: Start, tmp_path: Path) -> None:
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    options = ["--api-key", "sesame", "--ssl-certfile", str(tmp_path / "both.pem"), "--log-format", "json"]
    server = start(PARROT, "--port", "0", *options).wait_ready()
    shown = server.wait_for("curl -s " + server.url + "/v1/chat")
    assert server.url.startswith("https://") and '-H "Authorization: Bearer $OMNIFLOW_API_KEY"' in shown
    with httpx.Client(base_url=server.url, verify=trust, timeout=HANGS_S) as client:
        assert client.get("/ready").status_code == 200 and client.get("/v1/models").status_code == 401
        headers = {"authorization": "Bearer sesame", "x-request-id": "trace-1"}
        body = {"model": "parrot", "messages": [{"role": "user", "content": "hello"}]}
        answer = client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.json()["choices"][0]["message"]["content"] == "hello "
        server.process.send_signal(signal.SIGTERM)  # a kept connection does not hold it up
        assert server.end() == 0
    refused, answered = (json.loads(line) for line in server.err)
    assert (refused["path"], refused["status"], refused["outcome"]) == ("/v1/models", 401, "invalid_api_key")
    assert answered["request_id"] == answer.headers["x-request-id"] and answered["client_request_id"] == "trace-1"
    assert answered["logger"] == "omniflow.access" and answered["status"] == 200 and answered["duration_ms"] > 0
    assert not any("sesame" in line for line in (*server.out, *server.err))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--ssl-certfile", "/gone.pem"], "cannot use /gone.pem for TLS: No such file or directory"),
        (["--ssl-keyfile", "/gone.pem"], "server.ssl_keyfile needs the certificate, too"),
        (["--api-key", "two words"], "server.api_keys=(hidden): Expected `str` matching regex"),
        (["--log-format", "xml"], "server.log_format='xml': Invalid enum value 'xml'; write text or json"),
    ],
)
def test_options_of_the_server_that_are_wrong(cli: Cli, options: list[str], expected: str) -> None:
    assert expected in refused(cli("run", PARROT, "--port", "0", *options))


def test_keys_are_shown_to_nobody(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIFLOW_API_KEYS", "sesame, other")
    ran = cli("explain", PARROT, "--config")
    assert re.search(r"server.api_keys +\(hidden\) +environment", ran.out) and "sesame" not in ran.out
    monkeypatch.setenv("OMNIFLOW_API_KEYS", "half\u00e9")
    assert "half" not in refused(cli("explain", PARROT))


def is_one(server: Running, counted: str) -> bool:
    return bool(httpx.get(f"{server.url}/ready", timeout=HANGS_S).json()[counted] == 1)


def stages_of(answer: httpx.Response) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in answer.json()["stages"]}


def test_ready_shows_every_stage_while_requests_run_and_while_it_drains(start: Start) -> None:
    server = start(PARROT, "--profile", "loud", "--port", "0", "--set", "runtime.hang_s=3").wait_ready()
    caller = threading.Thread(target=server.chat, args=("one " + "wait " * 400,))
    caller.start()
    busy = {"name": "parrot", "state": "ready", "restarts": 0, "in_flight": 1, "running": 1, "queued": 0}
    idle = busy | {"name": "hum", "in_flight": 0, "running": 0}
    wait_until(lambda: stages_of(httpx.get(f"{server.url}/ready", timeout=HANGS_S)) == {"parrot": busy, "hum": idle})
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("SIGTERM: 1 under way")
    ready = httpx.get(f"{server.url}/ready", timeout=HANGS_S)
    assert (ready.status_code, ready.json()["status"], ready.json()["in_flight"]) == (503, "draining", 1)
    assert ready.json()["reason"] == "the runtime is draining"
    assert stages_of(ready) == {"parrot": busy, "hum": idle}
    assert httpx.get(f"{server.url}/live", timeout=HANGS_S).status_code == 200
    refused = server.chat("hello")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    caller.join()


def test_ready_counts_restarts(start: Start) -> None:
    server = start(PARROT, "--profile", "loud", "--port", "0").wait_ready()
    assert server.chat("die").status_code == 503
    wait_until(lambda: httpx.get(f"{server.url}/ready", timeout=HANGS_S).status_code == 200)
    stages = stages_of(httpx.get(f"{server.url}/ready", timeout=HANGS_S))
    assert (stages["parrot"]["restarts"], stages["hum"]["restarts"]) == (1, 0)


def test_drain_ends_after_its_time_and_refuses_who_waits(start: Start) -> None:
    options = ("--set", "runtime.drain_s=0.3", "--set", "runtime.max_in_flight=1")
    server = start(PARROT, "--profile", "loud", "--port", "0", *options).wait_ready()
    replies: dict[str, httpx.Response] = {}

    def ask(name: str) -> None:
        replies[name] = server.chat("one " + "wait " * 400, stream=True)  # far longer than the test

    callers = [threading.Thread(target=ask, args=(name,)) for name in ("runs", "waits")]
    for caller, counted in zip(callers, ("in_flight", "queued"), strict=True):
        caller.start()
        wait_until(partial(is_one, server, counted))
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert time.monotonic() - began >= 0.3
    for caller in callers:
        caller.join()
    assert (replies["waits"].status_code, replies["waits"].headers["retry-after"]) == (503, "5")
    assert replies["waits"].json()["error"]["message"] == "the runtime is draining"
    assert replies["runs"].status_code == 200
    assert "[DONE]" not in replies["runs"].text and "the runtime is stopping" in replies["runs"].text


def test_a_graph_that_fails_for_good_ends_the_command(start: Start) -> None:
    server = start(PARROT, "--profile", "loud", "--port", "0").wait_ready()
    assert server.chat("die").status_code == 503
    wait_until(lambda: server.chat("hello").status_code == 200)  # restarted, once
    assert server.chat("die").status_code == 503
    assert server.end() == 1
    assert server.err[-1] == "error: stage 'parrot': died 2 times within 60 s, the last time: killed by SIGKILL"


def test_a_users_actors_run_in_processes_of_their_own_from_any_folder(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "user" / "my_graph.py"
    file.parent.mkdir()
    file.write_text(USER_GRAPH.format(setup="pass"))
    server = start("user/my_graph.py", "--port", "0", "--set", "repeat.times=3", cwd=tmp_path).wait_ready()
    processes = {line.split()[-1] for line in server.out if re.match(r"(repeat|again) +ready", line)}
    assert len(processes - {str(server.process.pid)}) == 2
    health = httpx.get(f"{server.url}/health", timeout=HANGS_S).json()
    assert {stage["state"] for stage in health["stages"]} == {"ready"}
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0 and server.err == []


@pytest.mark.parametrize("options", [[], ["--single-process"]])
def test_a_stage_that_cannot_start_is_one_line(cli: Cli, options: list[str]) -> None:
    file = f"my_broken_{len(options)}.py"
    Path(file).write_text(USER_GRAPH.format(setup="import not_there"))
    ran = cli("run", file, "--port", "0", *options)
    assert ran.code == 1
    (line,) = ran.err.splitlines()
    assert re.fullmatch(
        r"error: stage '(repeat|again)': (failed to start: )?ModuleNotFoundError: No module named 'not_there' "
        r"\(--debug shows the traceback\)",
        line,
    )


def test_debug_shows_the_traceback_of_the_stages_own_process(cli: Cli) -> None:
    Path("my_broken.py").write_text(USER_GRAPH.format(setup="import not_there"))
    ran = cli("run", "my_broken.py", "--port", "0", "--debug")
    assert ran.code == 1
    assert 'my_broken.py", line 8, in setup' in ran.err and "typer" not in ran.err
    assert ran.err.splitlines()[-1].endswith("ModuleNotFoundError: No module named 'not_there'")


def test_a_signal_while_stages_start_ends_the_command(start: Start, tmp_path: Path) -> None:
    (tmp_path / "my_slow.py").write_text(USER_GRAPH.format(setup="import anyio; await anyio.sleep(60)"))
    port = free_port()
    server = start("my_slow.py", "--port", str(port), "--single-process", cwd=tmp_path)
    wait_until(lambda: answers(port))
    assert httpx.get(f"http://127.0.0.1:{port}/live", timeout=HANGS_S).status_code == 200
    assert httpx.get(f"http://127.0.0.1:{port}/ready", timeout=HANGS_S).status_code == 503
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert server.err == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_addresses_that_cannot_be_listened_on() -> None:
    from omniflow.cli.serving import refuse_what_cannot_be_served
    from omniflow.errors import ConfigError

    with pytest.raises(ConfigError, match="cannot listen on 192.0.2.1:0: .*; choose another --host or --port"):
        refuse_what_cannot_be_served(ServerConfig(host="192.0.2.1", port=0))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="is in use; stop what listens there"):
            refuse_what_cannot_be_served(ServerConfig(port=taken.getsockname()[1]))


# -- record and replay ---------------------------------------------------------------------------------------------


@pytest.fixture
def recordings(start: Start, tmp_path: Path) -> Callable[..., list[Path]]:
    """Runs a server that records into a folder, has `texts` said and hummed, and gives the files."""

    def record(graph: str, *texts: str, options: Sequence[str] = (), cwd: Path = ROOT) -> list[Path]:
        folder = tmp_path / "recordings"
        server = start(graph, "--port", "0", "--record", str(folder), *options, cwd=cwd).wait_ready()
        assert f"recording requests, with all that they send, to {folder}" in server.out
        model = httpx.get(f"{server.url}/v1/models", timeout=HANGS_S).json()["data"][0]["id"]
        for text in texts:
            messages = [{"role": "user", "content": text}]
            body = {"model": model, "messages": messages}
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=HANGS_S)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0 and server.err == []
        return sorted(folder.iterdir())

    return record


Record = Callable[..., list[Path]]


def test_a_recorded_request_is_replayed(recordings: Record, cli: Cli) -> None:
    (file,) = recordings(PARROT, "one two", options=["--profile", "loud", "--set", "parrot.prefix=Hey "])
    ran = cli("replay", str(file))
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert re.fullmatch(r"request req_\w+ of parrot, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", lines[0])
    assert re.fullmatch(r"from chat to text, usage, seed \d+", lines[1])
    assert re.search(r"^parrot.text → \(text\) +12 characters  12 characters  same *$", ran.out, re.MULTILINE)
    assert lines[-2:] == [
        "the request ended with: all its outputs; now with: all its outputs",
        "no difference (edges compared: 2, given: 0, not comparable: 0)",
    ]


def test_replay_names_the_first_edge_that_differs(recordings: Record, cli: Cli) -> None:
    (file,) = recordings(PARROT, "one two")
    ran = cli("replay", str(file), "--set", "parrot.repeat=2", "--option", "seed=4", "--option", "stop=x")
    assert (ran.code, ran.err) == (1, "")
    assert "parrot.repeat was not set and is 2" in ran.out
    assert re.search(r"^option seed was \d+ and is 4$", ran.out, re.MULTILINE)
    assert "option stop was () and is ('x',)" in ran.out
    assert ran.out.splitlines()[-1] == (
        "first difference: parrot.text → (text) differs at characters 0-15; nothing before stage parrot differs"
    )


def test_replay_says_how_a_request_ended(recordings: Record, cli: Cli) -> None:
    Path("my_picky.py").write_text(CHATTY)
    (file,) = recordings("my_picky.py", "", options=["--single-process"], cwd=Path.cwd())
    ran = cli("replay", str(file), "--single-process")
    assert ran.code == 0
    end = "InvalidInputError in answer: say something"
    assert f"the request ended with: {end}; now with: {end}" in " ".join(ran.out.split())


def test_record_keeps_the_newest(recordings: Record) -> None:
    assert len(recordings(PARROT, "a", "b", "c", "d", options=["--record-max", "2"])) == 2


def test_the_environment_is_recorded_and_not_read_again(
    recordings: Record, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIFLOW__PARROT__PREFIX", "first ")
    (file,) = recordings(PARROT, "one")
    monkeypatch.setenv("OMNIFLOW__PARROT__PREFIX", "second ")
    assert cli("replay", str(file)).code == 0


def test_a_graph_by_a_relative_path_is_found_from_anywhere(recordings: Record, cli: Cli, tmp_path: Path) -> None:
    """The command's folder is another one than the server's."""
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "my_recorded.py").write_text(CHATTY)
    (file,) = recordings("my_recorded.py", "one", options=["--single-process"], cwd=tmp_path / "user")
    assert cli("replay", str(file), "--single-process").code == 0
    (tmp_path / "user" / "my_recorded.py").rename(tmp_path / "my_moved.py")
    assert refused(cli("replay", str(file))).startswith(f"there is no file {tmp_path}/user/my_recorded.py")
    assert cli("replay", str(file), "--graph", str(tmp_path / "my_moved.py"), "--single-process").code == 0


CHATTY = """\
from omniflow import Actor, Chat, Emit, Graph, InvalidInputError, TextDelta

class Answer(Actor):
    async def run(self, chat: Chat, emit: Emit[TextDelta]) -> None:
        if not chat.messages[-1].parts[0].text:
            raise InvalidInputError("say something", param="messages")
        await emit.send(TextDelta("yes"))

graph = Graph("chatty")
answer = graph.stage("answer", Answer)
graph.input(chat=answer)
graph.output(text=answer)
"""


def test_recordings_and_options_that_are_wrong(recordings: Record, cli: Cli) -> None:
    (file,) = recordings(PARROT, "one")
    assert refused(cli("replay", "nothing.recording")) == "cannot read nothing.recording: No such file or directory"
    assert refused(cli("replay", PARROT)) == f"{PARROT} is no recording of omniflow"
    assert (
        refused(cli("replay", str(file), "--option", "sped=2"))
        == "a request has no option 'sped'; did you mean 'speed'?"
    )
    assert refused(cli("replay", str(file), "--option", "speed")) == "--option 'speed': write it as KEY=VALUE"
    assert refused(cli("replay", str(file), "--option", "seed=x")) == (
        "--option: seed='x': Expected `int | null`, got `str`"
    )
    assert refused(cli("replay", str(file), "--set", "parrot.repaet=2")).startswith(
        "command line: stage 'parrot' has no"
    )
    assert refused(cli("replay", str(file), "--graph", WORDS)) == (
        "graph 'words' declares no profiles, so --profile quiet means nothing"
    )
    file.write_bytes(file.read_bytes()[:-1])
    assert refused(cli("replay", str(file))) == f"{file} is damaged: it was cut short, or changed after it was written"


def test_folders_and_sizes_that_cannot_be_recorded_to(cli: Cli) -> None:
    Path("file").write_text("x")
    for options, message in [
        (["--record", "file"], "cannot record to file: File exists"),
        (
            ["--record", "x", "--record-max-bytes", "much"],
            "'much' is no size; write a number of bytes or text like '4 GiB'",
        ),
    ]:
        assert refused(cli("run", PARROT, "--port", "0", *options)).startswith(message)
    assert "Invalid value for '--record-max'" in refused(cli("run", PARROT, "--record-max", "0"), code=2)
