"""Encoded images as an encoder takes them: upright, in red, green and blue, and nothing shining through."""

from __future__ import annotations

import io
import re
import struct
import warnings
from typing import TYPE_CHECKING

import numpy as np

from omniflow.errors import InvalidInputError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 64_000_000
"""More than any phone's camera gives. Decoded they are 192 MB, whatever the size of the file."""
MAX_SCANS = 100
"""Of a JPEG. Each goes over all pixels, 40 ms for the most that are taken, and may be written in 31 bytes: a small file
could keep an encoder busy for hours. Encoders write about 10.
"""
_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])")
"""What a JPEG consists of, and not a byte of what was compressed, nor a place to restart in that."""
_ORIENTATION = 0x0112
"""The tag of an EXIF that says how an image is to be turned."""
_AT_MOST = f"at most {MAX_PIXELS // 10**6} million are taken"


def quiet_pillow() -> None:
    """What Pillow finds odd in an image is told to whoever sent it, where it matters: not to this process's log."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


def read_picture(data: bytes, where: str) -> Image:
    """The image in `data` (png, jpeg or webp; of several frames the first), of mode RGB.

    It is turned as its EXIF orientation says; what is transparent lies on white. Raises InvalidInputError, which says
    `where` it is, for what is no such image, is broken, or is larger than `MAX_PIXELS`.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size  # as the head says: nothing is decoded yet
            if width * height > MAX_PIXELS:
                raise _invalid(f"{where}: the image has {width} x {height} pixels; {_AT_MOST}")
            if _num_scans(data) > MAX_SCANS:
                raise _invalid(f"{where}: the JPEG goes over its pixels more than {MAX_SCANS} times; send it baseline")
            picture.load()
            return _on_white(_in_8_bits(_upright(picture)))
    except UnidentifiedImageError as error:
        raise _invalid(f"{where}: the image is not a png, jpeg or webp file") from error
    except Image.DecompressionBombError as error:  # of a head that claims more than 179 million
        raise _invalid(f"{where}: the image has too many pixels; {_AT_MOST}") from error
    # What Pillow's readers stumble over.
    except (OSError, SyntaxError, ValueError, TypeError, IndexError, EOFError, struct.error) as error:
        raise _invalid(
            f"{where}: the image cannot be decoded ({error}); send it whole, as png, jpeg or webp"
        ) from error


def _num_scans(data: bytes) -> int:
    """How often the pixels of the JPEG in `data` are gone over; 0 where it is none."""
    at, count = 2, 0
    while data[:2] == b"\xff\xd8" and count <= MAX_SCANS and (marker := _MARKER.search(data, at)):
        if marker[1] == b"\xd9":  # the end; what follows it is something else
            break
        count += marker[1] == b"\xda"
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return count


def _upright(picture: Image) -> Image:
    """Turned as its EXIF orientation says. ImageOps.exif_transpose would write all of the EXIF again, and fails with
    whatever error for many a tag that no one has to read.
    """
    from PIL.Image import Transpose

    try:
        orientation = picture.getexif().get(_ORIENTATION)
    except (OSError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, struct.error):
        return picture  # an EXIF that nobody can read says nothing
    turns = (None, None, Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM,
             Transpose.TRANSPOSE, Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90)  # fmt: skip
    turn = turns[orientation] if isinstance(orientation, int) and 0 <= orientation < len(turns) else None
    return picture if turn is None else picture.transpose(turn)


def _in_8_bits(picture: Image) -> Image:
    """Greys of 16 bits, which Pillow would cut off at 255."""
    from PIL import Image

    return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)) if picture.mode == "I;16" else picture


def _on_white(picture: Image) -> Image:
    from PIL import Image

    if not picture.has_transparency_data:
        return picture if picture.mode == "RGB" else picture.convert("RGB")  # which copies: 12 ms of 12 million pixels
    above = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")


def _invalid(message: str) -> InvalidInputError:
    return InvalidInputError(message, param="messages")
