"""What every transport promises, run on each of them."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from omniflow.errors import ProtocolError, UnavailableError
from omniflow.media import AudioChunk
from omniflow.messages import Beat, Cancel, Connect, Credit
from omniflow.transport import arrow_shm
from omniflow.transport.arrow_shm import ArrowShmLink

from ..files import few_files
from ..waiting import HANGS_S
from .echo import TYPES, Inner
from .ends import KINDS, Ends

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]


class Nested(msgspec.Struct, frozen=True):
    text: str
    data: bytes
    inner: Inner
    many: list[Inner]
    nothing: None
    pair: tuple[int, float]


@pytest.fixture(params=KINDS)
async def ends(request: pytest.FixtureRequest) -> Any:
    async with Ends.opened(request.param) as found:
        yield found


@pytest.fixture
async def shm() -> Any:
    """Only Arrow shared memory has blocks: 1 MiB of it, so that it runs out soon."""
    found = Ends("arrow_shm", 2**20)
    yield found
    found.close()


def inner(num_rows: int) -> Inner:
    return Inner(np.arange(num_rows * 3, dtype=np.float32).reshape(num_rows, 3), ("a", "ä"), {"x": [1, 2], "": []})


def assert_same(value: Any, expected: Any) -> None:
    """Equal, down to types, dtypes and shapes."""
    assert type(value) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
        assert value.tobytes() == expected.tobytes()
    elif isinstance(expected, msgspec.Struct):
        for name in expected.__struct_fields__:
            assert_same(msgspec.structs.asdict(value)[name], msgspec.structs.asdict(expected)[name])
    elif isinstance(expected, (list, tuple)):
        assert len(value) == len(expected)
        for one, other in zip(value, expected, strict=True):
            assert_same(one, other)
    else:
        assert value == expected


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [0, 3, 5000])
async def test_nested_struct(ends: Ends, num_rows: int) -> None:
    value = Nested("hello", b"\0\xff", inner(num_rows), [inner(1), inner(num_rows)], None, (1, 0.5))
    assert_same(await ends.there(value), value)


DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">f4", "M8[ns]", "U3"]


@pytest.mark.parametrize("shape", [(7,), (5, 3, 1000)])
@pytest.mark.parametrize("dtype", DTYPES)
async def test_numpy_dtypes(ends: Ends, dtype: str, shape: tuple[int, ...]) -> None:
    value = (np.arange(np.prod(shape)) % 100).astype("i8").astype(dtype).reshape(shape)
    assert_same(await ends.there(value), value)


@pytest.mark.parametrize(
    "value",
    [
        np.array(2.5),
        np.empty((0, 4), np.float32),
        np.arange(24).reshape(4, 6)[::2, ::3],
        np.asfortranarray(np.arange(20_000.0).reshape(200, 100)),
        np.broadcast_to(np.float32(1), (3, 4)),
    ],
    ids=["0-d", "empty", "strided", "fortran", "broadcast"],
)
async def test_numpy_layouts(ends: Ends, value: np.ndarray) -> None:
    assert_same(await ends.there(value), value)


TORCH_DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
TORCH_DTYPES += ["complex64", "float8_e4m3fn"]


@pytest.mark.parametrize("size", [5, 20_000])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
async def test_torch_dtypes(ends: Ends, dtype: str, size: int) -> None:
    torch = pytest.importorskip("torch")
    value = (torch.arange(size) % 50).to(vars(torch)[dtype])
    got = await ends.there(value, torch.Tensor)
    assert (got.dtype, got.shape) == (value.dtype, value.shape)
    assert torch.equal(got.view(torch.uint8), value.view(torch.uint8))


async def test_torch_layouts(ends: Ends) -> None:
    torch = pytest.importorskip("torch")
    square = torch.arange(40_000.0).reshape(200, 200)
    values = [torch.tensor(1.5), torch.empty(0, 3), square.t(), square[::2, 1::3], square.to(torch.complex64).conj()]
    # One element, and none, of which torch says that they are contiguous whatever the stride.
    values += [square[:1, 3], square[:1, :1, None], square[5:5, 3], torch.arange(9)[4::5], square[0, :1].expand(1)]
    for value in values:
        got = await ends.there(value, torch.Tensor)
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        assert torch.equal(got, value)
    assert not (await ends.there(torch.ones(3, requires_grad=True).detach(), torch.Tensor)).requires_grad


@pytest.mark.parametrize("num_rows", [3, 50_000])
async def test_record_batch(ends: Ends, num_rows: int) -> None:
    pa = pytest.importorskip("pyarrow")
    value = pa.record_batch({"n": pa.array(range(num_rows)), "s": pa.array([str(n) for n in range(num_rows)])})
    got = await ends.there(value, pa.RecordBatch)
    assert got.equals(value)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (None, type(None)),
        ({}, dict[str, int]),
        ({"a": [1, 2], "b": []}, dict[str, list[int]]),
        ((1, "x", None), tuple[int, str, None]),
        ([[], [b""]], list[list[bytes]]),
        ("ä" * 100_000, str),
        ("", str),
        (os.urandom(500_000), bytes),
        (b"x" * 40_000, bytes),
        (2**63, int),
        ([f"word{n}" for n in range(20_000)], list[str]),
    ],
    ids=["None", "{}", "dict", "tuple", "lists", "200 KB", "''", "500 KB", "40 KB", "2**63", "20,000 strings"],
)
async def test_plain_values(ends: Ends, value: Any, hint: Any) -> None:
    assert_same(await ends.there(value, hint), value)


async def test_large_text_beside_large_arrays(ends: Ends) -> None:
    """The text and the arrays share one block."""
    value = Nested("ä" * 30_000, b"y" * 70_000, inner(9000), [inner(1)], None, (1, 2.0))
    assert_same(await ends.there(value), value)


class Views(msgspec.Struct, frozen=True):
    raw: msgspec.Raw
    view: memoryview


@pytest.mark.parametrize("size", [50, 100_000])
async def test_fields_that_are_views_of_bytes_stay_what_they_are(ends: Ends, size: int) -> None:
    """Whatever comes after them: what they lie in is not used again as long as they live."""
    values = [b"x" * size, b"x" * size, b"y" * size]
    got = [await ends.there(Views(msgspec.Raw(msgspec.msgpack.encode(each)), memoryview(each))) for each in values]
    assert [msgspec.msgpack.decode(each.raw) for each in got] == values
    assert [bytes(each.view) for each in got] == values


async def test_arrays_of_a_receiver_are_read_only(shm: Ends) -> None:
    for size in (10, 100_000):
        got = await shm.there(np.zeros(size, np.float32))
        assert not got.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            got[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            got.flags.writeable = True


# -- order, control, closing -------------------------------------------------------------------------------------------


async def test_order_of_small_and_large_items_and_messages(ends: Ends) -> None:
    """Far more than a socket holds, while the receiver does not read at all."""
    ends.types[1] = np.ndarray
    sizes = [1, 100, 5000, 20_000, 3000]

    async def send_all() -> None:
        for number in range(1500):
            await ends.send(np.full(sizes[number % 5], number, np.int32), np.ndarray, seq=number)
            if number % 100 == 0:
                ends.a.send(Credit(1, number, 1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send_all)
        for number in range(1500):
            item = await ends.at_b.item()
            assert (item.edge, item.request, item.seq) == (1, 7, number)
            assert item.value[0] == item.value[-1] == number
            assert len(item.value) == sizes[number % 5]
    while len(ends.at_b.order) < 1515:
        await ends.at_b.news()
    expected: list[object] = []
    for number in range(1500):
        expected += [number, Credit(1, number, 1)] if number % 100 == 0 else [number]
    assert ends.at_b.order == expected


async def test_both_ways_at_once(ends: Ends) -> None:
    ends.types[1] = ends.types[2] = np.ndarray

    async def flood(link: Any, edge: int) -> None:
        for number in range(300):
            pending = link.send_item(edge, 1, number, np.full(4000, number, np.int32))
            if pending is not None:
                await pending

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(flood, ends.a, 1)
        tasks.start_soon(flood, ends.b, 2)
        for number in range(300):
            assert (await ends.at_b.item()).value[0] == number
            assert (await ends.at_a.item()).value[0] == number


async def test_control_messages_never_wait(ends: Ends) -> None:
    before = ends.a.statistics().sent, ends.b.statistics().received
    for number in range(5000):
        ends.a.send(Cancel(number))
    await ends.a.flushed()
    assert ends.a.statistics().backlog == 0
    while len(ends.at_b.messages) < 5000:
        await ends.at_b.news()
    assert ends.at_b.messages == [Cancel(number) for number in range(5000)]
    assert ends.a.statistics().sent == before[0] + 5000
    assert ends.b.statistics().received == before[1] + 5000


async def test_descriptors_arrive_open_and_once(shm: Ends) -> None:
    left, right = socket.socketpair()
    shm.a.send(Connect("c"), (left.detach(),))
    while not shm.at_b.messages:
        await shm.at_b.news()
    (descriptor,) = shm.at_b.descriptors
    with right, socket.socket(fileno=descriptor) as received:
        received.send(b"hello")
        assert right.recv(10) == b"hello"


@pytest.mark.parametrize("kind", ["local_object", "arrow_shm"])
async def test_a_closed_link_closes_descriptors(kind: str) -> None:
    ends = Ends(kind)
    ends.close()
    left, right = socket.socketpair()
    ends.a.send(Connect("c"), (left.detach(),))
    with right:
        assert right.recv(1) == b"", "the other end is open"


async def test_close_is_seen_by_the_peer_after_everything_before_it(ends: Ends) -> None:
    for number in range(5):
        await ends.send(number, int, seq=number)
    ends.a.close()
    await ends.at_b.closed.wait()
    assert [item.value for item in ends.at_b.items] == list(range(5))
    assert not ends.at_a.closed.is_set()
    ends.b.send(Beat("", 0.0))
    assert ends.b.send_item(1, 1, 0, 5) is None
    ends.a.close()
    ends.b.close()


async def test_views_outlive_the_link(shm: Ends) -> None:
    got = await shm.there(np.arange(50_000))
    shm.close()
    assert got[-1] == 49_999


async def test_a_value_of_the_wrong_type_is_told_to_the_receiver_and_harms_nothing_else(shm: Ends) -> None:
    await shm.send(AudioChunk(np.zeros(9000, np.float32), 24000), Inner)
    await shm.send("text", int, edge=2)
    await shm.send([np.zeros(2)], list[Inner], edge=3)
    await shm.send(5, int, edge=4)
    assert (await shm.at_b.item()).value == 5
    assert [(edge, request, error.kind) for edge, request, error in shm.at_b.bad] == [
        (1, 7, "ProtocolError"),
        (2, 7, "ProtocolError"),
        (3, 7, "ProtocolError"),
    ]
    assert "Expected `int`, got `str`" in shm.at_b.bad[1][2].message
    await shm.returned()


class Large(msgspec.Struct, frozen=True):
    """What there is no room for where it arrives, as torch says, or Python."""

    rows: np.ndarray
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise RuntimeError("CUDA out of memory.\nOf the allocated memory") if self.number == -1 else MemoryError


async def test_what_there_is_no_room_for_ends_its_request_alone(shm: Ends) -> None:
    """What came in the same datagram arrives, and its memory goes back."""
    shm.types |= {1: Large, 2: int}
    shm.a.send(Credit(1, 1, 1))  # leaves alone, and the rest of this turn together
    for request, number in enumerate((-1, -2)):
        value = Large(np.zeros(30_000), 0)
        msgspec.structs.force_setattr(value, "number", number)
        assert shm.a.send_item(1, request, 0, value) is None
    shm.a.send_item(2, 7, 0, 5)
    shm.a.send(Cancel(9))
    while Cancel(9) not in shm.at_b.messages:
        await shm.at_b.news()
    assert [(request, error.kind, error.message) for _edge, request, error in shm.at_b.bad] == [
        (0, "UnavailableError", "a value cannot be taken in here: RuntimeError: CUDA out of memory."),
        (1, "UnavailableError", "a value cannot be taken in here: MemoryError: "),
    ]
    assert (await shm.at_b.item()).value == 5
    await shm.returned()


async def test_a_receiver_without_memory_for_copies_holds_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise MemoryError("Unable to allocate 117. KiB")

    ends = Ends("arrow_shm", 2**20, keeps_views=False)
    monkeypatch.setattr(arrow_shm, "_copied", fail)
    array = ends.a.allocate(FULL)
    await ends.send([np.zeros(FULL, np.uint8), array], list[np.ndarray])
    while not ends.at_b.bad:
        await ends.at_b.news()
    assert "MemoryError: Unable to allocate" in ends.at_b.bad[0][2].message
    del array
    await ends.returned()
    ends.close()


async def test_a_type_that_cannot_be_decoded_is_told_to_the_receiver(shm: Ends) -> None:
    await shm.send(inner(1), Inner | AudioChunk)
    await shm.send(5, int, edge=2)
    assert (await shm.at_b.item()).value == 5
    assert "contains multiple Struct types" in shm.at_b.bad[0][2].message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([object()]), "an array of dtype object cannot travel; use numbers"),
        (np.zeros(2, [("x", "f4")]), r"an array of dtype \[\('x', '<f4'\)\] cannot travel"),
        (object(), "a value of type object cannot travel between processes"),
        (lambda: 0, "a value of type function cannot travel"),
        (2**70, "list cannot travel between processes: can.t serialize ints"),
        ("\ud800", "list cannot travel between processes: .*surrogates"),
        (np.ma.array([1, 2], mask=[True, False]), "a masked array cannot travel; send its data and its mask"),
        (functools.reduce(lambda inner, _: [inner], range(5000), []), "list cannot travel between processes: max"),
    ],
    ids=["object array", "records", "object", "function", "2**70", "surrogate", "masked", "deep"],
)
async def test_what_cannot_travel_is_refused_at_the_sender(shm: Ends, value: object, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        shm.a.send_item(1, 1, 0, [np.zeros(9), value])
    assert await shm.there(1) == 1


async def test_numbers_that_numpy_has_no_name_for_are_refused(shm: Ends) -> None:
    """Their bytes would arrive, as bytes."""
    dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(ProtocolError, match="an array of dtype bfloat16 cannot travel"):
        shm.a.send_item(1, 1, 0, np.zeros(3, dtypes.bfloat16))


@pytest.mark.parametrize("kind", ["arrow_shm", "cuda_ipc", "nccl"])
async def test_tensors_that_are_not_plain_are_refused_at_the_sender(kind: str) -> None:
    """Also those that would go by a lane: once its message has left, a value cannot be refused."""
    torch = pytest.importorskip("torch")
    square = torch.eye(3)
    values = [square.to_sparse(), square.to("meta")]
    async with Ends.opened(kind) as ends:
        for value in values:
            with pytest.raises(ProtocolError, match="tensor cannot travel; send a plain one"):
                ends.a.send_item(1, 1, 0, [np.zeros(9), value])
        assert torch.equal(await ends.there(square, torch.Tensor), square)


async def test_a_control_message_that_is_too_large_is_refused(shm: Ends) -> None:
    with pytest.raises(ProtocolError, match=r"a Connect message of 20000\d bytes is too large"):
        shm.a.send(Connect("x" * 200_000))


# -- memory ------------------------------------------------------------------------------------------------------------


def mapped(address: int) -> bool:
    """True where `address` lies in one of our memfds."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(text, 16) for text in line.split()[0].split("-"))
            if begin <= address < end:
                return "memfd:omniflow-slab" in line
    return False


async def test_no_copy_on_the_receiving_side(shm: Ends) -> None:
    torch, pa = pytest.importorskip("torch"), pytest.importorskip("pyarrow")
    array = await shm.there(np.arange(20_000))
    tensor = await shm.there(torch.arange(20_000), torch.Tensor)
    batch = await shm.there(pa.record_batch({"n": pa.array(range(20_000))}), pa.RecordBatch)
    addresses = [array.ctypes.data, tensor.data_ptr(), batch.column(0).buffers()[1].address]
    assert [mapped(address) for address in addresses] == [True, True, True]
    assert addresses[0] % 64 == addresses[1] % 64 == addresses[2] % 8 == 0
    assert shm.a.statistics().blocks_held == 3
    assert torch.from_dlpack(tensor).data_ptr() == tensor.data_ptr()


async def test_local_objects_are_handed_over_themselves() -> None:
    ends = Ends("local_object")
    value = inner(10)
    assert await ends.there(value) is value
    ends.close()


async def test_a_block_returns_when_its_last_view_dies(shm: Ends) -> None:
    got = await shm.there(inner(5000))
    rows = got.rows[10:20].reshape(-1)
    del got
    assert shm.a.statistics().blocks_held == shm.memory_a.pool.blocks_in_use == 1
    del rows
    await shm.returned()
    assert shm.a.statistics().blocks_held == 0


async def test_views_of_other_libraries_keep_a_block(shm: Ends) -> None:
    torch, pa = pytest.importorskip("torch"), pytest.importorskip("pyarrow")
    array = await shm.there(np.arange(20_000))
    tensor = torch.from_dlpack(torch.from_numpy(array)[5:].view(-1))
    del array
    buffer = pa.py_buffer(await shm.there(np.arange(10_000)))
    column = (await shm.there(pa.record_batch({"n": pa.array(range(20_000))}), pa.RecordBatch)).column(0)[3:]
    assert (int(tensor[0]), buffer.size, column[0].as_py()) == (5, 80_000, 3)
    assert shm.memory_a.pool.blocks_in_use == 3
    del tensor, buffer, column
    await shm.returned()


async def test_a_view_may_die_in_another_thread(shm: Ends) -> None:
    held = [await shm.there(np.arange(20_000)) for _ in range(3)]
    assert shm.memory_a.pool.blocks_in_use == 3
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    await shm.returned()


async def test_blocks_return_without_the_garbage_collector(shm: Ends) -> None:
    gc.disable()
    try:
        got = await shm.there(inner(9000))
        seen = weakref.ref(got.rows)
        del got
        assert seen() is None
        await shm.returned()
    finally:
        gc.enable()


async def test_a_sender_holds_no_value_that_was_sent(shm: Ends) -> None:
    """Not even until the garbage collector comes by: a value may itself be a view that holds a block."""
    gc.disable()
    try:
        for size in (10, 100_000):
            value = np.zeros(size)
            seen = weakref.ref(value)
            await shm.send(value)
            del value
            assert seen() is None
    finally:
        gc.enable()


async def test_blocks_are_used_again(shm: Ends) -> None:
    addresses = set()
    for number in range(50):
        got = await shm.there(np.full(10_000, number))
        addresses.add(got.ctypes.data)
        del got
        await shm.returned()
    assert len(addresses) == 1


FULL, EIGHT = 120_000, 8
"""So many values of so many bytes fill the memory; each is too large to ride in a message."""


async def test_a_sender_waits_for_memory_and_goes_on(shm: Ends) -> None:
    shm.types[1] = np.ndarray
    held = [await shm.there(np.full(FULL, number, np.uint8)) for number in range(EIGHT)]
    pending = shm.a.send_item(1, 7, 8, np.full(FULL, 8, np.uint8))
    assert pending is not None
    with anyio.move_on_after(0) as scope:
        await anyio.sleep(0)
    assert scope.cancelled_caught
    async with anyio.create_task_group() as tasks:

        async def finish() -> None:
            await pending

        tasks.start_soon(finish)
        await anyio.wait_all_tasks_blocked()
        assert not shm.at_b.items
        del held[3]
        assert (await shm.at_b.item()).value[0] == 8
    assert [array[0] for array in held] == [number for number in range(EIGHT) if number != 3]


async def test_what_fits_into_a_message_never_waits_for_memory(shm: Ends) -> None:
    """A receiver may hold as many as it likes: they stop taking blocks once there are none."""
    held = [await shm.there(np.full(5000, number)) for number in range(100)]
    assert shm.memory_a.pool.blocks_in_use == 16
    assert [array[0] for array in held] == list(range(100))
    assert (await shm.there(["x" * 900] * 100, list[str]))[99] == "x" * 900
    del held
    await shm.returned()


async def test_a_receiver_may_take_copies_instead_of_views() -> None:
    ends = Ends("arrow_shm", 2**20, keeps_views=False)
    held = [await ends.there(np.full(FULL, number, np.uint8)) for number in range(3 * EIGHT)]
    assert [array[-1] for array in held] == list(range(3 * EIGHT))
    assert not mapped(held[0].ctypes.data)
    assert not held[0].flags.writeable
    await ends.returned()
    ends.close()


async def test_waiting_senders_are_served_in_their_order(shm: Ends) -> None:
    held = [await shm.there(np.full(FULL, number, np.uint8)) for number in range(EIGHT)]
    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(shm.send, np.full(FULL, number, np.uint8))
            await anyio.wait_all_tasks_blocked()
        for number in range(3):
            held.pop()
            item = await shm.at_b.item()
            assert item.value[0] == number
            held.insert(0, item.value)


async def test_a_cancelled_sender_loses_no_memory_and_blocks_nobody(shm: Ends) -> None:
    held = [await shm.there(np.zeros(FULL, np.uint8)) for _ in range(EIGHT)]
    async with anyio.create_task_group() as tasks:
        large = anyio.CancelScope()

        async def send_large() -> None:
            with large:
                await shm.send(np.zeros(900_000, np.uint8), edge=2)

        tasks.start_soon(send_large)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(shm.send, np.ones(FULL, np.uint8))
        await anyio.wait_all_tasks_blocked()
        held.pop()
        while shm.memory_a.pool.blocks_in_use == EIGHT:
            await anyio.sleep(0)
        await anyio.wait_all_tasks_blocked()
        assert not shm.at_b.items
        large.cancel()
        assert (await shm.at_b.item()).value[0] == 1
    del held
    await shm.returned()
    assert (await shm.there(np.full(900_000, 2, np.uint8)))[0] == 2


async def test_a_block_given_to_a_sender_that_is_cancelled_at_that_moment_returns(shm: Ends) -> None:
    pool = shm.memory_a.pool
    blocks = [pool.try_take(FULL) for _ in range(EIGHT)]
    waiting = asyncio.get_running_loop().create_task(pool.take(FULL))
    await anyio.wait_all_tasks_blocked()
    for block in blocks:
        assert block is not None
        pool.give_back(block.slab, block.slot, block.generation)
    waiting.cancel()  # its block is there, but it has not run yet
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.blocks_in_use == 0


@pytest.mark.parametrize("size", [2**16, 2**16 + 1, 100_000, 2**17, 600_000, 2**20 - 4096, 2**20])
async def test_whatever_is_not_larger_than_the_memory_fits(shm: Ends, size: int) -> None:
    small = await shm.there(np.zeros(9000, np.uint8))
    del small
    for number in range(3):
        got = await shm.there(np.full(size, number, np.uint8))
        assert got[0] == got[-1] == number
        del got


async def test_a_value_larger_than_the_memory_is_refused(shm: Ends) -> None:
    message = r"a value of 1048640 bytes is larger than the shared memory of its host \(1048576 bytes\)"
    with pytest.raises(ProtocolError, match=message):
        shm.a.send_item(1, 1, 0, np.zeros(2**20 + 1, np.uint8))
    assert await shm.there(5) == 5


async def test_blocks_of_a_peer_that_is_gone_return(shm: Ends) -> None:
    held = [await shm.there(np.zeros(FULL, np.uint8)) for _ in range(EIGHT)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shm.send, np.zeros(FULL, np.uint8))
        await anyio.wait_all_tasks_blocked()
        shm.b.close()
        await shm.at_a.closed.wait()
    assert shm.memory_a.pool.blocks_in_use == 0
    assert len(held) == EIGHT


async def test_a_release_of_another_generation_is_ignored(shm: Ends) -> None:
    pool = shm.memory_a.pool
    first = pool.try_take(100_000)
    assert first is not None
    pool.give_back(first.slab, first.slot, first.generation)
    second = pool.try_take(100_000)
    assert second is not None
    assert (second.slab, second.slot) == (first.slab, first.slot)
    pool.give_back(first.slab, first.slot, first.generation)
    assert pool.blocks_in_use == 1


async def test_thousands_of_blocks_die_at_once(shm: Ends) -> None:
    """Their keys do not fit into one datagram; they return all the same."""
    keys = [(2**40 + number, number, 2**40) for number in range(20_000)]
    shm.b._release(keys)  # type: ignore[attr-defined]
    while shm.a.statistics().received < 20:
        await anyio.sleep(0)


async def test_memory_stays_bounded_over_many_sizes(shm: Ends) -> None:
    pool = shm.memory_a.pool
    sizes = [9000, 70_000, 130_000, 260_000, 520_000, 1_000_000]
    for size in np.random.default_rng(0).permutation(sizes * 10):
        got = await shm.there(np.full(size, size % 251, np.uint8))
        assert got[-1] == size % 251
        assert pool.total_bytes <= 2**20
        del got
    await shm.there(1)
    assert pool._count > len(pool._slabs), "slabs were dropped for others"
    assert shm.b._mapped.keys() == pool._slabs.keys()  # type: ignore[attr-defined]


async def test_one_large_value_does_not_leave_small_ones_a_single_slot(shm: Ends) -> None:
    await shm.there(np.zeros(2**20, np.uint8))
    held = [await shm.there(np.full(FULL, number, np.uint8)) for number in range(EIGHT)]
    assert [array[0] for array in held] == list(range(EIGHT))


async def test_a_slot_a_little_larger_is_used_where_memory_is_short(shm: Ends) -> None:
    held = [await shm.there(np.zeros(FULL, np.uint8)) for _ in range(EIGHT - 1)]
    assert (await shm.there(np.ones(50_000, np.uint8)))[0] == 1
    assert shm.memory_a.pool._count == 1
    assert len(held) == EIGHT - 1


async def test_a_link_with_descriptors_in_its_backlog_closes_them(shm: Ends) -> None:
    for _ in range(40):
        left, right = socket.socketpair()
        right.close()
        shm.a.send(Connect("x" * 20_000), (left.detach(),))
    assert shm.a.statistics().backlog > 0
    shm.close()
    for descriptor in shm.at_b.descriptors:
        os.close(descriptor)


async def test_a_process_that_can_open_no_file_more_has_no_shared_memory_for_now(shm: Ends) -> None:
    """What fits into a message goes on."""
    with few_files(1):
        assert shm.a.allocate(FULL) is None
        assert (await shm.there(np.full(50_000, 7, np.uint8)))[-1] == 7
        with pytest.raises(UnavailableError, match="no shared memory can be had"):
            await shm.send(np.zeros(FULL, np.uint8))
    assert (await shm.there(np.full(FULL, 8, np.uint8)))[-1] == 8


async def test_a_sender_that_can_send_no_descriptor_is_told_and_sends_the_next(shm: Ends) -> None:
    with few_files(2), pytest.raises(UnavailableError, match="memory cannot be shared with b: Too many open files"):
        await shm.send(np.zeros(FULL, np.uint8))
    assert shm.memory_a.pool.blocks_in_use == 0
    assert (await shm.there(np.full(FULL, 8, np.uint8)))[-1] == 8


async def test_a_receiver_that_can_open_no_file_more_is_told_and_gets_the_next(shm: Ends) -> None:
    with few_files(3):
        array = shm.a.allocate(FULL)
        await shm.send([np.zeros(FULL, np.uint8), array], list[np.ndarray])
        while not shm.at_b.bad:
            await shm.at_b.news()
    assert [(request, error.kind) for _edge, request, error in shm.at_b.bad] == [(7, "UnavailableError")]
    del array
    await shm.returned()
    assert (await shm.there(np.full(FULL, 8, np.uint8)))[-1] == 8


async def test_a_slab_whose_descriptor_could_not_be_carried_is_told_of_again(
    shm: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_fds = socket.send_fds

    def refuse_once(*_arguments: object) -> int:
        monkeypatch.setattr(socket, "send_fds", send_fds)
        raise OSError(errno.ETOOMANYREFS, "Too many references")

    monkeypatch.setattr(socket, "send_fds", refuse_once)
    await shm.send(np.zeros(FULL, np.uint8))
    while not shm.at_b.bad:
        await shm.at_b.news()
    assert [(request, error.kind) for _edge, request, error in shm.at_b.bad] == [(7, "UnavailableError")]
    await shm.returned()
    assert (await shm.there(np.full(FULL, 8, np.uint8)))[-1] == 8


async def test_statistics(ends: Ends) -> None:
    before = ends.a.statistics().sent, ends.b.statistics().received
    assert await ends.there(1) == 1
    statistics = ends.a.statistics()
    assert (statistics.sent - before[0], statistics.backlog, statistics.blocks_held) == (1, 0, 0)
    assert ends.b.statistics().received == before[1] + 1


@pytest.fixture
def other_process() -> Iterator[socket.socket]:
    """A second process that sends back what it gets (echo.py)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.contract.echo", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        yield ours
        ours.close()
        assert process.wait(HANGS_S) == 0


async def test_another_process(other_process: socket.socket) -> None:
    """The real thing: mapped by another process, sent back from its memory, and all blocks returned at both."""
    found = Ends("local_object")
    link = ArrowShmLink("echo", found.at_a, other_process, found.memory_a, TYPES)
    values = [(1, inner(20_000)), (1, inner(2)), (2, np.arange(100_000.0)), (3, "ä" * 100_000), (4, b"z" * 300_000)]
    for number in range(40):
        edge, value = values[number % len(values)]
        pending = link.send_item(edge, 1, number, value)
        if pending is not None:
            await pending
        item = await found.at_a.item()
        assert (item.edge, item.seq) == (edge, number)
        assert_same(item.value, value)
        del item
    while found.memory_a.pool.blocks_in_use:
        await anyio.sleep(0.001)
    link.close()
    found.close()
