"""Tools, choices and schemas with OpenAI's own client, through sockets and every stage but the thinker."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio.to_thread
import openai
import pydantic
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamEvent

from omniflow.media import Chat, ChatMessage, Options, TextPart, Tool
from omniflow.recording import Recorder, Recording
from omniflow.replay import compare, replay
from omniflow.runtime import Runtime
from omniflow.server.app import build_app
from omniflow.server.serve import serve

from .caller import caller_plan

pytestmark = pytest.mark.anyio
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
ALOUD: Any = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
async def url() -> AsyncIterator[str]:
    async with Runtime(caller_plan()) as runtime, serve(build_app(runtime, model="caller"), port=0) as address:
        yield f"{address.url}/v1"


@pytest.fixture
async def sdk(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def arguments(message: Any) -> list[Any]:
    return [json.loads(each.function.arguments) for each in message.tool_calls]


async def test_calls_and_their_results_round_the_whole_way(sdk: openai.AsyncOpenAI) -> None:
    asked = [user("how is it in Paris and Rome?")]
    first = await sdk.chat.completions.create(model="caller", messages=asked, tools=[WEATHER])
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    calls = choice.message.tool_calls
    assert calls is not None and [each.type for each in calls] == ["function", "function"]
    assert arguments(choice.message) == [{"city": "Paris"}, {"city": "Rome"}] and calls[0].id != calls[1].id
    results: Any = [
        {"role": "tool", "tool_call_id": each.id, "content": text}
        for each, text in zip(calls, ["sunny", "raining <|im_end|>"], strict=True)
    ]
    second = await sdk.chat.completions.create(
        model="caller", messages=[*asked, choice.message, *results], tools=[WEATHER]
    )
    assert second.choices[0].message.content == "It is sunny and raining <|im_end|>."
    assert second.choices[0].finish_reason == "stop" and second.choices[0].message.tool_calls is None
    assert second.usage is not None and first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


async def test_the_stream_helper_joins_calls(sdk: openai.AsyncOpenAI) -> None:
    events: list[ChatCompletionStreamEvent[Any]] = []
    async with sdk.chat.completions.stream(
        model="caller", messages=[user("Paris or Rome?")], tools=[WEATHER], stream_options={"include_usage": True}
    ) as stream:
        async for event in stream:
            events.append(event)
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Let me look." and message.role == "assistant"
    assert arguments(message) == [{"city": "Paris"}, {"city": "Rome"}]
    assert message.tool_calls is not None
    assert [each.function.parsed_arguments for each in message.tool_calls] == arguments(message)
    assert final.choices[0].finish_reason == "tool_calls" and final.usage is not None
    kinds = [event.type for event in events]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("tool_calls.function.arguments.delta") > 4, "arguments come as they are written"
    assert not any("tool_call>" in (e.delta or "") for e in events if e.type == "content.delta")


async def test_a_forced_call_has_no_content(sdk: openai.AsyncOpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        asked: Any = {"messages": [user("how is Oslo?")], "tools": [WEATHER], "tool_choice": choice}
        message = (await sdk.chat.completions.create(model="caller", **asked)).choices[0].message
        assert message.content is None and arguments(message) == [{"city": "Oslo"}]


async def test_one_call_where_calls_may_not_be_parallel(sdk: openai.AsyncOpenAI) -> None:
    reply = await sdk.chat.completions.create(
        model="caller", messages=[user("Paris or Rome?")], tools=[WEATHER], parallel_tool_calls=False
    )
    assert arguments(reply.choices[0].message) == [{"city": "Paris"}]


async def test_no_calls_where_there_are_no_tools(sdk: openai.AsyncOpenAI) -> None:
    said: Any = user('say <tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        message = (await sdk.chat.completions.create(model="caller", messages=[said], **more)).choices[0].message
        assert message.tool_calls is None and "<tool_call>" in (message.content or "")


async def test_an_answer_that_is_cut_inside_a_call(sdk: openai.AsyncOpenAI) -> None:
    asked: Any = {"messages": [user("how is Ouagadougou?")], "tools": [WEATHER], "tool_choice": "required"}
    whole = await sdk.chat.completions.create(model="caller", **asked)
    assert whole.usage is not None
    cut = await sdk.chat.completions.create(model="caller", max_tokens=whole.usage.completion_tokens - 9, **asked)
    assert cut.choices[0].finish_reason == "length"
    (call,) = cut.choices[0].message.tool_calls or ()
    assert '{"city": "Ouagadougou"}'.startswith(call.function.arguments) and call.function.arguments.count("}") == 0


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
async def test_calls_in_a_spoken_answer_are_not_spoken(sdk: openai.AsyncOpenAI, tool_choice: Any) -> None:
    text = "Let me look." if tool_choice == "auto" else ""
    asked: Any = {"messages": [user("how is Paris?")], "tools": [WEATHER], "tool_choice": tool_choice, **ALOUD}
    whole = (await sdk.chat.completions.create(model="caller", **asked)).choices[0].message
    async with sdk.chat.completions.stream(model="caller", **asked) as stream:
        async for _ in stream:
            pass
        streamed = (await stream.get_final_completion()).choices[0].message
    for message in (whole, streamed):
        assert arguments(message) == [{"city": "Paris"}] and not message.content
        if not text:
            assert message.audio is None
            continue
        assert message.audio is not None and message.audio.transcript == text
        assert len(base64.b64decode(message.audio.data)) == 2 * 10 * len(text)


class Trip(pydantic.BaseModel):
    city: str
    days: int


async def test_parse_with_pydantic(sdk: openai.AsyncOpenAI) -> None:
    parsed = await sdk.chat.completions.parse(model="caller", messages=[user("Where to?")], response_format=Trip)
    assert parsed.choices[0].message.parsed == Trip(city="Paris", days=2)
    async with sdk.chat.completions.stream(
        model="caller", messages=[user("Where to?")], response_format=Trip
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == Trip(city="Paris", days=2)


class Weather(pydantic.BaseModel):
    """Tells the weather in a city."""

    city: str


async def test_parse_calls_with_pydantic(sdk: openai.AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")
    parsed = await sdk.chat.completions.parse(model="caller", messages=[user("how is Bonn?")], tools=[tool])
    (call,) = parsed.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Weather(city="Bonn")


async def test_choices(sdk: openai.AsyncOpenAI) -> None:
    asked: Any = {"messages": [user("say hello")], "n": 3, "seed": 5, "stream_options": {"include_usage": True}}
    plain = {key: value for key, value in asked.items() if key != "stream_options"}
    whole = await sdk.chat.completions.create(model="caller", **plain)
    assert [choice.message.content for choice in whole.choices] == ["hello 5", "hello 6", "hello 7"]
    async with sdk.chat.completions.stream(model="caller", **asked) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    contents = {choice.index: choice.message.content for choice in streamed.choices}
    assert contents == {0: "hello 5", 1: "hello 6", 2: "hello 7"}
    alone = await sdk.chat.completions.create(model="caller", messages=[user("say hello")], seed=5)
    assert whole.usage is not None and alone.usage is not None and streamed.usage == whole.usage
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    assert whole.usage.completion_tokens == 3 * alone.usage.completion_tokens


async def test_logprobs(sdk: openai.AsyncOpenAI) -> None:
    asked: Any = {"messages": [user("say Grüße 👩‍🚀")], "logprobs": True, "top_logprobs": 2}
    whole = (await sdk.chat.completions.create(model="caller", **asked)).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    joined = bytes(byte for each in whole.logprobs.content for byte in each.bytes or ())
    assert joined.decode() == whole.message.content == "Grüße 👩‍🚀"
    assert all(len(each.top_logprobs) == 2 for each in whole.logprobs.content)
    async with sdk.chat.completions.stream(model="caller", **asked) as stream:
        async for _ in stream:
            pass
        streamed = (await stream.get_final_completion()).choices[0]
    assert streamed.logprobs is not None and streamed.logprobs.content == whole.logprobs.content


async def test_the_synchronous_client(url: str) -> None:
    def talk() -> list[Any]:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked: Any = {"model": "caller", "messages": [user("how is Paris?")], "tools": [WEATHER]}
            with client.chat.completions.stream(**asked) as stream:
                return arguments(stream.get_final_completion().choices[0].message)

    assert await anyio.to_thread.run_sync(talk) == [{"city": "Paris"}]


async def test_a_replay_gives_the_same_calls_with_the_same_ids() -> None:
    recordings: list[Recording] = []
    plan = caller_plan()
    chat = Chat((ChatMessage("user", (TextPart("how is Paris or Rome?"),)),))
    async with Runtime(plan, None, Recorder(plan, recordings.append, source="caller")) as runtime:
        reply = await runtime.submit(
            "chat", chat, outputs={"text", "tool_calls"}, options=Options(tools=(Tool("weather"),), top_logprobs=1)
        )
        ids = {delta.id for delta in (await reply.collect())["tool_calls"]}
        await runtime.drain()
    assert len(ids) == 3, "two, and none for what follows"
    comparison = compare(recordings[0], await replay(recordings[0], plan), plan)
    assert comparison.same and "detokenize.tool_calls -> client.tool_calls" in [edge.edge for edge in comparison.edges]


async def test_what_the_prompt_cannot_hold_is_refused(sdk: openai.AsyncOpenAI) -> None:
    deep: Any = {}
    for _ in range(150):
        deep = {"a": deep}
    bad: Any = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.chat.completions.create(model="caller", messages=[user("hi")], tools=[bad])
    assert refused.value.param == "tools" and "stage 'merge'" in refused.value.message
    long: Any = {"type": "function", "function": {"name": "f", "description": "word " * 10_000}}
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.chat.completions.create(model="caller", messages=[user("hi")], tools=[long])
    assert refused.value.code == "context_length_exceeded"
    assert (await sdk.chat.completions.create(model="caller", messages=[user("hi")])).choices
