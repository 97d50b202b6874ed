"""litellm, unmodified."""

from __future__ import annotations

import io
import json
import wave
from typing import Any

import pytest

from .conftest import Served

litellm = pytest.importorskip("litellm", reason="litellm is not installed: make test-clients")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
HELLO = [{"role": "user", "content": "Say hello."}]
WEATHER = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def to(served: Served) -> dict[str, Any]:
    model = f"openai/{served.model}"
    return {"model": model, "api_base": served.base_url, "api_key": served.key, "num_retries": 0, "max_retries": 0}


def test_chat_whole_and_streamed(real: Served) -> None:
    asked = {"messages": HELLO, "max_tokens": 12, "temperature": 0, "seed": 1}
    whole = litellm.completion(**to(real), **asked)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens > 0 and whole.usage.prompt_tokens > 0
    chunks = list(litellm.completion(**to(real), **asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text


@pytest.mark.anyio
async def test_chat_async(real: Served) -> None:
    stream = await litellm.acompletion(**to(real), messages=HELLO, max_tokens=8, stream=True)
    assert [chunk async for chunk in stream][-1].choices[0].finish_reason in ("stop", "length")


def test_speech_there_and_back(real: Served) -> None:
    sound = litellm.speech(
        **to(real), input="The meeting begins at nine.", voice="alloy", response_format="wav"
    ).content
    with wave.open(io.BytesIO(sound)) as file:
        assert file.getnframes() / file.getframerate() > 1
    heard = litellm.transcription(**to(real), file=("speech.wav", sound, "audio/wav"))
    assert "meeting" in heard.text.lower()


def test_a_spoken_answer(real: Served) -> None:
    answer = litellm.completion(
        **to(real),
        messages=HELLO,
        max_tokens=12,
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "wav"},
    )
    audio = answer.choices[0].message.audio
    assert audio.transcript and audio.data and audio.id.startswith("audio_") and audio.expires_at > 0


def test_a_tool_is_called_and_its_result_read(caller: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "what is the weather in Paris?"}]
    asked = litellm.completion(**to(caller), messages=messages, tools=WEATHER)
    assert asked.choices[0].finish_reason == "tool_calls"
    (call,) = asked.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [asked.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = litellm.completion(**to(caller), messages=messages, tools=WEATHER)
    assert answer.choices[0].message.content == "It is sunny."


def test_a_tool_call_streamed(caller: Served) -> None:
    messages = [{"role": "user", "content": "weather in Rome and Oslo?"}]
    chunks = list(litellm.completion(**to(caller), messages=messages, tools=WEATHER, stream=True))
    whole = litellm.stream_chunk_builder(chunks).choices[0].message
    cities = [json.loads(call.function.arguments)["city"] for call in whole.tool_calls]
    assert cities == ["Rome", "Oslo"] and len({call.id for call in whole.tool_calls}) == 2


def test_json_that_follows_a_schema(caller: Served) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}}
    messages = [{"role": "user", "content": "say where"}]
    answer = litellm.completion(**to(caller), messages=messages, response_format=form)
    assert json.loads(answer.choices[0].message.content) == {"city": "Paris", "days": 2}


def test_errors_are_those_that_it_knows(real: Served) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**to(real) | {"model": "openai/nobody"}, messages=HELLO)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**to(real), messages=HELLO, temperature=7)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**to(real) | {"api_key": "sk-wrong"}, messages=HELLO)
