"""What every system in the comparison has to do, and how it says what it measured: one JSON object a line.

Needs msgspec and numpy only, so that it runs in the environment of the peers, too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator

import msgspec
import numpy as np

KB, MB = 2**10, 2**20
PAYLOADS = {"64 KB": 64 * KB, "1 MB": MB, "16 MB": 16 * MB, "64 MB": 64 * MB}
REPEATS = {"64 KB": 200, "1 MB": 80, "16 MB": 12, "64 MB": 6}
NUM_TRIPS, NUM_IDLE, NUM_SENT = 1500, 120, 20_000
PAUSE_S = 0.002
"""Before each message of an `idle` measurement: long enough for everybody to have gone to sleep."""


class Message(msgspec.Struct, array_like=True):
    """About 200 bytes as msgpack: what a control message between two stages would carry."""

    request_id: str
    stage: str
    seq: int
    step: int
    sent_ns: int
    modality: str
    shape: list[int]
    dtype: str
    finished: bool
    meta: dict[str, str]


def message(seq: int = 0) -> Message:
    return Message(
        "req-0123456789abcdef0123456789abcdef",
        "talker.decode",
        seq,
        seq & 1023,
        time.monotonic_ns(),
        "audio",
        [1, 24000, 2],
        "float32",
        False,
        {
            "edge": "thinker->talker",
            "transport": "arrow_shm",
            "trace": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "slot": "17",
        },
    )


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


def payload(size: int) -> np.ndarray:
    """`size` bytes that end with 255 and begin with 0, as `check` expects."""
    return (np.arange(size, dtype=np.uint64) & 255).astype(np.uint8)


def check(array: np.ndarray) -> int:
    """Called by whoever has received a payload: reads its first and last byte; gives the time of that in ns."""
    if int(array[0]) != 0 or int(array[-1]) != 255:
        raise AssertionError("the payload is damaged")
    return time.monotonic_ns()


CORES = sorted(os.sched_getaffinity(0))


def pin(core: int) -> None:
    """The sender runs on core 0, the receiver on core 1, where there are two."""
    os.sched_setaffinity(0, {CORES[core % len(CORES)]})


def percentile(samples: list[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def tell(system: str, metric: str, value: float, **more: float | str) -> None:
    """One measurement; times are in microseconds."""
    print(json.dumps({"system": system, "metric": metric, "value": value, **more}), flush=True)


def tell_times(system: str, metric: str, times_ns: list[float]) -> None:
    """The median of many times, and what 99 of 100 stay below."""
    tell(system, metric, percentile(times_ns, 0.5) / 1e3, p99=percentile(times_ns, 0.99) / 1e3, samples=len(times_ns))


def tell_payload(system: str, name: str, times_ns: list[float]) -> None:
    tell_times(system, f"payload {name}", times_ns[1:])


def sizes() -> Iterator[tuple[str, np.ndarray, int]]:
    """Name, payload and number of repeats; the first repeat of each touches fresh memory and does not count."""
    for name, size in PAYLOADS.items():
        yield name, payload(size), REPEATS[name] + 1


def skip(reason: str) -> None:
    """This system cannot be measured here."""
    print(json.dumps({"skipped": reason}), flush=True)
    sys.exit(0)
