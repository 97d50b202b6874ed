from __future__ import annotations

import base64
import json
from typing import Any

import anyio
import httpx
import pytest

from omniflow.errors import OverloadedError, StageDiedError
from omniflow.media import TextDelta
from omniflow.runtime import Runtime
from omniflow.server.app import build_app
from omniflow.server.encoders import pcm16, wav_header

from .scripted import Output, ScriptedReply, ScriptedRuntime, parrot_plan, tone

pytestmark = pytest.mark.anyio
SPOKEN = pcm16(tone(13).samples)
WAV = wav_header(24000, 1, len(SPOKEN)) + SPOKEN


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/audio/speech/batch", json={"model": "tiny"} | body)


async def test_each_item_has_a_result_in_its_place(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    items = [
        {"input": "One."},
        {"input": "Two.", "voice": {"id": "b"}, "speed": 2, "response_format": "pcm", "seed": 0},
        {"input": " "},
    ]
    body = (await post(client, items=items, voice="a", speed=0.5, seed=7)).json()
    assert body["id"].startswith("batch_req_") and (body["total"], body["succeeded"], body["failed"]) == (3, 2, 1)
    first, second, third = body["results"]
    assert (first["index"], first["status"], first["media_type"]) == (0, "success", "audio/wav")
    assert base64.b64decode(first["audio_data"]) == WAV
    assert first["usage"] == {"input_tokens": 4, "output_tokens": 1, "total_tokens": 5} and first["error"] is None
    assert second["media_type"] == "audio/pcm" and base64.b64decode(second["audio_data"]) == SPOKEN
    assert (third["status"], third["audio_data"], third["param"]) == ("error", None, "items[2].input")
    assert (third["error"], third["code"]) == ("items[2].input: is empty; expected a text to say", "invalid_value")
    asked = {submission.value[0].text: submission.options for submission in runtime.submissions}  # type: ignore[index]
    assert (asked["One."].voice, asked["One."].speed, asked["One."].seed) == ("a", 0.5, 7)
    assert (asked["Two."].voice, asked["Two."].speed, asked["Two."].seed) == ("b", 2, 0)
    assert len({submission.request_id for submission in runtime.submissions}) == 2


async def test_one_failure_is_that_items_alone(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    submit = runtime.submit

    async def sometimes(entry: str, value: list[TextDelta], **options: Any) -> ScriptedReply:
        if value[0].text == "full":
            raise OverloadedError("no place")
        runtime.script = (
            [Output("audio", tone(4)), StageDiedError("killed")]
            if value[0].text == "die"
            else [Output("audio", tone(13))]
        )
        return await submit(entry, value, **options)

    runtime.submit = sometimes  # type: ignore[method-assign, assignment]
    items = [{"input": text} for text in ("a", "full", "die", "b")]
    response = await post(client, items=items)
    assert response.status_code == 200
    results = response.json()["results"]
    assert [result["status"] for result in results] == ["success", "error", "error", "success"]
    assert [result["code"] for result in results] == [None, "rate_limit_exceeded", "stage_died", None]
    assert base64.b64decode(results[3]["audio_data"]) == WAV


async def test_a_batch_does_not_crowd_itself_out(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    submit = runtime.submit

    async def one_at_a_time(*args: Any, **options: Any) -> ScriptedReply:
        if runtime.status().in_flight:
            raise OverloadedError("no place")
        return await submit(*args, **options)

    runtime.submit = one_at_a_time  # type: ignore[method-assign, assignment]
    body = (await post(client, items=[{"input": text} for text in "abcdef"])).json()
    assert (body["succeeded"], body["failed"]) == (6, 0)
    assert sorted(submission.value[0].text for submission in runtime.submissions) == list("abcdef")  # type: ignore[index]


async def test_only_a_few_run_at_a_time(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    go = anyio.Event()
    runtime.script = [go, Output("audio", tone(13))]
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            body = (await post(client, items=[{"input": str(number)} for number in range(9)])).json()
            assert body["succeeded"] == 9

        tasks.start_soon(ask)
        while len(runtime.submissions) < 4:
            await anyio.sleep(0)
        for _ in range(50):
            await anyio.sleep(0)
        assert len(runtime.submissions) == 4
        go.set()


async def test_the_graph_says_each_text() -> None:
    async with Runtime(parrot_plan()) as runtime:
        transport = httpx.ASGITransport(build_app(runtime, model="tiny"))
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
            texts = ["a" * number for number in range(1, 9)]
            body = (await post(client, items=[{"input": text} for text in texts], response_format="pcm")).json()
    assert [len(base64.b64decode(each["audio_data"])) for each in body["results"]] == [20 * n for n in range(1, 9)]


ITEM = {"input": "Hello."}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"items": None}, "items"),
    ({"items": []}, "items"),
    ({"items": [ITEM] * 33}, "items"),
    ({"items": ["Hello."]}, "items[0]"),
    ({"items": [ITEM, {}]}, "items[1].input"),
    ({"items": [ITEM, {"input": 5}]}, "items[1].input"),
    ({"items": [ITEM | {"speed": 9}]}, "items[0].speed"),
    ({"items": [ITEM | {"response_format": "midi"}]}, "items[0].response_format"),
    ({"items": [ITEM | {"voice": ""}]}, "items[0].voice"),
    ({"items": [ITEM | {"seed": 0.5}]}, "items[0].seed"),
    ({"voice": 5}, "voice"),
    ({"speed": 0}, "speed"),
    ({"response_format": "midi"}, "response_format"),
    ({"seed": "x"}, "seed"),
    ({"instructions": 5}, "instructions"),
]


@pytest.mark.parametrize(("change", "param"), CASES, ids=lambda value: json.dumps(value)[:60])
async def test_a_wrong_field_is_an_error_of_the_whole(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, change: dict[str, Any], param: str
) -> None:
    response = await post(client, **({"items": [ITEM]} | change))
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert not runtime.submissions
    assert (await post(client, items=[ITEM])).json()["succeeded"] == 1


async def test_an_unknown_model(client: httpx.AsyncClient) -> None:
    assert (await post(client, model="gpt", items=[ITEM])).status_code == 404
