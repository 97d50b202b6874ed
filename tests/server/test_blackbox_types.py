"""Every reply and event is what the types of OpenAI's client say: the client itself builds its objects unseen."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types import Model
from openai.types.audio import Transcription, TranscriptionStreamEvent, TranscriptionVerbose
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from omniflow.media import Generated, TextDelta, TextLogprob, ToolCallDelta
from omniflow.runtime import Output
from omniflow.server.app import build_app
from omniflow.server.encoders import pcm16, wav_header

from .scripted import HELLO, ScriptedRuntime, Step, tone
from .test_openapi import capable

pytestmark = pytest.mark.anyio
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
NAMED = TextLogprob("é", "é".encode(), -0.5, (("é", "é".encode(), -0.5), ("\ufffd", b"\xc3", -float("inf"))))
LIKELY = (Output("text", TextDelta("é", (NAMED,))), Output("usage", Generated("length", 7, 1)))
CALLING = (
    Output("tool_calls", ToolCallDelta(0, id="call_1", name="noop")),
    Output("tool_calls", ToolCallDelta(0, arguments="{}")),
    Output("usage", Generated("stop", 7, 5)),
)
ALOUD = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "noop"}}], "tool_choice": "required"}
SOUND = pcm16(tone(16000, 16000).samples)
WAV = wav_header(16000, 1, len(SOUND)) + SOUND


def check(type: Any, value: Any) -> None:
    TypeAdapter(type).validate_python(value, strict=True)


def frames(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


def client_of(runtime: ScriptedRuntime) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(runtime, model="tiny"))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://tiny")


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        (HELLO, {}),
        (HELLO, {"n": 2}),
        (HELLO, ALOUD),
        (LIKELY, {"logprobs": True, "top_logprobs": 2}),
        (CALLING, TOOLS),
    ],
    ids=["text", "choices", "aloud", "logprobs", "calls"],
)
async def test_chat(script: tuple[Step, ...], asked: dict[str, Any]) -> None:
    async with client_of(ScriptedRuntime(script)) as client:
        whole = await client.post("/v1/chat/completions", json=HI | asked)
        check(ChatCompletion, whole.json())
        streamed = await client.post(
            "/v1/chat/completions", json=HI | asked | {"stream": True, "stream_options": {"include_usage": True}}
        )
    chunks = frames(streamed)
    for chunk in chunks:
        check(ChatCompletionChunk, chunk)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole.json()["usage"]


async def test_transcriptions() -> None:
    async with client_of(capable()) as client:

        async def write(**fields: Any) -> httpx.Response:
            data = {"model": "tiny"} | fields
            return await client.post("/v1/audio/transcriptions", data=data, files={"file": ("a.wav", WAV)})

        check(Transcription, (await write()).json())
        times = {"timestamp_granularities[]": ["word", "segment"]}
        check(TranscriptionVerbose, (await write(response_format="verbose_json", **times)).json())
        events = frames(await write(stream="true"))
    for event in events:
        check(TranscriptionStreamEvent, event)
    assert [event["type"] for event in events] == ["transcript.text.delta", "transcript.text.done"]


async def test_models() -> None:
    async with client_of(ScriptedRuntime()) as client:
        (listed,) = (await client.get("/v1/models")).json()["data"]
    check(Model, listed)
