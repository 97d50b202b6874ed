"""Every wrong value of every field: 400 with the field's path, and the next request works."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from .scripted import ScriptedRuntime

pytestmark = pytest.mark.anyio
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
SAY = {"model": "tiny", "input": "Hello.", "response_format": "pcm"}
B64 = base64.b64encode(b"RIFF").decode()


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, *parts]}]}


def audio(**input_audio: Any) -> dict[str, Any]:
    return user({"type": "input_audio", "input_audio": input_audio})


def image(url: Any) -> dict[str, Any]:
    return user({"type": "image_url", "image_url": {"url": url}})


PART = "messages[0].content[1]"
CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "audio": {"id": "audio_nobody"}}]}, "messages[0].audio.id"),
    ({"messages": [{"role": "assistant", "audio": {}}]}, "messages[0].audio.id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages[0].role"),
    (user({}), f"{PART}.type"),
    (user({"type": "smell"}), f"{PART}.type"),
    (user({"type": "text"}), f"{PART}.text"),
    (user({"type": "text", "text": 5}), f"{PART}.text"),
    (user({"type": "file", "file": {"file_id": "f"}}), PART),
    (user({"type": "input_audio"}), f"{PART}.input_audio"),
    (audio(format="wav"), f"{PART}.input_audio.data"),
    (audio(data=B64), f"{PART}.input_audio.format"),
    (audio(data=B64, format="midi"), f"{PART}.input_audio.format"),
    (audio(data="", format="wav"), f"{PART}.input_audio.data"),
    (audio(data="?not base64?", format="wav"), f"{PART}.input_audio.data"),
    (audio(data="UklGR", format="wav"), f"{PART}.input_audio.data"),
    (audio(data="Grüße", format="wav"), f"{PART}.input_audio.data"),
    (image(5), f"{PART}.image_url.url"),
    (image("https://example.com/a.png"), f"{PART}.image_url.url"),
    (image("file:///etc/passwd"), f"{PART}.image_url.url"),
    (image("data:image/png,raw"), f"{PART}.image_url.url"),
    (image(f"data:text/html;base64,{B64}"), f"{PART}.image_url.url"),
    (image("data:image/png;base64,"), f"{PART}.image_url.url"),
    (user({"type": "image_url", "image_url": B64}), f"{PART}.image_url"),
    (user({"type": "audio_url", "audio_url": {"url": f"data:audio/midi;base64,{B64}"}}), f"{PART}.audio_url.url"),
    (user({"type": "video_url", "video_url": {"url": "http://a/b.mp4"}}), f"{PART}.video_url.url"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"modalities": []}, "modalities"),
    ({"modalities": ["smell"]}, "modalities[0]"),
    ({"modalities": "audio"}, "modalities"),
    ({"modalities": ["text", "audio"], "audio": {"voice": ""}}, "audio.voice"),
    ({"modalities": ["text", "audio"], "audio": {"voice": {"id": ""}}}, "audio.voice.id"),
    ({"modalities": ["text", "audio"], "audio": {"format": "midi"}}, "audio.format"),
    ({"modalities": ["text", "audio"], "audio": {"format": "aac"}}, "audio.format"),
    ({"modalities": ["text", "audio"], "audio": {"format": "wav"}, "stream": True}, "audio.format"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"seed": 0.5}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"n": 0}, "n"),
    ({"n": 2}, "n"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"web_search_options": {}}, "web_search_options"),
]
SPEECH_CASES: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": ""}, "input"),
    ({"input": " \n"}, "input"),
    ({"voice": ""}, "voice"),
    ({"voice": 5}, "voice"),
    ({"voice": {}}, "voice.id"),
    ({"response_format": "midi"}, "response_format"),
    ({"response_format": "aac"}, "response_format"),
    ({"speed": 0.2}, "speed"),
    ({"speed": 4.1}, "speed"),
    ({"speed": "fast"}, "speed"),
    ({"stream_format": "tape"}, "stream_format"),
    ({"stream": 1}, "stream"),
]


async def refused(client: httpx.AsyncClient, path: str, content: bytes, headers: dict[str, str] | None = None) -> Any:
    """The error of a request that must be refused with 400; the next, valid one must not be."""
    response = await client.post(path, content=content, headers=headers)
    assert response.status_code == 400, response.text
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"]
    valid = HI if "chat" in path else SAY
    assert (await client.post(path, json=valid)).status_code == 200
    return body["error"]


@pytest.mark.parametrize(("change", "param"), CHAT_CASES, ids=lambda value: json.dumps(value)[:60])
async def test_chat(client: httpx.AsyncClient, runtime: ScriptedRuntime, change: dict[str, Any], param: str) -> None:
    error = await refused(client, "/v1/chat/completions", json.dumps(HI | change).encode())
    assert error["param"] == param
    assert len(runtime.submissions) == 1, "the invalid request reached the graph"


@pytest.mark.parametrize(("change", "param"), SPEECH_CASES, ids=lambda value: json.dumps(value)[:60])
async def test_speech(client: httpx.AsyncClient, runtime: ScriptedRuntime, change: dict[str, Any], param: str) -> None:
    error = await refused(client, "/v1/audio/speech", json.dumps(SAY | change).encode())
    assert error["param"] == param
    assert len(runtime.submissions) == 1, "the invalid request reached the graph"


@pytest.mark.parametrize("field", ["model", "messages", "input"])
async def test_a_field_that_is_left_out(client: httpx.AsyncClient, field: str) -> None:
    path, valid = ("/v1/audio/speech", SAY) if field == "input" else ("/v1/chat/completions", HI)
    body = {key: value for key, value in valid.items() if key != field}
    error = await refused(client, path, json.dumps(body).encode())
    assert (error["param"], error["message"]) == (field, f"{field}: is required")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"5", b'"hi"', b"{'model': 1}", b"\xff\xfe", b'{"model": "\xff"}', b"[" * 100_000]
    + [b'{"model": "tiny", "a": ' + b"[" * 100_000, b'{"model": "\\ud800"}', b'{"temperature": 1e999}', b"model=tiny"],
    ids=lambda content: content[:24].decode("ascii", "backslashreplace"),
)
async def test_what_is_no_json_object(client: httpx.AsyncClient, path: str, content: bytes) -> None:
    await refused(client, path, content)


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "1s"])
async def test_a_timeout_that_is_no_number_of_seconds(client: httpx.AsyncClient, value: str) -> None:
    headers = {"X-Request-Timeout": value}
    error = await refused(client, "/v1/chat/completions", json.dumps(HI).encode(), headers)
    assert error["param"] == "x-request-timeout"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
async def test_an_unknown_model(client: httpx.AsyncClient, path: str) -> None:
    valid = HI if "chat" in path else SAY
    response = await client.post(path, json=valid | {"model": "gpt-4o"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found" and response.json()["error"]["param"] == "model"
    assert (await client.post(path, json=valid | {"model": "tiny-alias"})).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
async def test_a_body_that_is_too_large(client: httpx.AsyncClient, runtime: ScriptedRuntime, path: str) -> None:
    async def pieces() -> Any:
        for _ in range(40):
            yield b" " * 10_000

    for content in (b" " * 300_001, pieces()):
        response = await client.post(path, content=content)
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
    valid = HI if "chat" in path else SAY
    assert (await client.post(path, json=valid)).status_code == 200
    assert (await client.post(path, json=valid | {"pad": "x" * 290_000})).status_code == 200
    assert len(runtime.submissions) == 2
