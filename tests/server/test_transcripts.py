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


def test_the_least_recently_used_goes_first() -> None:
    transcripts = Transcripts(max_items=2)
    transcripts.keep("a", "1")
    transcripts.keep("b", "2")
    transcripts.find("a")
    transcripts.keep("c", "3")
    assert [transcripts.find(name) for name in "abc"] == ["1", None, "3"]
