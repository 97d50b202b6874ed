from __future__ import annotations

from collections import OrderedDict

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniflow.server.kept import KeptValues

pytestmark = pytest.mark.anyio


class Maker:
    """Makes bytes, and counts how often; waits for `go` where it is told to, and fails so many times."""

    def __init__(self, value: bytes = b"value", *, waits: bool = False, failures: int = 0) -> None:
        self.calls = 0
        self.value, self.failures = value, failures
        self.go = anyio.Event()
        if not waits:
            self.go.set()

    async def __call__(self) -> bytes:
        self.calls += 1
        await self.go.wait()
        if self.calls <= self.failures:
            raise ValueError(f"failure {self.calls}")
        return self.value


def kept(max_entries: int = 4, max_bytes: int = 100) -> KeptValues[str, bytes]:
    return KeptValues(len, max_entries=max_entries, max_bytes=max_bytes)


async def settled(maker: Maker, calls: int = 1) -> None:
    """Everybody has asked, and waits."""
    while maker.calls < calls:
        await anyio.lowlevel.checkpoint()
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


async def test_eight_who_ask_at_once_make_it_once() -> None:
    values, maker, given_to = kept(), Maker(waits=True), []

    async def ask() -> None:
        given_to.append(await values.get("a", maker))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(ask)
        await settled(maker)
        maker.go.set()
    assert given_to == [b"value"] * 8 and maker.calls == 1
    assert await values.get("a", maker) == b"value" and maker.calls == 1


async def test_a_failure_ends_the_one_who_made_it_and_the_next_makes_it_anew() -> None:
    values, maker = kept(), Maker(waits=True, failures=2)
    ends: list[object] = []

    async def ask() -> None:
        try:
            ends.append(await values.get("a", maker))
        except ValueError as error:
            ends.append(str(error))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(ask)
        await settled(maker)
        maker.go.set()
    assert sorted(map(str, ends)) == sorted(["failure 1", "failure 2", *[str(b"value")] * 6])
    assert maker.calls == 3


async def test_whoever_makes_it_may_leave_and_the_others_get_it() -> None:
    values, maker, ends = kept(), Maker(waits=True), []

    async def ask() -> None:
        ends.append(await values.get("a", maker))

    leaving = anyio.CancelScope()

    async def lead() -> None:
        with leaving:
            await ask()

    async with anyio.create_task_group() as group:
        group.start_soon(lead)
        await settled(maker)
        for _ in range(3):
            group.start_soon(ask)
        await settled(maker)
        leaving.cancel()
        await settled(maker, calls=2)
        maker.go.set()
    assert ends == [b"value"] * 3 and maker.calls == 2


async def test_one_who_waits_may_leave_too() -> None:
    values, maker = kept(), Maker(waits=True)
    async with anyio.create_task_group() as group:
        group.start_soon(values.get, "a", maker)
        await settled(maker)
        with anyio.move_on_after(0):
            await values.get("a", maker)
        maker.go.set()
    assert maker.calls == 1 and "a" in values


async def test_what_is_too_large_is_given_to_all_who_wait_and_not_kept() -> None:
    values, maker, given_to = kept(max_bytes=4), Maker(waits=True), []

    async def ask() -> None:
        given_to.append(await values.get("a", maker))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(ask)
        await settled(maker)
        maker.go.set()
    assert given_to == [b"value"] * 3 and maker.calls == 1
    assert len(values) == values.num_bytes == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 7), st.booleans()), max_size=40))
async def test_it_is_a_least_recently_used_cache_within_its_bounds(asked: list[tuple[str, int, bool]]) -> None:
    """Against a plain model of one; every third or so of the makers fails."""
    values, model = kept(max_entries=3, max_bytes=12), OrderedDict[str, bytes]()
    for key, size, fails in asked:
        maker = Maker(b"x" * size, failures=int(fails))
        known = model.get(key)
        if known is None and fails:
            with pytest.raises(ValueError, match="failure"):
                await values.get(key, maker)
        else:
            assert await values.get(key, maker) == (maker.value if known is None else known)
            model[key] = maker.value if known is None else known
            model.move_to_end(key)
        assert maker.calls == (known is None)
        while len(model) > 3 or sum(map(len, model.values())) > 12:
            model.popitem(last=False)
        assert len(values) == len(model) and all(each in values for each in model)
        assert values.num_bytes == sum(map(len, model.values())) <= 12


async def test_one_who_waits_for_another_waits_no_longer_than_it_may() -> None:
    values, maker = kept(), Maker(waits=True)
    async with anyio.create_task_group() as group:
        group.start_soon(values.get, "a", maker)
        await settled(maker)
        assert await values.get("a", maker, within_s=0.01) is None
        maker.go.set()
    assert await values.get("a", maker, within_s=0.01) == b"value" and maker.calls == 1
