"""A stage is killed while requests run: those of which nothing was seen run again, once, where it says so."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from omniflow.errors import CancelledError, DeadlineError, GraphError, RequestError, StageDiedError
from omniflow.graph import Restart, one_for_one
from omniflow.runtime import Runtime

from .graphs import errands
from .graphs.errands import Errand
from .running import CPU, pid_of, running, settled, up_again
from .waiting import HANGS_S

pytestmark = pytest.mark.anyio


class Scene:
    """A runtime, and the gate and the diary of its errands."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.runtime = runtime
        self.gate = folder / "gate"
        self.diary = folder / "diary"

    def errand(self, **what: Any) -> Errand:
        return Errand(str(self.diary), str(self.gate), **what)

    @property
    def notes(self) -> list[str]:
        return self.diary.read_text().split() if self.diary.exists() else []

    async def until(self, holds: Callable[[], bool]) -> None:
        with anyio.fail_after(HANGS_S):
            while not holds():
                await anyio.sleep(0.002)

    def kill(self, stage: str = "carry") -> None:
        os.kill(pid_of(self.runtime, stage), signal.SIGKILL)

    async def kill_at_gate(self, stage: str = "carry") -> None:
        await self.until(lambda: stage in self.notes)
        self.kill(stage)
        await self.until(lambda: self.runtime.status().state != "ready" or not self.is_up(stage))

    def is_up(self, stage: str) -> bool:
        return next(status.state for status in self.runtime.status().stages if status.name == stage) == "ready"

    async def submit(self, **what: Any) -> Any:
        how = {key: what.pop(key) for key in ("deadline_s", "outputs", "request_id") if key in what}
        how.setdefault("outputs", ["load", "says"])
        return await self.runtime.submit("errand", self.errand(**what), **how)


@asynccontextmanager
async def scene(folder: Path, restart: Restart | None = None, **config: Any) -> AsyncIterator[Scene]:
    async with running(errands.build(restart, str(folder)), CPU, **config) as runtime:
        yield Scene(runtime, folder)
        await settled(runtime)
        assert runtime._inputs.held_bytes == 0


async def error_of(reply: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await reply.collect()
    return caught.value


async def test_a_request_of_which_nothing_was_seen_runs_again(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        reply = await it.submit(load=b"12345", request_id="mine")
        other = await it.submit(outputs=["fetched"])
        await it.kill_at_gate()
        it.gate.touch()
        assert await reply.collect() == {"load": 5, "says": []}
        assert reply.request_id == "mine"
        assert await other.collect()
        assert (it.notes.count("carry"), it.notes.count("fetch")) == (2, 3)
        assert it.runtime.status().stages[1].restarts == 1


async def test_what_had_arrived_but_was_not_taken_comes_once(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        reply = await it.submit(says=3)
        await it.until(lambda: len(reply._items) == 3)
        await it.kill_at_gate()
        it.gate.touch()
        assert await reply.collect() == {"load": 0, "says": [0, 1, 2, 0, 1, 2]}


async def test_a_request_of_which_the_client_has_something_fails(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        reply = await it.submit(says=3)
        assert (await anext(reply)).value == 0
        assert it.runtime._inputs.held_bytes == 0
        await it.kill_at_gate()
        error = await error_of(reply)
        assert type(error) is StageDiedError
        assert str(error) == "stage 'carry': its process died (killed by SIGKILL); it is being restarted"
        assert it.notes.count("carry") == 1


async def test_a_stage_that_says_fail_fails(tmp_path: Path) -> None:
    async with scene(tmp_path, one_for_one(backoff_s=0.01)) as it:
        reply = await it.submit()
        await it.kill_at_gate()
        assert type(await error_of(reply)) is StageDiedError


async def test_only_the_stage_that_says_replay_is_replayed(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        reply = await it.submit()
        await it.until(lambda: "carry" in it.notes)
        it.gate.touch()
        assert await reply.collect()
        it.gate.unlink()
        reply = await it.submit(outputs=["load"])
        await it.until(lambda: it.notes.count("carry") == 2)
        await it.until(lambda: "fetch" not in reply.open_hosts)  # it has done its part, and said so
        it.kill("fetch")
        await it.until(lambda: not it.is_up("fetch"))
        it.gate.touch()
        assert await reply.collect() == {"load": 0}
        assert it.notes.count("carry") == 2


async def test_inputs_are_held_up_to_a_bound_of_bytes(tmp_path: Path) -> None:
    async with scene(tmp_path, replay_bytes=3000) as it:
        large = await it.submit(load=bytes(3000))
        small = [await it.submit(load=bytes(1000)) for _ in range(2)]
        assert 2000 < it.runtime._inputs.held_bytes <= 3000
        await it.until(lambda: it.notes.count("carry") == 3)
        await it.kill_at_gate()
        it.gate.touch()
        assert type(await error_of(large)) is StageDiedError
        assert [await reply.collect() for reply in small] == [{"load": 1000, "says": []}] * 2


async def test_a_request_that_kills_the_stage_does_so_twice_and_no_more(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        assert type(await error_of(await it.submit(kills=True))) is StageDiedError
        assert it.notes.count("carry") == 2
        await up_again(it.runtime)
        assert it.runtime.status().stages[1].restarts == 2


async def test_a_long_stream_of_inputs_enters_again(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        reply = await it.runtime.submit("weights", [1, 2, -1, *range(1000)])
        await it.kill_at_gate("weigh")
        it.gate.touch()
        assert await reply.collect() == {"total": 499_503}
        assert it.notes.count("weigh") == 2


async def test_the_deadline_holds_while_the_stage_restarts(tmp_path: Path) -> None:
    async with scene(tmp_path, one_for_one(backoff_s=30, in_flight="replay")) as it:
        reply = await it.submit(deadline_s=1.0)
        await it.kill_at_gate()
        error = await error_of(reply)
        assert isinstance(error, DeadlineError)
        assert str(error) == "stage 'carry': the deadline of 1 s passed while it was being restarted"


async def test_a_stage_that_takes_too_long_to_restart_fails_its_requests(tmp_path: Path) -> None:
    async with scene(tmp_path, one_for_one(backoff_s=30, in_flight="replay"), restart_wait_s=0.05) as it:
        reply = await it.submit()
        await it.kill_at_gate()
        assert type(await error_of(reply)) is StageDiedError


async def test_a_request_that_waits_for_the_restart_can_be_cancelled(tmp_path: Path) -> None:
    async with scene(tmp_path, one_for_one(backoff_s=0.2, in_flight="replay")) as it:
        reply = await it.submit()
        await it.kill_at_gate()
        await reply.cancel()
        assert isinstance(await error_of(reply), CancelledError)
        await settled(it.runtime)
        await up_again(it.runtime)
        it.gate.touch()
        assert await (await it.submit()).collect()
        assert it.notes.count("carry") == 2


async def test_a_stage_that_is_given_up_fails_its_requests(tmp_path: Path) -> None:
    async with scene(tmp_path, Restart("one_for_one", max_restarts=0, in_flight="replay")) as it:
        reply = await it.submit()
        await it.kill_at_gate()
        assert type(await error_of(reply)) is StageDiedError


async def test_where_all_hosts_restart_a_request_waits_for_all(tmp_path: Path) -> None:
    async with scene(tmp_path, Restart("one_for_all", backoff_s=0.01, in_flight="replay")) as it:
        reply = await it.submit()
        await it.kill_at_gate()
        it.gate.touch()
        assert await reply.collect() == {"load": 0, "says": []}
        assert it.notes.count("fetch") == it.notes.count("carry") == 2


async def test_drain_waits_for_what_runs_again(tmp_path: Path) -> None:
    async with scene(tmp_path, one_for_one(backoff_s=0.1, in_flight="replay")) as it:
        reply = await it.submit()
        await it.kill_at_gate()
        it.gate.touch()
        await it.runtime.drain()
        assert await reply.collect() == {"load": 0, "says": []}


def test_a_stage_that_is_not_restarted_cannot_replay() -> None:
    with pytest.raises(GraphError) as caught:
        errands.build(Restart(in_flight="replay")).spec()
    assert str(caught.value) == (
        "stage 'carry': in_flight='replay' needs a restart strategy that restarts it, one_for_one(in_flight='replay')"
    )
