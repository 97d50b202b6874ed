"""What goes over the wire: requests that are none, clients that are slow, replies that break off."""

from __future__ import annotations

import contextlib
import json
import logging
import socket as sockets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import h11
import pytest

from omniflow.config import ServerConfig
from omniflow.errors import StageDiedError
from omniflow.media import TextDelta
from omniflow.runtime import Output
from omniflow.server.app import build_app
from omniflow.server.serve import Address, serve

from ..waiting import HANGS_S
from .scripted import HELLO, ScriptedRuntime, tone

pytestmark = pytest.mark.anyio
LIMITS = ServerConfig(port=0, header_s=0.3, body_s=0.3, send_s=0.3, max_header_bytes=2048, max_body_bytes=50_000)
HI = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
VALID = HEAD + b"content-length: %d\r\n\r\n" % len(HI) + HI


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[tuple[ScriptedRuntime, Address]]:
    """One server for all: what a test does to it must not be seen by the next."""
    runtime = ScriptedRuntime()
    async with serve(build_app(runtime, model="tiny", config=LIMITS), LIMITS) as address:  # type: ignore[arg-type]
        yield runtime, address


@pytest.fixture
def runtime(served: tuple[ScriptedRuntime, Address]) -> Iterator[ScriptedRuntime]:
    runtime = served[0]
    yield runtime
    assert runtime.status().in_flight == 0
    runtime.replies.clear()
    runtime.script = HELLO


@pytest.fixture
def address(served: tuple[ScriptedRuntime, Address], runtime: ScriptedRuntime) -> Address:
    return served[1]


class Wire:
    """A client that sends any bytes, and reads replies one by one."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self.stream = stream
        self._left = b""

    async def reply(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next reply. Raises h11.RemoteProtocolError for half a reply."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        parser.send(h11.EndOfMessage())
        if self._left:
            parser.receive_data(self._left)
        head, body = h11.Response(status_code=200, headers=[]), b""
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(await self.receive())
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
        self._left = parser.trailing_data[0]
        return head.status_code, {key.decode(): value.decode() for key, value in head.headers}, body

    async def receive(self) -> bytes:
        """What comes next; empty at the end."""
        with anyio.fail_after(HANGS_S):
            try:
                return await self.stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return b""


@pytest.fixture
async def wire(address: Address) -> AsyncIterator[Wire]:
    async with await anyio.connect_tcp(address.host, address.port) as stream:
        yield Wire(stream)


async def works(address: Address) -> None:
    """The next valid request is answered."""
    async with await anyio.connect_tcp(address.host, address.port) as stream:
        await stream.send(VALID)
        assert (await Wire(stream).reply())[0] == 200


def error_of(reply: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    status, headers, body = reply
    assert headers["content-type"] == "application/json"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return status, error["code"]


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"hello\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid_http"),
        (b"GET /live HTTP/1.1\r\n\r\n", 400, "invalid_http"),
        (b"GET /live HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400, "invalid_http"),
        (b"GET /live HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n", 400, "invalid_http"),
        (b"GET /li\x00ve HTTP/1.1\r\nhost: x\r\n\r\n", 400, "invalid_http"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 404, "not_found"),
        (HEAD + b"content-length: -1\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello", 400, "invalid_http"),
        (HEAD + b"transfer-encoding: gzip\r\n\r\n", 501, "invalid_http"),
        (HEAD + b"x: " + b"a" * 3000 + b"\r\n\r\n", 431, "header_too_large"),
        (b"GET /" + b"a" * 70_000, 431, "header_too_large"),
        (HEAD + b"content-length: 50001\r\n\r\n", 413, "body_too_large"),
        (
            HEAD + CHUNKED + (b"2000\r\n" + b" " * 0x2000 + b"\r\n") * 7,
            413,
            "body_too_large",
        ),
        (HEAD + b"content-length: 1\r\n\r\n{", 400, "invalid_json"),
        (HEAD + b"content-length: 2\r\n\r\n\xff\xfe", 400, "invalid_json"),
        (b"BREW /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n", 405, "method_not_allowed"),
        (b"GET http://x/live HTTP/1.1\r\nhost: x\r\n\r\n", 404, "not_found"),
        (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", 404, "not_found"),
        (b"GET /v1/models/%ff%00 HTTP/1.1\r\nhost: x\r\n\r\n", 404, "model_not_found"),
    ],
)
async def test_what_is_no_request_gets_a_json_error(
    address: Address, wire: Wire, sent: bytes, status: int, code: str
) -> None:
    await wire.stream.send(sent)
    assert error_of(await wire.reply()) == (status, code)
    await works(address)


async def test_a_chunk_that_is_none_ends_the_connection(address: Address, wire: Wire) -> None:
    await wire.stream.send(HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n")
    assert error_of(await wire.reply()) == (400, "invalid_http")
    assert await wire.receive() == b""
    await works(address)


async def test_rubbish_behind_a_request_does_not_harm_its_reply(address: Address, wire: Wire) -> None:
    await wire.stream.send(VALID + b"rubbish\r\n\r\n")
    assert (await wire.reply())[0] == 200
    assert error_of(await wire.reply()) == (400, "invalid_http")
    await works(address)


async def test_requests_in_a_row_are_answered_in_their_order(address: Address, wire: Wire) -> None:
    await wire.stream.send(VALID + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" + VALID)
    bodies = [json.loads((await wire.reply())[2]) for _ in range(3)]
    assert [body["object"] for body in bodies] == ["chat.completion", "list", "chat.completion"]
    assert bodies[0]["id"] != bodies[2]["id"]


async def test_a_body_may_come_in_chunks_byte_by_byte(wire: Wire) -> None:
    await wire.stream.send(HEAD + CHUNKED)
    for byte in HI:
        await wire.stream.send(b"1\r\n%c\r\n" % byte)
    await wire.stream.send(b"0\r\n\r\n")
    assert (await wire.reply())[0] == 200


async def test_a_client_may_ask_before_it_sends_its_body(wire: Wire) -> None:
    await wire.stream.send(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(HI))
    assert (await wire.receive()).startswith(b"HTTP/1.1 100 ")
    await wire.stream.send(HI)
    assert (await wire.reply())[0] == 200


async def test_a_client_that_would_upgrade_is_answered(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    await wire.stream.send(VALID.replace(b"host: x", b"host: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c"))
    assert (await wire.reply())[0] == 200 and caplog.messages == []


async def test_head_and_options_have_no_surprises(wire: Wire) -> None:
    await wire.stream.send(b"HEAD /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    head, _, body = (b"".join([await wire.receive(), await wire.receive()])).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and body == b""


# -- slow clients ------------------------------------------------------------------------------------------------------


async def test_a_head_that_does_not_come_ends_the_connection(address: Address, wire: Wire) -> None:
    for byte in b"GET /live HTTP":
        await wire.stream.send(bytes([byte]))
    assert error_of(await wire.reply()) == (408, "request_timeout")
    assert await wire.receive() == b""
    await works(address)


async def test_a_head_that_trickles_is_not_waited_for_longer(wire: Wire) -> None:
    async def trickle() -> None:
        while True:
            await wire.stream.send(b"x")
            await anyio.sleep(0.01)

    async with anyio.create_task_group() as group:
        group.start_soon(trickle)
        assert error_of(await wire.reply()) == (408, "request_timeout")
        group.cancel_scope.cancel()


async def test_a_connection_that_says_nothing_is_closed(wire: Wire) -> None:
    assert await wire.receive() == b""


async def test_an_idle_connection_is_kept_for_the_next_request(wire: Wire) -> None:
    await wire.stream.send(VALID)
    assert (await wire.reply())[0] == 200
    await anyio.sleep(2 * LIMITS.header_s)
    await wire.stream.send(VALID)
    assert (await wire.reply())[0] == 200


async def test_a_body_that_does_not_come_is_a_408(address: Address, wire: Wire) -> None:
    await wire.stream.send(HEAD + b"content-length: 1000\r\n\r\n{")
    reply = await wire.reply()
    assert error_of(reply) == (408, "body_timeout")
    assert reply[1]["x-should-retry"] == "false" and reply[1]["connection"] == "close"
    assert await wire.receive() == b""
    await works(address)


async def test_a_refused_body_is_not_read_for_ever(address: Address, wire: Wire) -> None:
    await wire.stream.send(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    assert error_of(await wire.reply()) == (404, "not_found")
    with pytest.raises(anyio.BrokenResourceError), anyio.fail_after(HANGS_S):
        while True:
            await wire.stream.send(b"1\r\nx\r\n")
            await anyio.sleep(0.01)
    await works(address)


def read_to_the_end(connection: sockets.socket) -> int:
    """How many bytes come until the other end closes."""
    connection.settimeout(HANGS_S)
    received = 0
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(2**20):
            received += len(piece)
    return received


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_is_let_go(runtime: ScriptedRuntime, address: Address, stream: bool) -> None:
    runtime.script = [Output("audio", tone(240_000)) for _ in range(40)]  # 19 MB: more than the kernel takes
    body = json.dumps({"model": "tiny", "input": "hi", "response_format": "pcm", "stream": stream}).encode()
    connection = sockets.socket()
    connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
    connection.connect((address.host, address.port))
    with connection:
        connection.send(b"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        with anyio.fail_after(HANGS_S):
            while not runtime.replies:
                await anyio.sleep(0.001)
            await runtime.replies[0].left.wait()
        assert not stream or runtime.replies[0].num_taken < 40
        await anyio.sleep(3 * LIMITS.send_s)
        assert await anyio.to_thread.run_sync(read_to_the_end, connection) < 19_200_000
    await works(address)


# -- replies that break off --------------------------------------------------------------------------------------------


async def test_a_reply_that_fails_half_way_is_cut_without_a_fuss(
    runtime: ScriptedRuntime, address: Address, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    body = json.dumps({"model": "tiny", "input": "hi", "response_format": "pcm"}).encode()
    runtime.script = [Output("audio", tone(5)), StageDiedError("gone")]
    await wire.stream.send(
        b"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    with pytest.raises(h11.RemoteProtocolError, match="incomplete"):
        await wire.reply()
    errors: list[Any] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert errors == []
    assert "outcome=stage_died" in caplog.text


async def test_a_reply_that_fails_half_way_does_not_look_whole_to_http_1_0(
    runtime: ScriptedRuntime, address: Address
) -> None:
    """Its end is the end of the connection, so that must not be a quiet one."""
    body = json.dumps({"model": "tiny", "input": "hi", "response_format": "pcm"}).encode()
    runtime.script = [Output("audio", tone(5)), StageDiedError("gone")]
    async with await anyio.connect_tcp(address.host, address.port) as stream:
        head = b"POST /v1/audio/speech HTTP/1.0\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        await stream.send(head + body)
        with anyio.fail_after(HANGS_S), pytest.raises(anyio.BrokenResourceError):
            while True:
                await stream.receive()
    runtime.script = HELLO
    await works(address)


async def test_a_client_that_leaves_is_seen_behind_whatever_it_sent(runtime: ScriptedRuntime, address: Address) -> None:
    runtime.script = [Output("text", TextDelta("Hel")), anyio.Event()]
    async with await anyio.connect_tcp(address.host, address.port) as stream:
        await stream.send(VALID)
        with anyio.fail_after(HANGS_S):
            while not runtime.replies or not runtime.replies[0].num_taken:
                await anyio.sleep(0.001)
        await stream.send(b"\r\n")
        await anyio.sleep(0.05)  # it is read by itself, as from a client that pipelines
    with anyio.fail_after(HANGS_S):
        await runtime.replies[0].left.wait()
    runtime.script = HELLO
    await works(address)


# -- handshakes --------------------------------------------------------------------------------------------------------

UPGRADE = (
    b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


@pytest.mark.parametrize(
    "request_",
    [
        HEAD + b"content-length: 2\r\n" + UPGRADE + b"\r\n{}",
        b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\ncookie: " + b"y" * 9000 + b"\r\n" + UPGRADE + b"\r\n",
        b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nsec-websocket-protocol: \xe9\r\n" + UPGRADE + b"\r\n",
    ],
    ids=["post", "nine kilobytes of cookies", "not ascii"],
)
async def test_a_handshake_that_is_none_is_answered_and_closed(address: Address, wire: Wire, request_: bytes) -> None:
    """Else whoever may open a connection could take all descriptors."""
    await wire.stream.send(request_)
    with anyio.fail_after(HANGS_S):
        status, _, body = await wire.reply()
        assert status in (400, 431) and json.loads(body)["error"]["message"]
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                await wire.stream.receive()
    await works(address)
