"""The AudioVAE's streams in slots of tensors that never move, so that a step of many is one CUDA graph.

Every row of a step is the same work, whatever its stream brings: up to 4 latents, and the frames behind the last one.
A stream's first frames would be those before its first latent; they are computed, and not heard or seen by others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from actors.ming.audio_vae import OVERLAP, AudioVaeDecoder
from actors.streaming_decoder import BatchedDecoder
from omniflow.engine.replays import Replays
from omniflow.engine.slot_cache import SlotCache
from omniflow.errors import ContextLengthError, ProtocolError

_LATENTS = 4
"""Most of one stream in a step: as many as the talker's step makes."""
_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Streams of the captured steps."""
_LENGTHS = (256, 512, 1024)
"""Positions that the captured steps look back over, at 50 a second: 5, 10 and 20 s, where there is no kernel that knows
by itself. Longer ones look over all."""


class AudioSlot:
    """The state of one stream; the rest of it is in its slot."""

    def __init__(self, slot: int, skip: int) -> None:
        self.slot = slot
        self.has_ended = False
        self.num_latents = 0
        self.skip = skip
        """Samples at the front that are no part of the sound."""


class _Piece(NamedTuple):
    """What a row of a step is given."""

    state: AudioSlot
    latents: np.ndarray
    last: bool


class AudioSlots(BatchedDecoder[AudioSlot]):
    """`AudioVaeDecoder` for up to `slots` streams at a time, each up to `positions` frames long.

    `decoder` is on its device; it is changed: all but its spectra is computed in `dtype`. On a GPU all graphs are
    captured here, and steps run on a stream of their own, before other work where the GPU has both.
    """

    channels = 1

    def __init__(self, decoder: AudioVaeDecoder, *, slots: int, positions: int, dtype: torch.dtype) -> None:
        for part in (decoder.fc1, decoder.decoder, decoder.head):
            part.to(dtype)
        self._decoder, self._dtype = decoder, dtype
        self.sample_rate_hz, self.samples_per_frame = decoder.sample_rate_hz, decoder.samples_per_frame
        self.holdback, self.latent_dim, self.hop = decoder.holdback, decoder.latent_dim, decoder.hop
        self._before = decoder.ratio - decoder.first
        """Frames before a stream's first, and frames behind its last latent that wait for the next one."""
        self._frames = _LATENTS * decoder.ratio + self._before
        most = min(positions, decoder.backbone.max_position_embeddings)
        self.max_latents = (most - self._before) // decoder.ratio
        device, self._shape = decoder.window.device, decoder.backbone.shape
        self._most = most
        # A step writes all of its frames, also those that are not kept; kernels like multiples of 16.
        room = -(-(most + self._frames) // 16) * 16
        self._cache = SlotCache(self._shape, slots, room, dtype=dtype, device=device)
        self._free = list(range(slots))
        self._sizes = [*(size for size in _SIZES if size < slots), slots]
        self._lengths = [*(length for length in _LENGTHS if length < room and not self._cache.has_kernel), room]
        rows = slots + 1
        self._last = torch.zeros(rows, self._shape.hidden_size, dtype=dtype, device=device)
        self._tails = torch.zeros(rows, 2, OVERLAP - 1, decoder.hop, device=device)
        self._latents = torch.zeros(slots, _LATENTS, decoder.latent_dim, device=device)
        self._marks = torch.zeros(len(_Marks._fields), slots, dtype=torch.int64, device=device)
        self._sound = torch.zeros(slots, self._frames + OVERLAP - 1, decoder.hop, device=device)
        self._replays = Replays(device)
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._capture()

    def init(self) -> AudioSlot:
        """The state of a new stream, which has a slot until its `end`. Raises ProtocolError where none is free."""
        if not self._free:
            raise ProtocolError(f"all {self._cache.spare} slots are taken: end a stream before the next begins")
        return AudioSlot(self._free.pop(), self._before * self._decoder.hop + self._decoder.edge)

    def end(self, state: AudioSlot) -> None:
        """See `BatchedDecoder.end`: its slot is free."""
        if not state.has_ended:
            state.has_ended = True
            # A step that is under way may still write there; the next stream's first step comes after it, and clears.
            self._free.append(state.slot)

    def step(self, state: AudioSlot, frames: np.ndarray, last: bool) -> np.ndarray:
        """See `StreamingDecoder.step`. Raises ContextLengthError for a stream of more than `max_latents`."""
        return self.step_together([state], [frames], [last])[0]

    @torch.inference_mode()
    def step_together(
        self, states: Sequence[AudioSlot], frames: Sequence[np.ndarray], last: Sequence[bool]
    ) -> list[np.ndarray]:
        """See `BatchedDecoder.step_together`."""
        longest = max(state.num_latents + len(each) for state, each in zip(states, frames, strict=True))
        if longest > self.max_latents:
            raise ContextLengthError(
                f"{longest} latents in one segment; at most {self.max_latents} fit: begin a new stream"
            )
        sounds: dict[AudioSlot, list[np.ndarray]] = {state: [] for state in states}
        for pieces in _rounds([_pieces(*each) for each in zip(states, frames, last, strict=True)]):
            for piece, samples in zip(pieces, self._round(pieces), strict=True):
                sounds[piece.state].append(samples)
        return [np.concatenate([np.zeros(0, np.float32), *sounds[state]]) for state in states]

    def _round(self, pieces: Sequence[_Piece]) -> list[np.ndarray]:
        """The sound of `pieces` of different streams."""
        ratio, count = self._decoder.ratio, len(pieces)
        longest = max(piece.state.num_latents for piece in pieces) * ratio + self._frames
        size = next(size for size in self._sizes if size >= count)
        length = next((each for each in self._lengths if each >= longest), self._lengths[-1])
        with torch.cuda.stream(self._stream):
            self._fill(pieces, size)
            self._replays.run((size, length), functools.partial(self._decode, size, length))
            sound = self._sound[:count].to("cpu", copy=True).numpy().reshape(count, -1)
        return [self._cut(*each) for each in zip(pieces, sound, strict=True)]

    def _fill(self, pieces: Sequence[_Piece], size: int) -> None:
        """Bring what `pieces` are to the rows of a step; further rows are nothing, in the spare slot."""
        latents = np.zeros((size, _LATENTS, self.latent_dim), np.float32)
        marks = np.zeros((len(_Marks._fields), size), np.int64)
        marks[0] = self._cache.spare
        for row, (state, own, last) in enumerate(pieces):
            if not state.num_latents:
                self._cache.clear(state.slot)
                self._tails[state.slot] = 0
            count = len(own)
            if count:
                latents[row] = own[np.minimum(np.arange(_LATENTS), count - 1)]
            stop = count * self._decoder.ratio + (self._before if last else 0)
            marks[:, row] = (state.slot, state.num_latents * self._decoder.ratio, count, stop)
            state.num_latents += count
        self._latents[:size] = torch.from_numpy(latents).to(self._latents.device)
        self._marks[:, :size] = torch.from_numpy(marks).to(self._marks.device)

    def _cut(self, piece: _Piece, sound: np.ndarray) -> np.ndarray:
        """What of a row's `sound` is certain and was not given yet."""
        decoder, state = self._decoder, piece.state
        stop = len(piece.latents) * decoder.ratio * decoder.hop
        if piece.last:
            stop += (self._before + OVERLAP - 1) * decoder.hop - decoder.edge
        skip = min(state.skip, stop)
        state.skip -= skip
        return sound[skip:stop]

    @torch.inference_mode()
    def _capture(self) -> None:
        self._marks[0] = self._cache.spare
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for size in reversed(self._sizes):
                for length in self._lengths:
                    self._replays.capture((size, length), functools.partial(self._decode, size, length))

    def _decode(self, size: int, length: int) -> None:
        """The next sound of `size` rows, over `length` positions."""
        marks = _Marks(*self._marks[:, :size])
        steps = torch.arange(self._frames, device=marks.slot.device)
        positions = marks.start[:, None] + steps
        sight = self._cache.sight(
            marks.slot, positions, length=length, first=self._before, windows=self._decoder.backbone.windows
        )

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return self._cache.attend(layer, query, key, value, sight)

        hidden = self._decoder.decoder(self._spread(marks), positions.clamp(max=self._most - 1), attend)
        is_heard = (positions >= self._before) & (steps < marks.stop[:, None])
        self._add_up(marks, self._decoder.waves(hidden), is_heard)

    def _spread(self, marks: _Marks) -> torch.Tensor:
        """The frames [size, frames, hidden] on the lines between the latents; see `AudioVaeDecoder`."""
        own = self._decoder.fc1(self._latents[: len(marks.slot)].to(self._dtype))
        before = torch.where((marks.start == 0)[:, None], own[:, 0], self._last[marks.slot])
        own = torch.where((marks.num_latents > 0)[:, None, None], own, before[:, None])
        known = torch.cat([before[:, None], own, own[:, -1:]], dim=1)
        self._last.index_copy_(0, marks.slot, own[:, -1])
        lines = torch.lerp(known[:, :-1, None], known[:, 1:, None], self._decoder.weights.to(self._dtype))
        return lines.flatten(1, 2)[:, : self._frames]

    def _add_up(self, marks: _Marks, waves: torch.Tensor, is_heard: torch.Tensor) -> None:
        """Add up the overlapping `waves` [size, frames, overlap * hop], and keep what later ones will add to."""
        size, hop = len(waves), self._decoder.hop
        parts = torch.stack([waves, self._decoder.window.square().expand_as(waves)], dim=1)
        parts = torch.where(is_heard[:, None, :, None], parts, 0).reshape(size, 2, self._frames, OVERLAP, hop)
        sums = waves.new_zeros(size, 2, self._frames + OVERLAP - 1, hop)
        sums[:, :, : OVERLAP - 1] = self._tails[marks.slot]
        for offset in range(OVERLAP):
            sums[:, :, offset : offset + self._frames] += parts[:, :, :, offset]
        ends = (marks.num_latents * self._decoder.ratio)[:, None] + torch.arange(OVERLAP - 1, device=waves.device)
        rows = torch.arange(size, device=waves.device)[:, None]
        self._tails.index_copy_(0, marks.slot, sums[rows, :, ends].transpose(1, 2))
        self._sound[:size] = sums[:, 0] / sums[:, 1]


class _Marks(NamedTuple):
    """Of each row, int64 [size]."""

    slot: torch.Tensor
    start: torch.Tensor
    """Position of the first frame."""
    num_latents: torch.Tensor
    stop: torch.Tensor
    """Frame of the step before which the sound ends."""


def _pieces(state: AudioSlot, latents: np.ndarray, last: bool) -> list[_Piece]:
    starts = range(0, len(latents), _LATENTS)
    if not starts:
        return [_Piece(state, latents, True)] if last and state.num_latents else []
    return [_Piece(state, latents[start : start + _LATENTS], last and start == starts[-1]) for start in starts]


def _rounds(queues: Sequence[list[_Piece]]) -> Iterator[list[_Piece]]:
    """The first piece of each, then the second, ..."""
    for number in range(max(map(len, queues), default=0)):
        yield [queue[number] for queue in queues if number < len(queue)]
