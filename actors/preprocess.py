"""Takes a conversation apart: its text, and its media decoded as encoders want them."""

from __future__ import annotations

import functools

import numpy as np

from actors.clip import Clip
from actors.roles import Preprocessed
from actors.threads import Threads, in_order
from omniflow.actor import Actor, Count
from omniflow.errors import InvalidInputError, UnsupportedError
from omniflow.media import (
    AudioPart,
    Chat,
    ImagePart,
    Images,
    Part,
    Prompt,
    PromptMessage,
    TextPart,
    VideoPart,
    Waveforms,
)

SAMPLE_RATE_HZ = 16_000


class Preprocess(Actor):
    """Text passes as it is, audio becomes mono float32 at 16 kHz, images and video are recognized and stay encoded.

    Media are numbered in the order of the conversation; up to `decoders` recordings of all requests are decoded at the
    same time, each on a core. Raises InvalidInputError for what cannot be decoded, for
    an empty conversation, for more than `max_audio_s` seconds of audio in all and for more than `max_images` images or
    `max_videos` clips, and UnsupportedError for video where `max_videos` is 0, which says that the model takes none.
    """

    def __init__(
        self, *, max_audio_s: float = 600, max_images: int = 32, max_videos: int = 0, decoders: Count = 4
    ) -> None:
        self._max_audio_s = max_audio_s
        self._max_images = max_images
        self._max_videos = max_videos
        self._decoders = Threads(decoders)

    async def setup(self) -> None:
        """Load the audio libraries, so that the first request does not wait for them (50 ms)."""
        import soundfile  # noqa: F401
        import soxr  # noqa: F401

    async def run(self, chat: Chat) -> Preprocessed:
        """`audio` and `image` are None where the conversation has none."""
        if not any(message.tool_calls or any(map(_has_content, message.parts)) for message in chat.messages):
            raise _invalid("the conversation is empty; send at least one message with text, audio or an image")
        media = _Media()
        messages: list[PromptMessage] = []
        for at, message in enumerate(chat.messages):
            pieces: list[str | int] = []
            for number, part in enumerate(message.parts):
                pieces.append(self._take(part, f"messages[{at}].content[{number}]", media))
            messages.append(PromptMessage(message.role, tuple(pieces), message.tool_calls, message.tool_call_id))
        await self._decode_all(media)
        return Preprocessed(prompt=Prompt(tuple(messages)), audio=media.waveforms(), image=media.pictures())

    def busy_s(self) -> float:
        return max(super().busy_s(), self._decoders.busy_s())

    def _take(self, part: Part, where: str, media: _Media) -> str | int:
        """Text as it is; else the number of a media item, which is now in `media`."""
        match part:
            case TextPart():
                return part.text
            case AudioPart():
                return media.add_sound(part.data, where)
            case ImagePart():
                _require_room(len(media.images) - len(media.videos), self._max_images, where, "images")
                return media.add_picture(_checked_image(part.data, where), where)
            case VideoPart() if self._max_videos:
                _require_room(len(media.videos), self._max_videos, where, "video clips")
                media.videos.append(media.add_picture(_checked_video(part.data, where), where))
                return media.videos[-1]
            case _:
                raise UnsupportedError(f"{where}: this model takes no video; {_TAKES}", param="messages")

    async def _decode_all(self, media: _Media) -> None:
        """Decode the sounds of a conversation beside each other. Raises InvalidInputError for the first bad one."""

        async def decode(number: int) -> np.ndarray:
            return await self._decode(media.sounds[number], media.where[number], self._left(media))

        async def take(number: int, samples: np.ndarray) -> None:
            if len(samples) > self._left(media):
                raise self._too_much(media.where[number])
            media.waves[number] = samples

        await in_order(decode, {number: number for number in media.sounds}, self._decoders.most, take)

    async def _decode(self, data: bytes, where: str, most: int) -> np.ndarray:
        opened = functools.partial(Clip, data, where=where, param="messages", sample_rate_hz=SAMPLE_RATE_HZ)
        clip = await self._decoders.run(opened)
        blocks: list[np.ndarray] = []
        while not clip.ended:
            blocks.append(await self._decoders.run(clip.read_block))
            if sum(map(len, blocks)) > most:
                raise self._too_much(where)
        samples = np.concatenate(blocks)
        if not len(samples):
            raise _invalid(f"{where}: the audio holds no samples")
        return samples

    def _left(self, media: _Media) -> int:
        """Samples that the conversation may still have."""
        return round(self._max_audio_s * SAMPLE_RATE_HZ) - sum(map(len, media.waves.values()))

    def _too_much(self, where: str) -> InvalidInputError:
        return _invalid(
            f"{where}: the conversation holds more than {self._max_audio_s:g} s of audio, "
            "which is the most that is taken"
        )


class _Media:
    """The media of one conversation by their numbers; those images that are in `videos` are clips."""

    def __init__(self) -> None:
        self.sounds: dict[int, bytes] = {}
        self.waves: dict[int, np.ndarray] = {}
        self.images: dict[int, bytes] = {}
        self.videos: list[int] = []
        self.where: dict[int, str] = {}

    def add_sound(self, data: bytes, where: str) -> int:
        """The number that a recording now has; its samples go to `waves`."""
        return self._add(self.sounds, data, where)

    def add_picture(self, data: bytes, where: str) -> int:
        """The number that an image or a clip now has."""
        return self._add(self.images, data, where)

    def _add(self, kind: dict[int, bytes], data: bytes, where: str) -> int:
        number = len(self.where)
        kind[number], self.where[number] = data, where
        return number

    def waveforms(self) -> Waveforms | None:
        if not self.waves:
            return None
        where = tuple(self.where[number] for number in self.waves)
        return Waveforms(list(self.waves.values()), tuple(self.waves), SAMPLE_RATE_HZ, where)

    def pictures(self) -> Images | None:
        if not self.images:
            return None
        where = tuple(self.where[number] for number in self.images)
        return Images(list(self.images.values()), tuple(self.images), tuple(self.videos), where)


_TAKES = "send text, audio or images"


def _invalid(message: str) -> InvalidInputError:
    return InvalidInputError(message, param="messages")


def _has_content(part: Part) -> bool:
    return not isinstance(part, TextPart) or bool(part.text.strip())


def _checked_image(data: bytes, where: str) -> bytes:
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    if is_webp or data.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")):
        return data
    raise _invalid(f"{where}: the image is not a png, jpeg or webp file")


def _checked_video(data: bytes, where: str) -> bytes:
    is_avi = data[:4] == b"RIFF" and data[8:12] == b"AVI "
    if is_avi or data[4:8] == b"ftyp" or data.startswith(b"\x1a\x45\xdf\xa3"):
        return data
    raise _invalid(f"{where}: the video is not an mp4, mov, webm, mkv or avi file")


def _require_room(count: int, limit: int, where: str, what: str) -> None:
    if count >= limit:
        raise _invalid(f"{where}: the conversation holds more than {limit} {what}, which is the most that is taken")
