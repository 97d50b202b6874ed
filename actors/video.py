"""Encoded clips as an encoder takes them: some of their frames, upright, in red, green and blue."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from actors.pictures import MAX_PIXELS
from omniflow.errors import InvalidInputError
from omniflow.mp4 import claims_too_much

if TYPE_CHECKING:
    import av
    from av.codec.context import CodecContext
    from av.container import InputContainer
    from PIL.Image import Image

# Named one by one: FFmpeg also knows formats that are lists of other files and addresses, which it would open.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
_TAKEN = "send mp4, mov, webm, mkv or avi"
MAX_FRAMES = 72_000
"""Of a clip, 20 minutes at 60 a second: all up to the last one wanted are decoded."""


class VideoClip:
    """An encoded clip: how many frames it has (`count`) and how many a second (`rate_hz`).

    Raises InvalidInputError, which says `where` it is, for what is no clip or has more than `MAX_FRAMES`.
    """

    def __init__(self, data: bytes, where: str) -> None:
        import av

        self._data, self._where = data, where
        if not data:
            raise _invalid(f"{where}: the clip is empty (0 bytes)")
        if claims_too_much(io.BytesIO(data)):
            raise _invalid(f"{where}: the clip's head tells of more frames than there are bytes; send it whole")
        with self._opened() as container:
            stream = container.streams.video[0]
            try:
                times = [packet.pts for packet in container.demux(stream) if packet.size]
            except av.FFmpegError as error:
                raise self._broken(error) from error
            self.count = len(times)
            self.rate_hz = _rate_hz([each for each in times if each is not None], stream)
        if not 0 < self.count <= MAX_FRAMES:
            raise _invalid(f"{where}: the clip has {self.count} frames; 1 to {MAX_FRAMES} are taken")

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.count / self.rate_hz

    def pictures(self, wanted: Sequence[int]) -> Iterator[Image | None]:
        """The frames of the numbers `wanted`, which go up, as images of mode RGB; None after each of the others.

        Raises InvalidInputError where a frame cannot be decoded, or none can. What is counted but not shown, as
        some codecs have it, is the last one that is shown.
        """
        left = list(wanted)
        last: Image | None = None
        with self._opened() as container:
            for number, frame in enumerate(self._frames(container)):
                if not left:
                    return
                if number < left[0]:
                    yield None
                    continue
                last = self._upright(frame)
                while left and left[0] <= number:
                    left.pop(0)
                    yield last
        if last is None:
            raise _invalid(f"{self._where}: the clip has no frame that can be decoded; {_TAKEN}")
        for _ in left:
            yield last

    def _frames(self, container: InputContainer) -> Iterator[av.VideoFrame]:
        import av

        stream = container.streams.video[0]
        stream.codec_context.thread_type = "NONE"  # one core a clip, whoever else sends one
        stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
        try:
            yield from container.decode(stream)
        except av.FFmpegError as error:
            raise self._broken(error) from error

    def _upright(self, frame: av.VideoFrame) -> Image:
        """Turned as the file says that it is to be shown."""
        import av
        from PIL.Image import fromarray

        try:
            pixels = frame.to_ndarray(format="rgb24")
        except (av.FFmpegError, ValueError) as error:
            raise _invalid(f"{self._where}: a frame of the clip cannot be shown ({error}); {_TAKEN}") from error
        return fromarray(np.ascontiguousarray(np.rot90(pixels, frame.rotation // 90)))

    def _opened(self) -> InputContainer:
        import av

        options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": ""}
        try:
            container = av.open(io.BytesIO(self._data), "r", options=options, metadata_errors="ignore")
        except av.FFmpegError as error:
            raise _invalid(f"{self._where}: cannot be read as a clip ({error.strerror}); {_TAKEN}") from error
        streams = container.streams.video
        # Of a codec that FFmpeg does not know, there is a stream without a decoder.
        if not streams or cast("CodecContext | None", streams[0].codec_context) is None:
            container.close()
            raise _invalid(f"{self._where}: the clip holds no pictures that can be decoded; {_TAKEN}")
        size = streams[0].codec_context.width * streams[0].codec_context.height
        if size > MAX_PIXELS:
            container.close()
            raise _invalid(
                f"{self._where}: the clip's frames have {size} pixels; at most {MAX_PIXELS // 10**6} million are taken"
            )
        return container

    def _broken(self, error: av.FFmpegError) -> InvalidInputError:
        return _invalid(f"{self._where}: the clip is broken ({error.strerror}); send it whole")


def _rate_hz(times: Sequence[int], stream: av.VideoStream) -> float:
    """Frames a second on average, by their times where they have any."""
    span = max(times, default=0) - min(times, default=0)
    if span > 0 and stream.time_base:
        return float((len(times) - 1) / (span * stream.time_base))
    return float(stream.average_rate or 1)


def _invalid(message: str) -> InvalidInputError:
    return InvalidInputError(message, param="messages")
