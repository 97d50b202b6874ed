"""openai-agents over chat completions, unmodified."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from .conftest import Served

agents = pytest.importorskip("agents", reason="openai-agents is not installed: make test-clients")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(300), pytest.mark.anyio]


@asynccontextmanager
async def model(served: Served) -> AsyncIterator[Any]:
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.key, max_retries=0) as client:
        yield agents.OpenAIChatCompletionsModel(model=served.model, openai_client=client)


@agents.function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


async def test_an_agent_answers(real: Served) -> None:
    settings = agents.ModelSettings(max_tokens=16, temperature=0)
    async with model(real) as found:
        agent = agents.Agent(name="A", instructions="Be short.", model=found, model_settings=settings)
        assert (await agents.Runner.run(agent, "Say hello.")).final_output


async def test_an_agent_calls_its_tool(caller: Served) -> None:
    async with model(caller) as found:
        agent = agents.Agent(name="A", model=found, tools=[weather])
        result = await agents.Runner.run(agent, "what is the weather in Paris?")
    assert result.final_output == "It is sunny in Paris."
    assert result.context_wrapper.usage.requests == 2


async def test_an_agent_streams(caller: Served) -> None:
    async with model(caller) as found:
        agent = agents.Agent(name="A", model=found, tools=[weather])
        result = agents.Runner.run_streamed(agent, "what is the weather in Rome?")
        kinds = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
    assert kinds[-3:] == ["tool_called", "tool_output", "message_output_created"]
    assert result.final_output == "It is sunny in Rome."
