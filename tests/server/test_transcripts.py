from __future__ import annotations

from omniflow.server.transcripts import Transcripts


def test_a_transcript_is_kept_until_it_expires() -> None:
    now = [1000.0]
    transcripts = Transcripts(lifetime_s=60, clock=lambda: now[0])
    assert transcripts.keep("a", "hello") == 1060
    now[0] = 1059.9
    assert transcripts.find("a") == "hello"
    now[0] = 1060.0
    assert transcripts.find("a") is None and transcripts.find("b") is None


def test_the_oldest_goes_where_there_is_no_more_room() -> None:
    transcripts = Transcripts(max_chars=2 * (Transcripts.OVERHEAD_CHARS + 10))
    for name in "abc":
        transcripts.keep(name, name * 10)
    assert [transcripts.find(name) for name in "abc"] == [None, "b" * 10, "c" * 10]
    transcripts.keep("d", "d" * 20)
    assert [transcripts.find(name) for name in "bcd"] == [None, None, "d" * 20]
    transcripts.keep("e", "e" * 10_000)
    assert [transcripts.find(name) for name in "de"] == [None, None]


def test_looking_at_a_transcript_does_not_make_another_one_go() -> None:
    """What has been told to last until a time must not be outlived by what is older."""
    transcripts = Transcripts(max_chars=2 * (Transcripts.OVERHEAD_CHARS + 1))
    transcripts.keep("a", "1")
    transcripts.keep("b", "2")
    assert transcripts.find("a") == "1"
    transcripts.keep("c", "3")
    assert [transcripts.find(name) for name in "abc"] == [None, "2", "3"]


def test_what_has_expired_is_given_up() -> None:
    now = [0.0]
    transcripts = Transcripts(lifetime_s=60, clock=lambda: now[0])
    for second in range(1000):
        now[0] = second
        transcripts.keep(str(second), "x")
    assert len(transcripts._by_id) == len(transcripts._by_age) == 60
    assert transcripts._num_chars == 60 * (Transcripts.OVERHEAD_CHARS + 1)


def test_an_id_that_is_kept_again() -> None:
    transcripts = Transcripts(max_chars=2 * (Transcripts.OVERHEAD_CHARS + 1))
    for text in "123":
        transcripts.keep("a", text)
    assert transcripts.find("a") == "3"
