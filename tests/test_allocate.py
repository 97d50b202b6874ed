"""`Context.allocate`: what a stage writes there, its readers in another process read in the very same memory."""

from __future__ import annotations

import anyio
import msgspec
import numpy as np
import pytest

from omniflow.actor import Actor, Context, Emit, Stream
from omniflow.graph import Graph
from omniflow.media import Options

from .running import CPU, INLINE, running

pytestmark = pytest.mark.anyio


class Place(msgspec.Struct, frozen=True):
    """Where memory lies: the inode of a mapped file and the offset in it; (0, address) where it is not shared."""

    inode: int
    offset: int


class Picture(msgspec.Struct, frozen=True):
    pixels: np.ndarray
    painted_at: Place


class Seen(msgspec.Struct, frozen=True):
    painted_at: Place
    seen_at: Place
    total: int


def place_of(array: np.ndarray) -> Place:
    address = array.ctypes.data
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, offset, _, inode, *name = line.split()
            begin, end = (int(text, 16) for text in span.split("-"))
            if begin <= address < end and name and name[0].startswith("/memfd:omniflow-slab"):
                return Place(int(inode), address - begin + int(offset, 16))
    return Place(0, address)


def painted(ctx: Context, size: int) -> Picture:
    pixels = ctx.allocate((size, 4), np.uint8)
    pixels[:] = 3
    return Picture(pixels, place_of(pixels))


class Paint(Actor):
    """One picture; blocking, so it runs in a thread."""

    heavy = True

    def run(self, size: int, ctx: Context) -> Picture:
        return painted(ctx, size)


class Look(Actor):
    heavy = True

    async def run(self, picture: Picture) -> Seen:
        return Seen(picture.painted_at, place_of(picture.pixels), int(picture.pixels.sum()))


class Film(Actor):
    """Many pictures."""

    heavy = True

    async def run(self, size: int, emit: Emit[Picture], ctx: Context) -> None:
        for _ in range(20):
            await emit.send(await self.offload(painted, ctx, size))


class Watch(Actor):
    heavy = True

    async def run(self, pictures: Stream[Picture], emit: Emit[Seen]) -> None:
        async for picture in pictures:
            await emit.send(Seen(picture.painted_at, place_of(picture.pixels), int(picture.pixels.sum())))


def gallery() -> Graph:
    graph = Graph("gallery")
    paint, look = graph.stage("paint", Paint), graph.stage("look", Look)
    film, watch = graph.stage("film", Film), graph.stage("watch", Watch)
    graph.result(paint, look)
    graph.stream(film, watch)
    graph.input(picture=paint, film=film)
    graph.output(seen=look, watched=watch)
    return graph


async def test_in_another_process_it_is_the_same_memory() -> None:
    async with running(gallery(), CPU) as runtime:
        for size in (100_000, 2_000_000):
            seen = (await (await runtime.submit("picture", size)).collect())["seen"]
            assert seen.total == size * 4 * 3
            assert seen.painted_at.inode > 0
            assert seen.painted_at == seen.seen_at
        watched = (await (await runtime.submit("film", 50_000)).collect())["watched"]
        assert [each.total for each in watched] == [600_000] * 20
        assert all(each.painted_at == each.seen_at for each in watched)
        assert len({each.seen_at.offset for each in watched}) < 20, "blocks are used again"


async def test_in_one_process_it_is_a_plain_array() -> None:
    async with running(gallery(), INLINE) as runtime:
        seen = (await (await runtime.submit("picture", 100_000)).collect())["seen"]
        assert seen.painted_at == seen.seen_at
        assert seen.painted_at.inode == 0


async def test_more_than_the_memory_holds_arrives_all_the_same() -> None:
    """Eight pictures fill the memory; four films of twenty are under way, and each reader holds one."""
    async with running(gallery(), CPU, shm_bytes=2**20) as runtime, anyio.create_task_group() as tasks:

        async def film() -> None:
            watched = (await (await runtime.submit("film", 30_000)).collect())["watched"]
            assert [each.total for each in watched] == [360_000] * 20
            assert all(each.seen_at.inode > 0 for each in watched)

        for _ in range(4):
            tasks.start_soon(film)


@pytest.mark.parametrize(
    ("shape", "dtype", "num_bytes"), [(7, np.float32, 28), ((3, 4), "i2", 24), ((), "f8", 8), ((2, 0), "u1", 0)]
)
def test_shapes_and_dtypes(shape: int | tuple[int, ...], dtype: str, num_bytes: int) -> None:
    asked: list[int] = []

    def room(size: int) -> np.ndarray:
        asked.append(size)
        return np.zeros(size, np.uint8)

    for ctx in (Context("r", Options(), 1.0, "0"), Context("r", Options(), 1.0, "0", room)):
        array = ctx.allocate(shape, dtype)
        assert array.shape == ((shape,) if isinstance(shape, int) else shape)
        assert array.dtype == np.dtype(dtype)
        array[...] = 1
    assert asked == [num_bytes]
