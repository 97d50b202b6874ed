"""Voice activity detection: silero's network on a CPU, one model for all sessions, a state for each.

A frame (32 ms) takes 0.09 ms of a core, and 0.06 where several come in one call: 2 to 3 ms a second of sound. Frames of
several sessions in one call would save no more than that, so each session calls for itself, with all frames that came
together: at once where they are few, in a thread where the loop would stand still for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from omniflow.server.realtime.audio import Pcm16
from omniflow.server.realtime.silero import SILERO_VAD
from omniflow.server.realtime.turns import FRAME_SAMPLES

if TYPE_CHECKING:
    import onnxruntime

_CONTEXT = 64
"""Samples of the frame before, which each frame begins with."""
_INLINE_FRAMES = 6
"""0.4 ms; a thread's turn costs 0.1 ms by itself."""
_MOST_FRAMES = 512
"""In one call: 30 ms, in a thread."""

Rows = NDArray[np.float32]


class Model:
    """The network. Loaded by whoever needs it first, and fetched where it is not on this machine."""

    def __init__(self) -> None:
        self._session: onnxruntime.InferenceSession | None = None
        self._loading = anyio.Lock()
        self._threads = anyio.CapacityLimiter(1)

    async def load(self) -> None:
        """Returns once it can listen. Raises WeightsError where the weights cannot be had."""
        if self._session is not None:
            return
        async with self._loading:
            if self._session is None:
                self._session = await anyio.to_thread.run_sync(_load)

    async def run(self, frames: Rows, hidden: Rows, cell: Rows) -> tuple[Rows, Rows, Rows]:
        """(how likely each of `frames` is speech, and the state after them)."""
        assert self._session is not None
        call: Callable[..., tuple[Rows, Rows, Rows]] = self._session.run
        feed = {"input": frames, "h": hidden, "c": cell}
        if len(frames) <= _INLINE_FRAMES:
            return call(["speech_probs", "hn", "cn"], feed)
        return await anyio.to_thread.run_sync(call, ["speech_probs", "hn", "cn"], feed, limiter=self._threads)


def _load() -> onnxruntime.InferenceSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # it warns of initialisers that its own export left unused
    path = SILERO_VAD.fetch() / SILERO_VAD.files[0].name
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class Ears:
    """One session's ear: what it has heard so far decides how the next frame sounds."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._hidden: Rows = np.zeros((1, 1, 128), np.float32)
        self._cell = self._hidden
        self._context: Pcm16 = np.zeros(_CONTEXT, np.int16)

    async def warm(self) -> None:
        """Load the network now, where a session will listen soon: that takes a second. Raises WeightsError."""
        await self._model.load()

    async def listen(self, samples: Pcm16) -> list[float]:
        """How likely each frame of `samples` (whole frames, 16 kHz) is speech. Raises WeightsError."""
        await self._model.load()
        heard: list[float] = []
        for start in range(0, len(samples), _MOST_FRAMES * FRAME_SAMPLES):
            block = samples[start : start + _MOST_FRAMES * FRAME_SAMPLES]
            rows = _rows(np.concatenate([self._context, block]))
            found, self._hidden, self._cell = await self._model.run(rows, self._hidden, self._cell)
            self._context = block[-_CONTEXT:]
            heard += found.tolist()
        return heard


def _rows(samples: Pcm16) -> Rows:
    """Frames, each behind the last samples of the one before."""
    floats = samples.astype(np.float32) * np.float32(1 / 32768)
    count = (len(floats) - _CONTEXT) // FRAME_SAMPLES
    step = floats.itemsize
    shape, strides = (count, _CONTEXT + FRAME_SAMPLES), (FRAME_SAMPLES * step, step)
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(floats, shape, strides))
