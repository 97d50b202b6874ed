"""Encoder stages: media are decoded beside each other, pass together in batches of a bounded size, and are kept."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np

from actors.stage import ModelStage
from actors.threads import Threads, in_order

if TYPE_CHECKING:
    import torch
    from torch import nn

K = TypeVar("K")
R = TypeVar("R")
Item = TypeVar("Item")
Ready = TypeVar("Ready")
Made = TypeVar("Made")
T = TypeVar("T")
ModuleT = TypeVar("ModuleT", bound="nn.Module")
DtypeName = Literal["auto", "float32", "bfloat16"]
STEP_S = 0.05
"""A step of a pass ends with the first layer that ends after so long."""


class MediaEncoder(ModelStage, ABC, Generic[Item, Ready, Made]):
    """A tower over media of several requests: it passes over several items at once, keeps what it made of recent ones,
    and while it works, the next ones are decoded.

    `dtype` auto is bfloat16 on a GPU and float32 on a CPU. Up to `decoders` items are decoded at the same time, each on
    a core. What was made is kept up to `cache_mb`, since each turn of a conversation brings the media of all before.
    """

    heavy = True
    most: ClassVar[int]
    """Of what `size` counts, in one pass, but for a larger item, which goes alone: the memory of a pass is bounded."""

    def __init__(self, model: str, device: str, dtype: DtypeName, threads: int, decoders: int, cache_mb: int) -> None:
        super().__init__(model, device, threads)
        self._dtype = dtype
        self._decoders = Threads(decoders)
        self._recent: Recent[Made] = Recent(cache_mb * 10**6, self.num_bytes)

    @abstractmethod
    def digest(self, item: Item) -> bytes:
        """What `item` is known by: `digest_of` its data."""

    @abstractmethod
    async def ready(self, item: Item) -> Ready:
        """`item` as the tower takes it; what blocks goes through `decode`. Raises InvalidInputError that names it."""

    @abstractmethod
    def size(self, ready: Ready) -> int:
        """How much of `most` it takes."""

    @abstractmethod
    def layers(self, batch: Sequence[Ready]) -> Iterator[Sequence[Made] | None]:
        """A pass over `batch`: None after each layer, and in the end what was made of each."""

    @abstractmethod
    def num_bytes(self, made: Made) -> int:
        """What `made` takes of the cache."""

    async def encoded(self, requests: Sequence[Sequence[Item]]) -> list[list[Made]]:
        """What the tower makes of each item of each request; an item that comes twice is seen once."""
        digests = [await self.decode(self._digests, items) for items in requests]
        items = {
            digest: item
            for known_as, own in zip(digests, requests, strict=True)
            for digest, item in zip(known_as, own, strict=True)
        }
        made = {digest: kept for digest in items if (kept := self._recent.get(digest)) is not None}
        made |= await self._new({digest: item for digest, item in items.items() if digest not in made})
        return [[made[digest] for digest in known_as] for known_as in digests]

    async def decode(self, call: Callable[..., R], *args: Any) -> R:
        """Run a blocking step beside those of other items."""
        return await self._decoders.run(call, *args)

    async def joined(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """The rows of a request's items, in one piece. Those of a lone item are not copied (10 ms and more for 49 MB, a
        clip of 10 s): nobody writes to them, and they are what is kept.
        """
        return rows[0] if len(rows) == 1 else await self.decode(np.concatenate, rows)

    def busy_s(self) -> float:
        return max(super().busy_s(), self._decoders.busy_s())

    async def _new(self, items: Mapping[bytes, Item]) -> dict[bytes, Made]:
        made: dict[bytes, Made] = {}
        waiting: dict[bytes, Ready] = {}

        async def take(digest: bytes, ready: Ready) -> None:
            if waiting and self.size(ready) + sum(map(self.size, waiting.values())) > self.most:
                made.update(await self._pass(waiting))
                waiting.clear()
            waiting[digest] = ready

        await in_order(self.ready, items, self._decoders.most, take)
        return made | await self._pass(waiting) if waiting else made

    async def _pass(self, waiting: Mapping[bytes, Ready]) -> dict[bytes, Made]:
        passed = await run_through(self.offload, self.layers(list(waiting.values())))
        found = dict(zip(waiting, passed, strict=True))
        for digest, each in found.items():
            self._recent.keep(digest, each)
        return found

    def _digests(self, items: Sequence[Item]) -> list[bytes]:
        return [self.digest(item) for item in items]


class Recent(Generic[T]):
    """The results that were used last, by the digest of what they were made of, within `capacity_bytes`.

    Each turn of a conversation comes with the media of all earlier ones; only what is new has to be encoded.
    """

    def __init__(self, capacity_bytes: int, size_bytes: Callable[[T], int]) -> None:
        self._left = capacity_bytes
        self._size_bytes = size_bytes
        self._kept: OrderedDict[bytes, T] = OrderedDict()

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

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


async def run_through(offload: Callable[..., Awaitable[T | None]], layers: Iterator[T | None]) -> T:
    """The result of a pass, which gives None after each layer and its result in the end, in steps of `offload`.

    Other work goes between some of the layers. A GPU only queues them, so there a pass is one step, or two.
    """
    result: T | None = None
    while result is None:
        result = await offload(_advance, layers)
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


def on_host(tensor: torch.Tensor) -> np.ndarray:
    """Its values, to read, in memory of their own.

    A GPU copies into memory that stays where it is, which torch keeps for the next: 17 MB into any other took an H200
    14 ms, as long as the pass over the image.
    """
    import torch

    values: np.ndarray
    if tensor.is_cuda:
        values = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor).numpy().copy()
    else:
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        values = tensor.numpy() if whole else tensor.numpy().copy()  # a view of a pass would keep all of that
    values.setflags(write=False)
    return values
