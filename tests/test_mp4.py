from __future__ import annotations

import io

import pytest

from omniflow import mp4
from omniflow.mp4 import claims_too_much
from tests.videos import clip

CLIP = clip(15)


def claiming(count: int) -> bytes:
    """A clip whose head tells of `count` frames of a byte each."""
    data, at = bytearray(CLIP), CLIP.index(b"stsz")
    data[at + 8 : at + 16] = (1).to_bytes(4, "big") + count.to_bytes(4, "big")
    return bytes(data)


def box(kind: bytes, content: bytes) -> bytes:
    return (8 + len(content)).to_bytes(4, "big") + kind + content


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska", "avi"])
def test_what_is_whole_claims_what_it_has(container: str) -> None:
    file = io.BytesIO(clip(15, container=container))
    assert not claims_too_much(file)
    assert file.tell() == 0


@pytest.mark.parametrize(
    "data",
    [
        claiming(10**8),
        box(b"wide", b"") + claiming(10**8),
        box(b"abcd", b"stsz") + claiming(10**8),
        (1).to_bytes(4, "big") + b"free" + (16).to_bytes(8, "big") + claiming(10**8),
        claiming(10**8)[:-20],
        box(b"moof", box(b"traf", box(b"trun", bytes(4) + (10**8).to_bytes(4, "big")))),
        box(b"moov", box(b"cmov", b"")),
        box(b"moov", bytes(4) + b"stszstsz" + bytes(8) + b"\x7f" * 4),
        box(b"moov", bytes(mp4._BLOCK_BYTES - 20) + box(b"stsz", bytes(8) + b"\x7f" * 4)),
    ],
)
def test_a_claim_is_found_wherever_it_is(data: bytes) -> None:
    assert claims_too_much(io.BytesIO(data))


def test_pictures_sound_and_other_files_claim_nothing() -> None:
    claim = box(b"stsz", bytes(8) + b"\x7f" * 4)
    for data in (b"", b"ID3\x04" + bytes(20) + claim, box(b"mdat", claim), b"RIFF" + bytes(4) + b"WAVE" + claim):
        assert not claims_too_much(io.BytesIO(data))
