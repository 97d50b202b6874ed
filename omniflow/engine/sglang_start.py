"""How SGLang is started in this process, and ended. What differs between the `VERSIONS` is in `_construct`.

SGLang's settings and process groups are global to a process, so a process has one scheduler, for the life of it. With
several ranks a second one would not even start: torch counts in each process how often it has met others to share
memory between GPUs, and asks them for what they tell under that number (`StoreExchange`, one count for all groups).
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any, TypeVar

import torch

import omniflow.engine.sglang_environment
import omniflow.engine.sglang_penalties  # noqa: F401 - instead of SGLang's

# isort: split
import sglang
import sglang.srt.managers.scheduler
from sglang.srt.distributed.parallel_state import cleanup_dist_env_and_memory, get_tp_group
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import PortArgs, ServerArgs

from omniflow.engine.group import meet
from omniflow.engine.ranks import ALONE, Ranks
from omniflow.engine.sglang_registry import know_models_of
from omniflow.engine.sglang_scheduler import SteppedScheduler
from omniflow.errors import StartError

VERSIONS = ("0.5.17", "0.5.23")
"""Of SGLang, run with this code: the oldest and the newest."""
_OLDEST = (0, 5, 17)
_RANKS_IN_CONTEXT = (0, 5, 18)
"""From this version on the scheduler reads its rank from what was published, instead of taking it."""
# Its thread would end the parent of this process where a step takes too long, and never ends; our supervisor watches.
sglang.srt.managers.scheduler.create_scheduler_watchdog = lambda *args, **kwargs: None

_SHORT_OF_MEMORY = "should_skip_auto_prefill_cuda_graph_for_memory"
"""SGLang 0.5.17's rule by which a rank with less than 4 GB free has no graphs of prompts. 0.5.23 has none."""
_is_short = vars(cuda_graph_setup).get(_SHORT_OF_MEMORY)

S = TypeVar("S", bound=SteppedScheduler)


def _one_is_short(free_gb: float, chosen: set[tuple[str, str]]) -> bool:
    """That rule for all ranks alike: those that capture would wait for ever for one that does not."""
    assert _is_short is not None
    least = torch.tensor(free_gb)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
    return bool(_is_short(least.item(), chosen))


if _is_short is not None:
    setattr(cuda_graph_setup, _SHORT_OF_MEMORY, _one_is_short)


def build(kind: type[S], settings: dict[str, Any], ranks: Ranks = ALONE) -> S:
    """A scheduler with `settings`, by the names of SGLang's `ServerArgs`; call it in the thread that will step it.

    With `ranks` it is one of several that compute together, each on a GPU of its own; it waits for the others.
    Raises StartError where this process has one already, or the device has no room for `max_total_tokens`.
    """
    if _version() < _OLDEST:
        raise StartError(f"SGLang {sglang.__version__} is too old; install {VERSIONS[0]} or newer")
    if torch.distributed.is_initialized():
        raise StartError("SGLang allows one engine in a process, and this process has one; isolate the stage")
    with contextlib.ExitStack() as stack:
        stack.callback(close)
        know_models_of(Path(settings["model_path"]))
        server_args = ServerArgs(**settings, tp_size=ranks.size)
        # SGLang would choose a port that is free, and another process could take it before it listens.
        meet(ranks, "nccl" if server_args.device == "cuda" else "gloo")
        scheduler = _construct(kind, server_args, ranks.rank)
        scheduler.begin()
        wanted = settings["max_total_tokens"]
        if scheduler.kv_tokens() < wanted:
            raise StartError(f"the device has room for {scheduler.kv_tokens()} KV tokens; lower kv_tokens={wanted}")
        stack.pop_all()
    return scheduler


def close() -> None:
    """End SGLang's process groups and give the device's memory back, once nothing holds the scheduler any more."""
    cleanup_dist_env_and_memory()


def _construct(kind: type[S], server_args: ServerArgs, rank: int) -> S:
    gpu: int = server_args.base_gpu_id + rank
    if _version() < _RANKS_IN_CONTEXT:
        ports = _ports(server_args)
        publish(server_args, role="scheduler")
        ranks = {"tp_rank": rank, "moe_ep_rank": 0, "pp_rank": 0, "attn_cp_rank": 0, "moe_dp_rank": 0, "dp_rank": None}
        return kind(server_args, ports, gpu_id=gpu, **ranks)
    from sglang.srt.runtime_context import SpawnRanks

    server_args.resolve_once()
    ports = _ports(server_args)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=gpu))
    return kind(server_args, ports)


def _ports(server_args: ServerArgs) -> PortArgs:
    """The names of SGLang's sockets. It keeps them with empty files that stay; nobody here opens such a socket."""
    ports = PortArgs.init_new(server_args)
    for name in vars(ports).values():
        if isinstance(name, str) and name.startswith("ipc://"):
            Path(name.removeprefix("ipc://")).unlink(missing_ok=True)
    return ports


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", sglang.__version__)[:3])
