"""Tensors of other stages, for engines whose thread gives a GPU its work by a stream of its own.

They are ready in the order of the default stream, and their memory goes back in it (`omniflow/transport/lane.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def in_order(*tensors: torch.Tensor | None) -> Iterator[None]:
    """Read `tensors` here: where one is on a GPU by the default stream, which this thread's waits for afterwards."""
    if not any(tensor is not None and tensor.is_cuda for tensor in tensors):
        yield
        return
    default, own = torch.cuda.default_stream(), torch.cuda.current_stream()
    with torch.cuda.stream(default):
        yield
    own.wait_stream(default)
