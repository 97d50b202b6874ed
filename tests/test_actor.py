"""Ports read from the signature of `run`, and what is no signature of an actor."""

from __future__ import annotations

import threading
import time
from typing import Any, Optional

import anyio
import msgspec
import pytest

from omniflow.actor import Actor, BatchPolicy, Context, Emit, Outputs, Port, Stream, batched, ports_of
from omniflow.errors import GraphError
from tests.waiting import HANGS_S


class A(msgspec.Struct, frozen=True):
    n: int = 0


class B(msgspec.Struct, frozen=True):
    n: int = 0


class Split(Outputs):
    first: A
    second: B | None
    third: list[int]


class Everything(Actor):
    async def run(self, a: A, b: B | None, more: Stream[A] | None, out: Emit[B], log: Emit[str], ctx: Context) -> A: ...


class Splits(Actor):
    def run(self, a: A) -> Split: ...


class Batched(Actor):
    @batched(max_size=8, max_wait_ms=2)
    def run(self, items: list[A]) -> list[B]: ...


class Silent(Actor):
    async def run(self, a: Stream[A]) -> None: ...


class Maybe(Actor):
    async def run(self, a: Optional[A]) -> A | B | None: ...  # noqa: UP045 - the old spelling works, too


class Child(Batched):
    """Inherits run, ports and policy."""


def test_every_kind_of_port() -> None:
    ports = ports_of(Everything)
    assert ports.inputs == (Port("a", "value", A), Port("b", "value", B, True), Port("more", "stream", A, True))
    assert ports.outputs == (Port("out", "stream", B), Port("log", "stream", str), Port("result", "value", A))
    assert (ports.context, ports.split) == ("ctx", False)


def test_outputs_are_one_port_a_field() -> None:
    ports = ports_of(Splits)
    assert ports.outputs == (
        Port("first", "value", A),
        Port("second", "value", B, True),
        Port("third", "value", list[int]),
    )
    assert ports.split


@pytest.mark.parametrize("actor", [Batched, Child])
def test_a_batched_run_has_the_ports_of_one_item(actor: type[Actor]) -> None:
    assert ports_of(actor).inputs == (Port("items", "value", A),)
    assert ports_of(actor).outputs == (Port("result", "value", B),)
    assert actor.batch == BatchPolicy(8, 2)


def test_an_actor_may_give_nothing() -> None:
    assert ports_of(Silent).outputs == ()


def test_optional_spellings_and_optional_results() -> None:
    ports = ports_of(Maybe)
    assert ports.inputs == (Port("a", "value", A, True),)
    assert ports.outputs[0].optional
    assert set(ports.outputs[0].type.__args__) == {A, B}


class NoRun(Actor):
    pass


class NoAnnotation(Actor):
    async def run(self, a) -> None: ...  # type: ignore[no-untyped-def]


class NoReturn(Actor):
    async def run(self, a: A): ...  # type: ignore[no-untyped-def]


class BareStream(Actor):
    async def run(self, a: Stream) -> None: ...  # type: ignore[type-arg]


class BareEmit(Actor):
    async def run(self, out: Emit) -> None: ...  # type: ignore[type-arg]


class Unknown(Actor):
    async def run(self, a: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821


class BatchedOfOne(Actor):
    @batched(max_size=2)
    def run(self, item: A) -> list[B]: ...


class BatchedOfTwo(Actor):
    @batched(max_size=2)
    def run(self, items: list[A], others: list[B]) -> list[B]: ...


class BatchedToNothing(Actor):
    @batched(max_size=2)
    def run(self, items: list[A]) -> None: ...


LISTS = "is @batched: it takes one list[...] and returns one list[...]"


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        (NoRun, "NoRun has no run(); an actor needs one"),
        (NoAnnotation, "NoAnnotation.run(): parameter 'a' has no annotation; a port needs a type"),
        (NoReturn, "NoReturn.run() has no return annotation; write `-> None` where it gives no result"),
        (BareStream, "BareStream.run(): 'a' needs an item type, like Stream[TextDelta]"),
        (BareEmit, "BareEmit.run(): 'out' needs an item type, like Emit[TextDelta]"),
        (
            Unknown,
            "Unknown.run(): name 'Missing' is not defined; types of ports must be importable from its module",
        ),
        (BatchedOfOne, f"BatchedOfOne.run() {LISTS}"),
        (BatchedOfTwo, f"BatchedOfTwo.run() {LISTS}"),
        (BatchedToNothing, f"BatchedToNothing.run() {LISTS}"),
    ],
)
def test_what_is_no_signature(actor: type[Actor], message: str) -> None:
    with pytest.raises(GraphError) as caught:
        ports_of(actor)
    assert str(caught.value) == message


def test_batched_belongs_on_run() -> None:
    # Python 3.11 wraps what __set_name__ raises.
    with pytest.raises((GraphError, RuntimeError)) as caught:

        class Wrong(Actor):
            @batched(max_size=2)
            def work(self, items: list[A]) -> list[B]: ...

    assert "@batched belongs on run(), not on Wrong.work()" in str(caught.value.__cause__ or caught.value)


def test_a_batch_has_at_least_one_item() -> None:
    with pytest.raises(GraphError, match=r"@batched\(max_size=0\): a batch has at least 1 item"):
        batched(max_size=0)


@pytest.mark.anyio
async def test_offload_runs_one_call_at_a_time_in_the_order_of_the_callers() -> None:
    class Blocking(Actor):
        pass

    actor, other = Blocking(), Blocking()
    running, most, order = 0, 0, []

    def work(number: int) -> int:
        nonlocal running, most
        assert threading.current_thread() is not threading.main_thread()
        running += 1
        most = max(most, running)
        order.append(number)
        time.sleep(0.002)
        running -= 1
        return number

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(actor.offload, work, number)
    assert (most, order) == (1, [0, 1, 2, 3, 4])
    meet = threading.Barrier(2, timeout=HANGS_S)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.offload, meet.wait)
        tasks.start_soon(other.offload, meet.wait)


@pytest.mark.anyio
async def test_offload_passes_results_and_errors_on() -> None:
    def fail() -> Any:
        raise ZeroDivisionError("x")

    assert await Silent().offload(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await Silent().offload(fail)
