"""How an update changes a session."""

from __future__ import annotations

from typing import Any

import pytest

from omniflow.errors import InvalidInputError
from omniflow.server.realtime.audio import Pcmu
from omniflow.server.realtime.settings import Prompt, Session, Tracing, Transcription, updated, view
from omniflow.server.realtime.turns import SemanticVad, ServerVad


def of_input(**fields: Any) -> dict[str, Any]:
    return {"audio": {"input": fields}}


def turns(**fields: Any) -> dict[str, Any]:
    return of_input(turn_detection=fields)


def test_what_is_left_out_stays() -> None:
    session = updated(Session(instructions="a"), turns(type="server_vad", threshold=0.7, silence_duration_ms=200))
    session = updated(session, {"audio": {"output": {"voice": "joe", "speed": 1.5}}})
    session = updated(session, turns(prefix_padding_ms=0))
    assert session.instructions == "a" and session.audio.output.voice == "joe" and session.audio.output.speed == 1.5
    assert session.audio.input.turn_detection == ServerVad(0.7, 0, 200)


def test_null_turns_off_or_changes_nothing() -> None:
    session = updated(Session(), of_input(transcription={"model": "whisper-1", "language": "en"}))
    session = updated(session, of_input(transcription={"language": None}))
    assert session.audio.input.transcription == Transcription("whisper-1")
    nulls = {"instructions": None, "tools": None, "audio": {"input": {"format": None}, "output": None}, "model": None}
    assert updated(session, nulls) == session
    off = updated(session, of_input(turn_detection=None, transcription=None, noise_reduction=None))
    assert off.audio.input.turn_detection is None and off.audio.input.transcription is None
    assert updated(off, turns(type="server_vad", idle_timeout_ms=None)).audio.input.turn_detection == ServerVad()


def test_another_kind_begins_anew() -> None:
    session = updated(Session(), turns(create_response=False))
    session = updated(session, turns(type="semantic_vad", eagerness=None))
    assert session.audio.input.turn_detection == SemanticVad()
    session = updated(session, of_input(format={"type": "audio/pcmu", "rate": 8000}))
    assert session.audio.input.format == Pcmu()


def test_unknown_keys_and_opaque_values_are_taken() -> None:
    update = {"nonsense": {"a": [1]}, "tracing": {"group_id": None}, "prompt": {"id": "p"}, "truncation": "disabled"}
    session = updated(Session(), update | {"include": ["item.input_audio_transcription.logprobs"]})
    assert session.tracing == Tracing() and session.truncation == "disabled" and session.prompt == Prompt("p")
    ratio = {"type": "retention_ratio", "retention_ratio": 0.5, "token_limits": {"post_instructions": 9}}
    assert view(updated(session, {"truncation": ratio}), "s", 0)["truncation"] == ratio
    assert updated(session, {"tracing": None}).tracing is None


def test_sound_comes_with_its_transcript() -> None:
    assert updated(Session(), {"output_modalities": ["text", "audio"]}).output_modalities == ("audio",)


@pytest.mark.parametrize(
    ("update", "param"),
    [
        ({"type": "chat"}, "session.type"),
        ({"output_modalities": []}, "session.output_modalities"),
        ({"output_modalities": ["video"]}, "session.output_modalities[0]"),
        ({"instructions": 3}, "session.instructions"),
        ({"max_output_tokens": 0}, "session.max_output_tokens"),
        ({"max_output_tokens": "many"}, "session.max_output_tokens"),
        ({"tools": [{"type": "mcp", "server_label": "x", "name": "x"}]}, "session.tools[0].type"),
        ({"tools": [{"type": "function"}]}, "session.tools[0].name"),
        ({"tools": "x"}, "session.tools"),
        ({"tool_choice": "maybe"}, "session.tool_choice"),
        ({"tool_choice": {"type": "function"}}, "session.tool_choice.name"),
        ({"audio": 3}, "session.audio"),
        (of_input(format="pcm16"), "session.audio.input.format"),
        (of_input(format={"type": "audio/opus"}), "session.audio.input.format.type"),
        (of_input(format={"type": "audio/pcm", "rate": 16000}), "session.audio.input.format.rate"),
        (of_input(noise_reduction={"type": "all"}), "session.audio.input.noise_reduction.type"),
        (of_input(transcription="whisper"), "session.audio.input.transcription"),
        (turns(type="vad"), "session.audio.input.turn_detection.type"),
        (turns(threshold=1.1), "session.audio.input.turn_detection.threshold"),
        (turns(threshold="high"), "session.audio.input.turn_detection.threshold"),
        (turns(prefix_padding_ms=-1), "session.audio.input.turn_detection.prefix_padding_ms"),
        (turns(silence_duration_ms=1e9), "session.audio.input.turn_detection.silence_duration_ms"),
        (turns(idle_timeout_ms=1), "session.audio.input.turn_detection.idle_timeout_ms"),
        (turns(type="semantic_vad", eagerness="very"), "session.audio.input.turn_detection.eagerness"),
        (turns(create_response="yes"), "session.audio.input.turn_detection.create_response"),
        ({"audio": {"output": {"speed": 9}}}, "session.audio.output.speed"),
        ({"audio": {"output": {"voice": {"id": 5}}}}, "session.audio.output.voice.id"),
        ({"include": "all"}, "session.include"),
        ({"include": ["all"]}, "session.include[0]"),
        ({"tracing": "on"}, "session.tracing"),
        ({"tracing": {"group_id": 5}}, "session.tracing.group_id"),
        ({"truncation": {"type": "retention_ratio", "retention_ratio": 2}}, "session.truncation.retention_ratio"),
        ({"prompt": {}}, "session.prompt.id"),
    ],
)
def test_errors_name_the_field(update: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        updated(Session(), update)
    assert error.value.param == param


def test_a_transcription_session_shows_what_comes_in() -> None:
    shown = view(updated(Session(), {"type": "transcription"}), "sess_1", 5)
    assert set(shown) == {"object", "id", "expires_at", "type", "include", "audio"} and set(shown["audio"]) == {"input"}
