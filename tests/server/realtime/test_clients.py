"""Unmodified clients: OpenAI's SDK, blocking and not, and openai-agents."""

from __future__ import annotations

import base64
import json
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import openai
import pytest

from omniflow.client import realtime
from omniflow.client.connection import Server

from ...waiting import HANGS_S
from .scene import Scene

pytestmark = pytest.mark.anyio
USER: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one two three"}]}


def addresses(scene: Scene) -> dict[str, str]:
    where = f"{scene.address.host}:{scene.address.port}/v1"
    return {"base_url": f"http://{where}", "websocket_base_url": f"ws://{where}", "api_key": "none"}


async def test_the_sdk(scene: Scene) -> None:
    async with (
        openai.AsyncOpenAI(**addresses(scene)) as sdk,
        sdk.realtime.connect(model="scripted") as connection,
    ):
        await connection.session.update(session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
        silence = np.zeros(24000, "<i2").tobytes()
        await connection.input_audio_buffer.append(audio=base64.b64encode(silence).decode())
        await connection.input_audio_buffer.commit()
        await connection.response.create(response={"metadata": {"topic": "test"}})
        texts, num_bytes = "", 0
        with anyio.fail_after(HANGS_S):
            async for event in connection:
                if event.type == "response.output_audio_transcript.delta":
                    texts += event.delta
                elif event.type == "response.output_audio.delta":
                    num_bytes += len(base64.b64decode(event.delta))
                elif event.type == "response.done":
                    break
        assert texts == "you spoke for 1.0 s " and num_bytes == 5 * 4800
        assert event.response.metadata == {"topic": "test"} and event.response.status == "completed"
        secret = await sdk.realtime.client_secrets.create(session={"type": "realtime", "instructions": "x"})
        assert secret.value.startswith("ek_") and secret.session.type == "realtime"


async def test_the_blocking_sdk(scene: Scene) -> None:
    def talk() -> list[str]:
        with (
            openai.OpenAI(**addresses(scene)) as sdk,
            sdk.realtime.connect(model="scripted") as connection,
        ):
            connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
            connection.conversation.item.create(item=USER)
            connection.response.create()
            seen = []
            for event in connection:
                seen.append(event.type)
                if event.type == "response.done":
                    return seen
        return []

    seen = await anyio.to_thread.run_sync(talk)
    assert seen[:2] == ["session.created", "session.updated"] and seen.count("response.output_text.delta") == 3


async def test_openai_agents(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session with a tool: the model calls it, the SDK runs it and sends what it gave, the model says so."""
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    speaking = pytest.importorskip("agents.realtime")
    agents = pytest.importorskip("agents")
    asked = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return f"rain in {city}"

    agent = speaking.RealtimeAgent(name="guide", instructions="Help.", tools=[weather])
    settings = {"model_name": "scripted", "turn_detection": {"type": "semantic_vad"}}
    runner = speaking.RealtimeRunner(agent, config={"model_settings": settings})
    session = await runner.run(model_config={"api_key": "none", "url": scene.url()})
    kinds, sound = [], b""
    with anyio.fail_after(HANGS_S):
        async with session:
            await session.send_message("call")
            async for event in session:
                kinds.append(event.type)
                assert event.type != "error", event
                if event.type == "audio":
                    sound += event.audio.data
                if event.type == "audio_end":
                    break
            said = session._history[-1]
    assert asked == ["Oslo"] and "tool_end" in kinds
    assert len(sound) == 3 * 4800 and said.content[0].transcript.strip() == "rain in Oslo"


@pytest.mark.parametrize("interrupt", [False, True])
async def test_the_load_generator(scene: Scene, interrupt: bool) -> None:
    """Turns by hand, where an interruption is a cancel: the answer to 11 s of sound never ends by itself."""
    server = Server(f"{scene.address.url}/v1")
    speech = np.zeros(24000 * (11 if interrupt else 1), "<i2").tobytes()
    with anyio.fail_after(HANGS_S):
        async with realtime.session(server, "scripted", "manual", 100) as socket:
            turn = await realtime.spoken_turn(socket, speech, "manual", 0.2 if interrupt else None)
    assert turn.error is None and turn.times.audio_s >= 0.2
    assert turn.text.startswith("you spoke for 11.0 s" if interrupt else "you spoke for 1.0 s")
    assert (turn.barge_in_s is not None) == interrupt


async def test_the_load_generator_limits_answers(scene: Scene) -> None:
    async with realtime.session(Server(f"{scene.address.url}/v1"), "scripted", "vad", 7) as socket:
        await socket.send('{"type": "session.update", "session": {}}')
        session = json.loads(await socket.recv())["session"]
    assert session["max_output_tokens"] == 7 and session["audio"]["input"]["turn_detection"]["interrupt_response"]
