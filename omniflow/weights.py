"""Weights: where the files of a model come from, and where they lie on this machine.

    PackagedWeights    files inside wheels of the package index, pinned by version and sha256, kept in our cache; or
                       what a function writes there, from nothing
    InstalledWeights   a data package of omniflow's own, installed or in the checkout; nothing is fetched
    HubWeights         `hf:owner/repo[@revision]`, kept in the cache of huggingface_hub
    LocalWeights       a folder of the user's own

The cache is `platformdirs.user_cache_path("omniflow")`, or the folder that OMNIFLOW_CACHE names:

    weights/<name>-<key>/    one finished set of files, moved here in one rename; `manifest.json` lists their sizes
    partial/<name>-<key>.*/  a fetch under way; what a killed one left is removed by the next
    locks/<name>-<key>.lock  held by the one process that fetches

The key is made of the sources' sha256 and the version of the conversion, so a changed pin is a new folder. A finished
folder is self-contained: copy the cache to a machine without a network and it works there.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from omniflow.errors import WeightsError
from omniflow.prctl import die_with_parent

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

TRIES = 3
"""How often a broken download is begun anew."""
MANIFEST = "manifest.json"
_AS_REPO = "write hf:owner/repo or hf:owner/repo@revision"
_REPO = re.compile(r"[\w.-]+/[\w.-]+")


class Progress(Protocol):
    """Is told what a fetch does: a step in words, and bytes where they are known."""

    def __call__(self, name: str, step: str, done_bytes: int = 0, total_bytes: int | None = None) -> None: ...


class State(msgspec.Struct, frozen=True):
    """What is known of weights without fetching anything."""

    name: str
    source: str
    status: Literal["present", "missing", "broken"]
    path: Path | None
    """The folder of the files; None where it is not known before the fetch."""
    size_bytes: int | None
    """Bytes on disk where present, else bytes to download; None where unknown."""


class Weights(Protocol):
    """Files that an actor needs before `setup`."""

    @property
    def name(self) -> str:
        """What people call them; unique among the weights of a graph."""
        ...

    def path(self) -> Path:
        """The folder of the files. Raises WeightsError where they are not on this machine."""
        ...

    def fetch(self, progress: Progress | None = None) -> Path:
        """Bring the files here if they are not, and return their folder. Raises WeightsError that says what to do."""
        ...

    def state(self) -> State:
        """Whether the files are here; looks at names and sizes only."""
        ...


class Wheel(msgspec.Struct, frozen=True):
    """One pinned wheel of the package index."""

    package: str
    version: str
    sha256: str
    size_bytes: int

    @property
    def requirement(self) -> str:
        """As pip spells it."""
        return f"{self.package}=={self.version}"


class WheelFile(msgspec.Struct, frozen=True):
    """One file taken out of the wheels. Several `parts` are concatenated; `sha256` is that of the whole."""

    name: str
    sha256: str
    parts: tuple[str, ...]
    """Paths inside the wheels, in order."""


class PackagedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that ship inside wheels; fetched with pip, so the user's index configuration is honoured.

    `convert` is "module:function", called once with (source folder, target folder) after the files were verified;
    what it writes is then what is kept, and the source is dropped. Raise `convert_version` when its output changes.
    Without wheels the source folder is empty, and nothing is fetched: `convert` makes the weights.
    """

    name: str
    license: str
    wheels: tuple[Wheel, ...] = ()
    files: tuple[WheelFile, ...] = ()
    convert: str | None = None
    convert_version: int = 1

    @property
    def folder(self) -> Path:
        """Where the files lie once they are fetched."""
        return cache_folder() / "weights" / self._key

    @property
    def source(self) -> str:
        """The pinned packages."""
        return " + ".join(wheel.requirement for wheel in self.wheels) or "written on this machine"

    def path(self) -> Path:
        """The folder of the files. Raises WeightsError where they are not on this machine."""
        state = self.state()
        if state.status == "present":
            return self.folder
        raise WeightsError(
            f"{self.name} is {state.status} in {cache_folder()}; run `omniflow models fetch {self.name}`"
        )

    def state(self) -> State:
        """Whether the files are here with the sizes that the fetch wrote down (< 1 ms; contents are not read)."""
        try:
            expected = msgspec.json.decode((self.folder / MANIFEST).read_bytes(), type=dict[str, int])
        except (FileNotFoundError, NotADirectoryError):
            missing_bytes = sum(wheel.size_bytes for wheel in self.wheels)
            return State(self.name, self.source, "missing", self.folder, missing_bytes or None)
        except msgspec.DecodeError:
            expected = {}
        found = _sizes(self.folder)
        status: Literal["present", "broken"] = "present" if found == expected else "broken"
        return State(self.name, self.source, status, self.folder, sum(found.values()))

    def fetch(self, progress: Progress | None = None) -> Path:
        """Bring the files here if they are not, and return their folder.

        Safe against other processes and against being killed at any point. Raises WeightsError where the index
        cannot be reached, does not have the package, or gave something else than what is pinned `TRIES` times.
        """
        report = progress or _silent
        try:
            if self.state().status != "present":
                with self._locked(report):
                    if self.state().status != "present":
                        self._build(report)
        except OSError as error:
            raise WeightsError(
                f"cannot keep {self.name} in {cache_folder()}: {error.strerror or error}; "
                "make room there, or set OMNIFLOW_CACHE to a folder that can be written"
            ) from error
        return self.folder

    @property
    def _key(self) -> str:
        made_of = [[wheel.sha256 for wheel in self.wheels], self.files, self.convert, self.convert_version]
        return f"{self.name}-{hashlib.sha256(msgspec.json.encode(made_of)).hexdigest()[:12]}"

    @contextlib.contextmanager
    def _locked(self, report: Progress) -> Iterator[None]:
        import filelock

        locks = cache_folder() / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(locks / f"{self._key}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            report(self.name, "waiting for another process that fetches it")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _build(self, report: Progress) -> None:
        """Download, unpack, verify and convert beside the cache, then move the result into it."""
        partial = cache_folder() / "partial"
        partial.mkdir(parents=True, exist_ok=True)
        for left_over in partial.glob(f"{self._key}.*"):
            shutil.rmtree(left_over, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f"{self._key}.", dir=partial))
        try:
            result = self._download(work, report)
            if self.convert is not None:
                report(self.name, "converting" if self.wheels else "writing")
                result = _converted(self.convert, result, work / "converted")
            (result / MANIFEST).write_bytes(msgspec.json.encode(_sizes(result)))
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.parent.mkdir(exist_ok=True)
            result.rename(self.folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        report(self.name, "ready")

    def _download(self, work: Path, report: Progress) -> Path:
        problem = ""
        for _ in range(TRIES):
            if problem:
                report(self.name, f"downloading again ({problem})")
            attempt = Path(tempfile.mkdtemp(dir=work))
            try:
                wheels = [self._download_wheel(wheel, attempt, report) for wheel in self.wheels]
                if wheels:
                    report(self.name, "unpacking")
                return self._unpack(wheels, attempt / "files")
            except _BrokenDownload as error:
                problem = str(error)
                shutil.rmtree(attempt)
        raise WeightsError(
            f"{self.name}: the download was broken {TRIES} times ({problem}); "
            f"check the package index that pip uses (`pip config list`), or {self._elsewhere}"
        )

    def _download_wheel(self, wheel: Wheel, folder: Path, report: Progress) -> Path:
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
        target = folder / wheel.package

        def downloaded(done_bytes: int, total_bytes: int) -> None:
            report(self.name, "downloading", done_bytes, total_bytes)

        report(self.name, "downloading", 0, wheel.size_bytes)
        code, said = _pip_download(requirements, target, downloaded)
        if "invalid choice: 'raw'" in said:  # pip before 24.1 tells nobody how far it is
            code, said = _pip_download(requirements, target, downloaded, "off")
        if code == 0:
            return next(target.glob("*.whl"))
        if "No module named pip" in said:
            raise WeightsError(
                f"fetching {self.name} needs pip in this environment: run `{sys.executable} -m ensurepip`"
            )
        if "No matching distribution found" in said:
            # pip ends so both when it reaches no index and when the index lacks the release; it has retried already.
            raise WeightsError(
                f"{self.name}: pip finds no {wheel.requirement}; is the index in reach? Or {self._elsewhere}"
            )
        if "DO NOT MATCH THE HASHES" in said:
            raise _BrokenDownload(f"{wheel.requirement} does not have the pinned sha256 {wheel.sha256[:12]}...")
        raise _BrokenDownload(_last_error(said))

    @property
    def _elsewhere(self) -> str:
        return (
            f"run `omniflow models fetch {self.name}` where the index is reachable "
            f"and copy {self.folder} from there to the same place here"
        )

    def _unpack(self, wheels: list[Path], target: Path) -> Path:
        target.mkdir()
        sources: dict[str, Path] = {}
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                sources.update(dict.fromkeys(archive.namelist(), wheel))
        for file in self.files:
            digest = hashlib.sha256()
            with open(target / file.name, "wb") as out:
                for part in file.parts:
                    if part not in sources:
                        raise WeightsError(
                            f"{self.name}: {self.source} holds no {part}; the pin of these weights is wrong"
                        )
                    _append(sources[part], part, out.write, digest.update)
            if digest.hexdigest() != file.sha256:
                raise _BrokenDownload(f"{file.name} does not have the pinned sha256 {file.sha256[:12]}...")
        return target


class InstalledWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights in a Python package that holds nothing else: installed, or in `packages/` of a checkout of omniflow."""

    name: str
    license: str
    package: str
    """The distribution, `some-name`; its files lie in the importable folder `some_name`."""
    files: tuple[str, ...]
    size_bytes: int
    """Of all `files` together."""

    @property
    def source(self) -> str:
        """The package."""
        return self.package

    def path(self) -> Path:
        """The folder of the files. Raises WeightsError where the package is not here or not whole."""
        state = self.state()
        if state.status == "present" and state.path is not None:
            return state.path
        raise WeightsError(
            f"{self.name} is {state.status}: run `pip install ./packages/{self.package}` in a checkout of omniflow"
        )

    def fetch(self, progress: Progress | None = None) -> Path:
        """The same as `path`: there is nothing to fetch."""
        return self.path()

    def state(self) -> State:
        """Whether the files are here, with the bytes that they should have in all."""
        folder = self._folder()
        if folder is None:
            return State(self.name, self.source, "missing", None, self.size_bytes)
        sizes = _sizes(folder)
        found = sum(sizes.get(name, 0) for name in self.files)
        whole = found == self.size_bytes and set(self.files) <= set(sizes)
        return State(self.name, self.source, "present" if whole else "broken", folder, found)

    def _folder(self) -> Path | None:
        module = self.package.replace("-", "_")
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
        checkout = Path(__file__).parents[1] / "packages" / self.package / module
        return checkout if checkout.is_dir() else None


class HubWeights(msgspec.Struct, frozen=True):
    """A repository of the Hugging Face hub, in its own cache; HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE count."""

    repo: str
    revision: str | None = None

    def __post_init__(self) -> None:
        """Raises WeightsError for what is no `owner/repo`: the hub would be asked for it, 24 s where out of reach."""
        if not _REPO.fullmatch(self.repo):
            raise WeightsError(f"{self.name}: not the name of a repository; {_AS_REPO}")

    @property
    def name(self) -> str:
        """As the user wrote it: `hf:owner/repo[@revision]`."""
        return f"hf:{self.repo}@{self.revision}" if self.revision else f"hf:{self.repo}"

    def path(self) -> Path:
        """The snapshot's folder. Raises WeightsError where it is not on this machine."""
        return self._snapshot(local_files_only=True)

    def fetch(self, progress: Progress | None = None) -> Path:
        """Download what is missing of the snapshot; huggingface_hub shows its own bars."""
        if progress:
            progress(self.name, "downloading")
        path = self._snapshot(local_files_only=False)
        if progress:
            progress(self.name, "ready")
        return path

    def state(self) -> State:
        """Whether a snapshot of this revision is here."""
        try:
            path = self.path()
        except WeightsError:
            return State(self.name, self.name, "missing", None, None)
        return State(self.name, self.name, "present", path, sum(_sizes(path).values()))

    def file(self, name: str) -> Path:
        """One file of the snapshot, as it lies here, else as the hub has it. Raises WeightsError."""
        try:
            return self._file(name, local_files_only=True)  # the hub itself is asked for 24 s where it is out of reach
        except WeightsError:
            return self._file(name, local_files_only=False)

    def _file(self, name: str, local_files_only: bool) -> Path:
        return self._asking(
            local_files_only,
            lambda hub: hub.hf_hub_download(self.repo, name, revision=self.revision, local_files_only=local_files_only),
        )

    def _snapshot(self, local_files_only: bool) -> Path:
        return self._asking(
            local_files_only,
            lambda hub: hub.snapshot_download(self.repo, revision=self.revision, local_files_only=local_files_only),
        )

    def _asking(self, local_files_only: bool, ask: Callable[[Any], str]) -> Path:
        try:
            import huggingface_hub
            from huggingface_hub.errors import HFValidationError
        except ImportError as error:
            raise WeightsError(f"{self.name} needs huggingface_hub: run `pip install huggingface_hub`") from error
        _log_once("huggingface_hub")
        try:
            return Path(ask(huggingface_hub))
        except (OSError, HFValidationError) as error:  # OSError is the base of all that its HTTP client raises
            raise WeightsError(f"{self.name}: {self._problem(error, local_files_only)}") from error

    def _problem(self, error: Exception, local_files_only: bool) -> str:
        from huggingface_hub import errors

        match error:
            case errors.GatedRepoError():
                return "the repository is gated; accept its terms on its page and set HF_TOKEN"
            case errors.RepositoryNotFoundError():
                return "no such repository, or it is private; check the name, or set HF_TOKEN"
            case errors.RevisionNotFoundError():
                return f"the repository has no revision {self.revision!r}"
            case errors.HFValidationError():
                return f"not the name of a repository; {_AS_REPO}"
            case errors.LocalEntryNotFoundError() if local_files_only:
                return f"not in the hub's cache; run `omniflow models fetch {self.name}`"
            case errors.LocalEntryNotFoundError():
                return (
                    "not in the hub's cache, and the hub is out of reach (or HF_HUB_OFFLINE is set); "
                    "fetch it where the hub is reachable and copy the folder HF_HOME from there"
                )
            case errors.EntryNotFoundError():
                return "the repository has no such file"
        return str(error).splitlines()[0] if str(error) else type(error).__name__


NamedWeights = PackagedWeights | InstalledWeights
"""Weights with a name and a licence of their own, as a catalogue lists them."""


class LocalWeights(msgspec.Struct, frozen=True):
    """A folder on this machine that the user named."""

    name: str

    def path(self) -> Path:
        """The folder. Raises WeightsError where it does not exist or is a file."""
        folder = Path(self.name).expanduser().absolute()
        if folder.is_dir():
            return folder
        if folder.exists():
            raise WeightsError(f"{self.name} is a file; give the folder that holds the weights: {folder.parent}")
        raise WeightsError(f"{folder}: there is no such folder")

    def fetch(self, progress: Progress | None = None) -> Path:
        """The same as `path`: there is nothing to fetch."""
        return self.path()

    def state(self) -> State:
        """Whether the folder exists."""
        try:
            path = self.path()
        except WeightsError:
            return State(self.name, "local folder", "missing", None, None)
        return State(self.name, "local folder", "present", path, sum(_sizes(path).values()))


def resolve(ref: str, packaged: Mapping[str, NamedWeights]) -> Weights:
    """The weights that `ref` names: a key of `packaged`, `hf:owner/repo[@revision]`, or a path to a folder.

    Nothing is fetched. Raises WeightsError where `ref` is none of these, or a path that does not exist.
    """
    if not ref.strip():
        raise WeightsError("the name of the weights is empty; give hf:owner/repo[@revision], or a path to a folder")
    if ref in packaged:
        return packaged[ref]
    if ref.startswith("hf:"):
        repo, _, revision = ref.removeprefix("hf:").partition("@")
        return HubWeights(repo, revision or None)
    if ref.startswith((".", "/", "~")) or Path(ref).is_dir():
        local = LocalWeights(ref)
        local.path()
        return local
    near = difflib.get_close_matches(ref, packaged, n=1, cutoff=0.45)
    if near:
        meant = f"did you mean {near[0]}?"
    elif ref.count("/") == 1:
        meant = f"did you mean hf:{ref}?"
    else:
        meant = f"known names: {', '.join(sorted(packaged)) or 'none'}"
    raise WeightsError(f"unknown weights {ref!r}; {meant} (else hf:owner/repo[@revision], or a path to a folder)")


def read_file(ref: str, name: str) -> bytes:
    """The small file `name` of the weights that `ref` names, `hf:owner/repo[@revision]` or a path to a folder.

    Nothing else of them is fetched. Raises WeightsError where there is none.
    """
    weights = resolve(ref, {})
    try:
        file = weights.file(name) if isinstance(weights, HubWeights) else weights.path() / name
        return file.read_bytes()
    except FileNotFoundError:
        raise WeightsError(f"{ref} has no {name}") from None
    except OSError as error:
        raise WeightsError(f"cannot read {name} of {ref}: {error.strerror or error}") from error


def fetch(weights: Iterable[Weights], progress: bool = True) -> list[Path]:
    """Fetch what is missing of `weights`, one after the other, and return the folders in order.

    `progress` draws a bar on stderr (plain lines where that is no terminal) for each that is not here yet.
    """
    folders = []
    for each in weights:
        with contextlib.closing(ProgressBar()) as bar:
            folders.append(each.fetch(bar if progress else None))
    return folders


def cache_folder() -> Path:
    """The root of our cache: OMNIFLOW_CACHE, else the user's cache folder of this platform."""
    chosen = os.environ.get("OMNIFLOW_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("omniflow")


class ProgressBar:
    """A `Progress` that draws one bar on stderr; a line for each step where there are no bytes, or no terminal.

    Nothing is drawn before the first report; `close` leaves the bar as it stands.
    """

    def __init__(self) -> None:
        self._step = ""
        self._bar: RichProgress | None = None

    def __call__(self, name: str, step: str, done_bytes: int = 0, total_bytes: int | None = None) -> None:
        if sys.stderr.isatty() and (self._bar is not None or total_bytes is not None):
            self._draw(f"{name}: {step}", done_bytes, total_bytes)
        elif step != self._step:
            sys.stderr.write(f"{name}: {step}\n")
        self._step = step

    def close(self) -> None:
        """Stop drawing."""
        if self._bar:
            self._bar.stop()

    def _draw(self, description: str, done_bytes: int, total_bytes: int | None) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.add_task(description, total=None)
            self._bar.start()
        task = self._bar.task_ids[0]
        self._bar.update(task, description=description)
        if total_bytes is not None:
            self._bar.update(task, completed=done_bytes, total=total_bytes)


class _BrokenDownload(Exception):
    """What came is not what is pinned; worth another try."""


def _silent(name: str, step: str, done_bytes: int = 0, total_bytes: int | None = None) -> None:
    """Stands in where nobody wants to be told."""


def _log_once(library: str) -> None:
    """Leave what `library` logs to the log of this process: with a handler of its own, each line would come twice."""
    logger = logging.getLogger(library)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)


def _pip_download(
    requirements: Path, target: Path, downloaded: Callable[[int, int], None], progress_bar: str = "raw"
) -> tuple[int, str]:
    """Run pip; returns its exit code and what it said. Its cache is left out: ours would hold the file twice."""
    options = "--no-deps --only-binary :all: --require-hashes --no-cache-dir --no-input --disable-pip-version-check"
    options += f" --retries 2 --progress-bar {progress_bar}"
    command = [sys.executable, "-m", "pip", "download", *options.split()]
    command += ["--dest", str(target), "--requirement", str(requirements)]
    said: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                words = line.split()
                if len(words) == 4 and words[0] == "Progress":
                    downloaded(int(words[1]), int(words[3]))
                else:
                    said.append(line)
            return pip.wait(), "".join(said)
        finally:
            pip.kill()  # does nothing to a process that has ended


def _last_error(said: str) -> str:
    errors = [line.strip() for line in said.splitlines() if "error" in line.lower()]
    return errors[-1].removeprefix("ERROR: ")[:200] if errors else "pip gave no reason"


def _append(wheel: Path, part: str, *sinks: Callable[[bytes], object]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part) as source:
            while block := source.read(1 << 20):
                for sink in sinks:
                    sink(block)
    except zipfile.BadZipFile as error:
        raise _BrokenDownload(f"{wheel.name}: {error}") from error


def _converted(convert: str, source: Path, target: Path) -> Path:
    module, _, function = convert.partition(":")
    target.mkdir()
    try:
        vars(importlib.import_module(module))[function](source, target)
    except ImportError as error:
        raise WeightsError(f"{convert} needs {error.name}: run `pip install 'omniflow[embedded]'`") from error
    return target


def _sizes(folder: Path) -> dict[str, int]:
    return {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }
