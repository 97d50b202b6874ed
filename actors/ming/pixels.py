"""Images and clips as Ming's vision tower reads them: how large they are shown, which frames of a clip, cut in patches.

As Ming's processor does it (which is Qwen2-VL's for images): sizes are multiples of what one input of the thinker
covers (`Vision.cell`, 32 pixels), near to the proportions of the original, within bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from actors.ming.config import Pixels, Vision
from actors.video import VideoClip
from omniflow.errors import InvalidInputError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_RATIO = 200
"""Of the sides of an image."""
FPS = 2.0
"""Frames of a clip that are seen in a second of it."""
PART = 2_000_000
"""Pixels of a large image that are made narrower at a time: 30 ms."""
MIN_CELLS, CLIP_CELLS = 128, 96 * 128
"""Cells of a frame at least, and of half of the frames of a clip together at most."""


class Shown(NamedTuple):
    """An image or a clip, cut in patches.

    `values` is uint8 [frames * rows * columns, patch_dim], each patch as (colour, frame, row, column); those that are
    merged into one input follow each other. `grid` is (frames, rows, columns) of the patches. `times_s` are the times
    of the frames of a clip, empty for an image.
    """

    values: np.ndarray
    grid: tuple[int, int, int]
    times_s: tuple[float, ...] = ()


def show_image(picture: Image, where: str, sizes: Vision, pixels: Pixels) -> Iterator[Shown | None]:
    """Gives None after each part of a large image, and in the end the image.

    Raises InvalidInputError where it is more than 200 times as long as wide.
    """
    size = fitting(picture.height, picture.width, sizes.cell, pixels.min_pixels, pixels.max_pixels, where)
    for narrow in _narrowed(picture, size[1]):
        if narrow is None:
            yield None
        else:
            yield cut(_resized(narrow, size)[None], sizes)


def show_clip(clip: VideoClip, where: str, sizes: Vision, max_frames: int) -> Iterator[Shown | None]:
    """Gives None after each frame that was decoded, and in the end the clip: two frames a second of it, `max_frames` at
    most, resized so that all of them fit into the bound of a clip.
    """
    wanted = frames_to_see(clip.count, clip.rate_hz, max_frames)
    frames: list[np.ndarray] = []
    size: tuple[int, int] | None = None
    for picture in clip.pictures(wanted):
        if picture is not None:
            size = size or clip_size(picture.height, picture.width, len(wanted), sizes.cell, where)
            frames.append(_resized(picture, size))
        yield None
    shown_hz = len(wanted) / clip.count * clip.rate_hz
    times_s = frame_times(len(wanted), sizes.temporal_patch_size, shown_hz)
    yield cut(np.stack(frames), sizes)._replace(times_s=times_s)


def frame_times(count: int, depth: int, rate_hz: float) -> tuple[float, ...]:
    """When each frame is, in seconds, that `depth` of `count` pictures became: in the middle of its first and its last.

    The last picture is repeated where there are too few.
    """
    firsts = range(0, count, depth)
    return tuple((first + min(first + depth, count) - 1) / 2 / rate_hz for first in firsts)


def frames_to_see(count: int, rate_hz: float, max_frames: int) -> list[int]:
    """Which of `count` frames are seen, from the first to the last in equal steps."""
    most = max(1, min(max_frames, count) // 2 * 2)
    number = int(min(max(1.0, count / rate_hz * FPS), most))
    return [int(each) for each in np.linspace(0, count - 1, number, dtype=int)]


def fitting(height: int, width: int, cell: int, min_pixels: float, max_pixels: float, where: str) -> tuple[int, int]:
    """Height and width in which an image is shown. Raises InvalidInputError, which says `where` it is."""
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InvalidInputError(
            f"{where}: {width} x {height} pixels are too long; one side may be {MAX_RATIO} times the other",
            param="messages",
        )
    rows, columns = round(height / cell), round(width / cell)
    if rows * columns * cell**2 > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / cell)) for side in (height, width))
    elif rows * columns * cell**2 < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / cell) for side in (height, width))
    return rows * cell, columns * cell


def clip_size(height: int, width: int, count: int, cell: int, where: str) -> tuple[int, int]:
    """Height and width in which each of `count` frames is shown. Raises InvalidInputError, which says `where` it is."""
    most = max(CLIP_CELLS * cell**2 / count * 2, int(MIN_CELLS * cell**2 * 1.05))
    return fitting(height, width, cell, MIN_CELLS * cell**2, most, where)


def cut(frames: np.ndarray, sizes: Vision) -> Shown:
    """uint8 [frames, height, width, 3], both multiples of `cell`, in patches. The last frame is repeated where there
    are too few for the patches' depth.
    """
    depth, patch, merge = sizes.temporal_patch_size, sizes.patch_size, sizes.spatial_merge_size
    frames = np.concatenate([frames, np.repeat(frames[-1:], -len(frames) % depth, axis=0)])
    count, height, width, colours = frames.shape
    parts = frames.reshape(
        count // depth, depth, height // sizes.cell, merge, patch, width // sizes.cell, merge, patch, colours
    )
    values = parts.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, sizes.patch_dim)
    return Shown(values, (count // depth, height // patch, width // patch))


def _narrowed(picture: Image, width: int) -> Iterator[Image | None]:
    """Gives None after some rows of a large picture, and in the end the whole of it, `width` wide.

    Pillow's `resize` does all rows before it does columns, and rounds in between: what comes out is what it makes of
    the picture at once. That took 0.2 s for 12 million pixels, and 0.3 s for 48.
    """
    from PIL.Image import Resampling, new

    if picture.width * picture.height <= PART or width >= picture.width:
        yield picture
        return
    narrow = new("RGB", (width, picture.height))
    rows = max(1, PART // picture.width)
    for top in range(0, picture.height, rows):
        part = picture.crop((0, top, picture.width, min(top + rows, picture.height)))
        narrow.paste(part.resize((width, part.height), Resampling.BICUBIC), (0, top))
        yield None
    yield narrow


def _resized(picture: Image, size: tuple[int, int]) -> np.ndarray:
    from PIL.Image import Resampling

    return np.asarray(picture.resize(size[::-1], Resampling.BICUBIC))
