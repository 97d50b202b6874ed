"""What a pool of device memory gives out, on host memory."""

from __future__ import annotations

import pytest

from omniflow.errors import ProtocolError
from omniflow.transport.device_pool import FILLED, NUM_SLOTS, DevicePool, reached

pytest.importorskip("torch")
from tests.contract import host_memory

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("nothing_left")]


async def test_the_last_generation_of_a_slot_is_not_taken_for_the_first() -> None:
    """Words have 32 bits, and so have generations: what was filled 2 ** 32 blocks ago is not what comes now."""
    pool = DevicePool(2**20, host_memory.take)
    words = (await pool.open()).words
    pool._generations = [2**32 - 1] * NUM_SLOTS
    block = pool.try_take(100)
    assert block is not None and block.generation == 0
    words[block.slot, FILLED] = 2**32 - 1
    assert not reached(words[block.slot, FILLED], block.generation)
    words[block.slot, FILLED] = block.generation
    assert reached(words[block.slot, FILLED], block.generation)
    pool.close()


async def test_what_a_pool_takes_fits_whatever_its_size() -> None:
    """Blocks are multiples of 256 bytes."""
    pool = DevicePool(2**20 + 100, host_memory.take)
    await pool.open()
    assert pool.limit_bytes == 2**20
    assert pool.try_take(2**20 - 1) is not None
    with pytest.raises(ProtocolError, match=f"{2**20 + 1} bytes do not fit"):
        pool.try_take(2**20 + 1)
    pool.close()
