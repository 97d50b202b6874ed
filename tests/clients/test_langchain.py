"""langchain-openai, unmodified."""

from __future__ import annotations

import base64
import json
from typing import Any

import openai
import pytest

from .conftest import Served

langchain_openai = pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed: make test-clients"
)
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from pydantic import BaseModel  # noqa: E402

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


class Trip(BaseModel):
    """A trip."""

    city: str
    days: int


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def chat(served: Served, **more: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=served.base_url, api_key=served.key, model=served.model, max_retries=0, **more
    )


def test_chat_whole_and_streamed(real: Served) -> None:
    model = chat(real, max_tokens=12, temperature=0, seed=1)
    whole = model.invoke("Say hello.")
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    pieces = list(model.stream("Say hello."))
    assert len(pieces) > 2 and "".join(piece.content for piece in pieces) == whole.content


@pytest.mark.anyio
async def test_chat_async(real: Served) -> None:
    model = chat(real, max_tokens=8)
    assert (await model.ainvoke("Hi.")).content
    assert [piece async for piece in model.astream("Hi.")]


def test_a_spoken_answer_and_the_turn_after_it(real: Served) -> None:
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
    model = chat(real, max_tokens=12, model_kwargs=spoken)
    question = HumanMessage("Say hello.")
    answer = model.invoke([question])
    audio = answer.additional_kwargs["audio"]
    assert base64.b64decode(audio["data"]).startswith(b"RIFF") and audio["transcript"]
    # The answer goes back as `audio: {id}`, without its text.
    assert chat(real, max_tokens=8).invoke([question, answer, HumanMessage("And goodbye.")]).content


def test_sound_goes_in_as_it_writes_it(real: Served) -> None:
    client = openai.OpenAI(base_url=real.base_url, api_key=real.key)
    sound = client.audio.speech.create(model=real.model, voice="alloy", input="Hello.", response_format="wav").content
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"}}
    assert chat(real, max_tokens=8).invoke([HumanMessage([part])]).content


def test_tools(caller: Served) -> None:
    model = chat(caller).bind_tools([weather])
    question = HumanMessage("what is the weather in Paris?")
    asked = model.invoke([question])
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model.invoke([question, asked, result]).content == "It is sunny in Paris."


def test_tools_streamed(caller: Served) -> None:
    whole: Any = None
    for piece in chat(caller).bind_tools([weather]).stream("weather in Rome and Oslo?"):
        whole = piece if whole is None else whole + piece
    assert isinstance(whole, AIMessage) and [call["args"]["city"] for call in whole.tool_calls] == ["Rome", "Oslo"]


def test_a_tool_that_must_be_called(caller: Served) -> None:
    model = chat(caller).bind_tools([weather], tool_choice="weather")
    assert model.invoke("Paris!").tool_calls[0]["name"] == "weather"


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output(caller: Served, method: str) -> None:
    trip = chat(caller).with_structured_output(Trip, method=method).invoke("say where")
    assert trip == Trip(city="Paris", days=2)


def test_log_probabilities(caller: Served) -> None:
    answer = chat(caller, logprobs=True, top_logprobs=2).invoke("say hello there")
    tokens = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == answer.content == "hello there"
    assert len(tokens[0]["top_logprobs"]) == 2 and json.dumps(tokens)
