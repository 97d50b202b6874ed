"""A peer that dies before it has read all: Linux resets the socket, in which what it had sent itself still lies."""

from __future__ import annotations

import anyio
import pytest

from omniflow.messages import Credit
from tests.contract.ends import Ends
from tests.waiting import HANGS_S

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": use}) for use in (False, True)])
@pytest.mark.parametrize("is_sent_to", [True, False])
async def test_what_it_had_sent_arrives(is_sent_to: bool) -> None:
    """On both loops, for libuv looks no more at a socket with an error; and where a message to it has met the error."""
    ends = Ends("arrow_shm")
    ends.types[1] = int
    ends.b.send(Credit(1, 1, 1))
    for number in range(5):
        assert ends.a.send_item(1, 1, number, number) is None
        ends.a.push()
    ends.a.close()
    if is_sent_to:
        ends.b.send(Credit(1, 1, 1))
        ends.b.push()
    with anyio.fail_after(HANGS_S):
        await ends.at_b.closed.wait()
    assert [item.value for item in ends.at_b.items] == list(range(5))
    ends.close()
