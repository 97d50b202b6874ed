"""Each row of the protocol's table: what a client's event brings, in order."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest

from omniflow.errors import DeadlineError, InvalidInputError, StageDiedError, UnsupportedError
from omniflow.media import AudioChunk, AudioPart, Generated, Options, TextDelta, TextPart, ToolCall, ToolCallDelta
from omniflow.server.realtime.protocol import Bounds
from omniflow.server.realtime.responses import Abilities
from omniflow.server.realtime.turns import FRAME_SAMPLES

from ..scripted import tone
from .machine import EVERYTHING, MANUAL, Machine, kinds

TEXT = {"output_modalities": ["text"]}
WEATHER = {"type": "function", "name": "weather", "description": "d", "parameters": {"type": "object"}}
ADDED = ["response.created", "response.output_item.added", "conversation.item.added", "response.content_part.added"]
CLOSED = ["response.content_part.done", "response.output_item.done", "conversation.item.done", "response.done"]


def message(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **fields}


def silence(ms: int) -> str:
    return base64.b64encode(bytes(48 * ms)).decode()


def error_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    (event,) = events
    assert event["type"] == "error"
    return event["error"]  # type: ignore[no-any-return]


# -- session ---------------------------------------------------------------------------------------------------------


def test_created_first_with_all_settings() -> None:
    (created,) = Machine().events
    session = created["session"]
    assert created["type"] == "session.created"
    assert session["type"] == "realtime" and session["object"] == "realtime.session" and session["model"] == "tiny"
    assert session["output_modalities"] == ["audio"] and session["tool_choice"] == "auto" and session["tools"] == []
    assert session["audio"]["input"]["turn_detection"]["interrupt_response"] is True
    assert session["audio"]["output"]["format"] == {"type": "audio/pcm", "rate": 24000}


def test_update_answers_with_the_whole_session() -> None:
    (updated,) = Machine().send("session.update", session={"instructions": "Be brief.", "no such": 1})
    assert updated["type"] == "session.updated"
    assert updated["session"]["instructions"] == "Be brief." and updated["session"]["id"].startswith("sess_")


def test_a_graph_that_does_not_speak_answers_in_text() -> None:
    machine = Machine(abilities=Abilities(frozenset({"tiny"}), frozenset({"text"}), transcribes=False))
    assert machine.events[0]["session"]["output_modalities"] == ["text"]
    error = error_of(machine.send("session.update", event_id="e1", session={"output_modalities": ["audio"]}))
    assert error["param"] == "session.output_modalities" and error["event_id"] == "e1"
    error = error_of(machine.send("session.update", session={"tools": [WEATHER]}))
    assert error["param"] == "session.tools" and error["code"] == "unsupported_value"
    assert kinds(machine.send("session.update", session={"tools": []})) == ["session.updated"]


def test_voices() -> None:
    def voice(asked: str | None, param: str) -> str | None:
        if asked not in ("joe", "alloy"):
            raise InvalidInputError(f"{param}: there is no voice {asked!r}", param=param)
        return "joe"

    machine = Machine(abilities=EVERYTHING._replace(voice=voice))
    assert machine.ask().options.voice is None
    machine.send("response.cancel")
    assert kinds(machine.send("session.update", session={"audio": {"output": {"voice": "alloy"}}})) == [
        "session.updated"
    ]
    assert machine.ask().options.voice == "joe"
    machine.send("response.cancel")
    error = error_of(machine.send("session.update", session={"audio": {"output": {"voice": "bob"}}}))
    assert error["param"] == "session.audio.output.voice"
    error = error_of(machine.send("response.create", response={"audio": {"output": {"voice": {"id": "bob"}}}}))
    assert error["param"] == "response.audio.output.voice"
    assert machine.ask().options.voice == "joe"


def test_a_voice_that_was_uploaded_is_what_was_made_of_it() -> None:
    def learned(options: Options) -> Options:
        return msgspec.structs.replace(options, voice=None, voice_code=b"a code")

    machine = Machine(abilities=EVERYTHING._replace(with_learned_voice=learned))
    machine.send("session.update", session={"audio": {"output": {"voice": "me"}}})
    options = machine.ask().options
    assert (options.voice, options.voice_code) == (None, b"a code")


def test_another_model_is_refused() -> None:
    machine = Machine()
    assert error_of(machine.send("session.update", session={"model": "gpt"}))["code"] == "model_not_found"
    assert kinds(machine.send("session.update", session={"model": "tiny"})) == ["session.updated"]


# -- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        ("{", "invalid_json", None),
        ("", "invalid_json", None),
        ('{"type": "nonsense", "event_id": "mine"}', "unknown_event", "type"),
        ('{"event_id": "mine"}', "invalid_value", "type"),
        ('{"type": "input_audio_buffer.append", "audio": "?", "event_id": "mine"}', "invalid_value", "audio"),
        ('{"type": "response.create", "response": 3, "event_id": "mine"}', "invalid_value", "response"),
    ],
)
def test_what_cannot_be_read_is_an_error_and_no_more(text: str, code: str, param: str | None) -> None:
    machine = Machine()
    machine.protocol.receive(text)
    error = error_of(machine.take())
    assert error["code"] == code and error.get("param") == param and error["type"] == "invalid_request_error"
    assert error.get("event_id") == ("mine" if "mine" in text else None)
    assert kinds(machine.gives(machine.ask(), TextDelta("hi")))[-1] == "response.done"


# -- items -----------------------------------------------------------------------------------------------------------


def test_items_keep_their_ids_and_their_places() -> None:
    machine = Machine()
    added, done = machine.send("conversation.item.create", item=message(id="a"))
    assert added["previous_item_id"] is None and added["item"] == done["item"]
    assert added["item"] == {
        "id": "a",
        "object": "realtime.item",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "hello"}],
    }
    assert machine.send("conversation.item.create", item=message(id="c"))[0]["previous_item_id"] == "a"
    between = machine.send("conversation.item.create", item=message(id="b"), previous_item_id="a")
    assert between[0]["previous_item_id"] == "a"
    first = machine.send("conversation.item.create", item=message(id="0"), previous_item_id="root")
    assert first[0]["previous_item_id"] is None
    assert [entry.id for entry in machine.protocol._conversation] == ["0", "a", "b", "c"]


def test_errors_of_items_name_the_event() -> None:
    machine = Machine()
    machine.send("conversation.item.create", item=message(id="a"))
    for kind, fields, code in [
        ("conversation.item.create", {"item": message(id="a")}, "item_create_duplicate_item_id"),
        ("conversation.item.create", {"item": message(), "previous_item_id": "x"}, None),
        ("conversation.item.retrieve", {"item_id": "x"}, "item_retrieve_invalid_item_id"),
        ("conversation.item.delete", {"item_id": "x"}, "item_delete_invalid_item_id"),
        ("conversation.item.truncate", {"item_id": "x", "content_index": 0, "audio_end_ms": 1}, None),
        ("conversation.item.truncate", {"item_id": "a", "content_index": 0, "audio_end_ms": 1}, None),
    ]:
        error = error_of(machine.send(kind, event_id="rci_x", **fields))
        assert error["event_id"] == "rci_x" and error["param"] in ("item.id", "item_id", "previous_item_id")
        assert code is None or error["code"] == code


def test_retrieve_and_delete() -> None:
    machine = Machine()
    machine.send("conversation.item.create", item=message(id="a"))
    (retrieved,) = machine.send("conversation.item.retrieve", item_id="a")
    assert retrieved["type"] == "conversation.item.retrieved" and retrieved["item"]["content"][0]["text"] == "hello"
    assert machine.send("conversation.item.delete", item_id="a")[0]["item_id"] == "a"
    assert kinds(machine.send("conversation.item.delete", item_id="a")) == ["error"]


def test_the_oldest_items_go_and_the_client_is_told() -> None:
    machine = Machine(bounds=Bounds(items=2))
    for id in "abc":
        events = machine.send("conversation.item.create", item=message(id=id))
    assert kinds(events) == ["conversation.item.added", "conversation.item.done", "conversation.item.deleted"]
    assert events[-1]["item_id"] == "a"


def test_a_conversation_becomes_a_chat() -> None:
    machine = Machine({"instructions": "Be kind.", "output_modalities": ["text"], "tools": [WEATHER]})
    pcm = base64.b64encode(np.full(24000, 1000, "<i2").tobytes()).decode()
    heard = [{"type": "input_audio", "audio": pcm, "transcript": "said"}]
    for item in [
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "sys"}]},
        message(content=[{"type": "input_audio", "transcript": "earlier"}]),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"type": "function_call", "name": "weather", "arguments": "{}", "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        message(content=heard),
    ]:
        assert kinds(machine.send("conversation.item.create", item=item))[-1] == "conversation.item.done"
    machine.send("response.create")
    task = machine.responds[-1]
    roles = [each.role for each in task.chat.messages]
    assert roles == ["system", "system", "user", "assistant", "tool", "user"]
    assert task.chat.messages[0].parts == (TextPart("Be kind."),)
    assert task.chat.messages[2].parts == (TextPart("earlier"),)
    assert task.chat.messages[3].tool_calls == (ToolCall("c1", "weather", "{}"),)
    assert task.chat.messages[4].tool_call_id == "c1"
    (part,) = task.chat.messages[5].parts
    assert isinstance(part, AudioPart) and len(part.data) == 44 + 2 * 16000
    assert task.options.tools[0].name == "weather" and task.outputs == {"text", "usage", "tool_calls"}


def test_what_was_said_before_the_last_answer_is_words_where_they_are_known() -> None:
    machine = Machine(MANUAL | {"output_modalities": ["text"]})
    for words in ("first", None, "third"):
        machine.send("input_audio_buffer.append", audio=silence(100))
        machine.send("input_audio_buffer.commit")
        item_id = machine.events[-1]["item"]["id"]
        if words is not None:
            machine.protocol.written(item_id, words, 0.1)
        machine.send("response.create")
        machine.gives(machine.responds[-1], TextDelta("ok"))
    users = [each for each in machine.responds[-1].chat.messages if each.role == "user"]
    assert users[0].parts == (TextPart("first"),)
    assert isinstance(users[1].parts[0], AudioPart) and isinstance(users[2].parts[0], AudioPart)


def test_the_oldest_sound_is_forgotten_unless_it_is_words() -> None:
    machine = Machine(MANUAL | TEXT, bounds=Bounds(buffer_s=1))
    for words in ("first", None, None, None):
        machine.send("input_audio_buffer.append", audio=silence(900))
        item_id = machine.send("input_audio_buffer.commit")[0]["item_id"]
        if words is not None:
            machine.protocol.written(item_id, words, 0.9)
    machine.send("response.create")
    first, *others = machine.responds[-1].chat.messages
    assert first.parts == (TextPart("first"),)
    assert [len(part.data) for each in others for part in each.parts if isinstance(part, AudioPart)] == [28844] * 2


# -- the input buffer ------------------------------------------------------------------------------------------------


def test_a_manual_commit_makes_an_item_and_no_response() -> None:
    machine = Machine(MANUAL)
    assert machine.send("input_audio_buffer.append", audio=silence(100)) == []
    events = machine.send("input_audio_buffer.commit")
    assert kinds(events) == ["input_audio_buffer.committed", "conversation.item.added", "conversation.item.done"]
    assert events[0]["item_id"] == events[1]["item"]["id"] and events[0]["previous_item_id"] is None
    assert events[1]["item"]["content"] == [{"type": "input_audio", "transcript": None}]
    assert machine.responds == machine.transcribes == []


def test_an_empty_buffer_can_be_cleared_but_not_committed() -> None:
    machine = Machine(MANUAL)
    assert kinds(machine.send("input_audio_buffer.clear")) == ["input_audio_buffer.cleared"]
    error = error_of(machine.send("input_audio_buffer.commit", event_id="c"))
    assert error["code"] == "input_audio_buffer_commit_empty" and error["event_id"] == "c"
    machine.send("input_audio_buffer.append", audio=silence(100))
    machine.send("input_audio_buffer.clear")
    assert error_of(machine.send("input_audio_buffer.commit"))["code"] == "input_audio_buffer_commit_empty"


def test_the_buffer_is_bounded() -> None:
    machine = Machine(MANUAL, bounds=Bounds(buffer_s=1))
    assert machine.send("input_audio_buffer.append", audio=silence(900)) == []
    assert error_of(machine.send("input_audio_buffer.append", audio=silence(200)))["code"] == "input_audio_buffer_full"
    assert kinds(machine.send("input_audio_buffer.commit"))[0] == "input_audio_buffer.committed"
    assert machine.send("input_audio_buffer.append", audio=silence(900)) == []


@pytest.mark.parametrize("format", ["audio/pcmu", "audio/pcma"])
def test_telephone_audio(format: str) -> None:
    machine = Machine({"audio": {"input": {"turn_detection": None, "format": {"type": format}}}} | TEXT)
    machine.send("input_audio_buffer.append", audio=base64.b64encode(bytes(8000)).decode())
    machine.send("input_audio_buffer.commit")
    machine.send("response.create")
    (part,) = machine.responds[-1].chat.messages[-1].parts
    assert isinstance(part, AudioPart) and len(part.data) == 44 + 2 * 16000


# -- turns -----------------------------------------------------------------------------------------------------------

SPEECH = [0.0] * 20 + [0.9] * 20 + [0.0] * 20
TURN = [
    "input_audio_buffer.speech_started",
    "input_audio_buffer.speech_stopped",
    "input_audio_buffer.committed",
    "conversation.item.added",
    "conversation.item.done",
]


def test_a_detected_turn_is_committed_and_answered() -> None:
    events = Machine().say(SPEECH)
    assert kinds(events) == [*TURN, "response.created"]
    started, stopped, committed, added, *_ = events
    assert started["item_id"] == stopped["item_id"] == committed["item_id"] == added["item"]["id"]
    assert started["audio_start_ms"] == 20 * 32 - 300
    assert stopped["audio_end_ms"] == 40 * 32 + 512  # the first multiple of a frame beyond 500 ms of silence


@pytest.mark.parametrize("create", [True, False])
def test_create_response_decides_whether_a_turn_is_answered(create: bool) -> None:
    machine = Machine({"audio": {"input": {"turn_detection": {"create_response": create}}}})
    assert ("response.created" in kinds(machine.say(SPEECH))) == create


def test_speech_interrupts_the_answer() -> None:
    machine = Machine()
    task = machine.ask()
    machine.gives(task, TextDelta("on and on"), tone(2400), end=False)
    events = machine.say([0.0] * 5 + [0.9] * 5)
    assert kinds(events)[0] == "input_audio_buffer.speech_started"
    assert kinds(events)[-1] == "response.done"
    assert "response.output_item.done" in kinds(events)
    done = events[-1]["response"]
    assert done["status"] == "cancelled" and done["status_details"]["reason"] == "turn_detected"
    assert done["output"][0]["status"] == "incomplete" and machine.stops == [task.response_id]
    assert machine.gives(task, TextDelta("more")) == []
    (truncated,) = machine.send(
        "conversation.item.truncate", item_id=done["output"][0]["id"], content_index=0, audio_end_ms=99999
    )
    assert truncated["type"] == "conversation.item.truncated" and truncated["audio_end_ms"] == 99999
    assert kinds(machine.say([0.9] * 5 + [0.0] * 20)) == [*TURN[1:], "response.created"]


def test_without_interruption_the_turn_waits_for_the_answer() -> None:
    machine = Machine({"audio": {"input": {"turn_detection": {"interrupt_response": False}}}})
    first = machine.ask()
    assert kinds(machine.say(SPEECH)) == TURN
    assert kinds(machine.gives(first, TextDelta("ok")))[-2:] == ["response.done", "response.created"]


def test_responses_beside_the_conversation_are_not_interrupted() -> None:
    machine = Machine()
    beside = machine.ask(conversation="none")
    assert "response.done" not in kinds(machine.say(SPEECH))
    assert kinds(machine.gives(beside, TextDelta("done")))[-1] == "response.done"


def test_speech_without_end_is_a_turn_when_the_buffer_is_full() -> None:
    machine = Machine(bounds=Bounds(buffer_s=1))
    events = machine.say([0.9] * 40)
    assert kinds(events)[:5] == TURN


def test_switching_detection_off_and_on() -> None:
    machine = Machine()
    machine.say([0.9] * 5)
    machine.send("session.update", session=MANUAL)
    assert machine.say([0.9] * 5) == []
    assert kinds(machine.send("input_audio_buffer.commit"))[0] == "input_audio_buffer.committed"
    on = {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
    machine.send("session.update", session=on)
    assert kinds(machine.say(SPEECH))[:5] == TURN


def test_a_turn_is_transcribed_beside_its_answer() -> None:
    machine = Machine({"audio": {"input": {"transcription": {"language": "en", "prompt": "foxes"}}}})
    item_id = machine.say(SPEECH)[0]["item_id"]
    (task,) = machine.transcribes
    assert task.item_id == item_id and task.options.language == "en" and task.options.hint == "foxes"
    machine.protocol.wrote(item_id, "a fox")
    machine.protocol.written(item_id, "a fox", 1.5)
    delta, completed = machine.take()
    assert delta["delta"] == "a fox" and completed["transcript"] == "a fox" and delta["content_index"] == 0
    assert completed["usage"] == {"type": "duration", "seconds": 1.5}
    assert machine.send("conversation.item.retrieve", item_id=item_id)[0]["item"]["content"] == [
        {"type": "input_audio", "transcript": "a fox"}
    ]


def test_an_empty_language_is_none() -> None:
    machine = Machine({"audio": {"input": {"transcription": {"language": "", "prompt": ""}}}})
    machine.say(SPEECH)
    assert machine.transcribes[0].options == Options()


def test_a_failed_transcription_fails_nothing_else() -> None:
    machine = Machine({"audio": {"input": {"transcription": {}}}})
    machine.say(SPEECH)
    machine.protocol.not_written(machine.transcribes[0].item_id, StageDiedError("died"))
    (failed,) = machine.take()
    assert failed["type"].endswith("transcription.failed") and failed["error"]["code"] == "stage_died"
    assert kinds(machine.gives(machine.responds[0], TextDelta("ok")))[-1] == "response.done"


def test_a_graph_that_cannot_transcribe_says_so_with_each_turn() -> None:
    machine = Machine(
        {"audio": {"input": {"transcription": {}}}}, EVERYTHING._replace(transcribes=False), Bounds(buffer_s=10)
    )
    assert "conversation.item.input_audio_transcription.failed" in kinds(machine.say(SPEECH))


def test_semantic_vad_asks_what_was_said_and_ends_soon_after_a_sentence() -> None:
    semantic = {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}
    ended = {}
    for text in ("That is all.", None, "I would like to have a"):
        machine = Machine(semantic, bounds=Bounds(buffer_s=30))
        machine.say([0.9] * 10 + [0.0] * 8)
        (task,) = machine.listens
        if text is not None:
            machine.protocol.understood(task.pause, text)
        ended[text] = next(at for at in range(300) if "input_audio_buffer.speech_stopped" in kinds(machine.say([0.0])))
    assert 0 < ended["That is all."] < ended[None] < ended["I would like to have a"] <= 4000 / 32


def test_what_was_said_before_an_earlier_pause_does_not_end_a_later_one() -> None:
    machine = Machine({"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}, bounds=Bounds(buffer_s=30))
    machine.say([0.9] * 10 + [0.0] * 8)
    machine.say([0.9] * 5 + [0.0] * 8)
    first, _ = machine.listens
    machine.protocol.understood(first.pause, "That is all.")
    assert machine.say([0.0] * 8) == []


def test_few_pauses_are_asked_about_at_once() -> None:
    machine = Machine({"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}, bounds=Bounds(buffer_s=99))
    machine.say(([0.9] * 10 + [0.0] * 8) * 10)
    assert len(machine.listens) == 2
    for task in machine.listens:
        machine.protocol.understood(task.pause, None)
    machine.say(([0.9] * 10 + [0.0] * 8) * 2)
    assert len(machine.listens) == 4


def test_the_user_says_nothing_for_too_long() -> None:
    idle = {"turn_detection": {"idle_timeout_ms": 5000}}
    machine = Machine({"audio": {"input": idle}})
    assert machine.protocol.due_s is None
    machine.gives(machine.ask(), TextDelta("hm"), AudioChunk(np.zeros(24000, np.float32), 24000))
    assert machine.protocol.due_s == 100 + 1 + 5  # a second of sound is played first
    machine.say([0.0] * 10)
    machine.now_s = 106.0
    machine.protocol.tick()
    events = machine.take()
    assert kinds(events) == ["input_audio_buffer.timeout_triggered", *TURN[2:], "response.created"]
    assert events[0]["item_id"] == events[1]["item_id"] and events[0]["audio_end_ms"] >= 320 - 20


# -- responses -------------------------------------------------------------------------------------------------------


def test_a_written_answer() -> None:
    machine = Machine(TEXT)
    task = machine.ask()
    assert machine.events[-1]["response"]["output"] == [] and task.outputs == {"text", "usage"}
    events = machine.gives(task, TextDelta("Hel"), TextDelta("lo"), Generated("stop", 7, 2))
    assert kinds(events) == [*ADDED[1:], *["response.output_text.delta"] * 2, "response.output_text.done", *CLOSED]
    added = events[0]
    assert added["item"]["status"] == "in_progress" and added["item"]["role"] == "assistant"
    assert events[2]["part"] == {"type": "text", "text": ""} and events[-4]["part"] == {"type": "text", "text": "Hello"}
    done = events[-1]["response"]
    assert done["status"] == "completed" and done["output"][0]["content"] == [{"type": "output_text", "text": "Hello"}]
    assert done["usage"]["input_tokens"] == 7 and done["usage"]["total_tokens"] == 9
    assert done["output_modalities"] == ["text"] and "metadata" not in done


def test_a_spoken_answer() -> None:
    machine = Machine()
    events = machine.gives(machine.ask(), TextDelta("Hello."), tone(2400), tone(2400, start=2400))
    names = kinds(events)
    assert names[:3] == ADDED[1:] and names[-5:] == ["response.output_audio_transcript.done", *CLOSED]
    assert names[-6] == "response.output_audio.done" and names[3] == "response.output_audio_transcript.delta"
    sound = [base64.b64decode(e["delta"]) for e in events if e["type"] == "response.output_audio.delta"]
    assert all(len(piece) % 2 == 0 for piece in sound) and len(b"".join(sound)) == 2 * 4800
    assert events[2]["part"] == {"type": "audio", "transcript": ""}
    assert events[-1]["response"]["output"][0]["content"] == [{"type": "output_audio", "transcript": "Hello."}]


def test_sound_at_another_rate_and_a_long_chunk() -> None:
    machine = Machine()
    events = machine.gives(machine.ask(), TextDelta("a"), tone(22050 * 10, 22050))
    sound = [base64.b64decode(e["delta"]) for e in events if e["type"] == "response.output_audio.delta"]
    assert len(b"".join(sound)) == 2 * 24000 * 10 and max(map(len, sound)) == 48 * 1024


def test_telephone_output() -> None:
    machine = Machine({"audio": {"output": {"format": {"type": "audio/pcmu"}}}})
    events = machine.gives(machine.ask(), TextDelta("a"), tone(24000))
    sound = b"".join(base64.b64decode(e["delta"]) for e in events if e["type"] == "response.output_audio.delta")
    assert len(sound) == 8000


def test_sound_that_changes_its_rate_fails_the_response() -> None:
    machine = Machine()
    task = machine.ask()
    events = machine.gives(task, tone(100), tone(100, 8000))
    assert events[-1]["response"]["status"] == "failed" and machine.stops == [task.response_id]


def test_a_call_of_a_tool() -> None:
    machine = Machine({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}})
    task = machine.ask()
    assert task.options.tool_choice == "required" and task.options.tool_name == "weather"
    events = machine.gives(
        task, ToolCallDelta(0, "", "call_1", "weather"), ToolCallDelta(0, '{"city":'), ToolCallDelta(0, '"Oslo"}')
    )
    assert kinds(events) == [
        "response.output_item.added",
        "conversation.item.added",
        *["response.function_call_arguments.delta"] * 2,
        "response.function_call_arguments.done",
        *CLOSED[1:],
    ]
    assert events[0]["item"] == {
        "id": events[0]["item"]["id"],
        "object": "realtime.item",
        "type": "function_call",
        "status": "in_progress",
        "name": "weather",
        "call_id": "call_1",
        "arguments": "",
    }
    done = events[4]
    assert done["name"] == "weather" and done["call_id"] == "call_1" and done["arguments"] == '{"city":"Oslo"}'
    assert events[5]["item"]["status"] == "completed"
    output = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    added = machine.send("conversation.item.create", item=output)[0]
    assert added["item"]["output"] == "rain" and added["previous_item_id"] == events[0]["item"]["id"]
    machine.send("response.create")
    assert [each.role for each in machine.responds[-1].chat.messages][-2:] == ["assistant", "tool"]


def test_two_calls_and_words() -> None:
    machine = Machine({"tools": [WEATHER]})
    events = machine.gives(
        machine.ask(),
        TextDelta("Let me see."),
        tone(240),
        ToolCallDelta(0, "{}", "c0", "weather"),
        ToolCallDelta(1, "{}", "c1", "weather"),
    )
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    done = [e["call_id"] for e in events if e["type"] == "response.function_call_arguments.done"]
    assert done == ["c0", "c1"]


def test_half_a_call_is_not_made() -> None:
    machine = Machine({"tools": [WEATHER]})
    machine.gives(machine.ask(), ToolCallDelta(0, '{"ci', "c0", "weather"), end=False)
    events = machine.send("response.cancel")
    assert "response.function_call_arguments.done" not in kinds(events)
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    machine.ask()
    assert all(not each.tool_calls for each in machine.responds[-1].chat.messages)


def test_overrides_of_one_response() -> None:
    machine = Machine({"instructions": "long"})
    task = machine.ask(
        output_modalities=["text"],
        instructions="short",
        max_output_tokens=9,
        metadata={"client_event_id": "x"},
        audio={"output": {"voice": {"id": "joe"}}},
        conversation="auto",
    )
    created = machine.events[-1]["response"]
    assert created["metadata"] == {"client_event_id": "x"} and created["max_output_tokens"] == 9
    assert created["audio"]["output"]["voice"] == "joe" and created["output_modalities"] == ["text"]
    assert task.options.max_tokens == 9 and task.options.voice == "joe"
    assert task.chat.messages[0].parts == (TextPart("short"),)
    assert machine.gives(task, TextDelta("x"))[-1]["response"]["metadata"] == {"client_event_id": "x"}
    machine.send("response.create")
    assert machine.responds[-1].chat.messages[0].parts == (TextPart("long"),)


def test_a_response_beside_the_conversation() -> None:
    machine = Machine(TEXT)
    running = machine.ask()
    given = [message("only this"), {"type": "item_reference", "id": machine.events[1]["item"]["id"]}]
    machine.send("response.create", response={"conversation": "none", "input": given, "metadata": {"topic": "a"}})
    beside = machine.responds[-1]
    assert [each.parts for each in beside.chat.messages] == [(TextPart("only this"),), (TextPart("hello"),)]
    events = machine.gives(beside, TextDelta("aside"))
    assert not any(kind.startswith("conversation.") for kind in kinds(events))
    assert "conversation_id" not in events[-1]["response"]
    assert kinds(machine.gives(running, TextDelta("main")))[-1] == "response.done"
    machine.send("response.create")
    assert [each.parts for each in machine.responds[-1].chat.messages] == [(TextPart("hello"),), (TextPart("main"),)]


def test_one_response_of_the_conversation_at_a_time_and_a_few_beside() -> None:
    machine = Machine(TEXT)
    machine.ask()
    error = error_of(machine.send("response.create", event_id="r2"))
    assert error["code"] == "conversation_already_has_active_response" and error["event_id"] == "r2"
    for _ in range(4):
        assert kinds(machine.send("response.create", response={"conversation": "none"})) == ["response.created"]
    assert error_of(machine.send("response.create", response={"conversation": "none"}))["code"] == "rate_limit_exceeded"


def test_cancel() -> None:
    machine = Machine()
    task = machine.ask()
    machine.gives(task, TextDelta("on"), tone(240), end=False)
    events = machine.send("response.cancel")
    assert kinds(events) == ["response.output_audio.done", "response.output_audio_transcript.done", *CLOSED]
    done = events[-1]["response"]
    assert done["status"] == "cancelled"
    assert done["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
    assert machine.stops == [task.response_id]
    assert machine.gives(task, TextDelta("late"), tone(9)) == []
    machine.protocol.failed(task.response_id, DeadlineError("late"))
    assert machine.take() == []
    error = error_of(machine.send("response.cancel", event_id="c", response_id=task.response_id))
    assert error["code"] == "response_cancel_not_active" and error["message"].startswith("Cancellation failed")


def test_cancel_of_one_beside() -> None:
    machine = Machine()
    beside = machine.ask(conversation="none")
    assert error_of(machine.send("response.cancel"))["code"] == "response_cancel_not_active"
    assert kinds(machine.send("response.cancel", response_id=beside.response_id)) == ["response.done"]


def test_a_failed_response_says_why() -> None:
    machine = Machine()
    task = machine.ask()
    machine.gives(task, TextDelta("so f"), end=False)
    machine.protocol.failed(task.response_id, StageDiedError("its process died", stage="talker"))
    done = machine.take()[-1]["response"]
    assert done["status"] == "failed" and done["status_details"]["error"]["code"] == "stage_died"
    assert "talker" in done["status_details"]["error"]["message"]
    assert kinds(machine.gives(machine.ask(), TextDelta("again")))[-1] == "response.done"


def test_what_a_model_refuses_is_an_error_event_too() -> None:
    """Whether a model knows tools, it says itself: its graph has the output."""
    machine = Machine()
    assert kinds(machine.send("session.update", session={"tools": [WEATHER]})) == ["session.updated"]
    task = machine.ask()
    machine.take()
    machine.protocol.failed(task.response_id, UnsupportedError("tools: this model knows no tools", param="tools"))
    error, done = machine.take()
    assert error["type"] == "error" and done["response"]["status"] == "failed"
    assert error["error"]["param"] == "tools" and error["error"]["code"] == "unsupported_value"
    assert done["response"]["status_details"]["error"] == error["error"]
    assert kinds(machine.send("session.update", session={"tools": []})) == ["session.updated"]
    assert kinds(machine.gives(machine.ask(), TextDelta("again")))[-1] == "response.done"


def test_an_answer_that_was_too_long() -> None:
    machine = Machine()
    done = machine.gives(machine.ask(), TextDelta("on and"), tone(99), Generated("length", 3, 2))[-1]["response"]
    assert done["status"] == "incomplete" and done["status_details"]["reason"] == "max_output_tokens"
    assert done["output"][0]["status"] == "incomplete"


def test_an_answer_of_nothing() -> None:
    machine = Machine()
    (done,) = machine.gives(machine.ask())
    assert done["response"]["status"] == "completed" and done["response"]["output"] == []


def test_what_was_not_heard_is_forgotten() -> None:
    machine = Machine()
    text = "one two three four five six seven eight nine ten"
    done = machine.gives(machine.ask(), TextDelta(text), tone(24000))[-1]["response"]
    item_id = done["output"][0]["id"]
    machine.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=500)
    heard = machine.send("conversation.item.retrieve", item_id=item_id)[0]["item"]["content"][0]["transcript"]
    assert text.startswith(heard) and heard == "one two three four five"
    machine.ask("again")
    assert TextPart(heard) in machine.responds[-1].chat.messages[-2].parts


def test_a_transcription_session_answers_nothing() -> None:
    machine = Machine({"type": "transcription", "audio": {"input": {"transcription": {}}}})
    session = machine.events[0]["session"]
    assert session["object"] == "realtime.transcription_session" and set(session["audio"]) == {"input"}
    assert kinds(machine.say(SPEECH)) == TURN and len(machine.transcribes) == 1 and machine.responds == []
    assert kinds(machine.send("response.create")) == ["error"]


def test_a_draining_server_begins_nothing() -> None:
    machine = Machine()
    task = machine.ask()
    machine.protocol.leave()
    assert kinds(machine.gives(task, TextDelta("ok")))[-1] == "response.done"
    assert error_of(machine.send("response.create"))["code"] == "unavailable"
    assert kinds(machine.say(SPEECH)) == TURN


def test_large_items_are_refused_and_large_images_not_echoed() -> None:
    machine = Machine(TEXT)
    assert error_of(machine.send("conversation.item.create", item=message("x" * 950_000)))["param"] == "item"
    image = "data:image/png;base64," + base64.b64encode(bytes(100_000)).decode()
    added = machine.send(
        "conversation.item.create", item=message(content=[{"type": "input_image", "image_url": image}])
    )[0]
    assert added["item"]["content"] == [{"type": "input_image"}]
    assert len(json.dumps(machine.send("session.update", session={"instructions": "x" * 950_000}))) < 2000


def test_a_graph_that_only_transcribes_holds_no_conversation() -> None:
    abilities = Abilities(frozenset({"tiny"}), frozenset(), transcribes=True)
    machine = Machine({"type": "transcription"}, abilities)
    (error,) = machine.send("session.update", session={"type": "realtime"})
    assert error["error"]["param"] == "session.type" and error["error"]["code"] == "unsupported_value"
    (event,) = machine.send("session.update", session={"type": "transcription"})
    assert event["session"]["type"] == "transcription"


def test_the_buffer_of_webrtc_names_the_last_response() -> None:
    machine = Machine()
    assert machine.send("output_audio_buffer.clear")[0]["response_id"] == ""
    task = machine.ask()
    assert machine.send("output_audio_buffer.clear")[0]["response_id"] == task.response_id


def test_a_call_that_goes_on_after_the_next_has_begun_fails_the_response() -> None:
    machine = Machine({"tools": [WEATHER]})
    task = machine.ask()
    first, second = ToolCallDelta(0, "{", "c1", "weather"), ToolCallDelta(1, "{}", "c2", "weather")
    done = machine.gives(task, first, second, ToolCallDelta(0, "}"))[-1]["response"]
    assert done["status"] == "failed" and "call 0" in done["status_details"]["error"]["message"]
    assert machine.stops == [task.response_id]


def patient(timeout_ms: int, **detection: Any) -> Machine:
    settings = {"audio": {"input": {"turn_detection": {"idle_timeout_ms": timeout_ms, **detection}}}}
    return Machine(settings, bounds=Bounds(buffer_s=60))


def test_nobody_is_idle_who_speaks() -> None:
    """Though a response begins and ends meanwhile."""
    machine = patient(5000, interrupt_response=False)
    token = machine.ask()
    machine.gives(token, TextDelta("hm"), AudioChunk(np.zeros(24000, np.float32), 24000), end=False)
    started = machine.say([0.9] * 20)[0]
    machine.gives(token, end=True)
    machine.now_s += 7
    machine.say([0.9] * 100)
    machine.protocol.tick()
    assert machine.take() == []
    stopped = machine.say([0.9] * 50 + [0.0] * 30)
    assert "input_audio_buffer.speech_stopped" in kinds(stopped)
    assert {event["item_id"] for event in stopped if "item_id" in event} >= {started["item_id"]}


def test_judgements_of_what_was_committed_meanwhile_deafen_nobody() -> None:
    machine = patient(1000)
    machine.gives(machine.ask(), TextDelta("hm"))
    pcm = base64.b64encode(np.ones(150 * FRAME_SAMPLES, "<i2").tobytes()).decode()
    machine.protocol.receive(json.dumps({"type": "input_audio_buffer.append", "audio": pcm}))
    judged = len(machine.protocol.frames()) // FRAME_SAMPLES
    machine.now_s += 2
    machine.protocol.tick()
    machine.protocol.heard([0.0] * judged)
    machine.take()
    assert "input_audio_buffer.speech_started" in kinds(machine.say([0.9] * 80))


def test_of_an_answer_of_an_earlier_session_as_much_was_heard_as_its_client_says() -> None:
    """Nobody here knows how long its sound was."""
    machine = Machine(MANUAL)
    content = [
        {"type": "output_audio", "transcript": "The quick brown fox jumps over the lazy dog, and then it sleeps."}
    ]
    item = {"type": "message", "role": "assistant", "id": "it", "content": content}
    machine.send("conversation.item.create", item=item)
    machine.send("conversation.item.truncate", item_id="it", content_index=0, audio_end_ms=2000)
    (retrieved,) = machine.send("conversation.item.retrieve", item_id="it")
    assert retrieved["item"]["content"][0]["transcript"] == "The quick brown fox jumps over"
