"""Recordings: what a request was and what its edges carried, in a file of its own.

    with RecordingFolder(path) as folder:
        async with Runtime(plan, config, Recorder(plan, folder.keep)) as runtime:
            ...

A file holds what the caller sent, as it was sent: it is made for its owner's eyes only (mode 0600).
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from omniflow.digest import EdgeRecord, Packed, pack
from omniflow.errors import ErrorInfo, ProtocolError, RecordingError, RequestError
from omniflow.media import Options
from omniflow.messages import Recorded
from omniflow.observer import Observe
from omniflow.planner.plan import Plan

log = logging.getLogger("omniflow.recording")

SUFFIX = ".recording"
_OURS = re.compile(rf"\d{{8}}T\d{{6}}\.\d{{6}}Z-[\w-]*{re.escape(SUFFIX)}(\.part)?")
"""Names of our files, also of one that was being written when its process was killed; no other file is touched."""
_MAGIC, _FORMAT = b"omniflow recording ", 1
_CHECKSUM_BYTES = 16
_MOST_WAITING = 64
"""Recordings that wait for the disk; while it is slower than that, further requests are not recorded."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What was run, as its user named it: a graph reference, the settings that were set, the version of omniflow."""

    graph: str = ""
    settings: dict[str, Any] = {}
    omniflow: str = ""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `items` are what entered; `plan` is JSON (docs/explain.md); `error` is how it ended, if not well."""

    source: Source
    profile: str | None
    began: datetime.datetime
    request_id: str
    entry: str
    outputs: tuple[str, ...]
    options: Options
    deadline_s: float
    items: tuple[Packed, ...]
    plan: str
    edges: tuple[EdgeRecord, ...] = ()
    error: ErrorInfo | None = None


class Recorder:
    """The runtime's side: makes a `Recording` of each request, and hands it to `keep` once the request has ended.

    `given`: what stages are to give instead of running, in a replay. `keep` must not block.
    """

    def __init__(
        self,
        plan: Plan,
        keep: Callable[[Recording], None],
        *,
        source: Source | None = None,
        given: dict[str, tuple[Packed, ...]] | None = None,
    ) -> None:
        self.observe = Observe(given or {})
        self._keep = keep
        self._source = source or Source()
        self._profile = plan.graph.profile.name if plan.graph.profile else None
        self._plan = plan.to_json().decode()
        self._open: dict[int, Recording] = {}
        self._entered: dict[int, list[Packed]] = {}
        self._parts: dict[tuple[int, str], bytearray] = {}

    def seeded(self, options: Options) -> Options:
        """`options` with a seed: a request that names none gets one, so that it can be run again."""
        return options if options.seed is not None else msgspec.structs.replace(options, seed=secrets.randbits(63))

    def begin(
        self,
        number: int,
        request_id: str,
        entry: str,
        outputs: tuple[str, ...],
        options: Options,
        deadline_s: float,
        items: Sequence[object],
    ) -> None:
        """A request enters. One whose input has no wire form is not recorded."""
        try:
            packed = tuple(pack(item) for item in items)
        except ProtocolError as error:
            log.warning("request %s is not recorded: %s", request_id, error)
            return
        self._open[number] = Recording(
            source=self._source,
            profile=self._profile,
            began=datetime.datetime.now(datetime.UTC),
            request_id=request_id,
            entry=entry,
            outputs=outputs,
            options=options,
            deadline_s=deadline_s,
            items=packed,
            plan=self._plan,
        )

    def entered(self, number: int, item: object) -> None:
        """One more item of a request whose input comes bit by bit."""
        if number in self._open:
            self._entered.setdefault(number, []).append(pack(item))

    def heard(self, host: str, message: Recorded) -> None:
        """A host says, in one part or several, what left it for a request."""
        recording = self._open.get(message.request)
        if recording is None:
            return
        data = self._parts.setdefault((message.request, host), bytearray())
        data += message.part
        if message.last:
            del self._parts[message.request, host]
            edges = recording.edges + msgspec.msgpack.decode(data, type=tuple[EdgeRecord, ...])
            self._open[message.request] = msgspec.structs.replace(recording, edges=edges)

    def finish(self, number: int, error: RequestError | None) -> None:
        """The request has ended everywhere. What a host that died had not said stays unknown."""
        recording = self._open.pop(number, None)
        entered = self._entered.pop(number, [])
        for key in [key for key in self._parts if key[0] == number]:
            del self._parts[key]
        if recording is not None:
            items = (*recording.items, *entered)
            self._keep(msgspec.structs.replace(recording, items=items, error=error.info() if error else None))


# -- files -------------------------------------------------------------------------------------------------------------


def encode_recording(recording: Recording) -> bytes:
    """A recording as the bytes of a file."""
    payload = msgspec.msgpack.encode(recording)
    return _MAGIC + b"%d\n" % _FORMAT + _checksum(payload) + payload


def read_recording(path: Path) -> Recording:
    """The recording in a file. Raises RecordingError that says in one line what is wrong with it."""
    try:
        with path.open("rb") as file:
            head = file.readline(len(_MAGIC) + 20)
            found = re.fullmatch(re.escape(_MAGIC) + rb"(\d+)\n", head)
            if found is None:
                raise RecordingError(f"{path} is no recording of omniflow")
            if int(found[1]) != _FORMAT:
                raise RecordingError(
                    f"{path} is a recording of format {int(found[1])}, and this omniflow reads format {_FORMAT}; "
                    f"replay it with the omniflow that wrote it"
                )
            checksum, payload = file.read(_CHECKSUM_BYTES), file.read()
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from None
    if checksum != _checksum(payload):
        raise RecordingError(f"{path} is damaged: it was cut short, or changed after it was written")
    try:
        return msgspec.msgpack.decode(payload, type=Recording)
    except msgspec.DecodeError as error:
        raise RecordingError(f"{path} cannot be read by this omniflow: {error}") from None


def _checksum(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_CHECKSUM_BYTES).digest()


class RecordingFolder:
    """Keeps the newest recordings in a folder: at most `max_files`, of at most `max_bytes` together.

    What lies there already counts. A thread writes; leaving the context waits for it. A recording that cannot be
    written is logged and lost: requests are not held up or failed for it.
    """

    def __init__(self, path: Path, *, max_files: int = 1000, max_bytes: int = 2**30) -> None:
        self._path = path
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._writer = ThreadPoolExecutor(1, "recordings")
        self._waiting = threading.BoundedSemaphore(_MOST_WAITING)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            files = sorted(file for file in path.iterdir() if _OURS.fullmatch(file.name))
            self._files = deque((file, file.stat().st_size) for file in files)
        except OSError as error:
            raise RecordingError(f"cannot record to {path}: {error.strerror}") from None
        if not os.access(path, os.W_OK | os.X_OK):
            raise RecordingError(f"cannot record to {path}: Permission denied")
        self._num_bytes = sum(size for _, size in self._files)

    def __enter__(self) -> RecordingFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.shutdown()

    def keep(self, recording: Recording) -> None:
        """Write `recording`, soon; never waits."""
        if not self._waiting.acquire(blocking=False):
            log.warning("request %s is not recorded: the disk is too slow", recording.request_id)
            return
        self._writer.submit(self._write, recording).add_done_callback(self._written)

    def _written(self, write: Future[None]) -> None:
        self._waiting.release()
        error = write.exception()
        if error is not None:
            log.error("a recording is lost: %s", error)

    def _write(self, recording: Recording) -> None:
        data = encode_recording(recording)
        if len(data) > self._max_bytes:
            raise RecordingError(f"request {recording.request_id} takes {len(data)} bytes, more than all may take")
        safe_id = re.sub(r"[^\w-]", "_", recording.request_id, flags=re.ASCII)[:40]
        file = self._path / f"{recording.began:%Y%m%dT%H%M%S.%f}Z-{safe_id}{SUFFIX}"
        self._make_room(len(data))
        self._files.append((file, len(data)))
        self._num_bytes += len(data)
        part = file.with_name(file.name + ".part")
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(data)
            part.replace(file)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _make_room(self, num_bytes: int) -> None:
        while self._files and (len(self._files) >= self._max_files or self._num_bytes + num_bytes > self._max_bytes):
            oldest, size = self._files.popleft()
            oldest.unlink(missing_ok=True)
            self._num_bytes -= size
