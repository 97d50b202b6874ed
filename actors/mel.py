"""The log-mel spectrogram that Whisper was trained on (Radford et al. 2022, section 2.2), in numpy."""

from __future__ import annotations

import numpy as np

from omniflow.errors import InvalidInputError, ProtocolError
from omniflow.media import Waveforms

SAMPLE_RATE_HZ = 16_000
FFT_SIZE = 400
HOP = 160
"""Samples between two frames: 10 ms."""


def mel_filters(num_mels: int = 80) -> np.ndarray:
    """Slaney's triangular mel filters, each of area 1: float32 [num_mels, 201]."""
    frequencies_hz = np.fft.rfftfreq(FFT_SIZE, 1 / SAMPLE_RATE_HZ)
    edges_hz = _mel_to_hz(np.linspace(0, _hz_to_mel(SAMPLE_RATE_HZ / 2), num_mels + 2))
    low, centre, high = (edges_hz[i : num_mels + i, None] for i in range(3))
    rising = (frequencies_hz - low) / (centre - low)
    falling = (high - frequencies_hz) / (high - centre)
    filters: np.ndarray = np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)
    return filters.astype(np.float32)


def log_mel(samples: np.ndarray, filters: np.ndarray, window_s: int | None = None) -> np.ndarray:
    """`samples` float32 [n] at 16 kHz, n >= 2 -> float32 [len(filters), n // HOP].

    With `window_s` they are followed by silence up to there, or cut off: [len(filters), 100 * window_s].
    """
    num_samples = len(samples) if window_s is None else window_s * SAMPLE_RATE_HZ
    padded = np.pad(samples[:num_samples], (0, max(0, num_samples - len(samples))))
    padded = np.pad(padded, FFT_SIZE // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, FFT_SIZE)[::HOP][: num_samples // HOP]
    hann = np.hanning(FFT_SIZE + 1)[:-1].astype(np.float32)
    power = np.abs(np.fft.rfft(frames * hann, axis=1)).astype(np.float32) ** 2
    log = np.log10(np.maximum(filters @ power.T, 1e-10))
    scaled: np.ndarray = (np.maximum(log, log.max() - 8) + 4) / 4
    return scaled.astype(np.float32)


# Slaney's scale: linear up to 1 kHz (mel 15), above it 27 mels for each factor of 6.4.
def _hz_to_mel(hz: float) -> float:
    return float(15 + np.log(hz / 1000) * 27 / np.log(6.4)) if hz >= 1000 else hz * 3 / 200


def _mel_to_hz(mels: np.ndarray) -> np.ndarray:
    return np.where(mels >= 15, 1000 * np.exp(np.log(6.4) / 27 * (mels - 15)), mels * 200 / 3)


def checked_seconds(request: Waveforms, most_s: float) -> float:
    """How much sound a request has. Raises InvalidInputError for more than `most_s`, ProtocolError for another rate."""
    if request.sample_rate_hz != SAMPLE_RATE_HZ:
        raise ProtocolError(f"audio arrived at {request.sample_rate_hz} Hz, not at {SAMPLE_RATE_HZ} Hz")
    seconds = sum(map(len, request.samples)) / SAMPLE_RATE_HZ
    if seconds > most_s:
        raise InvalidInputError(
            f"the conversation holds {seconds:.1f} s of audio; this model takes at most {most_s:g} s", param="messages"
        )
    return seconds
