from __future__ import annotations

import pytest

from omniflow.telemetry import RequestTimes, Sound, longest_underrun_s


def test_times_of_a_spoken_answer() -> None:
    sounds = [Sound(11.0, 0.5), Sound(11.4, 1.0), Sound(12.0, 0.5)]
    times = RequestTimes(started_s=10.0, text_s=[10.5, 10.6, 10.9], sounds=sounds)
    assert times.ttft_s == pytest.approx(0.5) and times.ttfa_s == pytest.approx(1.0)
    assert times.itl_s == pytest.approx([0.1, 0.3])
    assert times.audio_s == pytest.approx(2.0) and times.rtf == pytest.approx(1.0)
    assert times.underrun_s == 0.0


def test_what_did_not_come_has_no_time() -> None:
    times = RequestTimes(started_s=0.0)
    assert (times.ttft_s, times.ttfa_s, times.itl_s, times.rtf, times.underrun_s) == (None, None, [], None, None)


@pytest.mark.parametrize(
    ("sounds", "starved_s"),
    [
        ([], 0.0),
        ([(1.0, 0.5)], 0.0),
        ([(1.0, 0.5), (1.5, 0.5)], 0.0),
        ([(1.0, 0.5), (1.7, 0.5)], 0.2),
        ([(1.0, 0.5), (1.7, 0.5), (2.5, 1.0), (2.6, 1.0)], 0.3),
        ([(1.0, 0.5), (2.0, 0.1), (2.0, 0.1), (2.3, 1.0)], 0.5),
    ],
)
def test_the_longest_silence_of_a_player(sounds: list[tuple[float, float]], starved_s: float) -> None:
    assert longest_underrun_s([Sound(at_s, duration_s) for at_s, duration_s in sounds]) == pytest.approx(starved_s)
