"""Sound files for tests: what FFmpeg reads in one, and what it makes of samples."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np

RATE_HZ = 16_000


def decoded(data: bytes) -> tuple[np.ndarray, int, float | None]:
    """Of a file: mono samples float32, their rate, and the seconds that it says it lasts."""
    with av.open(io.BytesIO(data)) as container:
        mono = av.AudioResampler("flt", "mono")
        parts = [part.to_ndarray()[0] for frame in container.decode(audio=0) for part in mono.resample(frame)]
        duration = container.duration
        return np.concatenate(parts), container.streams.audio[0].rate, duration and duration / av.time_base


def encoded(samples: np.ndarray, container: str, codec: str, folder: Path, **options: str) -> bytes:
    """`samples` (16 kHz, mono) as a file, at 48 kHz. FFmpeg wants a real one where it goes back to write the head."""
    place = folder / "sound"
    with av.open(str(place), "w", format=container, container_options=options) as out:
        stream = out.add_stream(codec, rate=48_000, layout="mono")
        resampler = av.AudioResampler(stream.format.name, "mono", 48_000)
        frame = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), "flt", "mono")
        frame.sample_rate, frame.pts, position = RATE_HZ, 0, 0
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            part.pts, position = position, position + part.samples
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return place.read_bytes()
