"""Clips to decode: every frame tells its number, and left from right and top from bottom."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np


def frame(number: int, width: int = 96, height: int = 64) -> np.ndarray:
    """Grey that grows by 8 a frame; the left half is redder, the upper half is bluer."""
    level = 20 + 8 * number % 160
    pixels = np.full((height, width, 3), level, np.uint8)
    pixels[:, : width // 2, 0] += 60
    pixels[: height // 2, :, 2] += 40
    return pixels


def clip(
    count: int,
    *,
    rate_hz: int = 25,
    width: int = 96,
    height: int = 64,
    container: str = "mp4",
    codec: str = "mpeg4",
) -> bytes:
    """`count` frames of `frame`."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate_hz)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = width, height, "yuv420p", 4_000_000
        for number in range(count):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame(number, width, height), "rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


def number_of(picture: np.ndarray) -> int:
    """Which of the first 20 frames of `clip` it is."""
    height, width = picture.shape[:2]
    return round((float(picture[3 * height // 4, 3 * width // 4].mean()) - 20) / 8)


def rotated(mp4: bytes, quarter: int) -> bytes:
    """The clip with a head that says: turn by so many quarters, clockwise."""
    matrix = {1: (0, 1, -1, 0), 2: (-1, 0, 0, -1), 3: (0, -1, 1, 0)}[quarter]
    at = mp4.index(b"tkhd") + 4 + 4 + 20 + 16
    entries = [matrix[0] << 16, matrix[1] << 16, 0, matrix[2] << 16, matrix[3] << 16, 0, 0, 0, 1 << 30]
    packed = b"".join((entry % 2**32).to_bytes(4, "big") for entry in entries)
    return mp4[:at] + packed + mp4[at + 36 :]
