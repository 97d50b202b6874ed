"""What goes wrong for one request ends that one, as what it was; others of the same host do not notice, or are told at
once that it has died.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any, Literal

import anyio
import msgspec
import numpy as np
import pytest

from omniflow.actor import Actor, Emit, Stream, batched
from omniflow.errors import (
    ActorBrokenError,
    InvalidInputError,
    ProtocolError,
    RequestError,
    StageDiedError,
    StageError,
    StartError,
)
from omniflow.graph import Graph, Restart
from omniflow.media import Options
from omniflow.planner import Cluster
from omniflow.runtime import Runtime
from tests.running import CPU, INLINE, pid_of, running, unstarted, up_again
from tests.waiting import HANGS_S

pytestmark = pytest.mark.anyio

BOTH = pytest.mark.parametrize("cluster", [INLINE, CPU], ids=["one process", "two"])


class Wish(msgspec.Struct, frozen=True):
    """What is to go wrong, or nothing: then it takes `seconds`."""

    what: str = ""
    seconds: float = 0.0


class Odd(msgspec.Struct, frozen=True):
    """A type with a rule of its own, which msgspec hears of where it decodes, and not where one is made of parts."""

    rate: int

    def __post_init__(self) -> None:
        assert self.rate > 0, "no rate"


class NoText(Exception):
    """Its text fails."""

    def __str__(self) -> str:
        raise AttributeError("half made")


async def something_cancelled() -> None:
    task = asyncio.get_running_loop().create_task(asyncio.sleep(9))
    task.cancel()
    await task


async def grant(wish: Wish) -> None:
    match wish.what:
        case "break":
            raise ActorBrokenError("the device is gone")
        case "surrogate":
            raise ValueError("half a character: \ud83d")
        case "param":
            raise InvalidInputError("no", param="x" * 200_000)
        case "no text":
            raise NoText
        case "exit":
            sys.exit(3)
        case "cancelled":
            await something_cancelled()
        case _:
            await anyio.sleep(wish.seconds)


class Genie(Actor):
    heavy = True

    async def run(self, wish: Wish) -> Wish:
        await grant(wish)
        return wish

    async def close(self) -> None:
        await anyio.sleep(1)  # as one that waits for its device


class Genies(Actor):
    heavy = True

    @batched(max_size=4)
    async def run(self, wish: list[Wish]) -> list[Wish]:
        for each in wish:
            await grant(each)
        return wish


def graph(actor: type[Actor]) -> Graph:
    found = Graph("wishes")
    stage = found.stage("genie", actor, restart=Restart("one_for_one", backoff_s=0.01))
    found.input(wish=stage)
    found.output(wish=stage)
    return found


async def ask(runtime: Runtime, wish: Wish) -> Any:
    """What becomes of it: a result or an error."""
    with anyio.fail_after(HANGS_S):
        try:
            return (await (await runtime.submit("wish", wish)).collect())["wish"]
        except RequestError as error:
            return error


@pytest.mark.parametrize("actor", [Genie, Genies])
@BOTH
@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("surrogate", StageError, r"ValueError: half a character: \\ud83d"),
        ("param", InvalidInputError, "no"),
        ("no text", StageError, "NoText"),
        ("exit", StageError, "3"),
        ("cancelled", StageError, r"run\(\) was cancelled from within"),
    ],
)
async def test_whatever_a_run_raises_ends_its_request_alone(
    actor: type[Actor], cluster: Cluster, what: str, kind: type[RequestError], text: str
) -> None:
    async with running(graph(actor), cluster) as runtime:
        found: list[Any] = []

        async def bystander() -> None:
            found.append(await ask(runtime, Wish(seconds=0.2)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bystander)
            await anyio.sleep(0.05)
            error = await ask(runtime, Wish(what))
        assert type(error) is kind
        with pytest.raises(kind, match=text):
            raise error
        assert error.stage == "genie"
        assert found == [Wish(seconds=0.2)]
        assert await ask(runtime, Wish()) == Wish()
        assert runtime.status().stages[0].restarts == 0


@BOTH
async def test_a_host_that_ends_itself_ends_all_that_it_runs(cluster: Cluster) -> None:
    """At once, not by their deadlines; and what comes meanwhile waits for the next one instead of it."""
    async with unstarted(graph(Genie), cluster) as runtime:
        found: list[Any] = []

        async def bystander() -> None:
            found.append(await ask(runtime, Wish(seconds=HANGS_S)))

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(bystander)
            await anyio.sleep(0.1)
            assert type(await ask(runtime, Wish("break"))) is StageError
            after = await ask(runtime, Wish())
        assert [type(each) for each in found] == [StageDiedError] * 2
        assert all("the device is gone" in each.message for each in found)
        if cluster is CPU:  # in one process nothing is started again
            assert after == Wish()
            await up_again(runtime)
        with anyio.fail_after(HANGS_S):
            while runtime.status().in_flight:
                await anyio.sleep(0.001)
        assert runtime._admission.num_taken == 0


class Maker(Actor):
    heavy = True

    async def run(self, wish: Wish) -> Odd:
        return msgspec.structs.force_setattr(odd := Odd(1), "rate", -1) or odd if wish.what else Odd(1)


class Taker(Actor):
    heavy = True

    async def run(self, odd: Odd) -> Wish:
        return Wish(str(odd.rate))


async def test_a_value_that_its_type_refuses_takes_no_other_along() -> None:
    found = Graph("odd")
    maker, taker = found.stage("maker", Maker), found.stage("taker", Taker)
    found.result(maker, taker)
    found.input(wish=maker)
    found.output(wish=taker)
    async with running(found, CPU) as runtime:
        outcomes: dict[int, Any] = {}

        async def asked(number: int) -> None:
            outcomes[number] = await ask(runtime, Wish("spoil" if number == 3 else ""))

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(asked, number)
        spoilt = outcomes.pop(3)
        assert type(spoilt) is ProtocolError
        assert "the value is refused by its type: AssertionError: no rate" in spoilt.message
        assert list(outcomes.values()) == [Wish("1")] * 7


class Note(msgspec.Struct):
    data: np.ndarray
    tag: bytes = b""


def note(size: int = 0, tag: Any = b"") -> Note:
    return Note(np.zeros(size, np.uint8), tag)


HOLES = memoryview(b"abcdef")[::2]
"""No one piece of memory, which is what a message takes."""


class Notes(Actor):
    heavy = True

    async def run(self, notes: Stream[Note]) -> Wish:
        return Wish(str(sum([1 async for _ in notes])))


class Sleeper(Actor):
    heavy = True

    async def run(self, note: Note) -> Wish:
        await anyio.sleep(HANGS_S if len(note.data) > 1000 else 0)
        return Wish(str(len(note.data)))


def sleepers(in_flight: Literal["fail", "replay"] = "fail") -> Graph:
    found = Graph("notes")
    again = Restart("one_for_one", backoff_s=0.01, in_flight=in_flight)
    a, b, notes = (
        *(found.stage(name, Sleeper, restart=again) for name in "ab"),
        found.stage("notes", Notes),
    )
    found.input(a=a, b=b, notes=notes)
    found.output(a=a, b=b, notes=notes)
    return found


@pytest.mark.parametrize("in_flight", ["fail", "replay"])
async def test_an_input_that_cannot_travel_takes_no_place_and_no_other_along(
    in_flight: Literal["fail", "replay"],
) -> None:
    async with running(sleepers(in_flight), CPU, max_in_flight=2) as runtime:
        other = await runtime.submit("a", note(2000), outputs=["a"])
        for entry, value in (("b", note(tag=HOLES)), ("notes", [note()] * 100 + [note(tag=HOLES)])):
            for _ in range(3):
                with (
                    anyio.fail_after(HANGS_S),
                    pytest.raises(InvalidInputError, match=f"input '{entry}' cannot travel"),
                ):
                    await (await runtime.submit(entry, value, outputs=[entry])).collect()
        found = await (await runtime.submit("notes", [note()] * 100, outputs=["notes"])).collect()
        assert found == {"notes": Wish("100")}
        await other.cancel()


async def test_half_a_character_in_an_id_or_an_option_is_refused() -> None:
    async with running(sleepers(), CPU, max_in_flight=2) as runtime:
        for _ in range(3):
            with pytest.raises(InvalidInputError, match="have to be whole characters"):
                await runtime.submit("b", note(), request_id="\ud800")
            with pytest.raises(InvalidInputError, match="have to be whole characters"):
                await runtime.submit("b", note(), options=Options(voice="\ud800"))
        found = await (await runtime.submit("b", note(), outputs=["b"], request_id="schön 🎈")).collect()
        assert found == {"b": Wish("0")}


async def test_a_caller_that_waits_for_room_to_enter_hears_that_its_stage_has_died() -> None:
    """Another stage holds the memory, and goes on."""
    async with running(sleepers(), CPU, shm_bytes=2**20) as runtime:
        other = await runtime.submit("b", note(600_000), outputs=["b"])
        found: list[Any] = []

        async def enter() -> None:
            try:
                await (await runtime.submit("a", note(600_000), outputs=["a"])).collect()
            except RequestError as error:
                found.append(error)

        with anyio.fail_after(HANGS_S / 2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(enter)
                while runtime.status().in_flight < 2:
                    await anyio.sleep(0.001)
                await anyio.sleep(0.05)
                os.kill(pid_of(runtime, "a"), signal.SIGKILL)
        assert [type(each) for each in found] == [StageDiedError]
        await other.cancel()


class Pieces(Actor):
    heavy = True

    async def run(self, wish: Wish, emit: Emit[Note]) -> None:
        size = int(wish.what)
        try:
            await emit.send(note(size))
        except RequestError:  # as it says: in pieces
            for _ in range(4):
                await emit.send(note(size // 4))


class Total(Actor):
    heavy = True

    async def run(self, notes: Stream[Note]) -> Wish:
        return Wish(str(sum([len(each.data) async for each in notes])))


async def test_a_send_that_fails_leaves_no_hole_in_its_stream() -> None:
    graph = Graph("pieces")
    pieces, total = graph.stage("pieces", Pieces), graph.stage("total", Total)
    graph.stream(pieces, total)
    graph.input(wish=pieces)
    graph.output(wish=total)
    async with running(graph, CPU, shm_bytes=2**20) as runtime:
        for size in ("1000", "2000000"):
            assert await ask(runtime, Wish(size)) == Wish(size)


class Hesitant(Actor):
    async def setup(self) -> None:
        await something_cancelled()

    async def run(self, wish: Wish) -> Wish:
        return wish


@BOTH
async def test_a_setup_that_is_cancelled_from_within_says_so(cluster: Cluster) -> None:
    with pytest.raises(StartError, match=r"setup\(\) was cancelled from within"):
        async with unstarted(graph(Hesitant), cluster):
            raise AssertionError("it started")
