"""Every wrong value of every field: 400 with the field's path, and the next request works."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from .scripted import ScriptedRuntime

pytestmark = pytest.mark.anyio
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
SAY = {"model": "tiny", "input": "Hello.", "response_format": "pcm"}
SPEECH_CASES: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": ""}, "input"),
    ({"input": " \n"}, "input"),
    ({"voice": ""}, "voice"),
    ({"voice": 5}, "voice"),
    ({"voice": {}}, "voice.id"),
    ({"voice": {"id": 5}}, "voice.id"),
    ({"seed": 0.5}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"instructions": 5}, "instructions"),
    ({"response_format": "midi"}, "response_format"),
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
