"""Windows: the pieces of sound that Whisper hears at a time, cut where nobody speaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from actors.mel import SAMPLE_RATE_HZ

WINDOWS_S = (10, 20, 30)
"""Whisper was trained on 30 s, padded with silence; a shorter window costs less: 0.11, 0.26 and 0.5 s of one core."""
MARGIN_S = 6
"""Silence that a window shorter than 30 s keeps after its clip. With 2 s Whisper repeats itself in 1 clip of 10."""
SILENCE = 1e-4
"""-80 dBFS: what never exceeds it holds nothing to hear."""


class Window(NamedTuple):
    """A piece of a longer sound: float32 [n] at 16 kHz, at most 30 s, and the sample that it begins with."""

    start: int
    samples: np.ndarray


class Cutter:
    """Cuts a sound that comes bit by bit; holds 30 s of it, and what was pushed last.

    Windows are at most 30 s long and end in the quietest 0.2 s of the 10 s before. Silence between them is left out.
    """

    def __init__(self) -> None:
        self._waiting = np.zeros(0, np.float32)
        self._start = 0

    def push(self, samples: np.ndarray) -> Iterator[Window]:
        """The windows that are complete with `samples`, float32 [n] at 16 kHz."""
        self._waiting = np.concatenate([self._waiting, samples])
        self._skip_silence()
        while len(self._waiting) > WINDOWS_S[-1] * SAMPLE_RATE_HZ:
            earliest, latest = WINDOWS_S[-2] * SAMPLE_RATE_HZ, WINDOWS_S[-1] * SAMPLE_RATE_HZ
            yield from self._take(earliest + _quietest(self._waiting[earliest:latest]))
            self._skip_silence()

    def rest(self) -> Iterator[Window]:
        """The last window, once there is no more sound."""
        yield from self._take(len(self._waiting))

    def _take(self, count: int) -> Iterator[Window]:
        window = Window(self._start, self._waiting[:count])
        self._drop(count)
        if np.abs(window.samples).max(initial=0) > SILENCE:
            yield window

    def _skip_silence(self) -> None:
        """Drop the whole seconds in front in which there is nothing to hear."""
        seconds = self._waiting[: len(self._waiting) // SAMPLE_RATE_HZ * SAMPLE_RATE_HZ].reshape(-1, SAMPLE_RATE_HZ)
        loud = np.flatnonzero(np.abs(seconds).max(axis=1, initial=0) > SILENCE)
        self._drop(SAMPLE_RATE_HZ * (int(loud[0]) if len(loud) else len(seconds)))

    def _drop(self, count: int) -> None:
        # A copy: a view would hold all that it was cut from.
        self._waiting = self._waiting[count:].copy()
        self._start += count


def cut(samples: np.ndarray) -> list[np.ndarray]:
    """The windows of a whole sound, see `Cutter`."""
    cutter = Cutter()
    return [window.samples for window in (*cutter.push(samples), *cutter.rest())]


def window_s(window: np.ndarray) -> int:
    """The shortest of `WINDOWS_S` that leaves `MARGIN_S` after the window."""
    needed_s = len(window) / SAMPLE_RATE_HZ + MARGIN_S
    return next((length_s for length_s in WINDOWS_S if needed_s <= length_s), WINDOWS_S[-1])


def _quietest(samples: np.ndarray) -> int:
    """The middle of the quietest 0.2 s; the last of them where several are alike."""
    step = SAMPLE_RATE_HZ // 5
    energy = np.square(samples[: len(samples) // step * step].reshape(-1, step)).mean(axis=1)
    return step * (len(energy) - 1 - int(energy[::-1].argmin())) + step // 2
