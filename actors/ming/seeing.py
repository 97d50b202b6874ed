"""Ming's image encoder as an actor: images and clips in, inputs of the thinker out; several requests pass together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from actors.encoding import DtypeName, MediaEncoder, digest_of, placed, run_through
from actors.ming.pixels import Shown, show_clip, show_image
from actors.pictures import quiet_pillow, read_picture
from actors.video import VideoClip
from omniflow.actor import Count, batched
from omniflow.errors import InvalidInputError
from omniflow.media import ImageFeatures, Images

if TYPE_CHECKING:
    from actors.ming.config import Pixels
    from actors.ming.vision_tower import VisionTower

MAX_BATCH = 8
"""Requests whose images may pass together."""
MAX_PATCHES = 16_384
"""In one pass, but for a larger clip, which goes alone: the memory of a pass is bounded by it."""


class _Item(NamedTuple):
    data: bytes
    is_clip: bool
    where: str


class _Seen(NamedTuple):
    rows: np.ndarray
    grid: tuple[int, int, int]
    """After merging."""
    times_s: tuple[float, ...]


class MingImageEncoder(MediaEncoder[_Item, Shown, _Seen]):
    """Sees with the vision tower of a Ming-flash-omni checkpoint: fills `ImageFeatures`.

    Images are png, jpeg or webp. Of clips (mp4, mov, webm, mkv, avi) two frames a second are seen, `max_frames` at
    most, and no sound is heard. An image has the same rows, within 1e-5 on a CPU, alone and beside others. Up to
    `decoders` images and clips are decoded at the same time, each on a core; one of 64 million pixels takes 0.5 GB
    meanwhile. The rows of recent ones are kept, up to `cache_mb`. `dtype` auto is bfloat16 on a GPU and float32 on a
    CPU.

    Raises InvalidInputError, which names the image, for what cannot be decoded, and for a clip of more than
    `max_clip_s` seconds; of several the first one.
    """

    preload = ("torch", "safetensors.torch", "actors.ming.vision_tower", "PIL.Image")
    most = MAX_PATCHES

    def __init__(
        self,
        *,
        model: str,
        device: str = "cpu",
        dtype: DtypeName = "auto",
        threads: int = 1,
        decoders: Count = 4,
        max_frames: int = 256,
        max_clip_s: float = 600,
        cache_mb: int = 512,
    ) -> None:
        super().__init__(model, device, dtype, threads, decoders, cache_mb)
        self._max_frames = max_frames
        self._max_clip_s = max_clip_s
        self._tower: VisionTower
        self._pixels: Pixels

    async def setup(self) -> None:
        """Load the tower, and run it once. Raises WeightsError where it cannot be loaded."""
        from PIL import Image

        quiet_pillow()
        await self.offload(self._load, self._weights.path())
        grey = Image.new("RGB", (256, 256), "grey")
        shown = await run_through(self.offload, show_image(grey, "", self._tower.sizes, self._pixels))
        await run_through(self.offload, self.layers([shown]))

    @batched(max_size=MAX_BATCH)
    async def run(self, image: list[Images]) -> list[ImageFeatures]:
        """See the class."""
        seen = await self.encoded([_items(request) for request in image])
        return [await self._features(request, own) for request, own in zip(image, seen, strict=True)]

    def digest(self, item: _Item) -> bytes:
        return digest_of(item.data, b"clip" if item.is_clip else b"image")

    async def ready(self, item: _Item) -> Shown:
        """Decoded, resized, and cut in patches."""
        sizes = self._tower.sizes
        if not item.is_clip:
            picture = await self.decode(read_picture, item.data, item.where)
            return await run_through(self.decode, show_image(picture, item.where, sizes, self._pixels))
        clip = await self.decode(VideoClip, item.data, item.where)
        if clip.seconds > self._max_clip_s:
            raise InvalidInputError(
                f"{item.where} lasts {clip.seconds:.1f} s; this model takes at most {self._max_clip_s:g} s in one clip",
                param="messages",
            )
        return await run_through(self.decode, show_clip(clip, item.where, sizes, self._max_frames))

    def size(self, ready: Shown) -> int:
        return len(ready.values)

    def layers(self, batch: Sequence[Shown]) -> Iterator[list[_Seen] | None]:
        merge = self._tower.sizes.spatial_merge_size
        for passed in self._tower.rows(batch):
            if passed is None:
                yield None
            else:
                grids = [(frames, high // merge, wide // merge) for frames, high, wide in (each.grid for each in batch)]
                yield [_Seen(*each) for each in zip(passed, grids, (each.times_s for each in batch), strict=True)]

    def num_bytes(self, made: _Seen) -> int:
        return made.rows.nbytes

    async def _features(self, request: Images, seen: Sequence[_Seen]) -> ImageFeatures:
        return ImageFeatures(
            rows=await self.joined([each.rows for each in seen]),
            index=request.index,
            grids=tuple(each.grid for each in seen),
            videos=request.videos,
            times_s=tuple(each.times_s for each in seen),
        )

    def _load(self, folder: Path) -> None:
        # Imports torch, so not at the top: a graph is checked and explained without it.
        import torch

        from actors.ming.config import Pixels
        from actors.ming.vision_tower import load_vision_tower

        torch.set_num_threads(self._threads)
        self._pixels = Pixels.load(folder)
        self._tower = placed(load_vision_tower(folder), self._device, self._dtype)


def _items(request: Images) -> list[_Item]:
    items: list[_Item] = []
    for data, index in zip(request.data, request.index, strict=True):
        is_clip = index in request.videos
        number = 1 + sum(item.is_clip == is_clip for item in items)
        name = f"{'clip' if is_clip else 'image'} {number} of the conversation"
        items.append(_Item(data, is_clip, request.where[len(items)] if request.where else name))
    return items
