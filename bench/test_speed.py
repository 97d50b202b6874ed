"""pytest-benchmark suites of the parts that every item and every request goes through.

    python -m pytest bench --benchmark-json=bench/results/parts.json

They run beside nothing and hold no target: bench/transports.py does. They are for comparing two commits.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from actors.piper.g2p import EnglishPhonemes
from bench.graphs import Ask, Step, row, running
from bench.links import ECHO, STREAM, TYPES, End
from bench.local import source_sink
from bench.workload import KB, Message, message
from omniflow.graph import Graph
from omniflow.mailbox import Credits, Mailbox
from omniflow.runtime import Runtime
from omniflow.transport.arrow_shm import ArrowShmLink, SharedMemory, socket_pair
from omniflow.transport.codec import Decoder, Encoder
from omniflow.transport.local_object import LocalObjectLink, local_pair

Bench = Callable[..., Any]


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as found:
        yield found


# -- mailbox -----------------------------------------------------------------------------------------------------------


def test_mailbox_filled_and_emptied(benchmark: Bench, runner: asyncio.Runner) -> None:
    """100 items in, 100 out, with their credits."""

    async def work() -> None:
        credits = Credits(100)
        box: Mailbox[int] = Mailbox(100, credits.give)
        for _ in range(100):
            seq = credits.try_take()
            box.put(seq, seq)
        for _ in range(100):
            await anext(box)

    benchmark(lambda: runner.run(work()))


# -- codec and transports ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["message", "64 KB"])
def test_encode(benchmark: Bench, kind: str) -> None:
    encoder, value = Encoder(), message() if kind == "message" else np.zeros(64 * KB, np.uint8)
    benchmark(encoder.encode, value)


def test_decode(benchmark: Bench) -> None:
    benchmark(Decoder(Message).decode, Encoder().encode(message()).body)


@pytest.fixture
def ends(runner: asyncio.Runner) -> Iterator[tuple[ArrowShmLink, ArrowShmLink]]:
    """A link, with both ends in this process: no wake-up in what is measured."""

    async def make() -> tuple[ArrowShmLink, ArrowShmLink]:
        one, other = socket_pair()
        memory = SharedMemory(2**24)
        return ArrowShmLink("b", End(), one, memory, TYPES), ArrowShmLink("a", End(), other, memory, TYPES)

    found = runner.run(make())
    yield found
    for end in found:
        end.close()


@pytest.mark.parametrize("kind", ["message", "64 KB copied", "64 KB loaned"])
def test_arrow_shm_there(
    benchmark: Bench, runner: asyncio.Runner, ends: tuple[ArrowShmLink, ArrowShmLink], kind: str
) -> None:
    """A value sent, delivered and released."""
    sender, receiver = ends
    copied = np.full(64 * KB, 255, np.uint8)
    copied[0] = 0

    async def work() -> None:
        for _ in range(20):
            if kind == "message":
                sender.send_item(STREAM + 1, 1, 0, 7)
            else:
                array = copied if kind == "64 KB copied" else sender.allocate(64 * KB)
                assert array is not None
                array[0], array[-1] = 0, 255
                sender.send_item(STREAM, 1, 0, array)
            sender.push()
            receiver.poll()
            await asyncio.sleep(0)
            sender.poll()

    TYPES[STREAM + 1] = int
    receiver._receiver = _Sink()  # type: ignore[assignment]
    benchmark(lambda: runner.run(work()))


class _Sink:
    """Takes what comes."""

    def on_item(self, *item: object) -> None: ...


def test_local_object_there(benchmark: Bench) -> None:
    link: LocalObjectLink
    link, _ = local_pair("a", "b", End(), _Sink())  # type: ignore[arg-type]
    one = message()
    benchmark(link.send_item, ECHO, 1, 0, one)


# -- graphs ------------------------------------------------------------------------------------------------------------


@contextmanager
def serving(runner: asyncio.Runner, graph: Graph, *, processes: bool) -> Iterator[Runtime]:
    """A runtime that is up; it is started and stopped in a task of its own."""
    up: asyncio.Future[Runtime] = runner.get_loop().create_future()
    stop = asyncio.Event()

    async def serve() -> None:
        async with running(graph, processes=processes) as runtime:
            up.set_result(runtime)
            await stop.wait()

    async def wait_for(what: asyncio.Future[Any]) -> Any:
        return await what

    serving = runner.get_loop().create_task(serve())
    yield runner.run(wait_for(up))
    stop.set()
    runner.run(wait_for(serving))


@pytest.mark.parametrize("num_stages", [1, 7])
def test_request_of_a_row_in_one_process(benchmark: Bench, runner: asyncio.Runner, num_stages: int) -> None:
    with serving(runner, row(num_stages, Step), processes=False) as runtime:

        async def request() -> None:
            await (await runtime.submit("note", message())).collect()

        benchmark(lambda: runner.run(request()))


def test_request_of_a_row_of_seven_processes(benchmark: Bench, runner: asyncio.Runner) -> None:
    with serving(runner, row(7, Step, isolate=True), processes=True) as runtime:

        async def request() -> None:
            await (await runtime.submit("note", message())).collect()

        benchmark(lambda: runner.run(request()))


def test_thousand_items_of_a_stream_in_one_process(benchmark: Bench, runner: asyncio.Runner) -> None:
    with serving(runner, source_sink(16), processes=False) as runtime:

        async def request() -> None:
            await (await runtime.submit("ask", Ask(1000))).collect()

        benchmark(lambda: runner.run(request()))


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["a" * 1000, "9" * 1000, "x^2" * 333, "word " * 200], ids=["letters", "digits", "powers", "words"]
)
def test_phonemes_of_1000_characters(benchmark: Bench, text: str) -> None:
    """A step of the talker's text: 0.01 to 0.09 s; tests/actors/test_piper_phonemes.py counts its work."""
    benchmark(EnglishPhonemes(), text)


# -- import ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statement", ["pass", "import omniflow"])
def test_a_new_interpreter(benchmark: Bench, statement: str) -> None:
    """What `import omniflow` adds, which loads no other library, may be 150 ms."""
    benchmark(subprocess.run, [sys.executable, "-c", statement], check=True)
