from __future__ import annotations

import threading
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from actors.ming import seeing
from actors.ming.config import Pixels
from actors.ming.pixels import Shown, show_clip, show_image
from actors.ming.seeing import MingImageEncoder
from actors.ming.vision_tower import VisionTower, load_vision_tower
from actors.video import VideoClip
from omniflow.errors import InvalidInputError
from omniflow.media import ImageFeatures, Images
from tests.actors.ming.towers import HIDDEN, write_towers
from tests.actors.test_pictures import encoded, head_of, scene
from tests.videos import clip
from tests.waiting import HANGS_S

WIDE, TALL, SMALL = (encoded(scene(*size)) for size in ((96, 40), (30, 77), (21, 20)))
CLIP = clip(20, rate_hz=8, width=64, height=48)  # 5 of its frames are seen, as 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_towers(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
async def encoder(folder: Path) -> AsyncIterator[MingImageEncoder]:
    actor = MingImageEncoder(model=str(folder), max_clip_s=3)
    await actor.setup()
    yield actor
    await actor.close()


def rows_of(features: ImageFeatures) -> list[np.ndarray]:
    """Those of each image, by its grid."""
    assert features.rows.dtype == np.float32 and features.rows.shape[1] == HIDDEN
    counts = [frames * rows * columns for frames, rows, columns in features.grids]
    assert len(features.rows) == sum(counts) and len(features.index) == len(features.times_s) == len(counts)
    return np.split(features.rows, np.cumsum(counts)[:-1])


def passes_of(encoder: MingImageEncoder, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """How many patches the images of each pass from now on have."""
    passes: list[list[int]] = []
    tower: Any = encoder._tower
    rows = tower.rows

    def watched(shown: list[Shown]) -> Any:
        passes.append([len(each.values) for each in shown])
        return rows(shown)

    monkeypatch.setattr(tower, "rows", watched)
    return passes


def shown_as(picture: Image.Image, name: str, tower: VisionTower, pixels: Pixels) -> Shown:
    *_, shown = show_image(picture, name, tower.sizes, pixels)
    assert shown is not None
    return shown


def rows_by(tower: VisionTower, shown: Shown) -> np.ndarray:
    *_, rows = tower.rows([shown])
    assert rows is not None
    return rows[0]


@pytest.mark.anyio
async def test_an_image_and_a_clip_become_the_rows_of_their_patches(encoder: MingImageEncoder, folder: Path) -> None:
    (features,) = await encoder.run([Images([WIDE, CLIP, TALL], (1, 4, 5), (4,))])
    assert (features.index, features.videos) == ((1, 4, 5), (4,))
    tower, pixels = load_vision_tower(folder), Pixels.load(folder)
    *_, shown = show_clip(VideoClip(CLIP, "clip 1"), "clip 1", tower.sizes, 256)
    assert shown is not None
    wanted = [
        shown_as(scene(96, 40), "image 1", tower, pixels),
        shown,
        shown_as(scene(30, 77), "image 2", tower, pixels),
    ]
    assert features.grids == tuple((each.grid[0], each.grid[1] // 2, each.grid[2] // 2) for each in wanted)
    assert features.grids[0] == (1, 5, 12) and features.grids[1][0] == 3
    assert features.times_s == ((), pytest.approx((0.25, 1.25, 2.0)), ())
    for rows, each in zip(rows_of(features), wanted, strict=True):
        assert np.abs(rows - rows_by(tower, each)).max() <= 1e-5


@pytest.mark.anyio
async def test_an_image_is_seen_the_same_alone_and_beside_those_of_others(folder: Path) -> None:
    requests = [
        Images([WIDE, SMALL], (0, 2)),
        Images([CLIP], (1,), (1,)),
        Images([TALL, WIDE], (0, 1)),
    ]
    together, alone = MingImageEncoder(model=str(folder)), MingImageEncoder(model=str(folder), cache_mb=0)
    await together.setup()
    await alone.setup()
    batch = await together.run(requests)
    for features, request in zip(batch, requests, strict=True):
        assert (features.index, features.videos) == (request.index, request.videos)
        for rows, data in zip(rows_of(features), request.data, strict=True):
            (single,) = await alone.run([Images([data], (7,), (7,) if data is CLIP else ())])
            assert np.abs(rows - single.rows).max() <= 1e-5
    assert np.array_equal(rows_of(batch[0])[0], rows_of(batch[2])[1])
    assert np.abs(rows_of(batch[0])[1][:4] - rows_of(batch[0])[0][:4]).max() > 0.01


@pytest.mark.anyio
async def test_what_was_seen_before_is_not_seen_again(
    encoder: MingImageEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = passes_of(encoder, monkeypatch)
    (first,) = await encoder.run([Images([WIDE, WIDE, CLIP], (0, 1, 2), (2,))])
    (second,) = await encoder.run([Images([TALL, CLIP, WIDE], (0, 1, 2), (1,))])
    assert [len(each) for each in passes] == [2, 1] and passes[0][0] == 5 * 12 * 4
    assert np.array_equal(rows_of(first)[0], rows_of(first)[1])
    assert np.array_equal(rows_of(first)[0], rows_of(second)[2])
    assert np.array_equal(rows_of(first)[2], rows_of(second)[1])
    assert second.times_s == ((), first.times_s[2], ())
    encoder._recent = type(encoder._recent)(65 * HIDDEN * 4, lambda seen: seen.rows.nbytes)
    for data in (WIDE, SMALL, WIDE):  # 60 and 6 rows: they do not fit beside each other
        await encoder.run([Images([data], (0,))])
    assert len(passes) == 5
    same = [(await encoder.run([Images([WIDE], (0,))]))[0].rows for _ in range(2)]
    assert np.shares_memory(*same) and not same[0].flags.writeable


@pytest.mark.anyio
async def test_a_file_is_seen_as_what_it_is_sent_for(encoder: MingImageEncoder) -> None:
    """Beside one who sends it as a clip, too."""
    with pytest.raises(InvalidInputError, match="^image 1 of the conversation: .*not a png, jpeg or webp"):
        await encoder.run([Images([CLIP], (0,)), Images([CLIP], (0,), (0,))])


@pytest.mark.anyio
async def test_a_pass_is_bounded(encoder: MingImageEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MingImageEncoder, "most", 300)
    passes = passes_of(encoder, monkeypatch)
    await encoder.run([Images([WIDE, SMALL], (0, 1)), Images([TALL, CLIP, encoded(scene(16, 16))], (0, 1, 2), (1,))])
    assert [len(each) for each in passes] == [2, 1, 1, 1]
    assert all(len(each) == 1 or sum(each) <= 300 for each in passes)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("images", "named"),
    [
        (Images([SMALL, b"GIF89a"], (0, 1)), r"^image 2 of the conversation: .*not a png, jpeg or webp"),
        (Images([SMALL, b"GIF89a"], (0, 1), (), ("a", "messages[0]")), r"^messages\[0\]: .*not a png, jpeg or webp"),
        (
            Images([CLIP, SMALL, CLIP[:99]], (0, 1, 2), (0, 2)),
            r"^clip 2 of the conversation: .*cannot be read as a clip",
        ),
        (Images([SMALL, CLIP], (0, 1)), r"^image 2 of the conversation: .*not a png, jpeg or webp"),
        (Images([clip(25, rate_hz=8)], (0,), (0,)), r"^clip 1 of the conversation lasts 3\.1 s; .* at most 3 s"),
        (Images([encoded(Image.new("RGB", (900, 3)))], (0,)), r"^image 1 of the conversation: 900 x 3 pixels"),
    ],
)
async def test_what_cannot_be_seen_is_named_and_the_next_is_seen(
    encoder: MingImageEncoder, images: Images, named: str
) -> None:
    with pytest.raises(InvalidInputError, match=named) as refused:
        await encoder.run([images])
    assert refused.value.param == "messages"
    (features,) = await encoder.run([Images([SMALL], (0,))])
    assert features.grids == ((1, 2, 3),) and len(features.rows) == 6


@pytest.mark.anyio
async def test_16_bits_see_nearly_the_same(encoder: MingImageEncoder, folder: Path) -> None:
    actor = MingImageEncoder(model=str(folder), dtype="bfloat16")
    await actor.setup()
    request = Images([WIDE, CLIP], (0, 1), (1,))
    ((half,), (whole,)) = (await actor.run([request]), await encoder.run([request]))
    assert half.grids == whole.grids and half.rows.dtype == np.float32
    assert 1e-4 < np.abs(half.rows - whole.rows).max() < 0.03
    assert np.abs(np.linalg.norm(half.rows, axis=1) - 1).max() < 1e-6, "rows are of length 1 in 32 bits"


def test_it_says_what_it_reads(folder: Path) -> None:
    assert [weights.path() for weights in MingImageEncoder(model=str(folder)).weights()] == [folder]


@pytest.mark.anyio
async def test_pillow_warns_nobody(folder: Path) -> None:
    """Of an image of 120 million pixels whoever sent it is told."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        actor = MingImageEncoder(model=str(folder))
        await actor.setup()
        with pytest.raises(InvalidInputError, match="12000 x 10000 pixels; at most 64 million"):
            await actor.run([Images([head_of(12000, 10000)], (0,))])
        await actor.close()
    assert [str(each.message) for each in told] == []


@pytest.mark.anyio
async def test_images_are_decoded_beside_each_other(encoder: MingImageEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are decoders meet in the decoder, which would break where they came one by one."""
    meeting, read = threading.Barrier(4, timeout=HANGS_S), seeing.read_picture

    def met(data: bytes, where: str) -> Image.Image:
        meeting.wait()
        return read(data, where)

    monkeypatch.setattr(seeing, "read_picture", met)
    images = [encoded(scene(20 + size, 40)) for size in range(8)]
    (features,) = await encoder.run([Images(images, tuple(range(8)))])
    monkeypatch.undo()
    for number, rows in enumerate(rows_of(features)):
        alone = MingImageEncoder(model=str(encoder._weights.path()), cache_mb=0)
        alone._tower, alone._pixels = encoder._tower, encoder._pixels
        (single,) = await alone.run([Images([images[number]], (0,))])
        assert np.abs(rows - single.rows).max() <= 1e-5


@pytest.mark.anyio
async def test_of_several_bad_images_the_first_is_named(
    encoder: MingImageEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it takes longest to find out."""
    second_is_known, read = threading.Event(), seeing.read_picture

    def slow_first(data: bytes, where: str) -> Image.Image:
        if where == "messages[0]":
            assert second_is_known.wait(HANGS_S)
        try:
            return read(data, where)
        finally:
            if where == "messages[1]":
                second_is_known.set()

    monkeypatch.setattr(seeing, "read_picture", slow_first)
    bad = Images([b"GIF89a", b"GIF87a", SMALL], (0, 1, 2), (), ("messages[0]", "messages[1]", "messages[2]"))
    with pytest.raises(InvalidInputError, match=r"^messages\[0\]: ") as refused:
        await encoder.run([bad])
    assert refused.value.param == "messages"
