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

from omniflow.errors import DeadlineError, OverloadedError, StageDiedError, UnsupportedError
from omniflow.media import (
    AudioPart,
    Chat,
    ChatMessage,
    Generated,
    ImagePart,
    Options,
    Part,
    TextDelta,
    TextLogprob,
    TextPart,
    Tool,
    ToolCall,
    ToolCallDelta,
    VideoPart,
)
from omniflow.server.app import build_app
from omniflow.server.encoders import pcm16

from .scripted import HELLO, Output, ScriptedRuntime, parrot_plan, tone

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
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"audio_tokens": 0, "text_tokens": 7, "image_tokens": 0, "cached_tokens": 0},
        "completion_tokens_details": {"text_tokens": 2, "audio_tokens": 0, "reasoning_tokens": 0},
    }
    assert runtime.submissions[0].outputs == {"text", "usage"}, "the talker must not run for text"
    assert runtime.replies[0].left.is_set()


async def test_options_reach_the_graph(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    asked = {"temperature": 1, "top_p": 0.5, "seed": 3, "stop": ["a", "b"], "max_tokens": 9, "max_completion_tokens": 8}
    await client.post("/v1/chat/completions", json=ALOUD | asked | {"audio": {"voice": {"id": "joe"}, "format": "wav"}})
    await post(client, stop="end", max_tokens=9)
    await post(client, top_p=0)
    first, second, likeliest = (submission.options for submission in runtime.submissions)
    assert first == Options(temperature=1.0, top_p=0.5, seed=3, stop=("a", "b"), max_tokens=8, voice="joe")
    assert second == Options(stop=("end",), max_tokens=9)
    assert likeliest is not None and likeliest.top_p is not None and 0 < likeliest.top_p < 0.001


async def test_all_that_shapes_an_answer_reaches_the_graph(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    asked = {
        "frequency_penalty": 0.5,
        "presence_penalty": -2,
        "repetition_penalty": 1.05,
        "logit_bias": {"7": 1, "50256": -100},
        "logprobs": True,
        "top_logprobs": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
        "parallel_tool_calls": False,
    }
    assert (await post(client, **asked)).status_code == 200
    assert runtime.submissions[0].options == Options(
        frequency_penalty=0.5,
        presence_penalty=-2.0,
        repetition_penalty=1.05,
        logit_bias=((7, 1.0), (50256, -100.0)),
        top_logprobs=3,
        json_schema='{"type":"object"}',
        parallel_tool_calls=False,
    )
    assert (await post(client, logprobs=True, response_format={"type": "json_object"})).status_code == 200
    assert runtime.submissions[1].options == Options(top_logprobs=0, json_schema="{}")


FILES = [
    ("audio/wav", b"RIFF", AudioPart(b"RIFF", "wav")),
    ("image/png", b"PNG", ImagePart(b"PNG")),
    ("video/mp4", b"MP4", VideoPart(b"MP4")),
    ("text/plain;charset=utf-8", "Grüße".encode(), TextPart("notes:\nGrüße")),
    ("application/json", b"{}", TextPart("notes:\n{}")),
]


@pytest.mark.parametrize(("mime", "data", "part"), FILES)
async def test_files_are_what_they_hold(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, mime: str, data: bytes, part: Part
) -> None:
    file = {"filename": "notes", "file_data": f"data:{mime};base64,{base64.b64encode(data).decode()}"}
    messages = [{"role": "user", "content": [{"type": "file", "file": file}]}]
    assert (await post(client, messages=messages)).status_code == 200
    assert runtime.submissions[0].value == Chat((ChatMessage("user", (part,)),))


async def test_the_conversation_reaches_the_graph(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    sound, image = base64.b64encode(b"RIFF").decode(), base64.b64encode(b"PNG").decode()
    parts = [
        {"type": "text", "text": "what", "prompt_cache_breakpoint": True},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"DATA:Audio/MPEG;base64,{sound}"}},
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


@pytest.mark.parametrize("stream", [True, False])
async def test_what_no_stage_takes_is_a_fault_of_the_messages(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, stream: bool
) -> None:
    runtime.script = [UnsupportedError("this profile has no image encoder", stage="image_encoder")]
    response = await post(client, stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages") and "'image_encoder'" in error["message"]


async def test_nulls_and_unknown_and_harmless_keys_are_taken(client: httpx.AsyncClient) -> None:
    nulls = dict.fromkeys(
        "stream stream_options modalities audio max_tokens max_completion_tokens temperature top_p top_k seed stop n "
        "frequency_penalty presence_penalty repetition_penalty logit_bias logprobs top_logprobs response_format tools "
        "tool_choice functions function_call web_search_options user store metadata service_tier parallel_tool_calls "
        "reasoning_effort prediction verbosity".split()
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
    inner_nulls = {
        "messages": [
            {"role": "user", "content": "hi", "name": None, "tool_calls": None, "tool_call_id": None, "audio": None},
            {"role": "user", "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": None}]},
        ],
        "stream_options": {"include_usage": None},
        "audio": {"voice": None, "format": None},
        "tools": [{"type": "function", "function": {"name": "f", "description": None, "parameters": None}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": None, "strict": None}},
    }
    for body in (nulls, harmless, inner_nulls):
        response = await post(client, **body)
        assert response.status_code == 200, response.text


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
    asked, default = (submission.deadline_s for submission in runtime.submissions)
    assert asked == pytest.approx(2.5, abs=0.5) and asked <= 2.5 and default is None


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


def text_of(chunks: list[Any], index: int) -> str:
    """The content of one choice of a stream, whose chunks keep its rules."""
    mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == index]
    assert mine[0]["delta"]["role"] == "assistant" and sum("role" in each["delta"] for each in mine) == 1
    assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + ["stop"]
    return "".join(each["delta"].get("content", "") for each in mine)


async def test_choices(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    """The second choice waits until the client has the first one's text: they must not wait for each other."""
    later = anyio.Event()
    runtime.scripts = [
        [
            Output("text", TextDelta("one")),
            later,
            Output("usage", Generated("stop", 7, 1, audio_tokens=2, image_tokens=3)),
        ],
        [Output("text", TextDelta("two")), Output("usage", Generated("stop", 7, 20, audio_tokens=2, image_tokens=3))],
        [
            Output("text", TextDelta("three")),
            Output("usage", Generated("stop", 7, 300, audio_tokens=2, image_tokens=3)),
        ],
    ]

    async def release() -> None:
        while len(runtime.replies) < 3 or not all(reply.left.is_set() for reply in runtime.replies[1:]):
            await anyio.sleep(0.001)
        later.set()

    async with anyio.create_task_group() as group:
        group.start_soon(release)
        response = await post(client, n=3, seed=2**63 - 2, stream=True, stream_options={"include_usage": True})
    *chunks, last, done = events(response)
    assert [text_of(chunks, index) for index in range(3)] == ["one", "two", "three"]
    assert chunks[-1]["choices"][0]["index"] == 0, "the first choice ends last"
    assert done == "data: [DONE]" and last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 321,
        "total_tokens": 328,
        "prompt_tokens_details": {"audio_tokens": 2, "text_tokens": 2, "image_tokens": 3, "cached_tokens": 0},
        "completion_tokens_details": {"text_tokens": 321, "audio_tokens": 0, "reasoning_tokens": 0},
    }
    seeds = [submission.options.seed for submission in runtime.submissions if submission.options]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert len({submission.request_id for submission in runtime.submissions}) == 3


async def test_spoken_choices(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    runtime.scripts = [HELLO, HELLO[2:], HELLO, HELLO[2:]]
    whole = (await client.post("/v1/chat/completions", json=ALOUD | {"n": 2})).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    spoken = [choice["message"]["audio"] for choice in whole["choices"]]
    assert [each["transcript"] for each in spoken] == ["Hello.", "lo."] and spoken[0]["id"] != spoken[1]["id"]
    chunks = events(await client.post("/v1/chat/completions", json=ALOUD | {"n": 2, "stream": True}))[:-1]
    for index, sound in enumerate([SPOKEN, SPOKEN[10:]]):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        audio = [delta["audio"] for delta in deltas if "audio" in delta]
        assert base64.b64decode("".join(each.get("data", "") for each in audio)) == sound
        assert sum("id" in each for each in audio) == sum("expires_at" in each for each in audio) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_one_choice_that_fails_ends_the_request(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, stream: bool
) -> None:
    runtime.scripts = [[anyio.Event()], [StageDiedError("gone", stage="thinker")], [anyio.Event()]]
    response = await post(client, n=3, stream=stream)
    assert response.status_code == 503 and response.json()["error"]["code"] == "stage_died"
    assert all(reply.left.is_set() for reply in runtime.replies)
    assert (await post(client, n=3)).status_code == 200


async def test_one_choice_that_fails_breaks_the_stream_of_all(
    client: httpx.AsyncClient, runtime: ScriptedRuntime
) -> None:
    seen = anyio.Event()
    runtime.scripts = [[Output("text", TextDelta("one")), seen, anyio.Event()], [seen, StageDiedError("gone")]]
    url = "/v1/chat/completions"
    async with anyio.create_task_group() as group:

        async def release() -> None:
            while not runtime.replies or not runtime.replies[0].num_taken:
                await anyio.sleep(0.001)
            seen.set()

        group.start_soon(release)
        response = await client.post(url, json=HI | {"n": 2, "stream": True})
    *chunks, last = events(response)
    assert chunks[-1]["choices"][0]["delta"] == {"content": "one"} and last["error"]["code"] == "stage_died"
    assert "[DONE]" not in response.text and all(reply.left.is_set() for reply in runtime.replies)


async def test_many_choices_are_refused_as_one(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    runtime.refusal = OverloadedError("full")
    assert (await post(client, n=4, stream=True)).status_code == 429


LOGPROBS = (
    TextLogprob("Hel", b"Hel", -0.5, (("Hel", b"Hel", -0.5), ("\ufffd", b"\xe4", float("-inf")))),
    TextLogprob("lo", b"lo", -1.5, (("\ufffd", b"\xe4", -3.4e38),)),
)


async def test_logprobs(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    runtime.script = [Output("text", TextDelta("Hel", LOGPROBS[:1])), Output("text", TextDelta("lo", LOGPROBS[1:]))]
    expected = [
        {
            "token": "Hel",
            "logprob": -0.5,
            "bytes": [72, 101, 108],
            "top_logprobs": [
                {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108]},
                {"token": "\ufffd", "logprob": -9999.0, "bytes": [228]},
            ],
        },
        {
            "token": "lo",
            "logprob": -1.5,
            "bytes": [108, 111],
            "top_logprobs": [{"token": "\ufffd", "logprob": -9999.0, "bytes": [228]}],
        },
    ]
    whole = (await post(client, logprobs=True, top_logprobs=2)).json()
    assert whole["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    chunks = events(await post(client, logprobs=True, stream=True))[:-1]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [each["content"] for each in streamed if each] == [expected[:1], expected[1:]]
    assert (await post(client)).json()["choices"][0]["logprobs"] is None


WEATHER = {"name": "weather", "description": "d", "parameters": {"type": "object"}, "strict": True}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "news"}}]
THE_WEATHER = Tool("weather", "d", '{"type":"object"}', True)
THE_NEWS = Tool("news", parameters='{"type":"object","properties":{},"additionalProperties":false}')


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "options"),
    [
        (None, Options(tools=(THE_WEATHER, THE_NEWS))),
        ("auto", Options(tools=(THE_WEATHER, THE_NEWS))),
        ("none", Options()),
        ("required", Options(tools=(THE_WEATHER, THE_NEWS), tool_choice="required")),
        (named("news"), Options(tools=(THE_NEWS,), tool_choice="required", tool_name="news")),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("weather")]}},
            Options(tools=(THE_WEATHER,), tool_choice="required"),
        ),
    ],
)
async def test_tools_reach_the_graph(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, choice: Any, options: Options
) -> None:
    assert (await post(client, tools=TOOLS, tool_choice=choice)).status_code == 200
    assert runtime.submissions[0].options == options
    assert ("tool_calls" in runtime.submissions[0].outputs) == bool(options.tools)


async def test_calls_and_their_results_reach_the_graph(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    assert (await post(client, messages=messages)).status_code == 200
    assert runtime.submissions[0].value == Chat(
        (
            ChatMessage("user", (TextPart("hi"),)),
            ChatMessage("assistant", (), (ToolCall("call_1", "weather", '{"city": "Rome"}'),)),
            ChatMessage("tool", (TextPart("sunny"),), tool_call_id="call_1"),
        )
    )


async def test_an_assistants_turn_as_clients_send_it_back(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    first = (await client.post("/v1/chat/completions", json=ALOUD)).json()["choices"][0]["message"]
    expired = {"role": "assistant", "content": None, "audio": {"id": "audio_gone", "transcript": "I said."}}
    refused = {"role": "assistant", "content": None, "refusal": "I will not."}
    mine = {**first, "audio": {**first["audio"], "transcript": "Somebody else said."}}
    assert (await post(client, messages=[*HI["messages"], mine, expired, refused])).status_code == 200
    said = [message.parts for message in runtime.submissions[-1].value.messages]  # type: ignore[attr-defined]
    assert said[1:] == [(TextPart("Hello."),), (TextPart("I said."),), (TextPart("I will not."),)]


CALLS: list[Any] = [
    Output("tool_calls", ToolCallDelta(0, "", "call_1", "weather")),
    Output("tool_calls", ToolCallDelta(0, '{"city":')),
    Output("tool_calls", ToolCallDelta(0, '"Rome"}')),
    Output("tool_calls", ToolCallDelta(1, "{}", "call_2", "news")),
    Output("usage", Generated("stop", 7, 30)),
]


@pytest.mark.parametrize("body", [HI, ALOUD])
async def test_a_whole_answer_of_calls(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, body: dict[str, Any]
) -> None:
    runtime.script = CALLS
    choice = (await client.post("/v1/chat/completions", json=body | {"tools": TOOLS})).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "news", "arguments": "{}"}},
        ],
    }


@pytest.mark.parametrize("body", [HI, ALOUD])
async def test_a_stream_of_calls(client: httpx.AsyncClient, runtime: ScriptedRuntime, body: dict[str, Any]) -> None:
    runtime.script = CALLS
    response = await client.post("/v1/chat/completions", json=body | {"tools": TOOLS, "stream": True})
    assert deltas(response) == [
        {"role": "assistant"},
        {
            "tool_calls": [
                {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "call_2", "type": "function", "function": {"name": "news", "arguments": "{}"}}
            ]
        },
        {},
    ]
    assert events(response)[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_text_sound_and_calls_in_one_answer(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    runtime.script = [*CALLS[:4], *HELLO[:4], Output("usage", Generated("length", 7, 30))]
    body = ALOUD | {"tools": TOOLS}
    choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert choice["finish_reason"] == "length" and len(choice["message"]["tool_calls"]) == 2
    assert choice["message"]["content"] is None and choice["message"]["audio"]["transcript"] == "Hello."
    found = deltas(await client.post("/v1/chat/completions", json=body | {"stream": True}))
    assert [delta["role"] for delta in found if "role" in delta] == ["assistant"]
    assert [delta["audio"]["id"] for delta in found if "id" in delta.get("audio", {})] == [found[5]["audio"]["id"]]
    assert "".join(delta.get("audio", {}).get("transcript", "") for delta in found) == "Hello."
    text = (await post(client, tools=TOOLS)).json()["choices"][0]["message"]
    assert text["content"] == "Hello." and len(text["tool_calls"]) == 2


async def test_a_graph_that_calls_no_tools_says_so() -> None:
    runtime = ScriptedRuntime(plan=parrot_plan(outputs=["text"]))
    app = build_app(runtime, model="tiny")  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny") as client:
        response = await post(client, tools=TOOLS)
        assert response.status_code == 400 and response.json()["error"]["param"] == "tools"
        assert response.json()["error"]["message"] == (
            "graph 'parrot' gives no tool_calls: from chat it gives text, usage"
        )
        assert (await post(client, tools=TOOLS, tool_choice="none")).status_code == 200
