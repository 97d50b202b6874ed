"""The place of a process among those that compute one stage together. Light: every actor has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocess.connection import Connection


class Ranks:
    """A group of `size` processes that compute together, of which this one is `rank`.

    Rank 0 has a connection to each of the others, they have one to it.
    """

    def __init__(self, rank: int, size: int, connections: Sequence[Connection] = ()) -> None:
        self.rank = rank
        self.size = size
        self._connections = connections

    def tell(self, *messages: bytes | memoryview) -> None:
        """Rank 0 tells all others. Waits where one is far behind; raises OSError where one is gone."""
        for connection in self._connections:
            for message in messages:
                connection.send_bytes(message)

    def lost(self, within_s: float) -> bool:
        """Rank 0 asks whether one of the others is gone, or will be `within_s` seconds from now."""
        from multiprocess.connection import wait

        return bool(wait(self._connections, within_s))  # they never say anything: there is nothing to read but the end

    def hear(self) -> bytes:
        """What rank 0 tells next. Waits for it; raises EOFError once rank 0 is gone."""
        message: bytes = self._connections[0].recv_bytes()
        return message


ALONE = Ranks(0, 1)
"""The place of a process that shares its stage with no other."""
