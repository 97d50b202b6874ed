"""Where turns begin and end, given how likely each frame is speech."""

from __future__ import annotations

import pytest

from omniflow.server.realtime.turns import EAGERNESS, FRAME_MS, SemanticVad, ServerVad, Turns, is_through


def heard(turns: Turns, probabilities: list[float]) -> dict[int, str]:
    """What came at which frame."""
    found = {at: turns.push(probability) for at, probability in enumerate(probabilities)}
    return {at: what for at, what in found.items() if what is not None}


def test_a_turn() -> None:
    turns = Turns(ServerVad(silence_duration_ms=320))
    assert heard(turns, [0.1] * 5 + [0.9] * 5 + [0.1] * 20) == {6: "started", 19: "stopped"}


def test_a_click_is_no_turn() -> None:
    assert heard(Turns(ServerVad()), [0.1, 0.9, 0.1, 0.9, 0.1] * 5) == {}


def test_a_pause_shorter_than_the_silence_is_within_the_turn() -> None:
    turns = Turns(ServerVad(silence_duration_ms=320))
    assert heard(turns, [0.9] * 5 + [0.1] * 9 + [0.9] * 3 + [0.1] * 10) == {1: "started", 26: "stopped"}


def test_speech_goes_on_a_little_below_the_threshold() -> None:
    turns = Turns(ServerVad(threshold=0.5, silence_duration_ms=64))
    assert heard(turns, [0.9, 0.9, *[0.4] * 50]) == {1: "started"}
    assert heard(turns, [0.3] * 2) == {1: "stopped"}


@pytest.mark.parametrize("threshold", [0.2, 0.95])
def test_the_threshold_counts(threshold: float) -> None:
    assert bool(heard(Turns(ServerVad(threshold=threshold)), [0.6] * 3)) == (threshold < 0.6)


def test_no_silence_at_all_ends_at_the_first_frame_without_speech() -> None:
    assert heard(Turns(ServerVad(silence_duration_ms=0)), [0.9, 0.9, 0.0]) == {1: "started", 2: "stopped"}


def silence_until_stopped(turns: Turns, said: str | None) -> int:
    """ms of silence that end a turn, where `said` is what is told of it."""
    heard(turns, [0.9] * 4)
    for frames in range(1, 1000):
        what = turns.push(0.0)
        if what == "paused" and said is not None:
            turns.understood(said)
        if what == "stopped":
            return frames * FRAME_MS
    raise AssertionError("the turn never ended")


@pytest.mark.parametrize("eagerness", ["low", "medium", "high", "auto"])
def test_eagerness(eagerness: str) -> None:
    turns = Turns(SemanticVad(eagerness=eagerness))  # type: ignore[arg-type]
    waited = [silence_until_stopped(turns, said) for said in ("It is.", None, "It is, and")]
    assert all(0 <= ms - wanted < FRAME_MS for ms, wanted in zip(waited, EAGERNESS[eagerness], strict=True))


@pytest.mark.parametrize(
    ("text", "through"),
    [
        ("The quick brown fox.", True),
        ("Really?", True),
        ('She said "stop!"', True),
        ("5.", True),
        ("Yes, it is.", True),
        ("The quick brown fox", False),
        ("I would like to...", False),
        ("I would like to.", False),
        ("Well, um.", False),
        ("Red, green,", False),
        ("", False),
    ],
)
def test_what_ends_like_a_sentence(text: str, through: bool) -> None:
    assert is_through(text) == through
