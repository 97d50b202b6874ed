"""The life of rank 1 of two that run Ming's thinker: a process of its own, started by `test_thinker_sglang_group`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engine import sglang_shim

if TYPE_CHECKING:
    from multiprocess.connection import Connection


def live(folder: Path, connection: Connection, settings: dict[str, Any]) -> None:
    sglang_shim.install_where_needed()
    from actors.ming.thinker_sglang import load_sglang_thinker
    from omniflow.engine.group import follow
    from omniflow.engine.ranks import Ranks

    ranks = Ranks(1, 2, [connection])
    follow(load_sglang_thinker(folder, ranks=ranks, **settings), ranks)
