"""Chat through the real server: text, speech, hearing, seeds, limits, and the requests that must be refused."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pydantic
import pytest

from tests.e2e.conftest import Server
from tests.e2e.hearing import heard, heard_pcm, word_errors
from tests.waiting import HANGS_S

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def test_answers(server: Server) -> None:
    reply = server.client().chat.completions.create(model="ming_omni", messages=CAPITAL, temperature=0)  # type: ignore[arg-type]
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens > 20


def test_metrics_tell_what_the_engines_hold(server: Server) -> None:
    def held(gauge: str) -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics", timeout=HANGS_S).text.splitlines()
        found = (re.fullmatch(rf'omniflow_engine_{gauge}{{.*stage="(.*)"}} (.*)', line) for line in lines)
        return {each[1]: float(each[2]) for each in found if each}

    assert held("kv_tokens_capacity") == {"thinker": 16384, "talker": 16384}
    story = [{"role": "user", "content": "Tell me a long story."}]
    endless = {"logit_bias": {"0": -100, "2": -100}, "max_completion_tokens": 1500, "stream": True}
    with server.client().chat.completions.create(model="ming_omni", messages=story, **endless) as chunks:  # type: ignore[call-overload]
        next(iter(chunks))
        server.wait_until("it runs", lambda: held("running")["thinker"] == 1 and held("kv_tokens_used")["thinker"] > 0)
    for gauge in ("running", "waiting", "kv_tokens_used"):
        server.wait_until("all is idle", lambda gauge=gauge: held(gauge) == {"thinker": 0, "talker": 0})


def test_streams_the_same_text(server: Server) -> None:
    client = server.client()
    whole = client.chat.completions.create(model="ming_omni", messages=CAPITAL, temperature=0)  # type: ignore[arg-type]
    text, finishes, usage = "", [], None
    for chunk in client.chat.completions.create(
        model="ming_omni",
        messages=CAPITAL,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},  # type: ignore[arg-type]
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finishes += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert finishes == ["stop"]
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


PROMPTS = ["What is the capital of France?", "Tell me two things about the sea.", "Why do people sleep at night?"]
"""One sentence proves nothing ("France is" is heard as "Francis"): errors are counted over all answers."""


def spoken(server: Server, prompt: str, stream: bool) -> tuple[str, bytes]:
    """(transcript, pcm16) of an answer to `prompt`."""
    asked = {
        "model": "ming_omni", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "seed": 1,
        "max_completion_tokens": 40, "modalities": ["text", "audio"], "audio": {"voice": "joe", "format": "pcm16"},
    }  # fmt: skip
    completions = server.client().chat.completions
    if not stream:
        audio = completions.create(**asked).choices[0].message.audio  # type: ignore[call-overload]
        return audio.transcript, base64.b64decode(audio.data)
    transcript, sound = "", b""
    for chunk in completions.create(stream=True, **asked):  # type: ignore[call-overload]
        for choice in chunk.to_dict()["choices"]:
            audio = choice["delta"].get("audio") or {}
            transcript += audio.get("transcript", "")
            sound += base64.b64decode(audio.get("data", ""))
    return transcript, sound


@pytest.mark.parametrize("stream", [False, True])
def test_speaks_what_it_writes(server: Server, stream: bool) -> None:
    wrong = count = 0
    for prompt in PROMPTS:
        transcript, sound = spoken(server, prompt, stream)
        samples = np.frombuffer(sound, "<i2").astype(np.float32) / 32768
        errors, words = word_errors(transcript, heard_pcm(samples, 24000))
        wrong, count = wrong + errors, count + words
    assert count > 40
    assert wrong / count <= 0.15


def test_whole_speech_in_wav(server: Server) -> None:
    reply = server.client().chat.completions.create(
        model="ming_omni", messages=CAPITAL, temperature=0, modalities=["text", "audio"],  # type: ignore[arg-type]
        audio={"voice": "joe", "format": "wav"}, seed=1,
    )  # fmt: skip
    audio = reply.choices[0].message.audio
    assert audio is not None
    assert reply.choices[0].message.content is None
    assert "Paris" in audio.transcript
    assert "capital" in heard(base64.b64decode(audio.data)).lower()


def test_hears(server: Server) -> None:
    """A question spoken by the server itself is understood by it."""
    client = server.client()
    question = client.audio.speech.create(
        model="ming_omni", voice="joe", input="What is the capital of France?", response_format="wav",
        extra_body={"seed": 1},
    )  # fmt: skip
    data = base64.b64encode(question.content).decode()
    clip = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    reply = client.chat.completions.create(
        model="ming_omni",
        messages=[{"role": "user", "content": [clip]}],
        temperature=0,  # type: ignore[list-item]
    )
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert 5 <= (reply.usage.prompt_tokens_details.audio_tokens or 0) <= 12, "what it heard, in tokens"


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def test_a_call_that_must_be_made_is_one_that_can_be(server: Server) -> None:
    asked = {
        "model": "ming_omni", "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0, "max_completion_tokens": 100,
    }  # fmt: skip
    completions = server.client().chat.completions
    whole = completions.create(**asked).choices[0]  # type: ignore[call-overload]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and arguments.keys() == {"city", "unit"}
    assert arguments["city"] == "Paris" and arguments["unit"] in ("celsius", "fahrenheit")
    with completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments


class Trip(pydantic.BaseModel):
    city: str
    days: int


def test_an_answer_by_a_schema(server: Server) -> None:
    reply = server.client().chat.completions.parse(
        model="ming_omni", messages=[{"role": "user", "content": "Plan a trip to Rome for three days."}],
        response_format=Trip, temperature=0, max_completion_tokens=60,
    )  # fmt: skip
    assert reply.choices[0].message.parsed == Trip(city="Rome", days=3)


def test_a_schema_that_is_none_is_refused(server: Server) -> None:
    client = server.client()
    schema = {"name": "s", "schema": {"type": "nosuch"}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="ming_omni", messages=CAPITAL,  # type: ignore[arg-type]
            response_format={"type": "json_schema", "json_schema": schema},
        )  # fmt: skip
    assert refused.value.param == "response_format" and "stage 'thinker'" in refused.value.message
    assert client.chat.completions.create(model="ming_omni", messages=CAPITAL, max_completion_tokens=2)  # type: ignore[arg-type]


def test_choices_with_logprobs(server: Server) -> None:
    asked = {
        "model": "ming_omni", "messages": [{"role": "user", "content": "Tell me two things about the sea."}],
        "temperature": 1, "max_completion_tokens": 8, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    completions = server.client().chat.completions
    several = completions.create(n=3, seed=5, **asked)  # type: ignore[call-overload]
    alone = completions.create(seed=6, **asked)  # type: ignore[call-overload]
    assert several.choices[1].message.content == alone.choices[0].message.content, "seed + 1"
    assert len({choice.message.content for choice in several.choices}) > 1
    assert several.usage.completion_tokens == 24 and several.usage.prompt_tokens == alone.usage.prompt_tokens
    for choice in several.choices:
        tokens = choice.logprobs.content
        assert b"".join(bytes(token.bytes) for token in tokens).decode() == choice.message.content
        assert all(token.logprob <= token.top_logprobs[0].logprob <= 0 for token in tokens)


def test_a_token_can_be_forced(server: Server) -> None:
    reply = server.client().chat.completions.create(
        model="ming_omni", messages=CAPITAL, temperature=0, max_completion_tokens=4, logit_bias={"28": 100},  # type: ignore[arg-type]
    )  # fmt: skip
    assert reply.choices[0].message.content == ",,,,"


def test_a_seed_gives_the_same_answer_alone_and_in_company(server: Server) -> None:
    client = server.client()

    def ask(seed: int) -> str:
        reply = client.chat.completions.create(
            model="ming_omni", messages=[{"role": "user", "content": "Write a short poem about the sea."}],
            temperature=0.9, seed=seed, max_completion_tokens=24,
        )  # fmt: skip
        return reply.choices[0].message.content or ""

    alone = ask(1)
    with ThreadPoolExecutor(4) as pool:
        company = list(pool.map(ask, [2, 1, 3, 4]))
    assert company[1] == alone
    assert len({alone, company[0], company[2], company[3]}) > 1


def test_stop_and_length(server: Server) -> None:
    client = server.client()
    cut = client.chat.completions.create(model="ming_omni", messages=CAPITAL, temperature=0, max_completion_tokens=3)  # type: ignore[arg-type]
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None and cut.usage.completion_tokens == 3
    stopped = client.chat.completions.create(model="ming_omni", messages=CAPITAL, temperature=0, stop=["Paris"])  # type: ignore[arg-type]
    assert stopped.choices[0].finish_reason == "stop"
    assert "Paris" not in (stopped.choices[0].message.content or "")


def test_an_image_is_refused_with_the_reason(server: Server) -> None:
    client = server.client()
    pixel = (
        "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5"
        "ErkJggg=="
    )
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="ming_omni",
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": pixel}}]}],
        )
    assert "stage 'image_encoder': this profile has no image encoder" in refused.value.message
    assert client.chat.completions.create(model="ming_omni", messages=CAPITAL, max_completion_tokens=2)  # type: ignore[arg-type]


def test_a_prompt_of_200_kb_is_refused_and_harms_nobody(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="ming_omni", messages=[{"role": "user", "content": "word " * 40_000}])
    assert refused.value.code == "context_length_exceeded"
    assert client.chat.completions.create(model="ming_omni", messages=CAPITAL, max_completion_tokens=2)  # type: ignore[arg-type]


def test_disconnect_while_thinking_cancels(server: Server) -> None:
    messages = [{"role": "user", "content": "Tell me a very long story."}]
    body = {"model": "ming_omni", "messages": messages, "stream": True}
    before = num_cancelled(server)
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=HANGS_S) as reply:
        pieces = reply.iter_raw()
        next(pieces)
        assert server.health()["in_flight"] == 1
    server.wait_until("nothing is in flight", lambda: server.health()["in_flight"] == 0)
    assert num_cancelled(server) == before + 1, "it did not come to its end"


def num_cancelled(server: Server) -> float:
    counter = 'omniflow_requests_total{endpoint="chat.completions",outcome="cancelled"} '
    lines = httpx.get(f"{server.url}/metrics", timeout=HANGS_S).text.splitlines()
    return sum(float(line.removeprefix(counter)) for line in lines if line.startswith(counter))


def test_killed_thinker_is_an_error_and_comes_back(server: Server) -> None:
    pid = server.pid_of("thinker")
    stream = server.client().chat.completions.create(
        model="ming_omni", messages=[{"role": "user", "content": "Tell me a very long story."}], stream=True
    )
    with pytest.raises(openai.APIError):
        for number, _ in enumerate(stream):
            if number == 2:
                os.kill(pid, signal.SIGKILL)
    again = server.client().chat.completions.create(model="ming_omni", messages=CAPITAL, temperature=0)  # type: ignore[arg-type]
    assert "Paris" in (again.choices[0].message.content or "")
    assert server.pid_of("thinker") != pid
