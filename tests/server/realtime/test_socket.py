"""Real sockets, the real runtime: what the machine by itself cannot tell."""

from __future__ import annotations

import base64
import json
import socket as plain_socket
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import websockets
from websockets.asyncio.client import connect

from omniflow.config import ServerConfig
from omniflow.errors import WeightsError

from ...waiting import HANGS_S
from .scene import MANUAL, TEXT, Client, Scene

pytestmark = pytest.mark.anyio


async def until(condition: Callable[[], bool], within_s: float = HANGS_S) -> None:
    with anyio.fail_after(within_s):
        while not condition():
            await anyio.sleep(0.002)


async def closed_with(client: Client) -> tuple[int | None, str]:
    """Code and reason of the close that comes next."""
    with anyio.fail_after(HANGS_S), pytest.raises(websockets.ConnectionClosed):
        while True:
            client.events.append(json.loads(await client.socket.recv()))
    return client.socket.close_code, client.socket.close_reason or ""


def small_socket(scene: Scene) -> plain_socket.socket:
    """The kernel holds little of what is sent to it."""
    small = plain_socket.socket()
    small.setsockopt(plain_socket.SOL_SOCKET, plain_socket.SO_RCVBUF, 4096)
    small.connect((scene.address.host, scene.address.port))
    return small


async def test_a_spoken_turn(scene: Scene) -> None:
    async with scene.client() as client:
        response = await client.turn("one two three")
    assert response["status"] == "completed" and response["usage"]["output_tokens"] == 3
    sound = [base64.b64decode(e["delta"]) for e in client.events if e["type"] == "response.output_audio.delta"]
    assert len(b"".join(sound)) == 3 * 4800
    metrics = await scene.metrics()
    assert 'omniflow_requests_total{endpoint="realtime",outcome="ok"} 1.0' in metrics
    assert 'omniflow_ttfa_seconds_count{endpoint="realtime"} 1.0' in metrics


async def test_a_committed_buffer_is_heard_and_written_down(scene: Scene) -> None:
    async with scene.client() as client:
        await client.update(**MANUAL, **TEXT)
        await client.update(audio={"input": {"transcription": {"language": "en"}}})
        await client.say(np.zeros(24000 * 2))
        await client.send("input_audio_buffer.commit")
        await client.send("response.create")
        events = await client.until("response.done")
        events += (
            []
            if "transcription.completed" in str(events)
            else await client.until("conversation.item.input_audio_transcription.completed")
        )
    texts = [e["delta"] for e in events if e["type"] == "conversation.item.input_audio_transcription.delta"]
    assert texts == ["2.0 s", " of speech."]
    (completed,) = [e for e in events if e["type"].endswith("transcription.completed")]
    assert completed["transcript"] == "2.0 s of speech." and completed["usage"]["seconds"] == 2.0
    assert "you spoke for 2.0 s" in str(events)


async def test_a_call_and_its_output(scene: Scene) -> None:
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    async with scene.client() as client:
        await client.update(tools=[tool], **TEXT)
        await client.ask("call")
        done = [e for e in await client.until("response.done") if e["type"] == "response.function_call_arguments.done"]
        assert done[0]["name"] == "weather" and json.loads(done[0]["arguments"]) == {"city": "Oslo"}
        output = {"type": "function_call_output", "call_id": done[0]["call_id"], "output": "rain today"}
        await client.send("conversation.item.create", item=output)
        await client.send("response.create")
        assert (await client.until("response.done"))[-1]["response"]["output"][0]["content"][0]["text"] == "rain today "


async def test_cancel_is_quiet_and_frees_the_graph(scene: Scene) -> None:
    async with scene.client() as client:
        await client.ask("now wait")
        await client.until("response.output_audio.delta")
        assert scene.runtime.status().in_flight == 1
        await client.send("response.cancel")
        assert (await client.until("response.done"))[-1]["response"]["status"] == "cancelled"
        await until(lambda: scene.runtime.status().in_flight == 0)
        assert (await client.turn())["status"] == "completed"
    assert 'outcome="cancelled"' in await scene.metrics()


async def test_a_failed_response_leaves_the_session(scene: Scene) -> None:
    async with scene.client() as client:
        failed = await client.turn("so fail")
        assert failed["status"] == "failed"
        assert failed["status_details"]["error"]["code"] == "unavailable"
        assert (await client.turn())["status"] == "completed"


async def test_many_responses_beside(scene: Scene) -> None:
    async with scene.client() as client:
        await client.ask("wait")
        for number in range(3):
            message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"n {number}"}]}
            await client.send("response.create", response={"conversation": "none", "input": [message], **TEXT})
        texts = set()
        while len(texts) < 3:
            done = (await client.until("response.done"))[-1]["response"]
            texts.add(done["output"][0]["content"][0]["text"])
        assert texts == {"n 0 ", "n 1 ", "n 2 "} and len(client.reader.open_responses) == 1


async def test_subprotocols(scene: Scene) -> None:
    offered: Any = ["realtime", "openai-insecure-api-key.sk-1", "openai-agents-sdk.0.20"]
    async with scene.client(subprotocols=offered) as client:
        assert client.socket.subprotocol == "realtime"
        assert (await client.turn())["status"] == "completed"


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("model=gpt-realtime", "model_not_found", "model"),
        ("model=x&intent=none", "model_not_found", "model"),
        ("model=" + "%E6%97%A5" * 200, "model_not_found", "model"),
        ("call_id=rtc_1", "unsupported_value", "call_id"),
    ],
)
async def test_what_is_not_served_is_refused_with_its_reason(scene: Scene, query: str, code: str, param: str) -> None:
    async with scene.client(query) as client:
        assert client.events[0]["error"]["code"] == code and client.events[0]["error"]["param"] == param
        assert (await closed_with(client))[0] == 1008


async def test_a_transcription_session(scene: Scene) -> None:
    async with scene.client("intent=transcription") as client:
        assert client.events[0]["session"]["type"] == "transcription"
        session = await client.update(
            type="transcription", audio={"input": {"turn_detection": None, "transcription": {"model": "whisper-1"}}}
        )
        assert session["session"]["audio"]["input"]["transcription"] == {"model": "whisper-1"}
        await client.say(np.zeros(24000))
        await client.send("input_audio_buffer.commit")
        events = await client.until("conversation.item.input_audio_transcription.completed")
        assert events[-1]["transcript"] == "1.0 s of speech."
        await client.send("response.create", event_id="no")
        assert (await client.next())["error"]["event_id"] == "no"


@pytest.mark.parametrize("config", [ServerConfig(realtime_sessions=2)])
async def test_a_full_server_says_try_later(scene: Scene) -> None:
    async with scene.client(), scene.client() as second:
        async with scene.client() as third:
            assert third.events[0]["error"]["code"] == "rate_limit_exceeded"
            assert (await closed_with(third))[0] == 1013
        assert (await second.turn())["status"] == "completed"
        assert "omniflow_realtime_sessions 2.0" in await scene.metrics()
    await scene.settled()
    assert "omniflow_realtime_sessions 0.0" in await scene.metrics()
    async with scene.client() as again:
        assert (await again.turn())["status"] == "completed"


@pytest.mark.parametrize("config", [ServerConfig(realtime_idle_s=0.6)])
async def test_an_idle_session_ends(scene: Scene) -> None:
    async with scene.client() as client:
        assert (await client.turn("a b"))["status"] == "completed"
        code, _ = await closed_with(client)
        assert code == 1001 and client.events[-1]["error"]["code"] == "session_idle"


@pytest.mark.parametrize("config", [ServerConfig(realtime_idle_s=0.6)])
async def test_a_session_that_answers_is_not_idle(scene: Scene) -> None:
    async with scene.client() as client:
        await client.ask("now wait")
        await client.until("response.output_audio.delta")
        await anyio.sleep(1.2)
        await client.send("response.cancel")
        assert (await client.until("response.done"))[-1]["response"]["status"] == "cancelled"


@pytest.mark.parametrize("config", [ServerConfig(realtime_session_s=1.0)])
async def test_a_session_has_an_end(scene: Scene) -> None:
    async with scene.client() as client:
        await client.ask("wait")
        code, reason = await closed_with(client)
        assert code == 1001 and "1 s" in reason and client.events[-1]["error"]["code"] == "session_expired"


@pytest.mark.parametrize("config", [ServerConfig(realtime_message_bytes=2**16)])
async def test_too_large_a_message_closes(scene: Scene) -> None:
    async with scene.client() as client:
        await client.send("input_audio_buffer.append", audio="A" * 2**17)
        assert (await closed_with(client))[0] == 1009


async def test_a_drain_lets_the_answer_end(scene: Scene) -> None:
    async with scene.client() as idle, scene.client() as busy, anyio.create_task_group() as group:
        await busy.ask("long 300")
        await busy.until("response.output_audio.delta")
        group.start_soon(scene.sockets.drain, 5.0)
        assert (await closed_with(idle))[0] == 1001
        assert (await busy.until("response.done"))[-1]["response"]["status"] == "completed"
        assert (await closed_with(busy))[0] == 1001
        async with scene.client() as late:
            assert (await closed_with(late))[0] == 1012


async def test_a_drain_is_bounded(scene: Scene) -> None:
    async with scene.client() as client:
        await client.ask("wait")
        await client.until("response.output_audio.delta")
        with anyio.fail_after(HANGS_S):
            await scene.sockets.drain(0.1)
        assert scene.sockets.num_open == 1


@pytest.mark.parametrize("config", [ServerConfig(send_s=0.5)])
async def test_a_client_that_does_not_read_is_cut_off_and_harms_nobody(scene: Scene) -> None:
    """Its answer is 60 s of sound: more than all buffers on the way hold."""
    async with (
        connect(scene.url(), sock=small_socket(scene), max_queue=1, ping_interval=None, close_timeout=0.1) as socket,
        scene.client() as other,
    ):
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "long 600"}]}
        await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
        await socket.send(json.dumps({"type": "response.create"}))
        await until(lambda: scene.runtime.status().in_flight == 1)
        while scene.sockets.num_open == 2:
            assert (await other.turn())["status"] == "completed"
        assert scene.runtime.status().in_flight == 0
        assert (await other.turn())["status"] == "completed"


async def test_clients_that_go_away_at_any_point(scene: Scene) -> None:
    async def come_and_go(number: int) -> None:
        async with connect(scene.url()) as socket:
            client = Client(socket)
            await client.send("session.update", session=MANUAL)
            await client.say(np.zeros(2400))
            await client.send("input_audio_buffer.commit")
            await client.ask("long 50 wait")
            for _ in range(number):
                await client.next()
            socket.transport.abort()

    async with anyio.create_task_group() as group:
        for number in range(0, 40, 2):
            group.start_soon(come_and_go, number)
    await scene.settled()
    async with scene.client() as client:
        assert (await client.turn())["status"] == "completed"


async def test_fifty_sessions_at_once(scene: Scene) -> None:
    async def talk(number: int) -> None:
        async with scene.client() as client:
            for turn in range(3):
                response = await client.turn(f"session {number} turn {turn}")
                assert response["output"][0]["content"][0]["transcript"] == f"session {number} turn {turn} "

    async with anyio.create_task_group() as group:
        for number in range(50):
            group.start_soon(talk, number)


KEYS = ServerConfig(api_keys=("sk-right",))


@pytest.mark.parametrize("config", [KEYS])
async def test_keys_and_client_secrets(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with scene.client():
            pass
    assert refused.value.response.status_code == 401
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    url, headers = f"{scene.address.url}/v1/realtime/client_secrets", {"authorization": "Bearer sk-right"}
    session = {"type": "realtime", "instructions": "Be brief.", **TEXT}
    async with httpx.AsyncClient(timeout=HANGS_S) as http:
        assert (await http.post(url, json={})).status_code == 401
        wanted = {"session": session, "expires_after": {"anchor": "created_at", "seconds": 60}}
        issued = (await http.post(url, json=wanted, headers=headers)).json()
        bad = await http.post(url, json={"session": {"type": "realtime", "model": "gpt"}}, headers=headers)
        assert bad.status_code == 404
        bad = await http.post(url, json={"session": {"audio": {"output": {"speed": 9}}}}, headers=headers)
        assert bad.json()["error"]["param"] == "session.audio.output.speed"
    assert issued["value"].startswith("ek_") and issued["session"]["instructions"] == "Be brief."
    offered: Any = ["realtime", f"openai-insecure-api-key.{issued['value']}"]
    async with scene.client(subprotocols=offered) as client:
        assert client.events[0]["session"]["instructions"] == "Be brief."
        assert client.events[0]["session"]["output_modalities"] == ["text"]


@pytest.mark.parametrize("config", [ServerConfig(cors_origins=("https://friend.example",))])
async def test_pages_of_other_sites(scene: Scene) -> None:
    own = f"http://{scene.address.host}:{scene.address.port}"
    for origin in (own, "https://friend.example"):
        async with scene.client(origin=origin) as client:
            assert (await client.turn())["status"] == "completed"
    for origin in ("https://evil.example", "null"):
        async with scene.client(origin=origin) as client:
            assert client.events[0]["error"]["code"] == "origin_not_allowed"
            assert (await closed_with(client))[0] == 1008


async def test_a_client_that_sends_much_before_it_reads(scene: Scene) -> None:
    """More than all buffers on the way hold, both ways: neither end waits for the other for ever."""
    async with connect(scene.url(), sock=small_socket(scene), max_queue=1) as socket:
        client = Client(socket)
        await client.send("session.update", session=MANUAL)
        await client.ask("long 1800")
        for _ in range(100):
            await client.send("input_audio_buffer.append", audio="A" * 200_000)
            await client.send("input_audio_buffer.clear")
        response = (await client.until("response.done"))[-1]["response"]
        assert response["status"] == "completed"


async def test_without_a_detector_only_turns_by_hand_work(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_reach() -> None:
        raise WeightsError("silero-vad: the index is out of reach")

    monkeypatch.setattr("omniflow.server.realtime.ears._load", out_of_reach)
    async with scene.client() as client:
        assert (await client.turn())["status"] == "completed"
        await client.say(np.zeros(4800))
        error = (await client.until("error"))[-1]["error"]
        assert error["type"] == "server_error" and "out of reach" in error["message"]
        assert (await closed_with(client))[0] == 1011
    async with scene.client() as client:
        await client.update(**MANUAL)
        await client.say(np.zeros(4800))
        await client.send("input_audio_buffer.commit")
        assert (await client.next())["type"] == "input_audio_buffer.committed"


async def test_binary_frames_are_read_as_text(scene: Scene) -> None:
    async with scene.client() as client:
        await client.socket.send(json.dumps({"type": "input_audio_buffer.clear"}).encode())
        assert (await client.next())["type"] == "input_audio_buffer.cleared"
        await client.socket.send(b"\xff\xfe")
        assert (await client.next())["error"]["code"] == "invalid_json"
