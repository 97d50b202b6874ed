"""Buffers that are allocated in shared memory and sent from where they lie."""

from __future__ import annotations

import gc
import threading
from typing import Any

import anyio
import numpy as np
import pytest

from omniflow.media import AudioChunk
from omniflow.transport.arrow_shm import ArrowShmLink, socket_pair

from ..waiting import until
from .echo import Inner
from .ends import Ends, Inbox

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
async def shm() -> Any:
    """1 MiB of shared memory."""
    found = Ends("arrow_shm", 2**20)
    yield found
    found.close()


def allocated(ends: Ends, size: int, dtype: Any = np.uint8) -> np.ndarray:
    """An array of `size` items in the memory of `a`, counting from 0."""
    memory = ends.a.allocate(size * np.dtype(dtype).itemsize)
    assert memory is not None
    array = memory.view(dtype)
    array[:] = np.arange(size)
    return array


def shared(one: np.ndarray, other: np.ndarray) -> bool:
    """True where writing to `one` shows in `other`: the two are the same memory."""
    before = int(other.reshape(-1)[0])
    one.reshape(-1)[0] += 1
    return int(other.reshape(-1)[0]) == before + 1


async def test_what_was_allocated_is_read_where_it_lies(shm: Ends) -> None:
    array = allocated(shm, 100_000, np.float32).reshape(200, 500)
    got = await shm.there(array)
    assert (got.shape, got.dtype, got[1, 1]) == ((200, 500), np.float32, 501.0)
    assert shared(array, got)
    assert not got.flags.writeable
    assert got.ctypes.data % 64 == 0


async def test_in_a_value_beside_what_is_copied(shm: Ends) -> None:
    array = allocated(shm, 30_000, np.float32)
    got = await shm.there([AudioChunk(array, 1), AudioChunk(np.full(20_000, 7, np.float32), 2)], list[AudioChunk])
    assert shared(array, got[0].samples)
    assert got[1].samples[-1] == 7
    assert shm.memory_a.pool.blocks_in_use == 2


async def test_beside_what_rides_in_the_message(shm: Ends) -> None:
    array = allocated(shm, 30_000, np.float32).reshape(-1, 3)
    got = await shm.there([Inner(array, ("a",), None), Inner(np.full((1, 3), 5.0), ("b",), None)], list[Inner])
    assert shared(array, got[0].rows)
    assert got[1].rows.tolist() == [[5.0, 5.0, 5.0]]
    assert shm.memory_a.pool.blocks_in_use == 1


async def test_a_part_of_it_and_a_part_that_is_not_in_one_piece(shm: Ends) -> None:
    array = allocated(shm, 40_000, np.int32)
    part = await shm.there(array[5000:9000])
    assert (part[0], len(part)) == (5000, 4000)
    assert shared(array[5000:], part)
    strided = await shm.there(array[::2])
    assert not shared(array[2:], strided[1:])
    assert strided[3] == 6


async def test_many_parts_of_it_name_its_block_once(shm: Ends) -> None:
    """A message that named it for each of them would not fit into a datagram."""
    rows = allocated(shm, 20_000, np.int32).reshape(-1, 2)
    got = await shm.there(list(rows), list[np.ndarray])
    assert [int(row[0]) for row in got] == list(range(0, 20_000, 2))
    assert shared(rows[7], got[7])
    assert shm.a.statistics().blocks_held == 2, "that of the rows, and one for the msgpack form"
    del got, rows
    await shm.returned()


async def test_of_very_many_blocks_some_are_copied() -> None:
    ends = Ends("arrow_shm", 2**26)
    arrays = [allocated(ends, 9000) for _ in range(600)]
    got = await ends.there(arrays, list[np.ndarray])
    assert [shared(*pair) for pair in zip(arrays, got, strict=True)] == [True] * 512 + [False] * 88
    assert all(array[100] == 100 for array in got)
    del got, arrays
    await ends.returned()
    ends.close()


async def test_a_tensor_over_it(shm: Ends) -> None:
    torch = pytest.importorskip("torch")
    array = allocated(shm, 30_000, np.float32)
    tensor = torch.from_numpy(array)[1:]
    got = await shm.there(tensor, torch.Tensor)
    assert (got[0], got.shape) == (1, (29_999,))
    assert shared(array[1:], got.numpy())


async def test_small_arrays_are_not_worth_a_block(shm: Ends) -> None:
    assert shm.a.allocate(100) is None
    assert Ends("local_object").a.allocate(2**20) is None


async def test_memory_returns_once_neither_side_has_it(shm: Ends) -> None:
    gc.disable()
    try:
        array = allocated(shm, 100_000)
        assert shm.memory_a.pool.blocks_in_use == 1
        got = await shm.there(array)
        del array
        await anyio.sleep(0.01)
        assert (got[3], shm.memory_a.pool.blocks_in_use, shm.a.statistics().blocks_held) == (3, 1, 1)
        del got
        await shm.returned()
        array = allocated(shm, 100_000)
        got = await shm.there(array)
        del got
        while shm.a.statistics().blocks_held:
            await anyio.sleep(0)
        assert shm.memory_a.pool.blocks_in_use == 1
        del array
        await shm.returned()
    finally:
        gc.enable()


async def test_what_is_never_sent_returns(shm: Ends) -> None:
    view = allocated(shm, 100_000)[10:20]
    assert shm.memory_a.pool.blocks_in_use == 1
    assert shm.memory_a.pool.find(view) is not None
    del view
    await shm.returned()


async def test_sent_twice_over_one_link_and_once_over_another(shm: Ends) -> None:
    left, right = socket_pair()
    inbox = Inbox()
    to_c = ArrowShmLink("c", Inbox(), left, shm.memory_a, shm.types)
    at_c = ArrowShmLink("a", inbox, right, shm.memory_b, shm.types)
    array = allocated(shm, 100_000)
    got = [await shm.there(array), await shm.there(array)]
    to_c.send_item(1, 1, 0, array)
    got.append((await inbox.item()).value)
    assert all(shared(array, each) for each in got)
    del array
    for held in (2, 1, 0):
        assert shm.memory_a.pool.blocks_in_use == 1
        got.pop(0)
        await until(lambda: shm.a.statistics().blocks_held + to_c.statistics().blocks_held == held)  # noqa: B023
    assert shm.memory_a.pool.blocks_in_use == 0
    to_c.close()
    at_c.close()


async def test_a_peer_that_dies_gives_back_what_it_held_as_often_as_it_held_it(shm: Ends) -> None:
    array = allocated(shm, 100_000)
    got = [await shm.there(array), await shm.there(array)]
    shm.b.close()
    await shm.at_a.closed.wait()
    assert shm.memory_a.pool.blocks_in_use == 1
    assert (array[7], got[0][7]) == (7, 7)
    del array
    await shm.returned()
    assert got[1][7] == 7


async def test_a_link_that_is_closed_holds_nothing(shm: Ends) -> None:
    array = allocated(shm, 100_000)
    shm.a.close()
    assert shm.a.send_item(1, 1, 0, array) is None
    del array
    await shm.returned()


async def test_where_all_memory_is_in_use_there_is_none(shm: Ends) -> None:
    held = [allocated(shm, 60_000) for _ in range(16)]
    assert shm.a.allocate(60_000) is None
    assert shm.a.allocate(2**21) is None
    del held[0]
    while shm.memory_a.pool.blocks_in_use == 16:
        await anyio.sleep(0)
    assert shm.a.allocate(60_000) is not None


async def test_who_allocates_does_not_overtake_those_who_wait(shm: Ends) -> None:
    held = [allocated(shm, 60_000) for _ in range(16)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shm.send, np.zeros(500_000, np.uint8))
        await anyio.wait_all_tasks_blocked()
        del held[0]
        await until(lambda: shm.memory_a.pool.blocks_in_use == 15)
        assert shm.a.allocate(60_000) is None
        held.clear()
        assert len((await shm.at_b.item()).value) == 500_000


async def test_in_threads_of_its_own(shm: Ends) -> None:
    """Arrays are allocated and dropped in threads, while the event loop takes and gives back blocks."""

    def churn() -> None:
        for _ in range(300):
            array = shm.a.allocate(60_000)
            if array is not None:
                array[0] = array[-1] = 1

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        got = await shm.there(np.full(60_000, 3, np.uint8))
        assert got[0] == got[-1] == 3
        del got
    await shm.returned()
    assert shm.memory_a.pool.find(np.zeros(1, np.uint8)) is None
    assert shm.memory_a.pool._loans == {}


async def test_a_block_of_the_next_owner_is_not_mistaken(shm: Ends) -> None:
    """Its slot was allocated, freed and taken again for a copy: nothing may be found there."""
    array = allocated(shm, 60_000)
    address = array.ctypes.data
    del array
    await shm.returned()
    block = shm.memory_a.pool.try_take(60_000)
    assert block is not None
    slab = shm.memory_a.pool.slab(block.slab)
    region = slab.bytes[block.offset : block.offset + 60_000]
    assert region.ctypes.data == address
    assert shm.memory_a.pool.find(region) is None
    shm.memory_a.pool.give_back(block.slab, block.slot, block.generation)
