"""Writes the prompt of Ming's thinker: text as tokens, and what was heard and seen as rows in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from actors.ming.config import AUDIO, IMAGE, Thinker, tells_times
from actors.ming.prompt import (
    AUDIO_TOKENS,
    CLIP_TOKENS,
    FRAME_TOKENS,
    IMAGE_TOKENS,
    Control,
    Grid,
    MediaTokens,
    Vocabulary,
    laid_out,
    places,
)
from actors.prompt_length import PromptLength
from actors.roles import MergeRole
from actors.stage import ModelStage
from omniflow.actor import Context
from omniflow.errors import ProtocolError, UnsupportedError
from omniflow.media import AudioFeatures, ImageFeatures, Prompt, TokenPrompt


class Media(NamedTuple):
    """A media item as the thinker takes it: `rows` [n, hidden], which of its kinds they are, a picture's grid, and the
    times of a clip's frames.
    """

    tokens: MediaTokens
    rows: np.ndarray
    kind: int
    grid: Grid | None = None
    times_s: tuple[float, ...] = ()


class MingMerge(ModelStage, MergeRole):
    """Ming-flash-omni's prompt of a conversation, in the chat template and with the tokenizer of `model`.

    Control tokens in what people wrote are plain text to the model: only the template writes real ones. Raises
    UnsupportedError for tools, which the model does not know, and ContextLengthError where the prompt does not fit.
    """

    def __init__(self, *, model: str) -> None:
        super().__init__(model)

    async def setup(self) -> None:
        """Raises WeightsError where the checkpoint's tokenizer or config.json is not Ming's, or missing."""
        folder = self._weights.path()
        config = await self.offload(Thinker.load, folder)
        self._hidden_size = config.hidden_size
        self._tells_times = await self.offload(tells_times, folder)
        self._vocabulary = await self.offload(Vocabulary, folder)
        self._length = PromptLength(config.max_position_embeddings, self._vocabulary.count)

    async def run(
        self, prompt: Prompt, audio: AudioFeatures | None, image: ImageFeatures | None, ctx: Context
    ) -> TokenPrompt:
        """A prompt with media has rows in the order of the conversation, and the places and kinds of all its inputs.

        Raises ProtocolError for features that are not those of the prompt's media.
        """
        if ctx.options.tools:
            raise UnsupportedError("tools: this model knows no tools; send none", param="tools")
        media = self._media(prompt, audio, image)
        pieces = (media[piece] if isinstance(piece, int) else piece for piece in laid_out(prompt))
        segments = list(_joined(_with_marks(pieces, self._tells_times)))
        num_rows = sum(len(each.rows) for each in media.values())
        texts = [each for each in segments if isinstance(each, str)]
        await self._length.refuse_far_too_long(self.offload, texts, num_rows)
        written = await self.offload(self._write, segments)
        self._length.check(len(written.ids), num_rows)
        return await self.offload(written.prompt, ctx.allocate) if media else TokenPrompt(written.ids)

    def _media(self, prompt: Prompt, audio: AudioFeatures | None, image: ImageFeatures | None) -> dict[int, Media]:
        found = [*_heard(audio), *_seen(image)]
        wanted = [piece for message in prompt.messages for piece in message.pieces if isinstance(piece, int)]
        if sorted(number for number, _ in found) != sorted(wanted):
            numbers = [number for number, _ in found]
            raise ProtocolError(f"the prompt has the media {wanted}; features came of {numbers}")
        for number, media in found:
            if media.rows.shape[1] != self._hidden_size:
                width = media.rows.shape[1]
                raise ProtocolError(f"media {number} has rows of {width} numbers; the model takes {self._hidden_size}")
        return dict(found)

    def _write(self, segments: Sequence[str | Control | Media]) -> _Written:
        encoded = iter(self._vocabulary.encode([each for each in segments if isinstance(each, str)]))
        written = _Written()
        for each in segments:
            match each:
                case str():
                    written.ids += next(encoded)
                case Control():
                    written.ids.append(self._vocabulary.id_of(each))
                case Media():
                    written.media.append((len(written.ids), each))
                    written.ids += [self._vocabulary.id_of(each.tokens.each)] * len(each.rows)
        return written


class _Written:
    """A prompt on its way: `ids`, and where in them the rows of media items begin."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.media: list[tuple[int, Media]] = []

    def prompt(self, allocate: Callable[..., np.ndarray]) -> TokenPrompt:
        num_rows = sum(len(media.rows) for _, media in self.media)
        rows = allocate((num_rows, self.media[0][1].rows.shape[1]), np.float32)
        np.concatenate([media.rows for _, media in self.media], out=rows)
        kinds = np.zeros(len(self.ids), np.uint8)
        for start, media in self.media:
            kinds[start : start + len(media.rows)] = media.kind
        return TokenPrompt(
            self.ids,
            rows,
            tuple(at for start, media in self.media for at in range(start, start + len(media.rows))),
            audio_tokens=int((kinds == AUDIO).sum()),
            image_tokens=int((kinds == IMAGE).sum()),
            places=places(list(self._parts())),
            kinds=kinds,
        )

    def _parts(self) -> Iterator[int | Grid]:
        """As `places` takes them."""
        end = 0
        for start, media in self.media:
            yield start - end
            yield len(media.rows) if media.grid is None else media.grid
            end = start + len(media.rows)
        yield len(self.ids) - end


def _joined(pieces: Iterable[str | Control | Media]) -> Iterator[str | Control | Media]:
    """Texts that touch become one, as a tokenizer sees them."""
    for is_text, group in groupby(pieces, key=lambda piece: isinstance(piece, str)):
        if is_text:
            yield "".join(each for each in group if isinstance(each, str))
        else:
            yield from group


def _with_marks(pieces: Iterable[str | Control | Media], tells_times: bool) -> Iterator[str | Control | Media]:
    """Media with the tokens around them; with `tells_times` a clip frame by frame."""
    for piece in pieces:
        if not isinstance(piece, Media):
            yield piece
        elif tells_times and piece.times_s:
            yield from _frame_by_frame(piece, piece.times_s)
        else:
            yield from (piece.tokens.begin, piece, piece.tokens.end)
            if piece.tokens.after:
                yield piece.tokens.after


def _frame_by_frame(clip: Media, times_s: Sequence[float]) -> Iterator[str | Control | Media]:
    assert clip.grid is not None
    grid = Grid(1, clip.grid.rows, clip.grid.columns)
    yield clip.tokens.begin
    for time_s, rows in zip(times_s, np.split(clip.rows, len(times_s)), strict=True):
        frame = Media(FRAME_TOKENS, rows, clip.kind, grid)
        yield from (f"<{time_s:.1f} seconds>", frame.tokens.begin, frame, frame.tokens.end)
    yield clip.tokens.end


def _heard(audio: AudioFeatures | None) -> Iterator[tuple[int, Media]]:
    if audio is None:
        return
    if audio.rows is None:
        raise ProtocolError("what was heard came without rows: this model does not hear by transcription")
    for number, rows in zip(audio.index, _split(audio.rows, audio.index, audio.num_rows, "audio"), strict=True):
        yield number, Media(AUDIO_TOKENS, rows, AUDIO)


def _seen(image: ImageFeatures | None) -> Iterator[tuple[int, Media]]:
    if image is None:
        return
    grids = [Grid(*grid) for grid in image.grids]
    pieces = _split(image.rows, image.index, [grid.size for grid in grids], "images")
    times = image.times_s or ((),) * len(grids)
    for number, rows, grid, times_s in zip(image.index, pieces, grids, times, strict=True):
        if number in image.videos and len(times_s) != grid.frames:
            raise ProtocolError(f"media {number}: {len(times_s)} times for the {grid.frames} frames of a clip")
        yield number, Media(CLIP_TOKENS if number in image.videos else IMAGE_TOKENS, rows, IMAGE, grid, times_s)


def _split(rows: np.ndarray, index: Sequence[int], sizes: Sequence[int], what: str) -> list[np.ndarray]:
    """The rows of each item. Raises ProtocolError where there are not as many as their sizes say."""
    if rows.ndim != 2 or len(sizes) != len(index) or sum(sizes) != len(rows) or min(sizes, default=0) < 1:
        raise ProtocolError(f"{what}: rows of shape {list(rows.shape)} for {len(index)} items of {list(sizes)} rows")
    return np.split(rows, np.cumsum(sizes)[:-1])
