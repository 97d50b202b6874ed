"""Jobs on GPUs: who runs where and when, and what becomes of those that fail. The GPUs are names here."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from bench.gpu import report
from bench.gpu.all import Runner, arguments_of, chosen, fetched, last_line, main, place
from bench.gpu.jobs import JOBS, ROWS, Job, unnamed
from omniflow.cli.machine import GpuReport

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
WORDS = {"work": "/w", "json": "/j", "gpus": "2", "smollm2": "/s", "piper": "/p"}
SPAN = "sh -c 'date +%s%N; date +%s%N; echo on $CUDA_VISIBLE_DEVICES'"


def job(name: str, command: str = SPAN, **settings: Any) -> Job:
    return Job(name, command, settings.pop("seconds", 1), "a test", **settings)


def runner(into: Path, jobs: Sequence[Job], gpus: str = "0,1", **settings: Any) -> Runner:
    return Runner(jobs, gpus.split(","), into, {"work": str(into)}, **settings)


async def test_each_job_has_its_row_and_no_failure_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "limit_s", property(lambda self: 0.01 if self.name == "late" else 60))
    jobs = [
        job("good", "python -c \"print('all is well')\""),
        job("bad", 'sh -c "echo what was wrong >&2; exit 3"'),
        job("skipped", "echo '3 skipped in 0.1s'"),
        job("late", "sleep 60"),
        job("no such", "/no/such/program"),
        job("reader", after="bad"),
        job("reader of the reader", after="reader"),
        job("writer", 'sh -c "echo 5 > {work}/five; echo {gpus} > {json}"', gpus="2", timed=True),
        job("long", seconds=1000),
    ]
    ran = runner(tmp_path, jobs, within_s=500)
    await ran.run()
    rows = ran.rows
    assert rows.keys() == {each.name for each in jobs}
    assert (rows["good"].outcome, rows["good"].last) == ("ok", "all is well")
    assert (rows["bad"].outcome, rows["bad"].last) == ("exit 3", "what was wrong")
    assert rows["skipped"].outcome == "all skipped" and rows["skipped"].has_failed
    assert rows["no such"].outcome.startswith("did not start: ")
    assert rows["late"].outcome == "killed after 0 s"
    assert rows["reader"].outcome == "bad did not end well"
    assert rows["reader of the reader"].outcome == "reader did not end well"
    assert rows["long"].outcome.startswith("takes 1000 s, ") and not rows["long"].has_failed
    assert ((tmp_path / "five").read_text(), (tmp_path / "writer.json").read_text()) == ("5\n", "2\n")
    written = json.loads((tmp_path / "all.json").read_text())
    assert {row["name"]: row["outcome"] for row in written["jobs"]} == {row.name: row.outcome for row in rows.values()}
    assert written["machine"]["cores"] > 0


async def test_timed_jobs_are_alone_on_their_gpus_and_several_gpus_are_no_hurdle(tmp_path: Path) -> None:
    kinds = itertools.product((True, False), ("1", "1", "2", "all"))
    jobs = [job(f"{number}", gpus=gpus, timed=timed) for number, (timed, gpus) in enumerate(kinds)]
    ran = runner(tmp_path, jobs, "0,1,2")
    await ran.run()
    assert all(row.is_ok for row in ran.rows.values())
    spans = {each.name: tuple(map(int, log(tmp_path, each).split()[:2])) for each in jobs}
    for one, other in itertools.combinations(jobs, 2):
        gpus = [set(ran.rows[each.name].gpus.split(",")) for each in (one, other)]
        if gpus[0] & gpus[1] and (one.timed or other.timed):
            (began, ended), (began_too, ended_too) = spans[one.name], spans[other.name]
            assert ended < began_too or ended_too < began
    for each in jobs:
        names = ran.rows[each.name].gpus
        assert len(names.split(",")) == {"1": 1, "2": 2, "all": 3}[each.gpus]
        assert log(tmp_path, each).endswith(f"on {names}\n")


def log(into: Path, each: Job) -> str:
    return (into / f"{each.name}.log").read_text()


async def test_untimed_jobs_run_first_and_late_ones_last(tmp_path: Path) -> None:
    jobs = [job("late", late=True, timed=False), job("two", gpus="2"), job("short", seconds=1), job("long", seconds=2)]
    ran = runner(tmp_path, [*jobs, job("untimed", timed=False)], "0,1")
    await ran.run()
    began = {each.name: int(log(tmp_path, each).split()[0]) for each in [*jobs, job("untimed")]}
    assert began["untimed"] < began["short"]  # on the GPU that `long` leaves
    assert max(began["short"], began["long"]) < began["two"] < began["late"]


async def test_what_wants_two_gpus_is_left_out_on_one(tmp_path: Path) -> None:
    ran = runner(tmp_path, [job("two", gpus="2"), job("all", gpus="all"), job("one")], "5")
    await ran.run()
    assert {row.name: row.outcome for row in ran.rows.values()} == {
        "two": "needs two GPUs",
        "all": "needs two GPUs",
        "one": "ok",
    }
    assert log(tmp_path, job("one")).endswith("on 5\n")


async def test_again_with_the_same_folder_does_what_is_not_done(tmp_path: Path) -> None:
    """What failed comes last, what was cut off does not; rows of what is not asked for now stay."""
    counted = 'sh -c "echo once >> {work}/count; date +%s%N"'
    before = [job("first", counted), job("second", "false"), job("aside", "false")]
    await runner(tmp_path, before).run()
    await runner(tmp_path, [job("cut", "sleep 60", seconds=0)], within_s=0.5).run()
    assert json.loads((tmp_path / "all.json").read_text())["jobs"][-1]["outcome"] == "cut off after 0 s"
    jobs = [job("second", counted), job("third", counted, after="second"), job("first", counted), job("cut", counted)]
    ran = runner(tmp_path, [*jobs, job("new", counted, late=True)])
    await ran.run()
    assert {row.name for row in ran.rows.values() if not row.is_ok} == {"aside"} and len(ran.rows) == 6
    assert (tmp_path / "count").read_text() == 5 * "once\n"
    began = {name: int(log(tmp_path, job(name))) for name in ("second", "cut", "new")}
    assert max(began["cut"], began["new"]) < began["second"]


async def test_nothing_of_a_job_outlives_it(tmp_path: Path) -> None:
    """Neither what it has left behind, nor it and its children where the run itself is ended."""
    left = job("left", "sh -c 'sleep 1000 & echo $!'")
    await runner(tmp_path, [left]).run()
    await gone(int(log(tmp_path, left)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner(tmp_path, [job("running", "sh -c 'sleep 1000 & echo $!; wait'")]).run)
        with anyio.fail_after(60):
            while not (file := tmp_path / "running.log").exists() or not file.read_text().endswith("\n"):
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    await gone(int(file.read_text()))


async def gone(pid: int) -> None:
    """Until it is dead; nobody may have asked for its end yet."""
    with anyio.fail_after(60):
        while is_alive(pid):
            await anyio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_places() -> None:
    timed, untimed = job("timed"), job("untimed", timed=False)
    assert place(untimed, {"0": [untimed, untimed], "1": [untimed], "2": [timed]}) == ["1"]
    assert place(timed, {"0": [untimed], "1": []}) == ["1"]
    assert place(job("two", gpus="2"), {"0": [untimed], "1": [], "2": []}) == ["1", "2"]
    assert place(job("all", gpus="all"), {"0": [untimed], "1": []}) == []
    assert place(untimed, {"0": [untimed] * 6}) == []


def test_the_last_line_is_one_that_says_something(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    file.write_bytes(b"\xff\nwhat was found\n}\n  0%| | 0/7 [00:00<?, ?it/s]\rhalf: 50%| 3/7 [00:04, 1.52it/s]\n\n")
    assert last_line(file) == "what was found"
    file.write_bytes(b"")
    assert last_line(file) == ""


def test_jobs_are_chosen_by_names_and_patterns_with_what_they_read() -> None:
    jobs = [job("a.write"), job("a.one", after="a.write"), job("a.two", after="a.write"), job("b")]
    assert [each.name for each in chosen(["a.two"], [], jobs)] == ["a.write", "a.two"]
    assert [each.name for each in chosen(["a.*"], ["a.one"], jobs)] == ["a.write", "a.two"]
    assert [each.name for each in chosen([], ["a.*"], jobs)] == ["b"]
    with pytest.raises(ValueError, match=r"no job is called c\.\*"):
        chosen(["c.*"], [], jobs)


@pytest.mark.parametrize(("with_gpu", "said"), [(False, "no GPU here"), (True, "no C compiler here")])
def test_make_gpu_installs_nothing_where_something_is_missing(tmp_path: Path, with_gpu: bool, said: str) -> None:
    if with_gpu:
        (tmp_path / "nvidia-smi").symlink_to("/bin/true")
    elif shutil.which("nvidia-smi"):
        pytest.skip("there is a GPU here")
    (tmp_path / "pyproject.toml").touch()
    found = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CC": "false"}
    command = ["make", "-f", ROOT / "Makefile", "gpu", f"PYTHON={sys.executable}"]
    made = subprocess.run(command, cwd=tmp_path, env=found, capture_output=True, text=True)
    assert made.returncode != 0 and said in made.stderr
    assert not (tmp_path / ".venv-gpu").exists()


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--list", "--only", "engine.*"]) == 0
    assert "engine.steps" in (shown := capsys.readouterr().out) and "tests.engine" not in shown
    assert main(["--only", "nothing"]) == 2
    assert "--list shows all" in capsys.readouterr().out
    assert arguments_of([]).within > 1e9


def test_the_table_of_jobs() -> None:
    """Names are unique, what a job reads is written by another, and what it runs is in the repository."""
    names = [each.name for each in JOBS]
    assert len(set(names)) == len(names)
    assert {each.after for each in JOBS} <= {"", *names}
    for each in JOBS:
        python, flag, module, *rest = (word.format(**WORDS) for word in shlex.split(each.command))
        assert (python, flag) == ("python", "-m")
        if module == "pytest":
            assert each.name.startswith("tests.")
            files = [ROOT / word for word in rest if word.startswith("tests/")]
        else:
            files = [ROOT / f"{module.replace('.', os.sep)}.py"]
        assert files and all(file.is_file() for file in files), each.name


class ParsedError(Exception):
    """The command line was understood."""


def test_scripts_understand_the_commands_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    understand = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *given: Any) -> None:
        understand(self, *given)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    for each in JOBS:
        _, _, module, *rest = (word.format(**WORDS) for word in shlex.split(each.command))
        if module != "pytest":
            monkeypatch.setattr(sys, "argv", [module, *rest])
            with pytest.raises(ParsedError):
                importlib.import_module(module).main()


def test_scripts_without_a_gpu_say_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "find_gpus", GpuReport)
    on_a_cpu = {"thinker.cpu", "speech.write"}
    for each in JOBS:
        _, _, module, *rest = (word.format(**WORDS) for word in shlex.split(each.command))
        if module != "pytest" and each.name not in on_a_cpu:
            monkeypatch.setattr(sys, "argv", [module, *rest])
            with pytest.raises(SystemExit) as ended:
                importlib.import_module(module).main()
            (line,) = capsys.readouterr().err.splitlines()
            wanted = "2 GPUs" if each.gpus != "1" and module != "bench.gpu.two_gpus" else "a GPU"
            assert ended.value.code == 2 and f"wants {wanted}, and sees none" in line, each.name


def test_weights_are_fetched_before_the_jobs_that_name_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console, jobs = Console(width=200), [job("reader", "cat {smollm2}/config.json"), job("other")]
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    assert fetched({"smollm2": "mine", "piper": "piper-nobody"}, jobs, console) == {
        "smollm2": str(tmp_path / "mine"),
        "piper": "piper-nobody",
    }
    assert capsys.readouterr().out == ""
    weights = {"smollm2": "./gone", "piper": "piper-joe"}
    assert fetched(weights, jobs, console) == weights
    assert capsys.readouterr().out.startswith("--smollm2: ")


def test_a_test_that_wants_a_gpu_and_has_no_row_is_a_job_too() -> None:
    others = [row for row in ROWS if row.name != "tests.kernels"]
    assert {"tests.kernels", "tests.depth_kernels"} <= {each.name for each in unnamed(others)}
    assert not {"tests.kernels", "tests.depth_kernels"} & {each.name for each in unnamed(ROWS)}
