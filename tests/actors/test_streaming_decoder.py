from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.streaming_decoder import Window, WindowedDecoder, check_streaming_decoder


class Smoother(WindowedDecoder):
    """Two samples a frame and channel, each a mean over the frames up to `reach` away."""

    num_features = 2
    samples_per_frame = 2
    sample_rate_hz = 100
    channels = 2

    def __init__(self, reach: int = 3, holdback: int = 3) -> None:
        self.reach = reach
        self.holdback = holdback

    def decode(self, frames: np.ndarray) -> np.ndarray:
        padded = np.pad(frames, ((self.reach, self.reach), (0, 0)))
        means = np.stack([padded[i : i + 2 * self.reach + 1].mean(axis=0) for i in range(len(frames))])
        return np.repeat(means, self.samples_per_frame, axis=0).ravel()


FRAMES = np.random.default_rng(0).standard_normal((40, 2), np.float32)
SIZES = st.lists(st.integers(0, 9), max_size=12)


@given(st.integers(1, 40), SIZES)
def test_any_chunking_gives_the_whole(count: int, sizes: list[int]) -> None:
    decoder = Smoother()
    check_streaming_decoder(decoder, FRAMES[:count], decoder.decode(FRAMES[:count]), sizes, 1e-6)


def test_an_empty_stream_gives_nothing() -> None:
    decoder = Smoother()
    assert len(decoder.step(decoder.init(), FRAMES[:0], True)) == 0


def test_no_more_is_decoded_again_than_the_context() -> None:
    decoder = Smoother()
    state = decoder.init()
    for start in range(0, 40, 4):
        decoder.step(state, FRAMES[start : start + 4], False)
        assert len(state.frames) <= 2 * decoder.holdback


def test_a_context_that_is_too_small_is_found() -> None:
    decoder = Smoother(reach=4)
    with pytest.raises(AssertionError, match="is .* off"):
        check_streaming_decoder(decoder, FRAMES, decoder.decode(FRAMES), [10, 10], 1e-6)


def test_frames_that_are_kept_too_long_are_found() -> None:
    class Late(Smoother):
        def step(self, state: Window, frames: np.ndarray, last: bool) -> np.ndarray:
            state.frames = np.concatenate([state.frames, frames])
            return self.decode(state.frames) if last else np.zeros(0, np.float32)

    decoder = Late()
    with pytest.raises(AssertionError, match="10 frames in, 0 samples out"):
        check_streaming_decoder(decoder, FRAMES, decoder.decode(FRAMES), [10], 1e-6)


def test_state_that_streams_share_is_found() -> None:
    class Shared(Smoother):
        state = Window(np.zeros((0, 2), np.float32))

        def init(self) -> Window:
            return self.state

    decoder = Shared()
    with pytest.raises(AssertionError):
        check_streaming_decoder(decoder, FRAMES, decoder.decode(FRAMES), [10, 10], 1e-6)
