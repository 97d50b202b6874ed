"""The terminal clients against the real server: one says what another writes down; spoken turns are measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omniflow.cli.app import app
from tests.e2e.conftest import Server
from tests.e2e.hearing import word_errors
from tests.speech import FOX


def run(server: Server, *arguments: str | Path) -> str:
    """What a command prints."""
    ran = CliRunner().invoke(app, [*map(str, arguments), "--url", f"{server.url}/v1"])
    assert ran.exit_code == 0, (ran.output, ran.exception)
    return ran.output


@pytest.mark.parametrize("ending", ["wav", "mp3"])
def test_what_is_said_is_written_down(server: Server, tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"fox.{ending}"
    assert str(file.name) in run(server, "say", FOX, "-o", file).replace("\n", "")
    wrong, count = word_errors(FOX, run(server, "transcribe", file, "--language", "en"))
    assert wrong / count <= 0.3


@pytest.mark.parametrize("interrupt", [False, True])
def test_a_spoken_turn_is_measured(server: Server, tmp_path: Path, interrupt: bool) -> None:
    """The unmeasured turn before counts too: two turns a run."""
    report = tmp_path / "report.json"
    options = ["--interrupt-after", "0.3"] if interrupt else ["--turn-end", "manual", "--max-tokens", "12"]
    run(server, "bench", "serve", "--kind", "realtime", "--num-turns", "1", "--json", report, *options)
    (load,) = json.loads(report.read_text())["loads"]
    assert load["num_turns"] == 1 and load["failures"] == {}
    assert {"ttft_s", "ttfa_s", "e2el_s"} <= set(load["metrics"]) and load["audio_s_per_s"] > 0
    assert ("barge_in_s" in load["metrics"]) == interrupt
    if interrupt:  # two frames of the detector, at the pace of speech, and what the machine adds
        assert load["metrics"]["barge_in_s"]["mean"] > 0.05
    server.wait_until("nothing is left of it", lambda: server.health()["in_flight"] == 0)
