"""Voices that the graph learns from recordings: for one request, or under a name for all that come after."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

import anyio
from msgspec import Struct

from omniflow.errors import DeadlineError, InvalidInputError, ProtocolError
from omniflow.media import VoiceCode, VoiceSample
from omniflow.server.kept import KeptValues

if TYPE_CHECKING:
    from omniflow.runtime import Runtime

MAX_SAMPLE_BYTES = 10 * 2**20
_MOST_NAMED = 256
_MOST_CODES, _MOST_CODE_BYTES = 256, 16 * 2**20
"""Of recordings that were heard already: 30 s of sound are 48 KB of Ming's."""


class NamedCode(Struct, frozen=True, kw_only=True):
    """An uploaded voice; the recording itself is not kept."""

    name: str
    code: bytes
    text: str
    """What is said in the recording; "": unknown."""
    consent: str
    description: str
    sample_bytes: int
    created_at: int


class LearnedVoices:
    """What one server has learned, in its memory only: at most 256 named voices, and the last 256 recordings."""

    def __init__(self) -> None:
        self._codes: KeptValues[bytes, bytes] = KeptValues(len, max_entries=_MOST_CODES, max_bytes=_MOST_CODE_BYTES)
        self._named: dict[str, NamedCode] = {}

    async def code_of(
        self, runtime: Runtime, data: bytes, at: str, *, deadline_s: float | None, request_id: str
    ) -> bytes:
        """`Options.voice_code` of an encoded clip; `at` is the field that it came in. All who ask for the same clip at
        a time wait for one run of the graph.

        Raises InvalidInputError, naming `at`, for a clip that no voice can be learned from.
        """
        if len(data) > MAX_SAMPLE_BYTES:
            raise InvalidInputError(
                f"{at}: the recording has {len(data)} bytes; at most {MAX_SAMPLE_BYTES} are taken", param=at
            )
        key = hashlib.sha256(data).digest()
        given_s = deadline_s or runtime.config.deadline_s
        ends_s = anyio.current_time() + given_s
        learn = functools.partial(_learn, runtime, VoiceSample(data, at), ends_s, request_id)
        code = await self._codes.get(key, learn, within_s=given_s)
        if code is None:
            raise DeadlineError(f"the deadline of {given_s:.3g} s passed while another request learned the same voice")
        return code

    def find(self, name: str | None) -> NamedCode | None:
        """The uploaded voice of this name."""
        return self._named.get(name) if name is not None else None

    def named(self) -> tuple[NamedCode, ...]:
        """All uploaded voices, the oldest first."""
        return tuple(self._named.values())

    def put(self, voice: NamedCode) -> None:
        """Keep a voice under its name, instead of one that had it. Raises InvalidInputError where there is no room."""
        if voice.name not in self._named and len(self._named) >= _MOST_NAMED:
            raise InvalidInputError(f"name: {_MOST_NAMED} voices are kept already; delete one first", param="name")
        self._named[voice.name] = voice

    def remove(self, name: str) -> bool:
        """Forget the voice of this name; False where there is none."""
        return self._named.pop(name, None) is not None


async def _learn(runtime: Runtime, sample: VoiceSample, ends_s: float, request_id: str) -> bytes:
    deadline_s = max(0.001, round(ends_s - anyio.current_time(), 3))
    reply = await runtime.submit(
        "voice", sample, outputs={"voice"}, deadline_s=deadline_s, request_id=f"{request_id}-voice"
    )
    async with reply:
        given = [value async for _, value in reply]
    if len(given) != 1 or not isinstance(given[0], VoiceCode):
        raise ProtocolError("the graph gave no voice for a recording")
    return given[0].data
