"""chat, say and bench serve against a real server with a scripted graph, as a user meets them."""

from __future__ import annotations

import json
import os
import resource
import wave
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import pytest

from omniflow.cli.app import run_command_line
from omniflow.cli.machine import open_files
from omniflow.config import ServerConfig
from omniflow.runtime import Output, Runtime
from omniflow.server.app import build_app
from omniflow.server.serve import serve

from ..files import soft_limit
from ..server.scripted import HELLO, ScriptedRuntime, parrot_plan

pytestmark = pytest.mark.anyio


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Awaitable[Ran]]


@pytest.fixture
async def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    """Runs one command against the parrot."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    async def command(*arguments: str) -> Ran:
        code = await anyio.to_thread.run_sync(run_command_line, list(arguments))
        return Ran(code, *capsys.readouterr())

    async with Runtime(parrot_plan()) as runtime, serve(build_app(runtime, model="parrot"), port=0) as address:
        monkeypatch.setenv("OMNIFLOW_URL", f"{address.url}/v1")
        yield command


async def test_chat_streams_the_answer(run: Run) -> None:
    ran = await run("chat", "one two three")
    assert (ran.code, ran.out, ran.err) == (0, "one two three \n", "")


async def test_a_conversation_ends_with_an_empty_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one two", "three", ""])
    monkeypatch.setattr("rich.console.Console.input", lambda self, *_: next(lines))
    ran = await run("chat")
    assert ran.code == 0
    assert [line for line in ran.out.splitlines() if "first text" not in line] == ["one two ", "three "]
    assert ran.out.count("first text") == 2


async def test_a_spoken_answer_goes_to_a_file(run: Run, tmp_path: Path) -> None:
    ran = await run("chat", "one two", "-o", str(tmp_path / "out.wav"))
    assert ran.out == "one two \n"
    with wave.open(str(tmp_path / "out.wav")) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        assert (file.getframerate(), file.getnchannels()) == (24000, 1)
    assert len(samples) == 10 * len("one two ")
    assert np.abs(samples - 0.25 * 32767).max() <= 1


async def test_say_into_a_wav_file(run: Run, tmp_path: Path) -> None:
    ran = await run("say", "hello", "-o", str(tmp_path / "out.wav"))
    assert ran.code == 0 and "first sound" in ran.out
    with wave.open(str(tmp_path / "out.wav")) as file:
        assert file.getnframes() == 10 * len("hello")


async def test_say_into_an_mp3_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "out.mp3"
    ran = await run("say", "hello", "-o", str(path))
    assert ran.code == 0 and str(path) in ran.out.replace("\n", "")
    assert path.read_bytes()[:2] in (b"ID", b"\xff\xf3", b"\xff\xfb")


@pytest.mark.parametrize("command", ["say", "chat"])
async def test_a_file_is_what_its_name_says(run: Run, tmp_path: Path, command: str) -> None:
    ran = await run(command, "hello", "-o", str(tmp_path / "out.m4a"))
    assert ran.code == 1 and "sound is written as .wav, and by `say` also as .mp3" in ran.err
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["out.wav", "out.mp3"])
async def test_a_file_that_cannot_be_written_is_one_line(run: Run, tmp_path: Path, name: str) -> None:
    ran = await run("say", "hello", "-o", str(tmp_path / "nowhere" / name))
    assert ran.code == 1 and ran.err.replace("\n", "").endswith(f"{name}: No such file or directory")


@pytest.mark.parametrize("end", ["", "/"])
async def test_a_url_may_leave_the_version_out(run: Run, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setenv("OMNIFLOW_URL", os.environ["OMNIFLOW_URL"].removesuffix("/v1") + end)
    assert (await run("chat", "one")).out == "one \n"


async def test_what_a_server_refuses_is_one_line(run: Run) -> None:
    ran = await run("chat", "hi", "--model", "nope")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "error: the server refused (404): model 'nope' is not served here; 'parrot' is\n"
    assert (await run("chat", "one")).out == "one \n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chat", "hi", "--url", "ftp://x"), "--url 'ftp://x': expected http://... or https://..."),
        (("chat", "hi", "--url", "http://127.0.0.1:9/v1"), "http://127.0.0.1:9/v1 cannot be reached"),
        (("chat", "hi", "-a", "nothing.wav"), "there is no file nothing.wav"),
        (("chat", "hi", "-a", __file__), "attach wav, mp3, flac, ogg, png"),
        (("transcribe", "nothing.wav"), "there is no file nothing.wav"),
        (("bench", "serve", "--prompts", "nothing.txt"), "cannot read nothing.txt: No such file"),
        (("bench", "serve", "--kind", "realtime", "--question", __file__), "is no wav file"),
    ],
)
async def test_wrong_arguments(run: Run, arguments: tuple[str, ...], message: str) -> None:
    ran = await run(*arguments)
    assert ran.code == 1 and message in ran.err and ran.err.count("\n") == 1


async def test_a_server_with_keys(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    config = ServerConfig(api_keys=("secret",))
    app = build_app(ScriptedRuntime(HELLO), model="tiny", config=config)  # type: ignore[arg-type]
    async with serve(app, port=0) as address:
        for given, code in (((), 1), (("--api-key", "wrong"), 1), (("--api-key", "secret"), 0)):
            arguments = ["chat", "hi", "--url", f"{address.url}/v1", *given]
            assert await anyio.to_thread.run_sync(run_command_line, arguments) == code
    said = capsys.readouterr()
    assert said.out == "Hello.\n" and said.err.count("refused (401)") == 2


async def test_an_answer_that_breaks_off_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    broken = [Output("text", HELLO[0].value), RuntimeError("bug")]  # type: ignore[union-attr]
    app = build_app(ScriptedRuntime(broken), model="tiny")  # type: ignore[arg-type]
    async with serve(app, port=0) as address:
        arguments = ["chat", "hi", "--url", f"{address.url}/v1"]
        assert await anyio.to_thread.run_sync(run_command_line, arguments) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("kind", ["chat", "chat-speech", "speech"])
async def test_bench_serve(run: Run, tmp_path: Path, kind: str) -> None:
    file, prompts = tmp_path / "out.json", tmp_path / "prompts.txt"
    prompts.write_text("one two three\n\nfour five six\n")
    ran = await run(
        *("bench", "serve", "--kind", kind, "--concurrency", "1", "--concurrency", "3", "--num-turns", "6"),
        *("--prompts", str(prompts), "--json", str(file)),
    )
    assert ran.code == 0, ran.err
    report = json.loads(file.read_text())
    assert [(load["concurrency"], load["num_turns"], load["failures"]) for load in report["loads"]] == [
        (1, 6, {}),
        (3, 6, {}),
    ]
    metrics = report["loads"][0]["metrics"]
    assert {"ttft_s", "itl_s", "tpot_s"} <= metrics.keys() if kind.startswith("chat") else "ttft_s" not in metrics
    assert {"ttfa_s", "rtf", "underrun_s"} <= metrics.keys() if "speech" in kind else "ttfa_s" not in metrics
    assert metrics["e2el_s"]["count"] == 6
    assert "3 at once" in ran.out and "E2EL" in ran.out


async def test_bench_serve_counts_failures_and_opens_many_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runtime = ScriptedRuntime(HELLO)
    app = build_app(runtime, model="tiny")  # type: ignore[arg-type]
    runtime.scripts = [HELLO, HELLO, (RuntimeError("bug"),), HELLO]
    async with serve(app, port=0) as address:
        file = tmp_path / "out.json"
        arguments = ["bench", "serve", "--url", f"{address.url}/v1", "--num-turns", "3", "--json", str(file)]
        with soft_limit(1024):
            assert await anyio.to_thread.run_sync(run_command_line, arguments) == 0
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == open_files(), "one for each connection"
    (load,) = json.loads(await anyio.Path(file).read_text())["loads"]
    assert sum(load["failures"].values()) == 1 and load["metrics"]["e2el_s"]["count"] == 2
    assert "failed" in capsys.readouterr().out
