"""The examples of the pages on HTTP, one after the other, against the real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Server
from tests.test_docs import blocks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("page", "lines"),
    [
        (
            "http.md",
            ["The|", "True\n", "tokens were heard", "400 stage 'image_encoder': this profile has no image encoder"],
        ),
        ("audio.md", []),
    ],
)
def test_the_examples_do_what_they_say(server: Server, tmp_path: Path, page: str, lines: list[str]) -> None:
    path = ROOT / "docs" / page
    program = "\n".join(code for code, needs_server in blocks(path, "python") if needs_server)
    assert "http://127.0.0.1:8000" in program
    ran = subprocess.run(
        [sys.executable, "-c", program.replace("http://127.0.0.1:8000", server.url)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    shown = [code for code, _ in blocks(path, "text")]
    assert shown and all(text in ran.stdout for text in [*shown, *lines]), ran.stdout
