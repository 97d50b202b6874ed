"""Streaming decoders: frames of a codec or an acoustic model in, samples out, and any chunking gives the same samples.

A decoder is a module that owns no stream: `init` makes the state of one, `step` takes some more of its frames. So one
decoder serves many requests, and a cancelled one leaves nothing behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

State = TypeVar("State")


class StreamingDecoder(ABC, Generic[State]):
    """The contract; `check_streaming_decoder` tests it."""

    samples_per_frame: int
    sample_rate_hz: int
    channels: int
    holdback: int
    """Frames that `step` may keep until it has seen what follows them: the look-ahead of the decoder."""

    @abstractmethod
    def init(self) -> State:
        """The state of a new stream."""

    @abstractmethod
    def step(self, state: State, frames: np.ndarray, last: bool) -> np.ndarray:
        """Decode `frames` float32 [num_frames, ...], the next of the stream of `state`, which is changed.

        Returns samples float32 [num_samples, channels] flattened C-order: all that are certain by now, with `last`
        all that were missing. `frames` may be empty; after `last` the state is of no more use.
        """


class BatchedDecoder(StreamingDecoder[State]):
    """A `StreamingDecoder` of latents float32 [n, latent_dim], whose streams step together. A state has
    `num_latents`.
    """

    latent_dim: int
    max_latents: int
    """Of one stream."""

    @abstractmethod
    def step_together(
        self, states: Sequence[State], frames: Sequence[np.ndarray], last: Sequence[bool]
    ) -> list[np.ndarray]:
        """`step` of each of `states`, in one pass over the frames of all. Raises ContextLengthError before any."""

    @abstractmethod
    def end(self, state: State) -> None:
        """The stream takes no more steps. May be called while others step."""


class Window:
    """The state of a `WindowedDecoder`: the frames that are still needed, and how many of them are decoded already."""

    def __init__(self, frames: np.ndarray) -> None:
        self.frames = frames
        self.num_decoded = 0


class WindowedDecoder(StreamingDecoder[Window]):
    """A decoder without memory of its own, which sees `holdback` frames to both sides of the one that it decodes.

    Each step decodes the new frames together with their neighbours, so that the work of a step of n frames is that of
    n + 2 * holdback.
    """

    num_features: int

    @abstractmethod
    def decode(self, frames: np.ndarray) -> np.ndarray:
        """Decode `frames` float32 [num_frames, num_features] by themselves; returns samples as `step` does."""

    def init(self) -> Window:
        """The state of a new stream."""
        return Window(np.zeros((0, self.num_features), np.float32))

    def step(self, state: Window, frames: np.ndarray, last: bool) -> np.ndarray:
        """See `StreamingDecoder.step`."""
        window = np.concatenate([state.frames, frames])
        start = state.num_decoded
        stop = len(window) if last else max(start, len(window) - self.holdback)
        state.num_decoded = min(stop, self.holdback)
        state.frames = window[stop - state.num_decoded :]
        if start == stop:
            return np.zeros(0, np.float32)
        per_frame = self.samples_per_frame * self.channels
        return self.decode(window)[start * per_frame : stop * per_frame]


def check_streaming_decoder(
    decoder: StreamingDecoder[State], frames: np.ndarray, whole: np.ndarray, sizes: Sequence[int], tolerance: float
) -> None:
    """Assert that `frames`, fed in chunks of `sizes` (0 allowed; the rest follows at once), decode to `whole`.

    Also that no more than `holdback` frames are kept back, and that another stream in between does not disturb.
    """
    bounds = np.minimum(np.cumsum([0, *sizes]), len(frames)).tolist() + [len(frames)]
    per_frame = decoder.samples_per_frame * decoder.channels
    state, other = decoder.init(), decoder.init()
    got = np.zeros(0, np.float32)
    for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        last = number == len(bounds) - 2
        got = np.concatenate([got, decoder.step(state, frames[start:stop], last)])
        decoder.step(other, frames[start:stop][::-1], False)
        assert len(got) >= (stop - decoder.holdback) * per_frame, f"{stop} frames in, {len(got)} samples out"
    assert len(got) == len(whole) == len(frames) * per_frame, f"{len(got)} samples out of {len(whole)}"
    apart = np.abs(got - whole)
    assert apart.max(initial=0) <= tolerance, f"sample {apart.argmax()} is {apart.max()} off, sizes {sizes}"
