"""Ming's image encoder as an actor: images and clips in, inputs of the thinker out; several requests pass together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from actors.encoding import Recent, digest_of, placed, run_through
from actors.ming.pixels import Shown, show_clip, show_image
from actors.pictures import quiet_pillow, read_picture
from actors.stage import ModelStage
from actors.video import VideoClip
from omniflow.actor import batched
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
    frame_s: float


class MingImageEncoder(ModelStage):
    """Sees with the vision tower of a Ming-flash-omni checkpoint: fills `ImageFeatures`.

    Images are png, jpeg or webp. Of clips (mp4, mov, webm, mkv, avi) two frames a second are seen, `max_frames` at
    most, and no sound is heard. An image has the same rows, within 1e-5 on a CPU, alone and beside others. The rows of
    recent ones are kept, up to `cache_mb`. `dtype` auto is bfloat16 on a GPU and float32 on a CPU.

    Raises InvalidInputError for what cannot be decoded, and for a clip of more than `max_clip_s` seconds.
    """

    heavy = True
    preload = ("torch", "safetensors.torch", "actors.ming.vision_tower", "PIL.Image")

    def __init__(
        self,
        *,
        model: str,
        device: str = "cpu",
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        threads: int = 1,
        max_frames: int = 256,
        max_clip_s: float = 600,
        cache_mb: int = 512,
    ) -> None:
        super().__init__(model, device, threads)
        self._dtype = dtype
        self._max_frames = max_frames
        self._max_clip_s = max_clip_s
        self._recent: Recent[_Seen] = Recent(cache_mb * 10**6, lambda seen: seen.rows.nbytes)
        self._tower: VisionTower
        self._pixels: Pixels

    async def setup(self) -> None:
        """Load the tower, and run it once. Raises WeightsError where it cannot be loaded."""
        from PIL import Image

        quiet_pillow()
        await self.offload(self._load, self._weights.path())
        grey = Image.new("RGB", (256, 256), "grey")
        shown = await run_through(self, show_image(grey, "", self._tower.sizes, self._pixels))
        await run_through(self, self._tower.rows([shown]))

    @batched(max_size=MAX_BATCH)
    async def run(self, image: list[Images]) -> list[ImageFeatures]:
        """See the class."""
        items = [_items(request) for request in image]
        digests = [await self.offload(_digests, each) for each in items]
        seen = await self._seen(
            {
                digest: item
                for known_as, each in zip(digests, items, strict=True)
                for digest, item in zip(known_as, each, strict=True)
            }
        )
        return [
            _features(request, [seen[digest] for digest in known_as])
            for request, known_as in zip(image, digests, strict=True)
        ]

    async def _seen(self, items: dict[bytes, _Item]) -> dict[bytes, _Seen]:
        known = {digest: self._recent.get(digest) for digest in items}
        found = {digest: seen for digest, seen in known.items() if seen is not None}
        waiting: dict[bytes, Shown] = {}
        for digest in [digest for digest in items if digest not in found]:
            shown = await self._shown(items[digest])
            if waiting and len(shown.values) + sum(len(each.values) for each in waiting.values()) > MAX_PATCHES:
                found |= await self._pass(waiting)
                waiting = {}
            waiting[digest] = shown
        return found | await self._pass(waiting)

    async def _shown(self, item: _Item) -> Shown:
        sizes = self._tower.sizes
        if not item.is_clip:
            picture = await self.offload(read_picture, item.data, item.where)
            return await run_through(self, show_image(picture, item.where, sizes, self._pixels))
        clip = await self.offload(VideoClip, item.data, item.where)
        if clip.seconds > self._max_clip_s:
            raise _invalid(
                f"{item.where} lasts {clip.seconds:.1f} s; this model takes at most {self._max_clip_s:g} s in one clip"
            )
        return await run_through(self, show_clip(clip, item.where, sizes, self._max_frames))

    async def _pass(self, waiting: dict[bytes, Shown]) -> dict[bytes, _Seen]:
        if not waiting:
            return {}
        merge = self._tower.sizes.spatial_merge_size
        found: dict[bytes, _Seen] = {}
        passed = await run_through(self, self._tower.rows(list(waiting.values())))
        for (digest, shown), rows in zip(waiting.items(), passed, strict=True):
            frames, high, wide = shown.grid
            found[digest] = _Seen(rows, (frames, high // merge, wide // merge), shown.frame_s)
            self._recent.keep(digest, found[digest])
        return found

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


def _digests(items: Sequence[_Item]) -> list[bytes]:
    return [digest_of(item.data, b"clip" if item.is_clip else b"image") for item in items]


def _features(request: Images, seen: Sequence[_Seen]) -> ImageFeatures:
    return ImageFeatures(
        rows=np.concatenate([each.rows for each in seen]),
        index=request.index,
        grids=tuple(each.grid for each in seen),
        videos=request.videos,
        frame_s=tuple(each.frame_s for each in seen),
    )


def _invalid(message: str) -> InvalidInputError:
    return InvalidInputError(message, param="messages")
