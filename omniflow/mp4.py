"""What the head of an mp4 or a mov claims, told before FFmpeg believes it: it takes 40 bytes for each frame and sample
of sound that a head tells of, and a head of 1 KB can tell of billions.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import BinaryIO

_COUNT = re.compile(rb"(?=(?:stsz.{8}|stz2.{8}|trun.{4})(.{4})|cmov)", re.DOTALL)
"""Where a head says how many there are, or is compressed, as nobody writes it any more."""
_LONGEST = 16
_BLOCK_BYTES = 1 << 20
_HEADS = b"moov moof trak mdia minf stbl traf mvex udta meta ilst edts dinf wave sinf schi tref".split()
"""Boxes that FFmpeg looks into, wherever they are."""


def claims_too_much(file: BinaryIO) -> bool:
    """Whether `file` is an mp4 or mov whose heads tell of more frames and samples than it has bytes.

    Afterwards it is at its begin. Files of any other kind claim nothing.
    """
    num_bytes = file.seek(0, io.SEEK_END)
    claimed = sum(sum(_counts(file, begin, min(end, num_bytes))) for begin, end in _heads(file, num_bytes))
    file.seek(0)
    return claimed > num_bytes


def _heads(file: BinaryIO, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of all but the sound and the pictures themselves."""
    at = 0
    while at + 8 <= num_bytes:
        file.seek(at)
        head = file.read(16)
        size, kind = int.from_bytes(head[:4], "big"), head[4:8]
        if size == 1:
            size = int.from_bytes(head[8:], "big")
        end = at + size if size else num_bytes
        if end < at + 8 or end > num_bytes and kind not in _HEADS:  # the end, or of another kind
            return
        if kind != b"mdat":
            yield at, end
        at = end


def _counts(file: BinaryIO, begin: int, end: int) -> Iterator[int]:
    for at in range(begin, end, _BLOCK_BYTES):
        file.seek(at)
        block = file.read(min(_BLOCK_BYTES, end - at) + _LONGEST)
        for found in _COUNT.finditer(block):
            if found.start() < _BLOCK_BYTES:
                yield 2**63 if found[1] is None else int.from_bytes(found[1], "big")
