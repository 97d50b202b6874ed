"""What lanes promise beside the contract of all transports: which tensors go by them, and how their memory returns."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from omniflow.errors import DeviceError, ProtocolError
from omniflow.messages import LaneAnswer, LaneNote, LaneOffer
from omniflow.transport import gloo_way, nccl
from omniflow.transport.arrow_shm import ArrowShmLink, SharedMemory, socket_pair
from omniflow.transport.cuda_ipc import CudaIpcLane
from omniflow.transport.device_pool import FREED, Arena, DevicePool, reached
from omniflow.transport.nccl import NcclLane

from ..files import few_files
from ..waiting import HANGS_S
from .ends import Ends, Inbox, lane_of

torch = pytest.importorskip("torch")
from . import host_memory  # noqa: E402 - needs torch
from .host_memory import HostMemory  # noqa: E402

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]

LANES = ["cuda_ipc", "cuda_ipc of another GPU", "nccl"]


class Mixed(msgspec.Struct, frozen=True):
    tensors: list[torch.Tensor]
    rows: np.ndarray
    text: str


def mixed(size: int = 20_000) -> Mixed:
    tensors = [torch.arange(size), torch.full((3, 5), 2.5, dtype=torch.bfloat16), torch.ones(7, dtype=torch.bool)]
    return Mixed(tensors, np.arange(size), "ä" * size)


def assert_mixed(got: Mixed, expected: Mixed) -> None:
    assert got.text == expected.text
    assert np.array_equal(got.rows, expected.rows)
    assert [(each.dtype, each.shape) for each in got.tensors] == [(each.dtype, each.shape) for each in expected.tensors]
    assert all(torch.equal(one, other) for one, other in zip(got.tensors, expected.tensors, strict=True))


def ours(ends: Ends) -> HostMemory:
    assert isinstance(ends.lane_a, CudaIpcLane) and isinstance(ends.lane_a.pool.memory, HostMemory)
    return ends.lane_a.pool.memory


def theirs(ends: Ends) -> HostMemory:
    assert isinstance(ends.lane_b, CudaIpcLane) and isinstance(ends.lane_b._theirs, HostMemory)
    return ends.lane_b._theirs


@pytest.mark.parametrize("kind", LANES)
async def test_tensors_by_the_lane_and_the_rest_by_messages(kind: str) -> None:
    async with Ends.opened(kind, 2**22) as ends:
        assert ends.a.statistics().lane == kind.split()[0]
        taken: list[int] = []
        fetch = ends.lane_b.fetch
        ends.lane_b.fetch = lambda block, origin: taken.append(block.length) or fetch(block, origin)
        for size in (10, 20_000):
            got = await ends.there(mixed(size))
            assert_mixed(got, mixed(size))
            del got
        assert taken == [519, 160_263]
        await ends.returned()
        assert ends.lane_a.pool.blocks_in_use == 0


async def test_until_the_lane_is_open_tensors_go_through_the_host() -> None:
    ends = Ends("cuda_ipc")
    assert_mixed(await ends.there(mixed()), mixed())
    assert ends.a.statistics().lane is None
    ends.close()


async def test_what_does_not_fit_into_the_pool_goes_through_the_host() -> None:
    async with Ends.opened("cuda_ipc", 2**20) as ends:
        value = [torch.zeros(700_000, dtype=torch.uint8) for _ in range(2)]
        ends.memory_a.pool.limit_bytes *= 4
        got = await ends.there(value, list[torch.Tensor])
        assert [len(each) for each in got] == [700_000] * 2
        assert ends.lane_a.pool.blocks_in_use == 0
        assert (await ends.there(value[0], torch.Tensor)).data_ptr()
        assert any(theirs(ends).words.cast("B"))


async def test_views_lie_in_the_senders_memory() -> None:
    async with Ends.opened("cuda_ipc") as ends:
        got = await ends.there(torch.zeros(1000), torch.Tensor)
        ours(ends).view(0, 4000)[0].view(torch.float32)[5] = 3
        assert got[5] == 3


async def test_what_comes_from_another_gpu_is_written_to_the_receivers_memory() -> None:
    """The sender's pool of a lane to another GPU is that GPU's: what arrives is a view, and not a copy."""
    async with Ends.opened("cuda_ipc of another GPU") as ends:
        got = await ends.there(torch.zeros(1000), torch.Tensor)
        theirs(ends).view(0, 4000)[0].view(torch.float32)[5] = 3
        assert got[5] == 3
        assert ends.lane_a.pool.blocks_in_use == 1
        del got
        await ends.returned()
        assert ends.lane_a.pool.blocks_in_use == 0


async def test_a_sender_takes_no_memory_of_its_own_gpu_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = host_memory.take
    monkeypatch.setattr(host_memory, "take", lambda size: taken.append(size) or take(size))
    async with Ends.opened("cuda_ipc of another GPU", 2**20) as ends:
        assert taken == [2**20] * 2  # one for each direction, on the side that receives
        assert isinstance(ends.lane_a, CudaIpcLane)
        assert ends.lane_a._shared._memory is None
    shared = ends.lane_a._shared
    assert await shared.open()  # closing the lane has left it alone
    shared.close()


async def test_what_a_receiver_on_another_gpu_has_no_room_for_goes_through_the_host() -> None:
    ends = Ends("cuda_ipc of another GPU")
    assert isinstance(ends.lane_b, CudaIpcLane)
    ends.lane_b.pool = DevicePool(2**20, refusing)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends.lane_a.serve, ends.a)
        tasks.start_soon(ends.lane_b.serve, ends.b)
        with anyio.fail_after(HANGS_S):
            while ends.lane_a.problem is None:
                await anyio.sleep(0.001)
        assert ends.lane_a.problem == "there is none"
        assert_mixed(await ends.there(mixed()), mixed())
        ends.close()


async def test_senders_that_wait_for_the_memory_of_a_receiver_that_dies_go_on() -> None:
    async with Ends.opened("cuda_ipc of another GPU", 2**20) as ends:
        held = [await ends.there(torch.zeros(500_000, dtype=torch.uint8), torch.Tensor) for _ in range(2)]
        waiting = [ends.a.send_item(1, 7, n, torch.zeros(500_000, dtype=torch.uint8)) for n in range(3)]
        assert None not in waiting
        async with anyio.create_task_group() as tasks:

            async def finish(pending: Any) -> None:
                await pending

            for each in waiting:
                tasks.start_soon(finish, each)
            await anyio.wait_all_tasks_blocked()
            ends.b.close()
            await ends.at_a.closed.wait()
        assert ends.lane_a.pool.blocks_in_use == 0
        assert len(held) == 2


async def test_a_block_returns_when_the_last_view_dies() -> None:
    async with Ends.opened("cuda_ipc") as ends:
        got = await ends.there([torch.arange(100), torch.arange(50)], list[torch.Tensor])
        kept = got[0][5:].reshape(5, 19)
        del got
        await anyio.sleep(0.01)
        assert (ends.a.statistics().blocks_held, ends.lane_a.pool.blocks_in_use) == (1, 1)
        assert kept[0, 0] == 5
        del kept
        await ends.returned()
        assert ends.lane_a.pool.blocks_in_use == 0


async def test_a_sender_waits_for_the_pool_and_goes_on() -> None:
    async with Ends.opened("cuda_ipc", 2**20) as ends:
        held = [await ends.there(torch.full((250_000,), n, dtype=torch.uint8), torch.Tensor) for n in range(4)]
        pending = ends.a.send_item(1, 7, 4, torch.full((250_000,), 4, dtype=torch.uint8))
        assert pending is not None
        async with anyio.create_task_group() as tasks:

            async def finish() -> None:
                await pending

            tasks.start_soon(finish)
            await anyio.wait_all_tasks_blocked()
            assert not ends.at_b.items
            del held[1]
            assert (await ends.at_b.item()).value[-1] == 4
        assert [each[0] for each in held] == [0, 2, 3]


async def test_a_cancelled_sender_gives_back_what_it_had_taken() -> None:
    """It had a block of the pool and waited for one of shared memory."""
    async with Ends.opened("cuda_ipc", 2**20) as ends:
        held = await ends.there(np.zeros(900_000, np.uint8), np.ndarray)
        with anyio.move_on_after(0.01) as scope:
            await ends.send([mixed(50_000)], list[Mixed])
        assert scope.cancelled_caught
        assert ends.lane_a.pool.blocks_in_use == 0
        del held
        assert_mixed((await ends.there([mixed(50_000)], list[Mixed]))[0], mixed(50_000))


# -- words -------------------------------------------------------------------------------------------------------------


async def test_memory_that_a_device_still_reads_is_not_used_again() -> None:
    """The view has died, but the reader's stream is not through with it."""
    async with Ends.opened("cuda_ipc", 2**20) as ends:
        theirs(ends).held = []
        first = await ends.there(torch.zeros(400_000, dtype=torch.uint8), torch.Tensor)
        address = first.data_ptr()
        del first
        await ends.returned()
        second = await ends.there(torch.zeros(400_000, dtype=torch.uint8), torch.Tensor)
        assert second.data_ptr() != address
        assert ours(ends).waits == []
        # Where there is nothing else, our stream waits for the word of the oldest.
        third = await ends.there(torch.zeros(300_000, dtype=torch.uint8), torch.Tensor)
        assert third.data_ptr() == address
        assert len(ours(ends).waits) == 1 and ours(ends).waits_for_ever()
        for slot, word, value in theirs(ends).held:
            theirs(ends).words[slot, word] = value
        assert not ours(ends).waits_for_ever()


async def test_a_reader_waits_for_what_is_not_there_yet_and_not_for_what_is() -> None:
    async with Ends.opened("cuda_ipc") as ends:
        await ends.there(torch.zeros(10), torch.Tensor)
        assert theirs(ends).waits == []
        ours(ends).held = []
        await ends.there(torch.zeros(10), torch.Tensor)
        assert len(theirs(ends).waits) == 1 and theirs(ends).waits_for_ever()


@pytest.mark.parametrize("kind", ["cuda_ipc", "cuda_ipc of another GPU"])
async def test_no_stream_waits_for_a_sender_that_has_died(kind: str) -> None:
    """Neither for a tensor that is still there, nor for one that is not."""
    async with Ends.opened(kind) as ends:
        ours(ends).held = []
        got = await ends.there(torch.zeros(10), torch.Tensor)
        gone = await ends.there(torch.zeros(10), torch.Tensor)
        del gone
        await anyio.sleep(0.01)
        memory = theirs(ends)
        assert len(memory.waits) == 2 and memory.waits_for_ever()
        ends.a.close()
        await ends.at_b.closed.wait()
        assert not memory.waits_for_ever()
        assert len(got) == 10
        # What is computed from them is worth nothing, and whoever computes it is told.
        assert [(edge, request, error.kind) for edge, request, error in ends.at_b.bad] == [(1, 7, "StageDiedError")] * 2


async def test_what_was_there_is_good_whatever_becomes_of_its_sender() -> None:
    async with Ends.opened("cuda_ipc") as ends:
        ours(ends).held = []
        got = await ends.there(torch.ones(10), torch.Tensor)
        for slot, word, value in ours(ends).held:
            ours(ends).words[slot, word] = value
        ends.a.close()
        await ends.at_b.closed.wait()
        assert ends.at_b.bad == []
        assert got.sum() == 10


async def test_no_stream_waits_for_a_reader_that_has_died() -> None:
    """It had given a block back, which our stream waits to write to, and holds another."""
    async with Ends.opened("cuda_ipc", 2**20) as ends:
        theirs(ends).held = []
        first = await ends.there(torch.zeros(700_000, dtype=torch.uint8), torch.Tensor)
        del first
        await ends.returned()
        second = await ends.there(torch.zeros(700_000, dtype=torch.uint8), torch.Tensor)
        assert ours(ends).waits_for_ever()
        ends.b.close()
        await ends.at_a.closed.wait()
        assert not ours(ends).waits_for_ever()
        assert ends.lane_a.pool.blocks_in_use == 0
        block = ends.lane_a.pool.try_take(2**20)
        assert block is not None and not ours(ends).waits_for_ever()
        assert len(second) == 700_000


def test_words_count_around() -> None:
    assert reached(5, 5) and reached(6, 5) and not reached(4, 5)
    assert reached(3, 0x7FFFFFFF + 0x7FFFFFFF)
    assert not reached(0xFFFFFFF0, 3)


async def test_a_pool_with_more_blocks_than_slots() -> None:
    """Slots are used in turn, so that a late word of a dead process meets no new block."""
    pool = DevicePool(2**20, host_memory.take)
    memory = await pool.open()
    blocks = [pool.try_take(256) for _ in range(512)]
    assert None not in blocks and pool.try_take(256) is None
    assert blocks[0] is not None
    pool.give_back(*_key(blocks[0]))
    memory.words[blocks[0].slot, FREED] = blocks[0].generation
    again = pool.try_take(256)
    assert again is not None and (again.slot, again.generation) == (blocks[0].slot, blocks[0].generation + 1)
    pool.give_back(*_key(blocks[0]))  # stale
    assert pool.blocks_in_use == 512
    pool.close()
    del memory


def _key(block: Any) -> tuple[int, int, int]:
    return block.slab, block.slot, block.generation


def test_free_ranges_are_joined() -> None:
    arena = Arena(1000)
    offsets = [arena.take(100) for _ in range(10)]
    assert (offsets, arena.take(1)) == ([n * 100 for n in range(10)], None)
    for number in (3, 5, 4, 9, 0):
        arena.give(number * 100, 100)
    assert arena._free == [(0, 100), (300, 300), (900, 100)]
    assert arena.take(300) == 300 and arena.take(101) is None and arena.take(60) == 0 and arena.take(60) == 900
    for offset, size in ((300, 300), (0, 60), (900, 60), (100, 200), (600, 300)):
        arena.give(offset, size)
    assert arena._free == [(0, 1000)]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def refusing(*_arguments: Any) -> HostMemory:
    raise DeviceError("there is none")


@pytest.mark.parametrize("end", ["a", "b"])
async def test_where_memory_cannot_be_shared_tensors_go_through_the_host(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    ends = Ends("cuda_ipc")
    assert isinstance(ends.lane_a, CudaIpcLane) and isinstance(ends.lane_b, CudaIpcLane)
    if end == "a":
        ends.lane_a.pool = DevicePool(2**20, refusing)
    else:
        ends.lane_b._attach = refusing
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends.lane_a.serve, ends.a)
        tasks.start_soon(ends.lane_b.serve, ends.b)
        while ends.lane_a.problem is None:
            await anyio.sleep(0.001)
        assert_mixed(await ends.there(mixed()), mixed())
        assert "device tensors to b go through the host, not by cuda_ipc: there is none" in caplog.text
        ends.close()


async def test_a_peer_without_a_lane() -> None:
    ends = Ends("cuda_ipc")
    ends.b._lane = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends.lane_a.serve, ends.a)
        while ends.lane_a.problem is None:
            await anyio.sleep(0.001)
        assert ends.lane_a.problem == "the other host has no lane"
        ends.close()


async def test_a_copy_that_fails_fails_its_sender_and_stops_no_reader() -> None:
    async with Ends.opened("cuda_ipc") as ends:
        memory = ours(ends)

        def fail(*_arguments: Any) -> None:
            raise DeviceError("cuMemcpyDtoDAsync failed: CUDA_ERROR_ILLEGAL_ADDRESS")

        memory.copy_in = fail
        ends.types[1] = torch.Tensor
        with pytest.raises(DeviceError, match="ILLEGAL"):
            ends.a.send_item(1, 7, 0, torch.zeros(9))
        await ends.at_b.item()
        assert not theirs(ends).waits_for_ever()


@pytest.mark.parametrize("beside", ["mapped", "not mapped"])
async def test_memory_that_torch_cannot_show_goes_back(beside: str) -> None:
    """With it goes host memory, whether that could be mapped or not."""
    async with Ends.opened("cuda_ipc") as ends:

        def fail(*_arguments: Any) -> Any:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        theirs(ends).view = fail
        with few_files(3 if beside == "not mapped" else 10):
            await ends.send(mixed(), Mixed)
            while not ends.at_b.bad:
                await ends.at_b.news()
        assert ends.at_b.bad[0][2].kind == "UnavailableError"
        assert ("could not be mapped" in ends.at_b.bad[0][2].message) == (beside == "not mapped")
        await ends.returned()
        assert ends.lane_a.pool.blocks_in_use == 0


async def test_host_memory_goes_back_where_the_stream_takes_no_words_any_more() -> None:
    """The block of the lane does not: whoever writes to it would wait for its word for ever."""
    problems: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: problems.append(context["exception"]))

    def fail(*_arguments: Any) -> Any:
        raise DeviceError("cuStreamWriteValue32 failed: CUDA_ERROR_ILLEGAL_ADDRESS")

    async with Ends.opened("cuda_ipc") as ends:
        got = [await ends.there(mixed()) for _ in range(3)]
        theirs(ends).write = fail
        del got
        with anyio.fail_after(HANGS_S):
            while ends.memory_a.pool.blocks_in_use:
                await anyio.sleep(0.001)
        assert [type(problem) for problem in problems] == [DeviceError]
        assert ends.lane_a.pool.blocks_in_use == 3


@pytest.mark.parametrize("kind", LANES)
async def test_a_link_that_is_closed_while_its_lane_opens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_way, "CONNECT_S", 1.0)  # gloo waits for as long, where one end was about to connect
    for turns in (0, 1, 3):
        ends = Ends(kind)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ends.lane_a.serve, ends.a)
            tasks.start_soon(ends.lane_b.serve, ends.b)
            for _ in range(turns):
                await anyio.sleep(0.001)
            ends.close()


@pytest.mark.parametrize("kind", ["cuda_ipc", "cuda_ipc of another GPU"])
async def test_a_lane_that_is_cancelled_as_memory_is_offered_closes_descriptors(kind: str) -> None:
    ends = Ends(kind)
    far = kind != "cuda_ipc"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends.lane_a.serve, ends.a)
        await anyio.wait_all_tasks_blocked()
        offered = tuple(os.memfd_create("offered") for _ in range(2))
        if far:
            ends.lane_a.on_answer(LaneAnswer(None, "", 2**20), "b", offered)
        else:
            ends.lane_a.on_offer(LaneOffer("cuda_ipc", "", 2**20), offered)
        tasks.cancel_scope.cancel()
    ends.close()


async def assert_goes_through_the_host(kind: str, problem: str) -> None:
    """The lane does not open, for that reason, and what it was for arrives all the same."""
    ends = Ends(kind, 2**20)
    async with anyio.create_task_group() as tasks:
        for lane, link in ((ends.lane_a, ends.a), (ends.lane_b, ends.b)):
            tasks.start_soon(lane.serve, link)
        with anyio.fail_after(HANGS_S):
            await ends.lane_a.settled()
            await ends.lane_b.settled()
        assert ends.lane_a.problem == problem
        assert_mixed(await ends.there(mixed()), mixed())
        ends.close()


@pytest.mark.parametrize("kind", ["cuda_ipc", "cuda_ipc of another GPU"])
@pytest.mark.parametrize("arrived", [0, 1])
async def test_where_descriptors_of_memory_are_lost_tensors_go_through_the_host(
    kind: str, arrived: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops those that a process may not open."""
    deliver = ArrowShmLink._deliver_to_lane

    def lose(link: ArrowShmLink, message: LaneOffer | LaneAnswer, descriptors: list[int]) -> None:
        for descriptor in descriptors[arrived:]:
            os.close(descriptor)
        deliver(link, message, descriptors[:arrived])

    monkeypatch.setattr(ArrowShmLink, "_deliver_to_lane", lose)
    await assert_goes_through_the_host(kind, "the descriptors of its memory did not arrive: are too many files open?")


@pytest.mark.parametrize("kind", ["cuda_ipc", "cuda_ipc of another GPU"])
@pytest.mark.parametrize("what", ["take", "attach", "descriptors"])
async def test_where_memory_cannot_have_its_descriptors_tensors_go_through_the_host(
    kind: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(HostMemory if what == "descriptors" else host_memory, what, fail)
    await assert_goes_through_the_host(kind, "[Errno 24] Too many open files")


async def test_the_next_communicator_works_after_a_death() -> None:
    for number in range(3):
        async with Ends.opened("nccl") as ends:
            assert (await ends.there(torch.full((9,), number), torch.Tensor))[0] == number
            ends.b.close()
            await ends.at_a.closed.wait()
            assert ends.lane_a.pool.blocks_in_use == 0


async def test_torch_finds_our_store_whenever_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group may ask again when the first tensor is sent; torch itself does not keep the Python part alive."""
    stores: list[Any] = []
    make = gloo_way._make_group

    def keep(rank: int, store: Any) -> Any:
        stores.append(torch.distributed.PrefixStore("later", store))
        return make(rank, store)

    monkeypatch.setattr(gloo_way, "_make_group", keep)
    async with Ends.opened("nccl"):
        gc.collect()
        for store in stores:
            store.set("key", "value")
            assert store.get("key") == b"value"


@pytest.mark.parametrize(("kind", "lives"), [("cuda_ipc", 1), ("nccl", 2)])
async def test_another_process_is_killed_and_the_next_one_serves(kind: str, lives: int) -> None:
    """It holds tensors of ours, has sent some that we hold, and more are on their way."""
    for number in range(lives):
        lane, inbox, memory = lane_of(kind, 2**24, apart=True), Inbox(), SharedMemory(2**24)
        ours, theirs = socket_pair()
        process = echo_process(theirs, kind)
        link = ArrowShmLink("echo", inbox, ours, memory, {5: torch.Tensor}, lane=lane)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lane.serve, link)
            with anyio.fail_after(60):
                while not lane.is_open:
                    await anyio.sleep(0.005)
            link.send_item(5, 1, 0, torch.full((100_000,), number))
            got = (await inbox.item()).value
            for seq in range(1, 10):
                link.send_item(5, 1, seq, torch.zeros(100_000))
            process.kill()
            with anyio.fail_after(HANGS_S):
                await inbox.closed.wait()
            assert (lane.pool.blocks_in_use, link.statistics().blocks_held) == (0, 0)
            assert got.sum() == number * 100_000
            tasks.cancel_scope.cancel()
        process.wait()
        memory.close()
        if isinstance(lane, CudaIpcLane):
            lane.pool.close()
        inbox.items.clear()
        del got


def echo_process(link: socket.socket, kind: str) -> subprocess.Popen[bytes]:
    """A process that sends back what it gets, by a lane as well."""
    with link:
        command = [sys.executable, "-m", "tests.contract.echo", str(link.fileno()), kind]
        return subprocess.Popen(command, pass_fds=[link.fileno()])


async def test_a_receive_that_fails_fails_its_request_and_closes_the_lane() -> None:
    """What was not received would be taken for what comes next."""
    async with Ends.opened("nccl") as ends:
        assert isinstance(ends.lane_a, NcclLane) and isinstance(ends.lane_b, NcclLane)
        way = ends.lane_b._in
        assert way is not None

        def fail(size: int, origin: object) -> Any:
            raise RuntimeError("out of memory")

        way.receive = fail
        await ends.send(torch.zeros(9), torch.Tensor)
        await ends.send(torch.zeros(9), torch.Tensor)
        while len(ends.at_b.bad) < 2:
            await ends.at_b.news()
        assert ends.at_b.bad[0][2].message == "its tensors cannot be had: RuntimeError: out of memory"
        assert (await ends.there(torch.ones(9), torch.Tensor)).sum() == 9
        assert ends.lane_a.problem == "RuntimeError: out of memory"
        with anyio.fail_after(HANGS_S):
            await ends.returned()
        assert ends.lane_a.pool.blocks_in_use == 0


async def test_a_communicator_that_breaks_fails_what_was_still_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborting it lets our stream go on, over tensors that are not there."""
    async with Ends.opened("nccl") as ends:
        assert isinstance(ends.lane_b, NcclLane) and ends.lane_b._in is not None
        monkeypatch.setattr(ends.lane_b._in, "lost", lambda: [(1, 6)])
        ends.lane_b.on_note(LaneNote(True, nccl._BROKEN, b""))
        assert [(request, error.kind) for _edge, request, error in ends.at_b.bad] == [(6, "StageDiedError")]
        while ends.lane_a.problem is None:
            await anyio.sleep(0.001)
        assert (await ends.there(torch.ones(9), torch.Tensor)).sum() == 9


async def test_a_lane_without_a_communicator_takes_no_notes() -> None:
    async with Ends.opened("cuda_ipc") as ends:
        with pytest.raises(ProtocolError, match="no communicator"):
            ends.lane_b.on_note(LaneNote(True, nccl._BROKEN, b""))


async def test_a_send_that_fails_is_told_to_the_receiver() -> None:
    async with Ends.opened("nccl") as ends:
        assert isinstance(ends.lane_a, NcclLane) and isinstance(ends.lane_b, NcclLane)
        way = ends.lane_a._out
        assert way is not None

        def fail(tensor: Any, size: int) -> Any:
            raise RuntimeError("the peer is gone")

        way.send = fail
        ends.lane_b._in, kept = None, ends.lane_b._in  # its receive would wait for what does not come
        await ends.send(torch.zeros(9), torch.Tensor)
        while not ends.at_b.bad:
            await ends.at_b.news()
        assert ends.lane_a.problem == "RuntimeError: the peer is gone"
        assert (await ends.there(torch.ones(9), torch.Tensor)).sum() == 9
        ends.lane_b._in = kept


async def test_what_torch_does_not_keep_until_it_is_sent_is_sent_as_a_copy() -> None:
    """A view of a peer's pool goes back once the default stream is through with it, whoever still sends it."""
    async with Ends.opened("nccl") as ends:
        assert isinstance(ends.lane_a, NcclLane) and ends.lane_a._out is not None
        sent: list[int] = []
        send = ends.lane_a._out.send
        ends.lane_a._out.send = lambda tensor, size: sent.append(tensor.data_ptr()) or send(tensor, size)
        own, borrowed = torch.arange(100), torch.from_numpy(np.arange(100))
        assert torch.equal(await ends.there(own[:90], torch.Tensor), own[:90])
        assert torch.equal(await ends.there(borrowed, torch.Tensor), own)
        assert sent[0] == own.data_ptr() and sent[1] != borrowed.data_ptr()


async def test_where_there_is_no_memory_to_pack_tensors_the_receiver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message that promises them has left."""

    def fail(*_arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    async with Ends.opened("nccl") as ends:
        assert isinstance(ends.lane_b, NcclLane)
        monkeypatch.setattr(nccl, "_packed", fail)
        ends.lane_b._in, kept = None, ends.lane_b._in  # its receive would wait for what does not come
        await ends.send([torch.zeros(9), torch.zeros(9)], list[torch.Tensor])
        while not ends.at_b.bad:
            await ends.at_b.news()
        assert ends.lane_a.problem == "RuntimeError: out of memory"
        ends.lane_b._in = kept


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without NCCL")
async def test_where_there_is_no_nccl_both_ends_know_at_once() -> None:
    """A sender that cannot make a communicator does not let its receiver wait for one."""
    ends = Ends("nccl")
    for link in (ends.a, ends.b):
        assert isinstance(link, ArrowShmLink)
        link._lane = NcclLane("nccl", 2**20, sends=link is ends.a, receives=link is ends.b)
    async with anyio.create_task_group() as tasks:
        for link in (ends.a, ends.b):
            tasks.start_soon(link._lane.serve, link)
        with anyio.fail_after(HANGS_S):
            await ends.a._lane.settled()
            await ends.b._lane.settled()
        assert ends.a._lane.problem is not None and "NCCL" in ends.a._lane.problem
        assert (await ends.there(torch.ones(9), torch.Tensor)).sum() == 9
        ends.close()


async def test_a_refusal_comes_once() -> None:
    lane = NcclLane("gloo", 100, sends=True, receives=False)
    lane.on_answer(LaneAnswer("first"), "b")
    lane.on_answer(LaneAnswer(), "b")
    lane.on_answer(LaneAnswer("second"), "b")
    assert (lane.is_open, lane.problem) == (False, "first")
