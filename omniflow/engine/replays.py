"""Functions of tensors that never move: a GPU captures each once for every size, and replays it as one CUDA graph.

A step of a small model is thousands of kernels of some microseconds each, and a launch from Python takes longer than
that. A replay launches all of them in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

_WARM_UPS = 2
"""Calls before a capture: in the first, libraries make handles and kernels are compiled, which no graph may hold."""


class Replays:
    """Graphs by key. What was not captured is called as it is; on a CPU that is everything.

    A function reads and writes tensors that were there before, at the same places in each call; what it makes itself
    lives in memory that all graphs share, so it is not to be used after the call. One thread calls, on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._captures = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def capture(self, key: Hashable, call: Callable[[], None]) -> None:
        """Capture `call`, which really runs before that: not for calls that may not run yet."""
        if not self._captures:
            return
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                call()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        # Other threads of the process may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            call()
        self._graphs[key] = graph

    def run(self, key: Hashable, call: Callable[[], None]) -> None:
        """What `call` does, by the graph of `key` where there is one."""
        graph = self._graphs.get(key)
        if graph is None:
            call()
        else:
            graph.replay()
