from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from actors import pictures
from actors.pictures import read_picture
from omniflow.errors import InvalidInputError


def scene(width: int = 80, height: int = 60) -> Image.Image:
    """Smooth, and different in each corner."""
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * columns / width, 255 * rows / height, 128 + 100 * np.sin(columns / 9)], axis=-1)
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(picture: Image.Image, format: str = "PNG", **how: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **how)
    return file.getvalue()


def apart(data: bytes, wanted: Image.Image) -> float:
    picture = read_picture(data, "image 1")
    assert picture.mode == "RGB" and picture.size == wanted.size
    return float(np.abs(np.asarray(picture, np.float32) - np.asarray(wanted.convert("RGB"), np.float32)).mean())


def head_of(width: int, height: int) -> bytes:
    """The begin of a PNG that would be so large."""
    head = bytearray(encoded(scene()))
    head[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    head[29:33] = zlib.crc32(head[12:29]).to_bytes(4, "big")
    return bytes(head[:200])


@pytest.mark.parametrize(
    ("format", "how", "most"),
    [
        ("PNG", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("WEBP", {"quality": 90}, 4),
        ("JPEG", {"quality": 95}, 2),
        ("JPEG", {"quality": 95, "progressive": True}, 2),
    ],
)
def test_formats(format: str, how: dict[str, object], most: float) -> None:
    assert apart(encoded(scene(), format, **how), scene()) <= most


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK"])
def test_all_colours_become_red_green_and_blue(mode: str) -> None:
    picture = scene().convert(mode)
    assert apart(encoded(picture, "JPEG" if mode == "CMYK" else "PNG"), picture) <= 3


def test_greys_of_16_bits_keep_their_range() -> None:
    greys = np.asarray(scene().convert("L"))
    picture = Image.fromarray(greys.astype(np.uint16) * 257)
    assert picture.mode == "I;16" and apart(encoded(picture), Image.fromarray(greys)) == 0


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_upright(orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = scene()
    wanted = stored.copy()
    wanted.getexif()[0x0112] = orientation
    upright = ImageOps.exif_transpose(wanted)
    assert upright.size == ((80, 60) if orientation < 5 else (60, 80))
    assert apart(encoded(stored, format, exif=exif), upright) <= 6
    assert orientation == 1 or apart(encoded(stored, format), stored) <= 6


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_lies_on_white(mode: str) -> None:
    picture = scene().convert("RGBA")
    alpha = np.zeros((60, 80), np.uint8)
    alpha[:30], alpha[30:45] = 255, 128
    picture.putalpha(Image.fromarray(alpha))
    how = {}
    if mode == "P":
        picture = scene().convert("P")
        how = {"transparency": picture.getpixel((79, 59))}
    data = encoded(picture.convert(mode), **how)
    pixels = np.asarray(read_picture(data, "image 1"), np.float32)
    assert (pixels[59, 79] == 255).all() and pixels[0, 0].mean() < 150
    if mode == "RGBA":
        assert np.abs(pixels[40, 10] - (255 + np.asarray(scene(), np.float32)[40, 10]) / 2).max() <= 2


def test_of_an_animation_the_first_frame_is_seen() -> None:
    others = [ImageOps.flip(scene()), ImageOps.mirror(scene())]
    for format in ("WEBP", "PNG"):
        assert apart(encoded(scene(), format, save_all=True, append_images=others), scene()) <= 6


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "not a png, jpeg or webp"),
        (b"GIF89a" + bytes(100), "not a png, jpeg or webp"),
        (encoded(scene(), "GIF"), "not a png, jpeg or webp"),
        (encoded(scene(), "TIFF"), "not a png, jpeg or webp"),
        (encoded(scene())[:120], "cannot be decoded"),
        (encoded(scene(), "JPEG")[:600], "cannot be decoded"),
        (encoded(scene(), "WEBP")[:200], "not a png, jpeg or webp|cannot be decoded"),
    ],
)
def test_what_is_no_whole_image_is_refused(data: bytes, named: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^image 7: .*({named})") as refused:
        read_picture(data, "image 7")
    assert refused.value.param == "messages"


def test_an_image_that_claims_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head is all that is there: decoding would say that it is broken."""
    for width, height, named in (
        (9000, 8000, "9000 x 8000 pixels; at most 64 million"),
        (60_000, 60_000, "too many pixels; at most 64 million"),
    ):
        with pytest.raises(InvalidInputError, match=named):
            read_picture(head_of(width, height), "image 1")
    monkeypatch.setattr(pictures, "MAX_PIXELS", 80 * 60)
    assert apart(encoded(scene()), scene()) == 0
    monkeypatch.setattr(pictures, "MAX_PIXELS", 80 * 60 - 1)
    with pytest.raises(InvalidInputError, match="80 x 60 pixels"):
        read_picture(encoded(scene()), "image 1")


def test_a_jpeg_that_goes_over_its_pixels_again_and_again_is_refused_before_it_is_decoded() -> None:
    """Other data that follows its end does not count."""
    data = encoded(scene(), "JPEG", progressive=True)
    begin = data.rindex(b"\xff\xda")
    scan, scans = data[begin:-2], data.count(b"\xff\xda")
    most = data[:-2] + scan * (pictures.MAX_SCANS - scans) + data[-2:] + scan * 1000
    assert read_picture(most, "image 1").size == (80, 60)
    with pytest.raises(InvalidInputError, match="more than 100 times; send it baseline"):
        read_picture(data[:-2] + scan * (pictures.MAX_SCANS - scans + 1) + data[-2:], "image 1")


@pytest.mark.parametrize(("tag", "value"), [(0x010F, 1.5), (0x011A, "ten"), (0x0100, "wide")])
def test_an_exif_that_cannot_be_written_again_is_no_obstacle(tag: int, value: object) -> None:
    """As cameras and editors leave them; the tag of the orientation is all that is read."""
    kinds = {float: 5, str: 2}
    entries = [(0x0112, 3, 1, (6).to_bytes(2, "little") + bytes(2))]
    data = b"\x01\x00\x00\x00\x01\x00\x00\x00" if isinstance(value, float) else str(value).encode() + b"\0"
    count = 1 if isinstance(value, float) else len(data)
    where = (8 + 2 + 2 * 12 + 4).to_bytes(4, "little")
    entries.append((tag, kinds[type(value)], count, where if len(data) > 4 else data.ljust(4, b"\0")))
    body = b"".join(
        each.to_bytes(2, "little") + kind.to_bytes(2, "little") + count.to_bytes(4, "little") + at
        for each, kind, count, at in sorted(entries)
    )
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + body + bytes(4) + data
    wanted = scene(8, 4).transpose(Image.Transpose.ROTATE_270)
    assert apart(encoded(scene(8, 4), "JPEG", exif=exif, quality=95, subsampling=0), wanted) < 4
