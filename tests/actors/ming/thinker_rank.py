"""The life of one rank of two that run Ming's thinker: a process of its own, started by `test_thinker_sglang_group`.

Both are fresh for each engine: torch counts, for a whole process, how often it has met others to share memory between
GPUs, and asks for them by that number, so one that has met a group before waits for a fresh one in vain.
"""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest

from tests.engine import sglang_shim

if TYPE_CHECKING:
    from multiprocess.connection import Connection

    from omniflow.engine.base import EngineOutput, EngineRequest
    from omniflow.engine.sglang import SGLangEngine

ENDS_S = {"gpu": 100, "cpu": 240}
"""After so long a rank says where it stands, and ends. The start and all requests take 40 s on a GPU."""


class Told(NamedTuple):
    """What a rank tells at its end."""

    read: list[int]
    """The inputs of each batch that it has read by a graph."""
    outputs: list[dict[str, list[EngineOutput]]]
    """Of each round of requests; rank 0 has them."""
    captures: list[bool]
    """Whether it would have graphs of prompts where both ranks have 5 GB free, and where rank 1 has 3; nothing where
    SGLang has no rule for that."""


def live(
    rank: int,
    folder: Path,
    other: Connection,
    test: Connection,
    settings: dict[str, Any],
    rounds: list[list[EngineRequest]],
) -> None:
    faulthandler.dump_traceback_later(ENDS_S[settings["device"]], exit=True)
    sglang_shim.install_where_needed()
    from actors.ming.thinker_sglang import load_sglang_thinker
    from omniflow.engine.group import follow, lead
    from omniflow.engine.ranks import Ranks
    from tests.engine.tiny import run

    ranks, outputs = Ranks(rank, 2, [other]), []
    engine = load_sglang_thinker(folder, ranks=ranks, **settings)
    captures = _captures([5.0, (5.0, 3.0)[rank]])
    with pytest.MonkeyPatch.context() as monkeypatch:
        read = _watched(engine, monkeypatch) if settings["prompt_graphs"] else []
        if rank == 0:
            leader = lead(engine, ranks)
            outputs = [run(leader, requests) for requests in rounds]
            leader.close()
        else:
            follow(engine, ranks)
    found = [{id: list(map(_on_cpu, each)) for id, each in given.items()} for given in outputs]
    test.send(Told(read, found, captures))


def _captures(free_gb: list[float]) -> list[bool]:
    from omniflow.engine import sglang_start

    rule = vars(sglang_start.cuda_graph_setup).get(sglang_start._SHORT_OF_MEMORY)
    return [] if rule is None else [not rule(each, set()) for each in free_gb]


def _on_cpu(output: EngineOutput) -> EngineOutput:
    return output if output.hidden is None else msgspec.structs.replace(output, hidden=output.hidden.cpu())


def _watched(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from tests.engine.prompt_graphs import graphs_of, read_by

    return read_by(graphs_of(engine, [4, 8, 16, 32, 48, 64], monkeypatch), monkeypatch)
