"""What an edge carried for one request, as digests by which two runs of the request can be compared.

Items that are pieces of a whole (text, tokens, samples, frames) are digested as the whole, in blocks of a fixed number
of units: where the whole was cut depends on timing, what it says does not. Any other item is a unit of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from omniflow.errors import ProtocolError
from omniflow.media import AudioChunk, Latents, TextDelta, Tokens
from omniflow.transport.codec import decoder_for, encode

Packed = tuple[bytes, bytes]
"""A value in the form in which it crosses processes: its msgpack form, and the region of its buffers."""
State = Literal["ended", "skipped", "cut"]
_DIGEST_BYTES = 8
_MOST_DIGESTS = 2**16
"""Digests of one edge (512 KB); what comes after shares the last one."""


def pack(value: object) -> Packed:
    """A value as bytes. Raises ProtocolError where it has no wire form."""
    encoded = encode(value)
    region = bytearray(encoded.size)
    for offset, flat in encoded.parts:
        region[offset : offset + flat.nbytes] = flat.data
    return encoded.body, bytes(region)


def unpack(hint: Any, packed: Packed) -> Any:
    """The value that `pack` took. Raises msgspec.ValidationError or TypeError where it is not of type `hint`."""
    body, region = packed
    return decoder_for(hint).decode(body, np.frombuffer(region, np.uint8) if region else None)


class Piece(NamedTuple):
    """An item as a run of units of `unit_bytes` each. `head` holds for all of them; `tail` marks their end."""

    data: bytes
    unit_bytes: int
    head: bytes = b""
    tail: bytes = b""


class Form(NamedTuple):
    """The canonical form of a type: what its units are, how many of them share a digest, how an item becomes units."""

    unit: str
    block: int
    piece: Callable[[Any], Piece]


def _text(value: TextDelta) -> Piece:
    return Piece(value.text.encode("utf-32-le", "surrogatepass"), 4)


def _tokens(value: Tokens) -> Piece:
    return Piece(np.asarray(value.ids, np.int64).tobytes(), 8)


def _samples(value: AudioChunk) -> Piece:
    samples = np.ascontiguousarray(value.samples)
    head = f"{samples.dtype.str} {value.sample_rate_hz} Hz {value.channels}"
    return Piece(samples.tobytes(), samples.itemsize * max(1, value.channels), head.encode())


def _frames(value: Latents) -> Piece:
    frames = np.ascontiguousarray(value.frames)
    head = f"{frames.dtype.str} {frames.shape[1:]} {value.segment}"
    frame_bytes = frames.itemsize * int(np.prod(frames.shape[1:]))
    return Piece(frames.tobytes(), max(1, frame_bytes), head.encode(), b"last" if value.last else b"")


def _whole(value: object) -> Piece:
    encoded = encode(value, order="deterministic")
    found = hashlib.blake2b(encoded.body, digest_size=16)
    for _, flat in encoded.parts:
        found.update(flat.data)
    return Piece(found.digest(), 16)


_JOINED: dict[Any, Form] = {
    TextDelta: Form("character", 16, _text),
    Tokens: Form("token", 1, _tokens),
    AudioChunk: Form("sample", 2048, _samples),
    Latents: Form("frame", 16, _frames),
}
"""Types whose items, joined, are what counts. By the declared type of the edge, since that is what its reader sees."""
_ITEM = Form("item", 1, _whole)


class EdgeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one edge carried: `size` units, with a digest of 8 bytes for each `block` of them.

    `cut`: it did not come to its end, because the request failed or its reader had enough. `opaque` says why its items
    could not be digested. `values` holds the items of a stage whose output depends on time, if they are few enough.
    """

    edge: str
    state: State
    unit: str
    block: int
    size: int = 0
    digests: bytes = b""
    opaque: str = ""
    values: tuple[Packed, ...] | None = None

    @property
    def num_whole(self) -> int:
        """How many of the digests are of whole blocks, so that nothing that comes after can change them."""
        return min(self.size // self.block, len(self.digests) // _DIGEST_BYTES, _MOST_DIGESTS - 1)


class EdgeDigest:
    """Takes in the items of one edge, one after the other."""

    def __init__(self, hint: Any) -> None:
        self.form = _JOINED.get(hint, _ITEM)
        self.size = 0
        self.opaque = ""
        self._digests = bytearray()
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._filled = 0
        """Units of the block that is not full yet."""
        self._head = b""
        self._marked = False
        """True where the block holds a mark but maybe no unit."""

    def add(self, value: object) -> None:
        """The next item. One that has no wire form makes the edge opaque; it never fails the request."""
        if self.opaque:
            return
        try:
            piece = self.form.piece(value)
        except (ProtocolError, TypeError, ValueError, AttributeError) as error:
            self.opaque = str(error)
            return
        if piece.head != self._head and (piece.data or piece.tail):
            self._hash.update(piece.head)
            self._head, self._marked = piece.head, True
        self._add_units(memoryview(piece.data), piece.unit_bytes)
        if piece.tail:
            self._hash.update(piece.tail)
            self._marked = True

    def _add_units(self, data: memoryview, unit_bytes: int) -> None:
        while data:
            part = data[: (self.form.block - self._filled) * unit_bytes] if self._may_flush else data
            data = data[len(part) :]
            self._hash.update(part)
            num_units = -(-len(part) // unit_bytes)
            self.size += num_units
            self._filled += num_units
            if self._filled == self.form.block and self._may_flush:
                self._flush()

    @property
    def _may_flush(self) -> bool:
        return len(self._digests) < (_MOST_DIGESTS - 1) * _DIGEST_BYTES

    def _flush(self) -> None:
        self._digests += self._hash.digest()
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._filled, self._marked = 0, False

    def digests(self) -> bytes:
        """All digests; call it once, at the end."""
        if self._filled or self._marked:
            self._flush()
        return bytes(self._digests)


def first_difference(a: EdgeRecord, b: EdgeRecord) -> int | None:
    """The unit from which on two records differ (to a block); None where they are the same as far as both go."""
    if "skipped" in (a.state, b.state):
        unknown = any(record.state == "cut" and record.size == 0 for record in (a, b))
        return None if a.state == b.state or unknown else 0
    whole = min(a.num_whole, b.num_whole)
    for start in range(0, whole * _DIGEST_BYTES, _DIGEST_BYTES):
        if a.digests[start : start + _DIGEST_BYTES] != b.digests[start : start + _DIGEST_BYTES]:
            return start // _DIGEST_BYTES * a.block
    if a.state == b.state == "ended":
        return None if (a.size, a.digests) == (b.size, b.digests) else whole * a.block
    for one, other in ((a, b), (b, a)):
        if one.state == "ended" and other.size > one.size:
            return one.size
    return None
