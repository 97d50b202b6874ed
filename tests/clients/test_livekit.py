"""LiveKit's OpenAI plugin without a room, unmodified."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Served

aiohttp = pytest.importorskip("aiohttp", reason="livekit-plugins-openai is not installed")
openai = pytest.importorskip("livekit.plugins.openai", reason="livekit-plugins-openai is not installed")
from livekit.agents import llm  # noqa: E402

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300), pytest.mark.anyio]
SAID = "The meeting begins at nine."


def to(served: Served) -> dict[str, Any]:
    return {"model": served.model, "base_url": served.base_url, "api_key": served.key}


@llm.function_tool
async def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@pytest.mark.parametrize("format", ["mp3", "wav", "pcm", "opus"])
async def test_it_speaks(real: Served, format: str) -> None:
    async with openai.TTS(**to(real), voice="alloy", response_format=format) as tts:
        frame = await tts.synthesize(SAID).collect()
    assert frame.sample_rate == 24000 and 1 < frame.duration < 5


async def test_it_hears(real: Served) -> None:
    async with openai.TTS(**to(real), voice="alloy", response_format="wav") as tts:
        frame = await tts.synthesize(SAID).collect()
    async with openai.STT(**to(real), use_realtime=False) as stt:
        heard = await stt.recognize(frame)
    assert "meeting" in heard.alternatives[0].text.lower()


async def test_it_answers(real: Served) -> None:
    context = llm.ChatContext()
    context.add_message(role="user", content="Say hello.")
    async with openai.LLM(**to(real), max_completion_tokens=12) as model:
        answer = await model.chat(chat_ctx=context).collect()
    assert answer.text and answer.usage is not None and answer.usage.completion_tokens > 0


async def test_it_calls_a_tool(caller: Served) -> None:
    context = llm.ChatContext()
    context.add_message(role="user", content="what is the weather in Paris?")
    async with openai.LLM(**to(caller)) as model:
        answer = await model.chat(chat_ctx=context, tools=[weather]).collect()
        (call,) = answer.tool_calls
        assert (call.name, call.arguments) == ("weather", '{"city": "Paris"}')
        context.items.append(llm.FunctionCall(call_id=call.call_id, name=call.name, arguments=call.arguments))
        context.items.append(
            llm.FunctionCallOutput(call_id=call.call_id, name=call.name, output="sunny in Paris", is_error=False)
        )
        assert (await model.chat(chat_ctx=context, tools=[weather]).collect()).text == "It is sunny in Paris."


async def test_realtime(real: Served) -> None:
    async with aiohttp.ClientSession() as http:
        model = openai.realtime.RealtimeModel(**to(real), voice="alloy", turn_detection=None, http_session=http)
        session = model.session()
        try:
            await session.update_instructions("Be short.")
            answer = await session.generate_reply(instructions="Say hello.")
            async for message in answer.message_stream:
                text = "".join([piece async for piece in message.text_stream])
                seconds = sum([frame.duration async for frame in message.audio_stream])
                assert text and seconds > 0.2
                break
        finally:
            await session.aclose()
            await model.aclose()
