"""Bodies that are no JSON, or JSON of the odd kind: a 4xx that says what is wrong, never a 500, and all goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from omniflow.errors import InvalidInputError
from omniflow.server.body import decode_json
from omniflow.server.chat_request import ChatRequest

from .scripted import ScriptedRuntime

pytestmark = pytest.mark.anyio
HI: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
SAY: dict[str, Any] = {"model": "tiny", "input": "hi", "response_format": "pcm"}
ROUTES = {"/v1/chat/completions": HI, "/v1/audio/speech": SAY}
MALFORMED = {
    "empty": b"",
    "blank": b" \n",
    "half": b'{"model": "tiny"',
    "half a string": b'{"model": "ti',
    "two documents": json.dumps(HI | {"input": "hi"}).encode() + b"{}",
    "trailing comma": b'{"model": "tiny",}',
    "comment": json.dumps(HI | {"input": "hi"}).encode() + b" // no",
    "single quotes": b"{'model': 'tiny'}",
    "not a number": b'{"temperature": NaN}',
    "infinity": b'{"temperature": -Infinity}',
    "no UTF-8": b'{"model": "\xff"}',
    "cut UTF-8": b'{"model": "\xc3"}',
    "UTF-16": '{"model": "tiny"}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "half a surrogate pair": b'{"model": "\\ud800"}',
    "control character": b'{"model": "a\nb"}',
    "zero bytes": b"\x00" * 10,
    "deep lists": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"x":' * 30_000 + b"1" + b"}" * 30_000,
    "form": b"model=tiny&input=hi",
    "multipart": b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\ntiny\r\n--b--\r\n',
}
WRONG_TYPE = {"null": b"null", "list": b"[]", "text": b'"tiny"', "number": b"1", "true": b"true"}


async def works(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.post(path, json=ROUTES[path])).status_code == 200


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", MALFORMED)
async def test_what_is_no_json(client: httpx.AsyncClient, path: str, name: str) -> None:
    response = await client.post(path, content=MALFORMED[name], headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"
    assert response.json()["error"]["message"]
    await works(client, path)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", WRONG_TYPE)
async def test_json_that_is_no_object(client: httpx.AsyncClient, path: str, name: str) -> None:
    response = await client.post(path, content=WRONG_TYPE[name])
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_value"
    await works(client, path)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("field", "number", "status"),
    [
        ("seed", "9223372036854775807", 200),
        ("seed", "-9223372036854775808", 200),
        ("seed", "9223372036854775808", 400),
        ("seed", "1" + "0" * 400, 400),
        ("seed", "1e400", 400),
        ("seed", "7.0", 200),
        ("seed", "7.5e1", 200),
        ("seed", "7.5", 400),
        ("seed", "-0.0", 200),
        ("seed", "1e30", 400),
        ("seed", "true", 400),
        ("unknown", "1" + "0" * 400, 200),
        ("unknown", "-1e-400", 200),
    ],
)
async def test_numbers(client: httpx.AsyncClient, path: str, field: str, number: str, status: int) -> None:
    body = json.dumps(ROUTES[path] | {field: "HERE"}).replace('"HERE"', number)
    response = await client.post(path, content=body)
    assert response.status_code == status, response.text
    if status == 400:
        assert response.json()["error"]["param"] == field
    await works(client, path)


@pytest.mark.parametrize("path", ROUTES)
async def test_of_a_key_that_comes_twice_the_last_holds(client: httpx.AsyncClient, path: str) -> None:
    twice = json.dumps(ROUTES[path]).replace('"model": "tiny"', '"model": 5, "model": "nobody", "model": "tiny"')
    response = await client.post(path, content=twice)
    assert response.status_code in (200, 400) and "nobody" not in response.text
    await works(client, path)


@pytest.mark.parametrize(
    "text", ["\0", "\u202e\uffff", "😀" * 1000, "a" * 200_000, "\r\n\r\n", "</script>", "${jndi:x}"]
)
async def test_any_text_is_text(client: httpx.AsyncClient, runtime: ScriptedRuntime, text: str) -> None:
    body = HI | {"messages": [{"role": "user", "content": text}]}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    (part,) = runtime.submissions[-1].value.messages[0].parts  # type: ignore[attr-defined]
    assert part.text == text


@pytest.mark.parametrize(
    "content_type",
    ["application/json; charset=utf-8", "text/plain", "application/x-www-form-urlencoded", "nonsense", ""],
)
async def test_json_is_read_whatever_it_is_called(client: httpx.AsyncClient, content_type: str) -> None:
    """curl -d calls everything a form."""
    headers = {"content-type": content_type} if content_type else {}
    response = await client.post("/v1/chat/completions", content=json.dumps(HI), headers=headers)
    assert response.status_code == 200


def test_whole_numbers_with_a_point_are_integers_and_nothing_else_changes() -> None:
    body = json.dumps(
        HI | {"seed": 7.0, "temperature": 1.0, "tools": [{"type": "function", "function": {"name": "f"}}]}
    )
    request = decode_json(body.encode(), ChatRequest)
    assert request.seed == 7 and isinstance(request.seed, int) and request.temperature == 1.0


@pytest.mark.parametrize(
    "change, param, words",
    [
        (
            {"messages": [{"role": "boss", "content": "Hi."}]},
            "messages[0].role",
            "assistant, developer, system, tool, user",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages[0].content[0].type",
            "audio_url, file, image_url, input_audio, refusal, text, video_url",
        ),
        ({"audio": {"format": "xyz"}}, "audio.format", "aac, flac, mp3, opus, pcm16, wav"),
        ({"modalities": ["text", "smell"]}, "modalities[1]", "audio, image, text"),
    ],
)
def test_of_a_wrong_word_the_right_ones_are_told(change: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        decode_json(json.dumps(HI | change).encode(), ChatRequest)
    assert refused.value.param == param
    assert refused.value.message.endswith(f"; expected one of {words}")


@pytest.mark.parametrize("charset", ["undefined", "unicode_escape", "punycode", "no such"])
async def test_a_form_of_an_odd_charset_is_refused(client: httpx.AsyncClient, charset: str) -> None:
    """To Starlette it is the name of any codec of Python's."""
    kind = f'multipart/form-data; boundary=b; charset="{charset}"'
    response = await client.post(
        "/v1/audio/transcriptions", content=MALFORMED["multipart"], headers={"content-type": kind}
    )
    assert response.status_code == 400
    assert f"the charset '{charset}' is not taken" in response.json()["error"]["message"]
