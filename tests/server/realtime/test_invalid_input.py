"""Every field of every event with what it cannot be: an error that names field and event, and then a working turn."""

from __future__ import annotations

from typing import Any

import pytest

from omniflow.media import TextDelta

from .machine import MANUAL, Machine, kinds

MESSAGE = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}


def item(**fields: Any) -> dict[str, Any]:
    return {"item": {**MESSAGE, **fields}}


def part(**fields: Any) -> dict[str, Any]:
    return item(content=[fields])


def response(**fields: Any) -> dict[str, Any]:
    return {"response": fields}


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


def tool(**parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "name": "f", "parameters": parameters}]


CREATE, RESPOND = "conversation.item.create", "response.create"
TRUNCATE = "conversation.item.truncate"
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("session.update", {}, "session"),
    ("session.update", {"session": None}, "session"),
    ("session.update", {"session": []}, "session"),
    ("session.update", {"session": {"audio": {"input": {"turn_detection": 1}}}}, "session.audio.input.turn_detection"),
    ("session.update", {"session": {"tracing": nested(400)}}, "session"),
    ("session.update", {"session": {"prompt": {"id": 10**40}}}, "session"),
    ("session.update", {"session": {"tools": tool(x=nested(40))}}, "session"),
    ("session.update", {"session": {"max_output_tokens": 2**40}}, "session.max_output_tokens"),
    ("input_audio_buffer.append", {}, "audio"),
    ("input_audio_buffer.append", {"audio": 1}, "audio"),
    ("input_audio_buffer.append", {"audio": "not base64!"}, "audio"),
    ("input_audio_buffer.append", {"audio": "AAA"}, "audio"),
    (CREATE, {}, "item"),
    (CREATE, {"item": None}, "item"),
    (CREATE, item(type="mcp_call"), "item.type"),
    (CREATE, item(type=None), "item.type"),
    (CREATE, item(role="tool"), "item.role"),
    (CREATE, item(role=None), "item.role"),
    (CREATE, item(content=None), "item.content"),
    (CREATE, item(content="text"), "item.content"),
    (CREATE, item(id=""), "item.id"),
    (CREATE, item(id=5), "item.id"),
    (CREATE, item(id="x" * 200), "item.id"),
    (CREATE, item(id="root"), "item.id"),
    (CREATE, item(content=[1]), "item.content[0]"),
    (CREATE, part(type="input_video"), "item.content[0].type"),
    (CREATE, part(type="input_text"), "item.content[0].text"),
    (CREATE, part(type="input_text", text=None), "item.content[0].text"),
    (CREATE, part(type="input_audio"), "item.content[0].audio"),
    (CREATE, part(type="input_audio", audio="?"), "item.content[0].audio"),
    (CREATE, part(type="input_image"), "item.content[0].image_url"),
    (CREATE, part(type="input_image", image_url="https://example/x.png"), "item.content[0].image_url"),
    (CREATE, part(type="input_image", image_url="data:image/png;base64,?"), "item.content[0].image_url"),
    (CREATE, item(role="system", content=[{"type": "input_audio", "audio": "AAAA"}]), "item.content[0]"),
    (CREATE, {"item": {"type": "function_call", "arguments": "{}"}}, "item.name"),
    (CREATE, {"item": {"type": "function_call", "name": "f"}}, "item.arguments"),
    (CREATE, {"item": {"type": "function_call", "name": "f", "arguments": {}}}, "item.arguments"),
    (CREATE, {"item": {"type": "function_call_output", "output": "x"}}, "item.call_id"),
    (CREATE, {"item": {"type": "function_call_output", "call_id": "c"}}, "item.output"),
    (CREATE, {"item": {"type": "function_call_output", "call_id": "c", "output": {}}}, "item.output"),
    (CREATE, {**item(), "previous_item_id": 3}, "previous_item_id"),
    (CREATE, {**item(), "previous_item_id": "nobody"}, "previous_item_id"),
    ("conversation.item.retrieve", {}, "item_id"),
    ("conversation.item.retrieve", {"item_id": None}, "item_id"),
    ("conversation.item.delete", {}, "item_id"),
    ("conversation.item.delete", {"item_id": "nobody"}, "item_id"),
    (TRUNCATE, {"item_id": "x"}, "audio_end_ms"),
    (TRUNCATE, {"item_id": "x", "audio_end_ms": -1}, "audio_end_ms"),
    (TRUNCATE, {"item_id": "x", "audio_end_ms": "1"}, "audio_end_ms"),
    (TRUNCATE, {"item_id": "x", "audio_end_ms": 1, "content_index": "0"}, "content_index"),
    (TRUNCATE, {"item_id": "x", "audio_end_ms": 1, "content_index": 10**40}, "content_index"),
    (TRUNCATE, {"item_id": "x", "audio_end_ms": 10**40}, "audio_end_ms"),
    (TRUNCATE, {"audio_end_ms": 1}, "item_id"),
    (RESPOND, {"response": []}, "response"),
    (RESPOND, response(conversation="other"), "response.conversation"),
    (RESPOND, response(conversation=3), "response.conversation"),
    (RESPOND, response(instructions=3), "response.instructions"),
    (RESPOND, response(output_modalities=[]), "response.output_modalities"),
    (RESPOND, response(output_modalities=["smell"]), "response.output_modalities[0]"),
    (RESPOND, response(max_output_tokens=0), "response.max_output_tokens"),
    (RESPOND, response(max_output_tokens=1.5), "response.max_output_tokens"),
    (RESPOND, response(metadata={"a": 1}), "response.metadata"),
    (RESPOND, response(metadata={"a": "x" * 513}), "response.metadata"),
    (RESPOND, response(metadata={str(n): "x" for n in range(17)}), "response.metadata"),
    (RESPOND, response(tools=[{"type": "mcp"}]), "response.tools[0].type"),
    (RESPOND, response(tools=tool(x=2**70)), "response.tools[0]"),
    (RESPOND, response(tools=tool(x=nested(40))), "response.tools[0]"),
    (RESPOND, response(max_output_tokens=2**40), "response.max_output_tokens"),
    (RESPOND, response(tool_choice=5), "response.tool_choice"),
    (RESPOND, response(tools=tool(), tool_choice={"type": "function", "name": "g"}), "response.tool_choice"),
    (RESPOND, response(audio={"output": {"format": {"type": "mp3"}}}), "response.audio.output.format.type"),
    (RESPOND, response(audio={"output": {"voice": 3}}), "response.audio.output.voice"),
    (RESPOND, response(input=[{"type": "item_reference", "id": "nobody"}]), "response.input[0].id"),
    (
        RESPOND,
        response(input=[MESSAGE, {**MESSAGE, "content": [{"type": "input_audio"}]}]),
        "response.input[1].content[0].audio",
    ),
    (RESPOND, response(input=[{"type": "nonsense"}]), "response.input[0].type"),
    (RESPOND, response(input="hello"), "response.input"),
    ("response.cancel", {"response_id": 4}, "response_id"),
    ("response.cancel", {"response_id": "nobody"}, "response_id"),
]


@pytest.mark.parametrize(("kind", "fields", "param"), CASES, ids=[f"{kind}-{param}" for kind, _, param in CASES])
def test_an_error_names_the_field_and_a_turn_follows(kind: str, fields: dict[str, Any], param: str) -> None:
    machine = Machine()
    (event,) = machine.send(kind, event_id="mine", **fields)
    assert event["type"] == "error"
    error = event["error"]
    assert error["param"] == param and error["event_id"] == "mine" and error["type"] == "invalid_request_error"
    assert error["message"] and error["code"]
    done = machine.gives(machine.ask(), TextDelta("well"))[-1]
    assert done["response"]["status"] == "completed"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("session.update", {"session": {}}),
        ("session.update", {"session": {"instructions": None, "voice": "x", "turn_detection": 5}}),
        ("input_audio_buffer.clear", {"nonsense": 1}),
        ("input_audio_buffer.append", {"audio": ""}),
        ("output_audio_buffer.clear", {}),
        (CREATE, item(id=None, status="completed", object="realtime.item", phase=None)),
        (CREATE, item(content=[])),
        (RESPOND, {"response": None}),
        (RESPOND, {}),
        (RESPOND, response(audio={"output": {"format": {"type": "audio/pcm", "rate": None}, "voice": None}})),
        (RESPOND, response(conversation=None, tools=None, metadata=None, input=None, prompt=None, audio=None)),
    ],
)
def test_what_is_harmless_is_no_error(kind: str, fields: dict[str, Any]) -> None:
    assert "error" not in kinds(Machine(MANUAL).send(kind, **fields))


@pytest.mark.parametrize("value", [None, "", "x" * 512])
def test_an_event_id_is_optional(value: str | None) -> None:
    machine = Machine()
    (event,) = machine.send("response.cancel", event_id=value)
    assert event["error"].get("event_id") == value


def test_a_deeply_nested_event() -> None:
    machine = Machine()
    machine.protocol.receive('{"type": "session.update", "session": ' + '{"audio": ' * 5000 + "1" + "}" * 5001)
    (event,) = machine.take()
    assert event["error"]["code"] == "invalid_json"
    machine.protocol.receive('{"type": "x", "event_id": ' + "[" * 5000 + "]" * 5000 + "}")
    assert kinds(machine.take()) == ["error"]


def test_half_a_character() -> None:
    machine = Machine()
    machine.protocol.receive('{"type": "response.create", "response": {"instructions": "\\ud800"}}')
    assert kinds(machine.take())[0] in ("error", "response.created")
