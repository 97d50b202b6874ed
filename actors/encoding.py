"""What encoder stages share: results that are kept, batches of a bounded size, passes that let others go between."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from omniflow.actor import Actor

if TYPE_CHECKING:
    import torch
    from torch import nn

K = TypeVar("K")
T = TypeVar("T")
ModuleT = TypeVar("ModuleT", bound="nn.Module")
DtypeName = Literal["auto", "float32", "bfloat16"]
STEP_S = 0.05
"""A step of a pass ends with the first layer that ends after so long."""


class Recent(Generic[T]):
    """The results that were used last, by the digest of what they were made of, within `capacity_bytes`.

    Each turn of a conversation comes with the media of all earlier ones; only what is new has to be encoded.
    """

    def __init__(self, capacity_bytes: int, size_bytes: Callable[[T], int]) -> None:
        self._left = capacity_bytes
        self._size_bytes = size_bytes
        self._kept: OrderedDict[bytes, T] = OrderedDict()

    def get(self, digest: bytes) -> T | None:
        """The result, which is now the last one used; None where it is not kept."""
        if digest in self._kept:
            self._kept.move_to_end(digest)
        return self._kept.get(digest)

    def keep(self, digest: bytes, result: T) -> None:
        """Keep `result`, and let go of those that were used longest ago."""
        if digest in self._kept:
            self._left += self._size_bytes(self._kept.pop(digest))
        self._kept[digest] = result
        self._left -= self._size_bytes(result)
        while self._left < 0:
            self._left += self._size_bytes(self._kept.popitem(last=False)[1])


def digest_of(data: bytes | memoryview, kind: bytes = b"") -> bytes:
    """What `Recent` calls a result by: of the data, and of what is made of it."""
    return hashlib.blake2b(data, digest_size=16, key=kind).digest()


def bounded(sizes: Mapping[K, int], most: int) -> Iterator[list[K]]:
    """The keys in their order, in batches whose sizes sum to `most` at most; a larger one goes alone."""
    batch: list[K] = []
    total = 0
    for key, size in sizes.items():
        if batch and total + size > most:
            yield batch
            batch, total = [], 0
        batch.append(key)
        total += size
    if batch:
        yield batch


async def run_through(actor: Actor, layers: Iterator[T | None]) -> T:
    """The result of a pass, which gives None after each layer and its result in the end.

    Other work of `actor` goes between some of the layers. A GPU only queues them, so there a pass is one step, or two.
    """
    result: T | None = None
    while result is None:
        result = await actor.offload(_advance, layers)
    return result


def _advance(layers: Iterator[T | None]) -> T | None:
    until = time.monotonic() + STEP_S
    for result in layers:
        if result is not None or time.monotonic() > until:
            return result
    raise RuntimeError("the pass ended without a result")


def dtype_for(wanted: DtypeName, device: str) -> torch.dtype:
    """What an encoder computes in: "auto" is bfloat16 on a GPU and float32 on a CPU."""
    # Imports torch, so not at the top: a graph is checked and explained without it.
    import torch

    if wanted == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return torch.float32 if wanted == "float32" else torch.bfloat16


def placed(module: ModuleT, device: str, wanted: DtypeName) -> ModuleT:
    """`module` on `device`, in what it computes in there.

    On a GPU this process from then on attends without cuDNN, which torch prefers on Hopper: it builds a plan for each
    new length of a clip or size of an image, and keeps them all. Heads of 64 and of 72 are FlashAttention's too.
    """
    import torch

    if device != "cpu":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return module.to(device, dtype_for(wanted, device))
