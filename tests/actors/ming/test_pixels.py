from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from actors.ming.config import Pixels, Vision
from actors.ming.pixels import Shown, clip_size, cut, fitting, frames_to_see, show_clip, show_image
from actors.video import VideoClip
from omniflow.errors import InvalidInputError
from tests.actors.test_pictures import scene
from tests.videos import clip, number_of

VISION, PIXELS = Vision(), Pixels(max_pixels=100_000)
SMALL = Vision(hidden_size=48, num_heads=2, patch_size=4)


def transformers_patches(pictures: list[Image.Image], vision: Vision, pixels: Pixels) -> tuple[np.ndarray, np.ndarray]:
    made = Qwen2VLImageProcessorPil(
        min_pixels=pixels.min_pixels,
        max_pixels=pixels.max_pixels,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        image_mean=list(pixels.image_mean),
        image_std=list(pixels.image_std),
    )(pictures, return_tensors="np")
    return made["pixel_values"], made["image_grid_thw"]


def bright(shown: Shown, pixels: Pixels) -> np.ndarray:
    """The values as the tower takes them, in float."""
    colours = shown.values.reshape(len(shown.values), 3, -1) / 255
    mean, std = (np.array(each)[:, None] for each in (pixels.image_mean, pixels.image_std))
    return ((colours - mean) / std).reshape(len(colours), -1)


def shown_as(picture: Image.Image, name: str, vision: Vision = VISION) -> Shown:
    *_, shown = show_image(picture, name, vision, PIXELS)
    assert shown is not None
    return shown


@pytest.mark.parametrize("size", [(80, 60), (400, 300), (33, 777), (1, 1), (97, 31)])
def test_an_image_is_transformers_patches(size: tuple[int, int]) -> None:
    picture = scene(*size)
    shown = shown_as(picture, "image 1")
    values, (grid,) = transformers_patches([picture], VISION, PIXELS)
    assert shown.grid == tuple(grid) and shown.times_s == ()
    assert shown.values.dtype == np.uint8 and shown.values.shape == (np.prod(grid), 1536)
    assert np.abs(bright(shown, PIXELS) - values).max() <= 1e-5
    assert size == (1, 1) or values.std() > 0.5


@pytest.mark.parametrize("size", [(500, 333), (1999, 70), (700, 900)])
def test_a_large_image_is_made_small_in_steps_to_the_same_pixels(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    whole = shown_as(Image.fromarray(noise), "image 1")
    monkeypatch.setattr("actors.ming.pixels.PART", 20_000)
    *parts, shown = show_image(Image.fromarray(noise), "image 1", VISION, PIXELS)
    assert shown is not None and np.array_equal(shown.values, whole.values)
    assert len(parts) >= size[0] * size[1] // 20_000 and parts == [None] * len(parts)


def test_sizes_are_transformers() -> None:
    random = np.random.default_rng(0)
    for height, width in [*random.integers(1, 4000, (300, 2)).tolist(), (6000, 31), (32, 6400)]:
        for low, high in ((64 * 64, 1280 * 1024), (100_000, 120_000)):
            if max(height, width) <= 200 * min(height, width):
                wanted = smart_resize(height, width, 32, low, high)
                assert fitting(height, width, 32, low, high, "image 1") == wanted


def test_an_image_that_is_too_long_is_refused() -> None:
    assert shown_as(Image.new("RGB", (800, 4)), "image 1", SMALL).grid[1] == 2
    with pytest.raises(InvalidInputError, match=r"^image 4: 801 x 4 pixels are too long; .* 200 times") as refused:
        shown_as(Image.new("RGB", (801, 4)), "image 4", SMALL)
    assert refused.value.param == "messages"


def test_a_clips_patches_are_those_of_its_frames_one_behind_the_other() -> None:
    """transformers' patches of two frames as images, each of which stands for both halves of a patch there."""
    pictures = [scene(96, 64), scene(96, 64).rotate(180), scene(96, 64).transpose(Image.Transpose.FLIP_TOP_BOTTOM)]
    shown = cut(np.stack([np.asarray(each) for each in pictures]), VISION)
    assert shown.grid == (2, 4, 6)
    pixels = Pixels(min_pixels=1)
    halves = [transformers_patches([each], VISION, pixels)[0].reshape(24, 3, 2, 256) for each in pictures]
    first = np.stack([halves[0][:, :, 0], halves[1][:, :, 1]], axis=2)
    values = bright(shown, pixels).reshape(2, 24, 3, 2, 256)
    assert np.abs(values[0] - first).max() <= 1e-5
    assert np.abs(values[1] - halves[2]).max() <= 1e-5, "the last is repeated"


@pytest.mark.parametrize(
    ("count", "rate_hz", "most", "wanted"),
    [
        (1, 25.0, 256, [0]),
        (3, 25.0, 256, [0]),
        (50, 25.0, 256, [0, 16, 32, 49]),
        (5, 1.0, 256, [0, 1, 2, 4]),
        (251, 25.0, 256, np.linspace(0, 250, 20).astype(int).tolist()),
        (100_000, 25.0, 256, np.linspace(0, 99_999, 256).astype(int).tolist()),
        (100_000, 25.0, 7, [0, 19999, 39999, 59999, 79999, 99999]),
        (500, 25.0, 1, [0]),
    ],
)
def test_which_frames_are_seen(count: int, rate_hz: float, most: int, wanted: list[int]) -> None:
    assert frames_to_see(count, rate_hz, most) == wanted


def shown_of(steps: Iterator[Shown | None]) -> Shown:
    *between, shown = steps
    assert between and set(between) == {None} and shown is not None
    return shown


def test_two_frames_a_second_of_a_clip_are_seen() -> None:
    made = VideoClip(clip(20, rate_hz=8), "clip 1")  # 2.5 s: 5 frames
    shown = shown_of(show_clip(made, "clip 1", SMALL, 256))
    frames, rows, columns = shown.grid
    assert frames == 3 and shown.times_s == pytest.approx([0.25, 1.25, 2.0])  # the last one is alone
    pixels = shown.values.reshape(3, rows // 2, columns // 2, 2, 2, 3, 2, 4, 4)
    bottom_right = pixels[:, -1, -1, :, :, :, :].mean(axis=(1, 2, 3, 5, 6))
    assert np.abs(bottom_right.flatten() - (20 + 8 * np.array([0, 4, 9, 14, 19, 19]))).max() < 3


@pytest.mark.parametrize(("size", "grid"), [((96, 64), (20, 28)), ((192, 32), (10, 56)), ((64, 96), (28, 20))])
def test_a_frame_of_a_clip_has_at_least_128_cells(size: tuple[int, int], grid: tuple[int, int]) -> None:
    """Of 8 pixels here: as they are, 96."""
    made = VideoClip(clip(4, rate_hz=2, width=size[0], height=size[1]), "clip 1")
    shown = shown_of(show_clip(made, "clip 1", SMALL, 256))
    assert shown.grid == (2, *grid)


def test_a_frame_of_a_long_clip_has_its_128_cells_all_the_same() -> None:
    for count in (2, 150, 180, 191, 192, 256):
        most = max(96 * 128 * 1024 / count * 2, int(128 * 1024 * 1.05))
        assert clip_size(720, 1280, count, 32, "clip 1") == smart_resize(720, 1280, 32, 128 * 1024, most)
    assert clip_size(720, 1280, 256, 32, "clip 1") == (8 * 32, 15 * 32)
    assert clip_size(720, 1280, 128, 32, "clip 1") == (10 * 32, 18 * 32)


def test_all_frames_of_a_clip_fit_into_its_bound() -> None:
    made = VideoClip(clip(60, rate_hz=2, width=240, height=160), "clip 1")
    alone = shown_of(show_clip(made, "clip 1", SMALL, 2))
    assert alone.grid == (1, 40, 60)
    shown = shown_of(show_clip(made, "clip 1", SMALL, 256))
    wanted = smart_resize(160, 240, 8, 128 * 64, int(96 * 128 * 64 / 60 * 2))
    assert shown.grid == (30, *[side // 4 for side in wanted])
    assert len(shown.values) // 4 <= 96 * 128
    assert number_of(shown.values[-4:].reshape(4, 3, -1).swapaxes(1, 2)) == 59 % 20
