"""Audio on its way in: an uploaded file of any usual format becomes mono sound at 16 kHz, block by block."""

from __future__ import annotations

import io
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO, cast

import anyio.to_thread
import numpy as np

from omniflow.errors import InvalidInputError
from omniflow.media import AudioChunk
from omniflow.mp4 import claims_too_much

if TYPE_CHECKING:
    import av
    from av.audio.frame import AudioFrame
    from av.codec.context import CodecContext
    from av.container import InputContainer

SAMPLE_RATE_HZ = 16_000
"""What models that hear were trained on."""
_BLOCK_S = 2
_READ_BYTES = 2**16
# Named one by one: FFmpeg also knows formats that are lists of other files and addresses, which it would open.
_CONTAINERS = "wav,w64,mp3,flac,ogg,matroska,webm,mov,mp4,m4a,3gp,aac"
_TAKEN = "send flac, mp3, mp4, mpeg, mpga, m4a, ogg, wav or webm"
_STATES_LENGTH = ("wav", "w64", "flac", "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
"""Containers whose head tells how much sound follows. Others are streams: what there is of them is all there is."""
_OPEN_RIFF_BYTES = 0x7FFF0000
"""Sizes from here on are written by those who do not know the size."""
_LEAST_HZ = 4_000
"""Of a file. One of 1 Hz would become 16 000 times as many samples: 125 bytes of FLAC are 260 MB then."""
_CUT_OFF_S = 0.5
"""Sound that may be missing from a file: encoders' padding is counted by some and not by others."""


class Clip:
    """An encoded file that is decoded as it is read. Its methods block, and may be called from any thread.

    Raises InvalidInputError, naming `file`, for what cannot be decoded, is broken, or ends before its end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._lock = threading.Lock()
        self._num_samples = 0
        self._reached_s = 0.0
        self._container = _opened(file)
        self._frames = self._decoded(self._container)
        self._stated_s = _stated_s(self._container)

    @property
    def seconds(self) -> float:
        """How much has been decoded."""
        return self._num_samples / SAMPLE_RATE_HZ

    def read_block(self) -> np.ndarray:
        """The next 2 s or less, float32 [n]; nothing once the file has ended or is closed."""
        import av

        parts: list[np.ndarray] = []
        with self._lock:
            try:
                while sum(map(len, parts)) < _BLOCK_S * SAMPLE_RATE_HZ:
                    part = next(self._frames, None)
                    if part is None:
                        break
                    parts.append(part)
            except av.FFmpegError as error:
                raise _broken(error) from error
        # Files of floats may hold anything up to 1e38, and what is no number.
        block: np.ndarray = np.nan_to_num(
            np.concatenate([np.zeros(0, np.float32), *parts]), copy=False, posinf=1, neginf=-1
        )
        np.clip(block, -1, 1, out=block)
        self._num_samples += len(block)
        if not len(block):
            self._check_length()
        return block

    def close(self) -> None:
        """Let the file go, once no block is being read."""
        with self._lock:
            self._frames = iter(())
            self._stated_s = 0.0
            self._container.close()

    def _check_length(self) -> None:
        # By the clock of the file: a recorder that was paused leaves gaps in which there is no sound.
        reached_s = max(self.seconds, self._reached_s)
        if reached_s < self._stated_s - _CUT_OFF_S:
            raise InvalidInputError(
                f"file: is cut off: its head says {self._stated_s:.1f} s, but it ends after {reached_s:.1f} s; "
                f"send it whole",
                param="file",
            )

    def _decoded(self, container: InputContainer) -> Iterator[np.ndarray]:
        """Mono samples, as the decoder gives them."""
        import av

        stream = container.streams.audio[0]
        stream.codec_context.thread_type = "NONE"  # one core a file, whoever else sends one
        mixer = _Mixer()
        begun = False
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except av.InvalidDataError:
                # In front of the first frame of an mp3 there may be anything; later it is damage.
                if begun:
                    raise
                continue
            for frame in frames:
                begun = True
                self._reached_s = (frame.time or 0.0) + frame.samples / frame.sample_rate
                yield from mixer.mix(frame)
        yield from mixer.rest()


class _Mixer:
    """Frames of any form, which may change amid a file, as mono sound at 16 kHz."""

    def __init__(self) -> None:
        self._form: tuple[str, str, int] | None = None
        self._resampler: av.AudioResampler | None = None

    def mix(self, frame: AudioFrame) -> Iterator[np.ndarray]:
        """What `frame` adds."""
        import av

        if frame.sample_rate < _LEAST_HZ:
            raise InvalidInputError(
                f"file: sound of {frame.sample_rate} Hz is not taken; send {_LEAST_HZ} Hz or more", param="file"
            )
        form = (frame.format.name, frame.layout.name, frame.sample_rate)
        if self._resampler is None or form != self._form:
            yield from self.rest()
            self._form, self._resampler = form, av.AudioResampler("flt", "mono", SAMPLE_RATE_HZ)
        yield from _samples(self._resampler.resample(frame))

    def rest(self) -> Iterator[np.ndarray]:
        """What the resampler still holds."""
        if self._resampler is not None:
            yield from _samples(self._resampler.resample(None))


def _opened(file: BinaryIO) -> InputContainer:
    # Imported here: it takes 0.1 s and 30 MiB, which a server that is sent no files should not spend.
    import av

    _refuse_half_a_wav(file)
    if claims_too_much(file):
        raise InvalidInputError("file: its head tells of more sound than there are bytes; send it whole", param="file")
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": ""}
    try:
        container = av.open(file, "r", options=options, buffer_size=_READ_BYTES, metadata_errors="ignore")
    except av.FFmpegError as error:
        raise InvalidInputError(f"file: cannot be read as audio ({error.strerror}); {_TAKEN}", param="file") from error
    sounds = container.streams.audio
    # Of a codec that FFmpeg does not know, there is a stream without a decoder.
    if not sounds or cast("CodecContext | None", sounds[0].codec_context) is None:
        container.close()
        raise InvalidInputError(f"file: holds no sound that can be decoded; {_TAKEN}", param="file")
    return container


def _refuse_half_a_wav(file: BinaryIO) -> None:
    """FFmpeg takes the size of a cut off file for what its head says."""
    num_bytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(12)
    file.seek(0)
    stated_bytes = int.from_bytes(head[4:8], "little") + 8
    if head[:4] == b"RIFF" and head[8:] == b"WAVE" and num_bytes < stated_bytes < _OPEN_RIFF_BYTES:
        raise InvalidInputError(
            f"file: is cut off: its head says {stated_bytes} bytes, but there are {num_bytes}; send it whole",
            param="file",
        )


def _stated_s(container: InputContainer) -> float:
    """Seconds of sound that the head of the file speaks of; 0 where it says nothing."""
    stream = container.streams.audio[0]
    if container.format.name not in _STATES_LENGTH:
        return 0.0
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    # Of the whole file: with a film in it, that may be longer than the sound.
    return (container.duration or 0) / 1e6 if len(container.streams) == 1 else 0.0


def _samples(frames: Iterable[AudioFrame]) -> Iterator[np.ndarray]:
    for frame in frames:
        yield np.asarray(frame.to_ndarray()[0], np.float32)


def _broken(error: av.FFmpegError) -> InvalidInputError:
    return InvalidInputError(f"file: is broken ({error.strerror})", param="file")


async def audio_chunks(clip: Clip, first: np.ndarray) -> AsyncGenerator[AudioChunk]:
    """The sound of a clip whose `first` block was read already, as a graph takes it."""
    block = first
    while len(block):
        yield AudioChunk(block, SAMPLE_RATE_HZ)
        block = await anyio.to_thread.run_sync(clip.read_block)
