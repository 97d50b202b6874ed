"""Real sockets, the real runtime, real clients: what an in-process transport cannot tell."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from socket import IPPROTO_TCP, TCP_NODELAY, socket
from typing import Any

import anyio
import anyio.to_thread
import httpx
import openai
import pytest
from starlette.types import Message

from omniflow.config import RuntimeConfig, ServerConfig
from omniflow.errors import ConfigError, StageDiedError
from omniflow.runtime import Output, Runtime
from omniflow.server.app import build_app
from omniflow.server.serve import Address, serve

from ..waiting import HANGS_S, until
from .scripted import HELLO, ScriptedRuntime, parrot_plan, tone

pytestmark = pytest.mark.anyio
MESSAGES: Any = [{"role": "user", "content": "one two three"}]
ALOUD: Any = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}
ONE_TWO_THREE_S = len("one two three ") * 10 / 24000


@pytest.fixture
async def served() -> AsyncIterator[tuple[Runtime, Address]]:
    """The parrot graph behind a real server."""
    async with Runtime(parrot_plan()) as runtime, serve(build_app(runtime, model="parrot"), port=0) as address:
        yield runtime, address


@pytest.fixture
async def sdk(served: tuple[Runtime, Address]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served[1].url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_sdk_chat(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="parrot", messages=MESSAGES)
    assert answer.choices[0].message.content == "one two three " and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.total_tokens == 6
    assert answer._request_id is not None and answer._request_id.startswith("req_")


async def test_sdk_chat_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="parrot", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "one two three "
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3


async def test_sdk_stream_helper_joins_a_spoken_answer(sdk: openai.AsyncOpenAI) -> None:
    """The helper joins strings and adds numbers: what must be sent once would show."""
    async with sdk.chat.completions.stream(model="parrot", messages=MESSAGES, **ALOUD) as stream:
        async for _ in stream:
            pass
        message = (await stream.get_final_completion()).choices[0].message
    assert message.role == "assistant" and message.audio is not None
    assert message.audio.transcript == "one two three " and message.audio.id.count("audio_") == 1
    assert 3000 < message.audio.expires_at - time.time() < 4000
    assert len(base64.b64decode(message.audio.data, validate=True)) == 2 * 24000 * ONE_TWO_THREE_S


async def test_sdk_second_turn(sdk: openai.AsyncOpenAI) -> None:
    first = await sdk.chat.completions.create(model="parrot", messages=MESSAGES, **ALOUD)
    spoken = first.choices[0].message.audio
    assert spoken is not None
    second = await sdk.chat.completions.create(
        model="parrot", messages=[*MESSAGES, {"role": "assistant", "audio": {"id": spoken.id}}]
    )
    assert second.choices[0].message.content == spoken.transcript


async def test_sdk_speech(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.audio.speech.create(model="parrot", voice="alloy", input="hello", response_format="wav")
    assert len(whole.content) == 44 + 2 * 50 and whole.content[40:44] == (100).to_bytes(4, "little")
    async with sdk.audio.speech.with_streaming_response.create(
        model="parrot", voice="alloy", input="hello", response_format="pcm"
    ) as streamed:
        assert streamed.headers["content-type"] == "audio/pcm"
        assert b"".join([piece async for piece in streamed.iter_bytes()]) == whole.content[44:]


async def test_sdk_errors(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.chat.completions.create(model="gpt", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.chat.completions.create(model="parrot", messages=MESSAGES, temperature=7)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    assert [model.id async for model in sdk.models.list()] == ["parrot"]
    assert (await sdk.models.retrieve("parrot")).owned_by == "omniflow"


async def test_sync_sdk(served: tuple[Runtime, Address]) -> None:
    def talk() -> tuple[str, int]:
        with openai.OpenAI(base_url=f"{served[1].url}/v1", api_key="none", max_retries=0) as client:
            with client.chat.completions.stream(model="parrot", messages=MESSAGES) as stream:
                text = stream.get_final_completion().choices[0].message.content
            with client.audio.speech.with_streaming_response.create(
                model="parrot", voice="alloy", input="hello", response_format="pcm"
            ) as speech:
                return text or "", len(speech.read())

    assert await anyio.to_thread.run_sync(talk) == ("one two three ", 100)


async def test_concurrent_requests_do_not_mix(sdk: openai.AsyncOpenAI) -> None:
    async def ask(text: str) -> None:
        answer = await sdk.chat.completions.create(
            model="parrot", messages=[{"role": "user", "content": text}], **ALOUD
        )
        spoken = answer.choices[0].message.audio
        assert spoken is not None and spoken.transcript == text + " "
        assert len(base64.b64decode(spoken.data)) == 20 * len(spoken.transcript)

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(ask, " ".join([f"word{number}"] * (number + 1)))


def post(path: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_its_request(served: tuple[Runtime, Address], stream: bool) -> None:
    runtime, address = served
    body = {"model": "parrot", "messages": [{"role": "user", "content": "do wait"}], "stream": stream}
    async with await anyio.connect_tcp(address.host, address.port) as socket:
        await socket.send(post("/v1/chat/completions", body))
        await until(lambda: runtime.status().in_flight == 1)
        if stream:
            assert b"200 OK" in await socket.receive()
    await until(lambda: runtime.status().in_flight == 0)
    async with httpx.AsyncClient(timeout=HANGS_S) as client:
        metrics = (await client.get(f"{address.url}/metrics")).text
    assert 'omniflow_requests_total{endpoint="chat.completions",outcome="cancelled"} 1.0' in metrics


async def test_a_client_that_goes_away_while_it_sends_does_no_harm(served: tuple[Runtime, Address]) -> None:
    runtime, address = served
    async with await anyio.connect_tcp(address.host, address.port) as socket:
        await socket.send(post("/v1/chat/completions", {"model": "parrot"})[:-5])
    async with httpx.AsyncClient(timeout=HANGS_S) as client:
        assert (await client.get(f"{address.url}/health")).status_code == 200
    assert runtime.status().in_flight == 0


async def test_a_deadline_ends_a_whole_reply_with_504(served: tuple[Runtime, Address]) -> None:
    body = {"model": "parrot", "messages": [{"role": "user", "content": "do wait"}]}
    async with httpx.AsyncClient(timeout=HANGS_S) as client:
        response = await client.post(
            f"{served[1].url}/v1/chat/completions", json=body, headers={"x-request-timeout": "0.05"}
        )
    assert response.status_code == 504 and "parrot" in response.json()["error"]["message"]


async def test_a_client_too_many_is_told_when_to_come_back() -> None:
    plan = parrot_plan()
    async with Runtime(plan, RuntimeConfig(max_in_flight=1)) as runtime, httpx.AsyncClient(timeout=HANGS_S) as client:
        async with serve(build_app(runtime, model="parrot"), port=0) as address, anyio.create_task_group() as group:
            body = {"model": "parrot", "messages": [{"role": "user", "content": "wait " * 20}]}
            url = f"{address.url}/v1/chat/completions"
            runtime._admission.held.add(7.2)
            runtime._admission.first_output.add(1.0)
            group.start_soon(partial(client.post, url, json=body))
            await until(lambda: runtime.status().in_flight == 1)
            response = await client.post(url, json=body)
            assert (response.status_code, response.headers["retry-after"]) == (429, "8")
            assert response.headers["x-should-retry"] == "true"
            assert response.json()["error"]["message"].startswith("1 requests run and 0 wait: no place is expected")
            group.cancel_scope.cancel()


async def test_sound_that_fails_half_way_breaks_off() -> None:
    """A clean end would be taken for the whole sound."""
    runtime = ScriptedRuntime([Output("audio", tone(100)), StageDiedError("killed", stage="talker")])
    async with serve(build_app(runtime, model="tiny"), port=0) as address, httpx.AsyncClient(timeout=HANGS_S) as client:  # type: ignore[arg-type]
        heard = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream(
                "POST", f"{address.url}/v1/audio/speech", json={"model": "tiny", "input": "a", "response_format": "pcm"}
            ) as response:
                async for piece in response.aiter_bytes():
                    heard += piece
        assert len(heard) == 200
        assert (await client.get(f"{address.url}/live")).status_code == 200


async def test_nobody_asks_again_on_a_connection_that_ends_behind_a_bug() -> None:
    runtime = ScriptedRuntime()
    async with serve(build_app(runtime, model="tiny"), port=0) as address, httpx.AsyncClient(timeout=HANGS_S) as client:  # type: ignore[arg-type]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        runtime.scripts = [[RuntimeError("bug")]]
        replies = [await client.post(f"{address.url}/v1/chat/completions", json=body) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [500, 200]
        assert replies[0].headers["connection"] == "close" and "connection" not in replies[1].headers


async def test_sdk_raises_on_a_stream_that_fails_half_way() -> None:
    runtime = ScriptedRuntime([*HELLO[:2], StageDiedError("killed", stage="talker")])
    async with serve(build_app(runtime, model="tiny"), port=0) as address:  # type: ignore[arg-type]
        async with openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key="none") as sdk:
            stream = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            with pytest.raises(openai.APIError, match="stage 'talker': killed"):
                async for _ in stream:
                    pass


async def test_first_bytes_come_before_the_sound_is_whole() -> None:
    gate = anyio.Event()
    runtime = ScriptedRuntime([Output("audio", tone(24000)), gate, Output("audio", tone(24000))])
    async with serve(build_app(runtime, model="tiny"), port=0) as address:  # type: ignore[arg-type]
        async with openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key="none") as sdk:
            for format in ("mp3", "wav", "pcm", "opus"):
                async with sdk.audio.speech.with_streaming_response.create(
                    model="tiny", voice="alloy", input="hi", response_format=format
                ) as streamed:
                    pieces = streamed.iter_bytes(64)
                    with anyio.fail_after(HANGS_S):
                        assert await anext(pieces)


async def test_a_slow_client_holds_back_the_graph() -> None:
    runtime = ScriptedRuntime([Output("audio", tone(10))] * 50)
    sent: list[Message] = []
    go_on = anyio.Event()
    body = json.dumps({"model": "tiny", "input": "a", "response_format": "pcm"}).encode()
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 4:
            await go_on.wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/audio/speech", "raw_path": b"/v1/audio/speech"}
    scope |= {"headers": [], "query_string": b"", "root_path": ""}
    async with anyio.create_task_group() as group:
        group.start_soon(build_app(runtime, model="tiny"), scope, receive, send)  # type: ignore[arg-type]
        await anyio.wait_all_tasks_blocked()
        assert runtime.replies[0].num_taken == 3
        go_on.set()
    assert runtime.replies[0].num_taken == 50 and sent[-1] == {
        "type": "http.response.body",
        "body": b"",
        "more_body": False,
    }


async def test_replies_under_way_end_when_the_server_is_left() -> None:
    gate = anyio.Event()
    runtime = ScriptedRuntime([*HELLO[:1], gate, *HELLO[1:]])
    answers: list[httpx.Response] = []

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(timeout=HANGS_S) as client:
            body = {"model": "tiny", "messages": MESSAGES, "stream": True}
            answers.append(await client.post(f"{url}/v1/chat/completions", json=body))

    async with anyio.create_task_group() as group:
        async with serve(build_app(runtime, model="tiny"), port=0) as address:  # type: ignore[arg-type]
            group.start_soon(ask, address.url)
            await until(lambda: bool(runtime.replies) and runtime.replies[0].num_taken == 1)
            asyncio_release(group, gate)
    assert answers[0].text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.ConnectError):
        await httpx.AsyncClient(timeout=HANGS_S).get(address.url)


def asyncio_release(group: anyio.abc.TaskGroup, gate: anyio.Event) -> None:
    async def release() -> None:
        await anyio.sleep(0.05)
        gate.set()

    group.start_soon(release)


async def test_a_port_in_use_is_one_line() -> None:
    app = build_app(ScriptedRuntime(), model="tiny")  # type: ignore[arg-type]
    async with serve(app, port=0) as address:
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{address.port}: Address already in use"):
            async with serve(app, port=address.port):
                pass


async def test_an_error_inside_the_block_comes_out_as_itself() -> None:
    app = build_app(ScriptedRuntime(), model="tiny")  # type: ignore[arg-type]
    cause = ValueError("why")
    with pytest.raises(KeyError) as raised:
        async with serve(app, port=0):
            raise KeyError("mine") from cause
    assert raised.value.__cause__ is cause


async def test_leaving_by_cancellation_still_ends_in_order() -> None:
    app = build_app(ScriptedRuntime(), model="tiny")  # type: ignore[arg-type]
    with anyio.CancelScope() as scope:
        async with serve(app, port=0) as address:
            scope.cancel()
            await anyio.sleep_forever()
    with pytest.raises(OSError):
        await anyio.connect_tcp(address.host, address.port)


async def test_small_replies_are_not_held_back_by_the_kernel() -> None:
    """Nagle's algorithm against delayed acknowledgements: 44 ms a reply on a kept connection."""
    app = build_app(ScriptedRuntime(), model="tiny")  # type: ignore[arg-type]
    async with serve(app, port=0) as address, httpx.AsyncClient(base_url=address.url, timeout=HANGS_S) as client:
        await client.get("/live")
        assert [one.getsockopt(IPPROTO_TCP, TCP_NODELAY) for one in connections_of(address)] == [1]


def connections_of(address: Address) -> Iterator[socket]:
    """The sockets of the server, which runs in this process, to its clients."""
    for name in os.listdir("/proc/self/fd"):
        if Path(f"/proc/self/fd/{name}").is_socket():
            with contextlib.suppress(OSError), socket(fileno=os.dup(int(name))) as one:
                if one.getsockname() == (address.host, address.port) and one.getpeername():  # one that listens has none
                    yield one


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1", "203.0.113.1"])
async def test_an_address_that_is_not_ours_is_one_line(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:0: "):
        async with serve(build_app(ScriptedRuntime(), model="tiny"), ServerConfig(host=host, port=0)):  # type: ignore[arg-type]
            pass
