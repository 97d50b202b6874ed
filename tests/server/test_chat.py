from __future__ import annotations

import base64
import io
import json
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import soundfile

from omniflow.errors import DeadlineError, OverloadedError, StageDiedError
from omniflow.media import AudioPart, Chat, ChatMessage, Generated, ImagePart, Options, TextDelta, TextPart
from omniflow.server.encoders import pcm16

from .scripted import Output, ScriptedRuntime, tone

pytestmark = pytest.mark.anyio
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ALOUD = HI | {"modalities": ["text", "audio"]}
SPOKEN = pcm16(tone(13).samples)


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=HI | body)


def events(response: httpx.Response) -> list[Any]:
    """The JSON of every event; the last is the bare text [DONE] where it was sent."""
    frames = response.text.removesuffix("\n\n").split("\n\n")
    return [frame if frame == "data: [DONE]" else json.loads(frame.removeprefix("data: ")) for frame in frames]


def deltas(response: httpx.Response) -> list[dict[str, Any]]:
    return [event["choices"][0]["delta"] for event in events(response)[:-1] if event["choices"]]


async def test_a_whole_answer_in_text(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    body = (await post(client)).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello.", "refusal": None},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert runtime.submissions[0].outputs == {"text", "usage"}, "the talker must not run for text"
    assert runtime.replies[0].left.is_set()


async def test_options_reach_the_graph(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    asked = {"temperature": 1, "top_p": 0.5, "seed": 3, "stop": ["a", "b"], "max_tokens": 9, "max_completion_tokens": 8}
    await client.post("/v1/chat/completions", json=ALOUD | asked | {"audio": {"voice": {"id": "joe"}, "format": "wav"}})
    await post(client, stop="end", max_tokens=9)
    first, second = (submission.options for submission in runtime.submissions)
    assert first == Options(temperature=1.0, top_p=0.5, seed=3, stop=("a", "b"), max_tokens=8, voice="joe")
    assert second == Options(stop=("end",), max_tokens=9)


async def test_the_conversation_reaches_the_graph(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    sound, image = base64.b64encode(b"RIFF").decode(), base64.b64encode(b"PNG").decode()
    parts = [
        {"type": "text", "text": "what", "prompt_cache_breakpoint": True},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/mpeg;base64,{sound}"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}", "detail": "low"}},
    ]
    messages = [{"role": "developer", "content": "be brief", "name": None}, {"role": "user", "content": parts}]
    assert (await post(client, messages=messages)).status_code == 200
    assert runtime.submissions[0].entry == "chat"
    assert runtime.submissions[0].value == Chat(
        (
            ChatMessage("developer", (TextPart("be brief"),)),
            ChatMessage(
                "user", (TextPart("what"), AudioPart(b"RIFF", "wav"), AudioPart(b"RIFF", "mp3"), ImagePart(b"PNG"))
            ),
        )
    )


async def test_nulls_and_unknown_and_harmless_keys_are_taken(client: httpx.AsyncClient) -> None:
    nulls = dict.fromkeys(
        "stream stream_options modalities audio max_tokens max_completion_tokens temperature top_p top_k seed stop n "
        "frequency_penalty presence_penalty logit_bias logprobs top_logprobs response_format tools tool_choice "
        "functions web_search_options user store metadata service_tier parallel_tool_calls reasoning_effort".split()
    )
    harmless = {
        "n": 1,
        "user": "u",
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "logprobs": False,
        "frequency_penalty": 0,
        "nobody_knows_this": [1, {"a": 2}],
    }
    for body in (nulls, harmless, {"tools": [{"type": "function"}], "tool_choice": "none"}):
        assert (await post(client, **body)).status_code == 200


async def test_a_stream_of_text(client: httpx.AsyncClient) -> None:
    response = await post(client, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert deltas(response) == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo."}, {}]
    *chunks, done = events(response)
    assert done == "data: [DONE]"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1 and {chunk["object"] for chunk in chunks} == {
        "chat.completion.chunk"
    }
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_is_streamed_only_where_it_is_asked_for(client: httpx.AsyncClient) -> None:
    *chunks, last, _ = events(await post(client, stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 9
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_a_spoken_stream_keeps_the_rules_of_joining_clients(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=ALOUD | {"stream": True})
    audio = [delta.get("audio", {}) for delta in deltas(response)]
    assert [d["role"] for d in deltas(response) if "role" in d] == ["assistant"] and "role" in deltas(response)[0]
    assert all("content" not in delta for delta in deltas(response))
    assert [a["id"] for a in audio if "id" in a] == [audio[0]["id"]]
    assert audio[-2].keys() == {"expires_at"} and sum("expires_at" in a for a in audio) == 1
    assert deltas(response)[-1] == {} and events(response)[-2]["choices"][0]["finish_reason"] == "stop"
    assert "".join(a.get("transcript", "") for a in audio) == "Hello."
    pieces = [a["data"] for a in audio if "data" in a]
    assert base64.b64decode("".join(pieces), validate=True) == SPOKEN
    assert all(len(base64.b64decode(piece)) % 6 == 0 for piece in pieces[:-1])


@pytest.mark.parametrize("rate_hz", [24000, 22050])
async def test_a_whole_spoken_answer_is_a_wav_of_the_graphs_rate(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, rate_hz: int
) -> None:
    runtime.script = [Output("text", TextDelta("Hi")), Output("audio", tone(1000, rate_hz))]
    message = (await client.post("/v1/chat/completions", json=ALOUD)).json()["choices"][0]["message"]
    assert message["content"] is None and message["audio"]["transcript"] == "Hi"
    samples, found_hz = soundfile.read(io.BytesIO(base64.b64decode(message["audio"]["data"])), dtype="float32")
    assert found_hz == rate_hz
    np.testing.assert_allclose(samples, tone(1000).samples, atol=2 / 32767)


async def test_streamed_sound_equals_whole_sound(client: httpx.AsyncClient) -> None:
    whole = await client.post("/v1/chat/completions", json=ALOUD | {"audio": {"format": "pcm16"}})
    streamed = await client.post("/v1/chat/completions", json=ALOUD | {"stream": True})
    joined = "".join(d.get("audio", {}).get("data", "") for d in deltas(streamed))
    assert whole.json()["choices"][0]["message"]["audio"]["data"] == joined


@pytest.mark.parametrize("format", ["mp3", "flac", "opus"])
async def test_whole_spoken_answers_in_compressed_formats(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, format: str
) -> None:
    runtime.script = [Output("audio", tone(24000))]
    body = ALOUD | {"audio": {"voice": "alloy", "format": format}}
    message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    samples, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(message["audio"]["data"])))
    assert (len(samples), rate_hz) == (24000, 24000)


async def test_the_second_turn_may_name_what_was_said(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    whole = (await client.post("/v1/chat/completions", json=ALOUD)).json()["choices"][0]["message"]["audio"]["id"]
    streamed = deltas(await client.post("/v1/chat/completions", json=ALOUD | {"stream": True}))[0]["audio"]["id"]
    for audio_id in (whole, streamed):
        turns = [*HI["messages"], {"role": "assistant", "audio": {"id": audio_id}}, {"role": "user", "content": "more"}]
        assert (await post(client, messages=turns)).status_code == 200
        assert runtime.submissions[-1].value.messages[1] == ChatMessage("assistant", (TextPart("Hello."),))


async def test_an_answer_that_was_cut_says_length(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    runtime.script = [Output("text", TextDelta("x")), Output("usage", Generated("length", 1, 1))]
    assert (await post(client)).json()["choices"][0]["finish_reason"] == "length"
    assert events(await post(client, stream=True))[-2]["choices"][0]["finish_reason"] == "length"


async def test_an_empty_answer_is_still_an_answer(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    runtime.script = [Output("usage", Generated("stop", 1, 0))]
    assert (await post(client)).json()["choices"][0]["message"]["content"] == ""
    assert deltas(await post(client, stream=True)) == [{"role": "assistant", "content": ""}, {}]
    aloud = (await client.post("/v1/chat/completions", json=ALOUD)).json()["choices"][0]["message"]["audio"]
    assert aloud["transcript"] == "" and len(base64.b64decode(aloud["data"])) == 44


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (OverloadedError("full", retry_after_s=2.5), 429, {"retry-after": "3", "x-should-retry": "true"}),
        (StageDiedError("gone", stage="talker"), 503, {"retry-after": "1", "x-should-retry": "false"}),
        (DeadlineError("late"), 504, {"x-should-retry": "false"}),
    ],
)
async def test_a_failure_before_the_first_token_is_a_plain_error(
    client: httpx.AsyncClient,
    runtime: ScriptedRuntime,
    stream: bool,
    error: Exception,
    status: int,
    headers: dict[str, str],
) -> None:
    runtime.script = [error]
    response = await post(client, stream=stream)
    assert response.status_code == status and response.headers["content-type"] == "application/json"
    assert response.json()["error"]["message"] == str(error) and response.json()["error"]["param"] is None
    assert {name: response.headers[name] for name in headers} == headers
    assert runtime.replies[0].left.is_set()


async def test_a_refused_submission_is_a_plain_error(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    runtime.refusal = OverloadedError("full")
    response = await post(client, stream=True)
    assert response.status_code == 429 and response.json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("body", [HI, ALOUD])
async def test_a_failed_stream_ends_with_its_error_and_without_done(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, body: dict[str, Any]
) -> None:
    runtime.script = [*runtime.script[:3], StageDiedError("killed", stage="talker")]
    response = await client.post("/v1/chat/completions", json=body | {"stream": True})
    *_, last = events(response)
    assert last["error"] == {
        "message": "stage 'talker': killed",
        "type": "server_error",
        "param": None,
        "code": "stage_died",
    }
    assert "[DONE]" not in response.text and "expires_at" not in response.text
    assert 'finish_reason":"' not in response.text


async def test_a_change_of_rate_inside_an_answer_is_an_error(
    client: httpx.AsyncClient, runtime: ScriptedRuntime
) -> None:
    runtime.script = [Output("audio", tone(8)), Output("audio", tone(8, 22050))]
    whole = await client.post("/v1/chat/completions", json=ALOUD)
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "protocol_error"
    assert (
        "22050"
        in events(await client.post("/v1/chat/completions", json=ALOUD | {"stream": True}))[-1]["error"]["message"]
    )


async def test_a_bug_is_a_500_without_a_traceback(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    runtime.script = [KeyError("secret")]
    response = await post(client)
    assert response.status_code == 500 and "secret" not in response.text and "Traceback" not in response.text
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"] in response.json()["error"]["message"]


async def test_the_timeout_header_becomes_the_deadline(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    await client.post("/v1/chat/completions", json=HI, headers={"X-Request-Timeout": "2.5"})
    await post(client)
    assert [submission.deadline_s for submission in runtime.submissions] == [2.5, None]


async def test_the_graph_works_under_the_id_that_the_client_gets(
    client: httpx.AsyncClient, runtime: ScriptedRuntime
) -> None:
    response = await post(client)
    assert response.headers["x-request-id"] == runtime.submissions[0].request_id
    assert response.headers["x-request-id"] != (await post(client)).headers["x-request-id"]


async def test_answers_of_concurrent_requests_do_not_mix(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    ids: set[str] = set()

    async def ask() -> None:
        response = await client.post("/v1/chat/completions", json=ALOUD | {"stream": True})
        (chat_id,) = {event["id"] for event in events(response)[:-1]}
        ids.add(chat_id)
        data = "".join(d.get("audio", {}).get("data", "") for d in deltas(response))
        assert base64.b64decode(data) == SPOKEN

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(ask)
    assert len(ids) == 8
