"""Every wrong value of every field of a chat: 400 (or 413) with the field's path, and the next request works."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import msgspec
import pytest

from omniflow.server.chat_request import ChatRequest, Message

from .scripted import ScriptedRuntime

pytestmark = pytest.mark.anyio
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
B64 = base64.b64encode(b"RIFF").decode()
ALOUD = {"modalities": ["text", "audio"]}
SCHEMA = {"name": "s", "schema": {"type": "object"}}


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, *parts]}]}


def audio(**input_audio: Any) -> dict[str, Any]:
    return user({"type": "input_audio", "input_audio": input_audio})


def audio_url(url: Any) -> dict[str, Any]:
    return user({"type": "audio_url", "audio_url": {"url": url}})


def image(url: Any) -> dict[str, Any]:
    return user({"type": "image_url", "image_url": {"url": url}})


def video(url: Any) -> dict[str, Any]:
    return user({"type": "video_url", "video_url": {"url": url}})


def file(**file: Any) -> dict[str, Any]:
    return user({"type": "file", "file": file})


def assistant(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [*calls], **fields}]}


def call(**fields: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}


def tool_result(**fields: Any) -> dict[str, Any]:
    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call()]}]
    return {"messages": [*earlier, {"role": "tool", "content": "x", "tool_call_id": "call_1", **fields}]}


def tools(*functions: Any, **fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": each} for each in functions], **fields}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


PART = "messages[0].content[1]"
CALL = "messages[1].tool_calls[0]"
RESULT = "messages[2]"
FUNCTION = "tools[0].function"
FORMAT = "response_format"
JSON_SCHEMA = "response_format.json_schema"
CASES: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [None]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": None, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "audio": {"id": "audio_nobody"}}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "audio": {"id": "audio_nobody"}}]}, "messages[0].audio.id"),
    ({"messages": [{"role": "assistant", "audio": {}}]}, "messages[0].audio.id"),
    ({"messages": [{"role": "assistant", "audio": {"id": 5}}]}, "messages[0].audio.id"),
    ({"messages": [{"role": "assistant", "audio": "audio_1"}]}, "messages[0].audio"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a", "transcript": 5}}]}, "messages[0].audio.transcript"),
    ({"messages": [{"role": "assistant", "refusal": 5}]}, "messages[0].refusal"),
    ({"messages": [{"role": "user", "refusal": "no"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [call()]}]}, "messages[0].tool_calls"),
    (assistant(5), CALL),
    (assistant({}), f"{CALL}.id"),
    (assistant(call(id="")), f"{CALL}.id"),
    (assistant(call(id=5)), f"{CALL}.id"),
    (assistant(call(type="custom")), f"{CALL}.type"),
    (assistant({"id": "a"}), f"{CALL}.function"),
    (assistant(call(function={"arguments": "{}"})), f"{CALL}.function.name"),
    (assistant(call(function={"name": "f"})), f"{CALL}.function.arguments"),
    (assistant(call(function={"name": "f", "arguments": {}})), f"{CALL}.function.arguments"),
    (assistant(tool_calls="f"), "messages[1].tool_calls"),
    (tool_result(tool_call_id=None), f"{RESULT}.tool_call_id"),
    (tool_result(tool_call_id=5), f"{RESULT}.tool_call_id"),
    (tool_result(tool_call_id="call_2"), f"{RESULT}.tool_call_id"),
    (tool_result(content=None), f"{RESULT}.content"),
    (tool_result(content={}), f"{RESULT}.content"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    (user({}), f"{PART}.type"),
    (user(None), PART),
    (user({"type": "smell"}), f"{PART}.type"),
    (user({"type": "text"}), f"{PART}.text"),
    (user({"type": "text", "text": 5}), f"{PART}.text"),
    (user({"type": "text", "text": None}), f"{PART}.text"),
    (user({"type": "refusal"}), f"{PART}.refusal"),
    (user({"type": "file"}), f"{PART}.file"),
    (file(), f"{PART}.file.file_data"),
    (file(file_id="f"), f"{PART}.file.file_id"),
    (file(file_data=5), f"{PART}.file.file_data"),
    (file(file_data=""), f"{PART}.file.file_data"),
    (file(file_data=B64), f"{PART}.file.file_data"),
    (file(file_data="https://example.com/a.png"), f"{PART}.file.file_data"),
    (file(file_data=f"data:application/pdf;base64,{B64}"), f"{PART}.file.file_data"),
    (file(file_data=f"data:audio/midi;base64,{B64}"), f"{PART}.file.file_data"),
    (file(file_data="data:text/plain;base64,/w=="), f"{PART}.file.file_data"),
    (user({"type": "input_audio"}), f"{PART}.input_audio"),
    (audio(format="wav"), f"{PART}.input_audio.data"),
    (audio(data=B64), f"{PART}.input_audio.format"),
    (audio(data=B64, format="midi"), f"{PART}.input_audio.format"),
    (audio(data="", format="wav"), f"{PART}.input_audio.data"),
    (audio(data=None, format="wav"), f"{PART}.input_audio.data"),
    (audio(data="?not base64?", format="wav"), f"{PART}.input_audio.data"),
    (audio(data="UklGR", format="wav"), f"{PART}.input_audio.data"),
    (audio(data="Grüße", format="wav"), f"{PART}.input_audio.data"),
    (image(5), f"{PART}.image_url.url"),
    (image(""), f"{PART}.image_url.url"),
    (image("https://example.com/a.png"), f"{PART}.image_url.url"),
    (image("HTTP://example.com/a.png"), f"{PART}.image_url.url"),
    (image("ftp://example.com/a.png"), f"{PART}.image_url.url"),
    (image("file:///etc/passwd"), f"{PART}.image_url.url"),
    (image("data:image/png,raw"), f"{PART}.image_url.url"),
    (image(f"data:text/html;base64,{B64}"), f"{PART}.image_url.url"),
    (image("data:image/png;base64,"), f"{PART}.image_url.url"),
    (image("data:image/png;base64,?"), f"{PART}.image_url.url"),
    (user({"type": "image_url", "image_url": B64}), f"{PART}.image_url"),
    (user({"type": "image_url"}), f"{PART}.image_url"),
    (audio_url(f"data:audio/midi;base64,{B64}"), f"{PART}.audio_url.url"),
    (audio_url(f"data:image/png;base64,{B64}"), f"{PART}.audio_url.url"),
    (audio_url("https://example.com/a.wav"), f"{PART}.audio_url.url"),
    (video("http://a/b.mp4"), f"{PART}.video_url.url"),
    (video(f"data:image/png;base64,{B64}"), f"{PART}.video_url.url"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": 5}, "stream_options"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"modalities": []}, "modalities"),
    ({"modalities": ["smell"]}, "modalities[0]"),
    ({"modalities": ["text", "image"]}, "modalities"),
    ({"modalities": "audio"}, "modalities"),
    ({"audio": "joe"}, "audio"),
    (ALOUD | {"audio": {"voice": ""}}, "audio.voice"),
    (ALOUD | {"audio": {"voice": 5}}, "audio.voice"),
    (ALOUD | {"audio": {"voice": {}}}, "audio.voice.id"),
    (ALOUD | {"audio": {"voice": {"id": ""}}}, "audio.voice.id"),
    (ALOUD | {"audio": {"format": "midi"}}, "audio.format"),
    (ALOUD | {"audio": {"format": "wav"}, "stream": True}, "audio.format"),
    (ALOUD | {"audio": {"format": "mp3"}, "stream": True}, "audio.format"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": 2**70}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": "all"}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 0.5}, "top_k"),
    ({"seed": 0.5}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": [5]}, "stop[0]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": "2"}, "n"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"frequency_penalty": "a"}, "frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"presence_penalty": []}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1.05}, "repetition_penalty"),
    ({"repetition_penalty": 1e3}, "repetition_penalty"),
    ({"repetition_penalty": "1"}, "repetition_penalty"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1.5": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"logit_bias": {" 5": 1}}, "logit_bias"),
    ({"logit_bias": {"+5": 1}}, "logit_bias"),
    ({"logit_bias": {"5\n": 1}}, "logit_bias"),
    ({"logit_bias": {"5_0": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 40: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": -101}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": {str(id): 1 for id in range(1025)}}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": "yes"}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 0, "logprobs": False}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({FORMAT: "json_object"}, FORMAT),
    ({FORMAT: {}}, f"{FORMAT}.type"),
    ({FORMAT: {"type": "xml"}}, f"{FORMAT}.type"),
    ({FORMAT: {"type": "json_schema"}}, JSON_SCHEMA),
    ({FORMAT: {"type": "json_schema", "json_schema": {}}}, f"{JSON_SCHEMA}.name"),
    ({FORMAT: {"type": "json_schema", "json_schema": SCHEMA | {"name": ""}}}, f"{JSON_SCHEMA}.name"),
    ({FORMAT: {"type": "json_schema", "json_schema": SCHEMA | {"name": "a b"}}}, f"{JSON_SCHEMA}.name"),
    ({FORMAT: {"type": "json_schema", "json_schema": SCHEMA | {"name": "a" * 65}}}, f"{JSON_SCHEMA}.name"),
    ({FORMAT: {"type": "json_schema", "json_schema": SCHEMA | {"schema": "{}"}}}, f"{JSON_SCHEMA}.schema"),
    ({FORMAT: {"type": "json_schema", "json_schema": SCHEMA | {"schema": []}}}, f"{JSON_SCHEMA}.schema"),
    ({FORMAT: {"type": "json_schema", "json_schema": SCHEMA | {"strict": 1}}}, f"{JSON_SCHEMA}.strict"),
    ({FORMAT: {"type": "json_schema", "json_schema": SCHEMA | {"description": 1}}}, f"{JSON_SCHEMA}.description"),
    ({"tools": "f"}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, FUNCTION),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (tools({}), f"{FUNCTION}.name"),
    (tools({"name": ""}), f"{FUNCTION}.name"),
    (tools({"name": "a b"}), f"{FUNCTION}.name"),
    (tools({"name": "a" * 65}), f"{FUNCTION}.name"),
    (tools({"name": "f\n"}), f"{FUNCTION}.name"),
    (tools({"name": "f", "description": 5}), f"{FUNCTION}.description"),
    (tools({"name": "f", "parameters": "{}"}), f"{FUNCTION}.parameters"),
    (tools({"name": "f", "parameters": []}), f"{FUNCTION}.parameters"),
    (tools({"name": "f", "strict": "yes"}), f"{FUNCTION}.strict"),
    (tools({"name": "f"}, {"name": "f"}), "tools"),
    (tools(*({"name": f"f{i}"} for i in range(129))), "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    (tools({"name": "f"}, tool_choice="always"), "tool_choice"),
    (tools({"name": "f"}, tool_choice=5), "tool_choice"),
    (tools({"name": "f"}, tool_choice={}), "tool_choice.type"),
    (tools({"name": "f"}, tool_choice={"type": "custom"}), "tool_choice.type"),
    (tools({"name": "f"}, tool_choice={"type": "function"}), "tool_choice.function"),
    (tools({"name": "f"}, tool_choice={"type": "function", "function": {}}), "tool_choice.function.name"),
    (tools({"name": "f"}, tool_choice={"type": "function", "function": {"name": "g"}}), "tool_choice"),
    (
        tools({"name": "f"}, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
        "tool_choice.allowed_tools.tools",
    ),
    (tools({"name": "f"}, parallel_tool_calls="no"), "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"web_search_options": {}}, "web_search_options"),
]


async def test_images_are_not_made(client: httpx.AsyncClient) -> None:
    error = await refused(client, {"modalities": ["image"]})
    assert error["message"] == "modalities: no images are made here; ask for 'text', or for 'text' and 'audio'"
    assert error["code"] == "unsupported_value"


def name_of(value: Any) -> str:
    return json.dumps(value)[:60]


async def refused(client: httpx.AsyncClient, change: dict[str, Any], status: int = 400) -> Any:
    """The error of a request that must be refused; the next, valid one must not be."""
    response = await client.post("/v1/chat/completions", json=HI | change)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"]
    assert (await client.post("/v1/chat/completions", json=HI)).status_code == 200
    return body["error"]


@pytest.mark.parametrize(("change", "param"), CASES, ids=name_of)
async def test_a_wrong_value(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, change: dict[str, Any], param: str
) -> None:
    error = await refused(client, change)
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert len(runtime.submissions) == 1, "the invalid request reached the graph"


@pytest.mark.parametrize("depth", [200, 30_000])
@pytest.mark.parametrize(
    "with_schema",
    [
        lambda schema: tools({"name": "f", "parameters": schema}),
        lambda schema: {FORMAT: {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
        lambda schema: {"metadata": schema},
    ],
    ids=["tools", "response_format", "unknown"],
)
async def test_what_is_nested_deeply_breaks_nothing(client: httpx.AsyncClient, depth: int, with_schema: Any) -> None:
    """Far too deep is no JSON to us; less deep is for whoever reads the schema to judge."""
    template = json.dumps(HI | with_schema("SCHEMA"))
    body = template.replace('"SCHEMA"', '{"a":' * depth + "1" + "}" * depth)
    response = await client.post("/v1/chat/completions", content=body.encode())
    assert response.status_code == (400 if depth > 1000 else 200), response.text
    assert (await client.post("/v1/chat/completions", json=HI)).status_code == 200


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "m" * 100_000}, 404),
        (tool_result(tool_call_id="c" * 100_000), 400),
        ({"logit_bias": {"x" * 100_000: 1}}, 400),
        (tools({"name": "f"}, tool_choice={"type": "function", "function": {"name": "g" * 100_000}}), 400),
    ],
    ids=["model", "tool_call_id", "logit_bias", "tool_choice"],
)
async def test_what_is_quoted_is_cut(client: httpx.AsyncClient, change: dict[str, Any], status: int) -> None:
    assert len((await refused(client, change, status))["message"]) <= 2003


async def test_every_optional_field_may_be_null(client: httpx.AsyncClient) -> None:
    """By itself, and all together; also those within messages."""
    optional = [field.encode_name for field in msgspec.structs.fields(ChatRequest) if not field.required]
    within = {field.encode_name: None for field in msgspec.structs.fields(Message) if not field.required}
    message = [{**within, "role": "user", "content": "hi"}]
    for change in ({}, *({name: None} for name in optional), dict.fromkeys(optional)):
        response = await client.post("/v1/chat/completions", json=HI | change | {"messages": message})
        assert response.status_code == 200, response.text


def test_every_field_has_a_case() -> None:
    """A field that is added is tried with a wrong value, too."""
    tried = {param.partition(".")[0].partition("[")[0] for _, param in CASES}
    assert {field.encode_name for field in msgspec.structs.fields(ChatRequest)} == tried
