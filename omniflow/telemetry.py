"""What is measured of a request, defined once; the server exports it, the benchmarks print it.

    TTFT      s   request accepted (a client: sent) until the first text
    TTFA      s   the same, until the first bytes of sound
    ITL       s   gap between one piece of text and the next
    RTF       1   request accepted until the last sound, over the seconds of sound; below 1 is faster than real time
    underrun  s   the longest silence of a player that starts with the first sound and plays as chunks arrive

A server stamps a piece when the graph gives it, a client when it has read it: the same definitions at both ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omniflow.media import AudioChunk, TextDelta

if TYPE_CHECKING:
    from omniflow.runtime import RuntimeStatus, StageStatus

OK = "ok"
"""Outcome of a request that ended as it should; every other outcome is the code of its error."""


class Sound(msgspec.Struct, frozen=True):
    """A piece of sound that was delivered at `at_s` and plays for `duration_s`."""

    at_s: float
    duration_s: float


class RequestTimes(msgspec.Struct):
    """When the pieces of one request came, in seconds of one monotonic clock. `None`: there was no such piece."""

    started_s: float = msgspec.field(default_factory=time.monotonic)
    text_s: list[float] = []
    sounds: list[Sound] = []

    def stamp(self, value: object) -> None:
        """Note that an output of the graph came now; one that is neither text nor sound counts for nothing."""
        match value:
            case TextDelta(text) if text:
                self.text_s.append(time.monotonic())
            case AudioChunk():
                self.sounds.append(Sound(time.monotonic(), value.duration_s))

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text."""
        return self.text_s[0] - self.started_s if self.text_s else None

    @property
    def ttfa_s(self) -> float | None:
        """Time to the first sound."""
        return self.sounds[0].at_s - self.started_s if self.sounds else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between successive pieces of text: one fewer than there were pieces."""
        return [later - earlier for earlier, later in pairwise(self.text_s)]

    @property
    def audio_s(self) -> float:
        """Seconds of sound in all."""
        return sum(sound.duration_s for sound in self.sounds)

    @property
    def rtf(self) -> float | None:
        """Real-time factor."""
        audio_s = self.audio_s
        return (self.sounds[-1].at_s - self.started_s) / audio_s if audio_s > 0 else None

    @property
    def underrun_s(self) -> float | None:
        """The longest silence of a player; 0 where it never ran dry."""
        return longest_underrun_s(self.sounds) if self.sounds else None


def longest_underrun_s(sounds: list[Sound]) -> float:
    """The longest time that a player starves which starts at once and pauses whenever it has nothing to play."""
    longest = 0.0
    plays_until = sounds[0].at_s if sounds else 0.0
    for sound in sounds:
        longest = max(longest, sound.at_s - plays_until)
        plays_until = max(plays_until, sound.at_s) + sound.duration_s
    return longest


_LATENCY_BUCKETS_S = (0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)
_ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
_RTF_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1, 1.25, 1.5, 2, 4)
_UNDERRUN_BUCKETS_S = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_DURATION_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)


class Metrics:
    """The Prometheus form of the definitions above, in a registry of its own; read by `exposition`."""

    def __init__(self, status: Callable[[], RuntimeStatus]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "omniflow_requests", "Requests that have ended.", ["endpoint", "outcome"], registry=self.registry
        )
        self.realtime_sessions = Gauge(
            "omniflow_realtime_sessions", "Realtime sessions that are open.", registry=self.registry
        )
        self._duration = self._histogram("omniflow_request_seconds", "Whole requests.", _DURATION_BUCKETS_S)
        self._ttft = self._histogram("omniflow_ttft_seconds", "Time to the first text.", _LATENCY_BUCKETS_S)
        self._ttfa = self._histogram("omniflow_ttfa_seconds", "Time to the first sound.", _LATENCY_BUCKETS_S)
        self._itl = self._histogram("omniflow_itl_seconds", "Gaps between pieces of text.", _ITL_BUCKETS_S)
        self._rtf = self._histogram("omniflow_rtf", "Time until the last sound over its seconds.", _RTF_BUCKETS)
        self._underrun = self._histogram(
            "omniflow_underrun_seconds", "Longest silence of a player fed as chunks arrive.", _UNDERRUN_BUCKETS_S
        )
        self.registry.register(_StatusCollector(status))

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, description, ["endpoint"], buckets=buckets, registry=self.registry)

    def request_ended(self, endpoint: str, outcome: str, times: RequestTimes) -> None:
        """Count one request. What needs a whole reply (duration, RTF, underrun) is taken of those that ended well."""
        self._requests.labels(endpoint, outcome).inc()
        _observe(self._ttft.labels(endpoint), times.ttft_s)
        _observe(self._ttfa.labels(endpoint), times.ttfa_s)
        itl = self._itl.labels(endpoint)
        for gap_s in times.itl_s:
            itl.observe(gap_s)
        if outcome == OK:
            _observe(self._duration.labels(endpoint), time.monotonic() - times.started_s)
            _observe(self._rtf.labels(endpoint), times.rtf)
            _observe(self._underrun.labels(endpoint), times.underrun_s)

    def exposition(self) -> bytes:
        """All metrics as Prometheus text."""
        return generate_latest(self.registry)


def _observe(histogram: Histogram, value: float | None) -> None:
    if value is not None:
        histogram.observe(value)


class _StatusCollector(Collector):
    """What the runtime says of itself, read at scrape time: no second copy that could be stale."""

    def __init__(self, status: Callable[[], RuntimeStatus]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield GaugeMetricFamily("omniflow_ready", "1 while the graph takes requests.", value=status.state == "ready")
        yield GaugeMetricFamily("omniflow_requests_in_flight", "Requests not yet ended.", value=status.in_flight)
        yield GaugeMetricFamily("omniflow_requests_queued", "Requests that wait for a place.", value=status.queued)
        labels = ["stage", "host"]
        up = GaugeMetricFamily("omniflow_stage_up", "1 while the stage takes requests.", labels=labels)
        restarts = CounterMetricFamily("omniflow_stage_restarts", "Times a stage was restarted.", labels=labels)
        in_flight = GaugeMetricFamily("omniflow_stage_in_flight", "Requests that need a stage.", labels=labels)
        running = GaugeMetricFamily("omniflow_stage_running", "Calls of run under way.", labels=labels)
        queued = GaugeMetricFamily("omniflow_stage_queued", "Items and calls that wait for a stage.", labels=labels)
        for stage in status.stages:
            where = [stage.name, stage.host]
            up.add_metric(where, stage.state == "ready")
            restarts.add_metric(where, stage.restarts)
            in_flight.add_metric(where, stage.in_flight)
            running.add_metric(where, stage.running)
            queued.add_metric(where, stage.queued)
        yield from (up, restarts, in_flight, running, queued)
        yield from _engines(status.stages)
        dropped = CounterMetricFamily(
            "omniflow_edge_dropped_items", "Items that readers missed on edges that drop the oldest.", labels=["edge"]
        )
        for edge in status.edges:
            dropped.add_metric([edge.name], edge.dropped)
        yield dropped


def _engines(stages: Sequence[StageStatus]) -> Iterator[Metric]:
    """What engines hold. A stage that has none, or is down, has no sample."""
    labels = ["stage", "host"]
    running = GaugeMetricFamily("omniflow_engine_running", "Generations in an engine's batch.", labels=labels)
    waiting = GaugeMetricFamily("omniflow_engine_waiting", "Generations that wait for a place in it.", labels=labels)
    used = GaugeMetricFamily("omniflow_engine_kv_tokens_used", "KV tokens that those running hold.", labels=labels)
    room = GaugeMetricFamily("omniflow_engine_kv_tokens_capacity", "KV tokens that there are.", labels=labels)
    for stage in stages:
        if stage.engine is not None:
            where = [stage.name, stage.host]
            running.add_metric(where, stage.engine.num_running)
            waiting.add_metric(where, stage.engine.num_waiting)
            used.add_metric(where, stage.engine.kv_tokens_used)
            room.add_metric(where, stage.engine.kv_tokens_total)
    yield from (running, waiting, used, room)
