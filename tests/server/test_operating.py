"""What an operator sets: TLS, origins of web pages, the log; and what both ends see of it."""

from __future__ import annotations

import io
import json
import logging
import re
import ssl
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
import openai
import pytest
import trustme
import websockets
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from omniflow.cli.serving import write_log
from omniflow.config import ServerConfig
from omniflow.errors import ConfigError, OverloadedError
from omniflow.runtime import Runtime
from omniflow.server.app import EXPOSED_HEADERS, build_app
from omniflow.server.exchange import Exchanges
from omniflow.server.keys import KeyCheck, Keys
from omniflow.server.logs import Fields, JsonFormatter
from omniflow.server.serve import serve, tls_context
from omniflow.telemetry import Metrics

from ..waiting import HANGS_S
from .scripted import ScriptedRuntime, parrot_plan

HI: Any = [{"role": "user", "content": "one two"}]
BODY = {"model": "tiny", "messages": HI}


def client_of(runtime: ScriptedRuntime | None = None, **config: Any) -> httpx.AsyncClient:
    app = build_app(runtime or ScriptedRuntime(), model="tiny", config=ServerConfig(**config))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://tiny")


# -- TLS ---------------------------------------------------------------------------------------------------------------


class Certificate(NamedTuple):
    chain: str
    key: str
    locked_key: str
    both: str
    trust: ssl.SSLContext


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """For localhost, by an authority that only `trust` knows."""
    from cryptography.hazmat.primitives import serialization

    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    issued = authority.issue_cert("localhost", "127.0.0.1", key_type=trustme.KeyType.ECDSA)
    issued.cert_chain_pems[0].write_to_path(folder / "chain.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    locked = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"open sesame"),
    )
    (folder / "locked.pem").write_bytes(locked)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    chain, key, locked_key, both = (str(folder / f"{name}.pem") for name in ("chain", "key", "locked", "both"))
    return Certificate(chain, key, locked_key, both, trust)


@pytest.mark.anyio
async def test_the_sdk_talks_over_tls_with_a_key(certificate: Certificate) -> None:
    config = ServerConfig(port=0, ssl_certfile=certificate.both, api_keys=("sesame",))
    async with (
        Runtime(parrot_plan()) as runtime,
        serve(build_app(runtime, model="p", config=config), config) as address,
    ):
        assert address.url.startswith("https://")
        http = openai.DefaultAsyncHttpxClient(verify=certificate.trust)
        async with openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key="sesame", http_client=http) as sdk:
            stream = await sdk.chat.completions.create(model="p", messages=HI, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "one two "
            spoken = await sdk.audio.speech.create(model="p", voice="a", input="hello", response_format="pcm")
            assert len(spoken.content) == 100
            with pytest.raises(openai.AuthenticationError) as refused:
                await sdk.with_options(api_key="wrong").chat.completions.create(model="p", messages=HI)
            assert refused.value.code == "invalid_api_key"
        # Who speaks no TLS gets no reply, and does no harm.
        async with httpx.AsyncClient(verify=certificate.trust, timeout=HANGS_S) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(address.url.replace("https", "http") + "/live")
            assert (await client.get(f"{address.url}/live")).status_code == 200


@pytest.mark.parametrize("name", ["chain", "both"])
def test_certificates_that_fit(certificate: Certificate, name: str) -> None:
    key = {"chain": certificate.key, "both": ""}[name]
    assert tls_context(ServerConfig(ssl_certfile=getattr(certificate, name), ssl_keyfile=key)) is not None
    locked = ServerConfig(
        ssl_certfile=certificate.chain, ssl_keyfile=certificate.locked_key, ssl_keyfile_password="open sesame"
    )
    assert tls_context(locked) is not None
    assert tls_context(ServerConfig()) is None


def test_certificates_that_do_not(certificate: Certificate, tmp_path: Path) -> None:
    (tmp_path / "none.pem").write_text("no certificate")
    for config, message in [
        (ServerConfig(ssl_keyfile=certificate.key), "set server.ssl_certfile"),
        (ServerConfig(ssl_certfile=str(tmp_path / "gone.pem")), "gone.pem for TLS: No such file"),
        (ServerConfig(ssl_certfile=str(tmp_path / "none.pem")), "none.pem for TLS"),
        (ServerConfig(ssl_certfile=certificate.chain), "does not fit"),
        (ServerConfig(ssl_certfile=certificate.chain, ssl_keyfile=certificate.locked_key), "password is wrong"),
    ]:
        with pytest.raises(ConfigError, match=message):
            tls_context(config)


# -- CORS --------------------------------------------------------------------------------------------------------------

PREFLIGHT = {
    "origin": "https://chat.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang,x-stainless-retry-count",
}


@pytest.mark.anyio
@pytest.mark.parametrize("origins", [("https://chat.example",), ("*",)])
async def test_a_web_page_may_call_where_its_origin_is_listed(origins: tuple[str, ...]) -> None:
    runtime = ScriptedRuntime()
    async with client_of(runtime, cors_origins=origins, api_keys=("k",)) as client:
        asked = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (
            asked.status_code == 200
            and asked.headers["access-control-allow-headers"] == (PREFLIGHT["access-control-request-headers"])
        )
        assert "POST" in asked.headers["access-control-allow-methods"] and "x-request-id" in asked.headers
        origin = {"origin": "https://chat.example"}
        allowed = {"*", "https://chat.example"}
        runtime.script = [KeyError("bug")]
        for headers, status in ((origin, 401), (origin | {"authorization": "Bearer k"}, 500)):
            response = await client.post("/v1/chat/completions", json=BODY, headers=headers)
            assert response.status_code == status and response.headers["access-control-allow-origin"] in allowed
            assert response.headers["access-control-expose-headers"] == ", ".join(EXPOSED_HEADERS)


@pytest.mark.anyio
async def test_other_web_pages_may_not() -> None:
    async with client_of(cors_origins=("https://chat.example",)) as client:
        other = PREFLIGHT | {"origin": "https://evil.example"}
        asked = await client.options("/v1/chat/completions", headers=other)
        assert asked.status_code == 400 and "access-control-allow-origin" not in asked.headers
        assert asked.json()["error"]["message"] == "Disallowed CORS origin" and "Origin" in asked.headers["vary"]
        reply = await client.post("/v1/chat/completions", json=BODY, headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in reply.headers
    async with client_of() as client:
        asked = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert asked.status_code == 405 and asked.json()["error"]["code"] == "method_not_allowed"
        assert "access-control-allow-origin" not in asked.headers


# -- headers and the log -----------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_every_reply_says_its_id_and_its_time() -> None:
    async with client_of() as client:
        for reply in [await client.post("/v1/chat/completions", json=BODY), await client.get("/nowhere")]:
            assert reply.headers["x-request-id"].startswith("req_")
            assert int(reply.headers["openai-processing-ms"]) >= 0


@pytest.mark.anyio
async def test_when_to_come_back_is_said_to_the_millisecond() -> None:
    runtime = ScriptedRuntime()
    runtime.refusal = OverloadedError("full", retry_after_s=1.25)
    async with client_of(runtime) as client:
        reply = await client.post("/v1/chat/completions", json=BODY)
    assert (reply.status_code, reply.headers["retry-after"], reply.headers["retry-after-ms"]) == (429, "2", "1250")
    assert reply.headers["x-should-retry"] == "true"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("headers", "logged"),
    [
        ({"x-request-id": "trace-1"}, "trace-1"),
        ({"x-client-request-id": "a/b:c", "x-request-id": "other"}, "a/b:c"),
        ({"x-request-id": "two words"}, None),
        ({"x-request-id": "x" * 129}, None),
        ({"x-request-id": 'forged" outcome=ok'}, None),
        ({}, None),
    ],
)
async def test_the_clients_own_id_is_logged_and_not_worked_under(
    caplog: pytest.LogCaptureFixture, headers: dict[str, str], logged: str | None
) -> None:
    caplog.set_level(logging.INFO, "omniflow.access")
    runtime = ScriptedRuntime()
    async with client_of(runtime) as client:
        reply = await client.post("/v1/chat/completions", json=BODY, headers=headers)
    assert reply.headers["x-request-id"] == runtime.submissions[0].request_id != headers.get("x-request-id")
    (line,) = [message for message in caplog.messages if "path=" in message]
    assert (f" client_request_id={logged}" in line) if logged else ("client_request_id" not in line)
    assert "query" not in line


@pytest.mark.anyio
@pytest.mark.parametrize(("trusted", "logged"), [(("127.0.0.1",), "10.1.2.3"), ((), "127.0.0.1")])
async def test_the_address_that_a_trusted_proxy_tells_is_logged(
    caplog: pytest.LogCaptureFixture, trusted: tuple[str, ...], logged: str
) -> None:
    caplog.set_level(logging.INFO, "omniflow.access")
    config = ServerConfig(port=0, trusted_proxies=trusted)
    app = build_app(ScriptedRuntime(), model="tiny", config=config)  # type: ignore[arg-type]
    async with serve(app, config) as address, httpx.AsyncClient(timeout=HANGS_S) as client:
        await client.get(f"{address.url}/nowhere", headers={"x-forwarded-for": "10.1.2.3"})
    assert [f" client={logged}" in line for line in caplog.messages if "path=/nowhere" in line] == [True]


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        (ServerConfig(), r"\d\d:\d\d:\d\d\.\d{3} INFO omniflow.access: status=200 path=-\n"),
        (ServerConfig(log_format="json"), r'\{"time": "[^"]+Z", "level": "info", .*"status": 200, "path": null\}\n'),
        (ServerConfig(access_log=False), ""),
    ],
)
def test_the_log_is_written_as_configured(monkeypatch: pytest.MonkeyPatch, config: ServerConfig, pattern: str) -> None:
    written, access = io.StringIO(), logging.getLogger("omniflow.access")
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(written)])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    level = access.level
    try:
        write_log(config)
        access.info("%s", Fields({"status": 200, "path": None}))
        access.debug("a probe")
    finally:
        access.setLevel(level)
    assert re.fullmatch(pattern, written.getvalue())


def test_json_lines() -> None:
    def formatted(message: str, *args: object, **more: Any) -> dict[str, Any]:
        record = logging.LogRecord("omniflow.x", logging.WARNING, __file__, 1, message, args, **more)
        (line,) = JsonFormatter().format(record).splitlines()
        return dict(json.loads(line))

    fields = formatted("%s", Fields({"path": "/v1", "status": None, "ms": 1.5}), exc_info=None)
    assert fields["path"] == "/v1" and fields["status"] is None and fields["ms"] == 1.5
    assert fields["logger"] == "omniflow.x" and fields["level"] == "warning" and fields["time"].endswith("Z")
    assert formatted("a %s\n\ud800", "b", exc_info=None)["message"] == "a b\n\ud800"
    error = KeyError("why")
    assert "KeyError: 'why'" in formatted("x", exc_info=(KeyError, error, None))["traceback"]
    assert str(Fields({"a": 1, "b": None})) == "a=1 b=-"


# -- WebSockets --------------------------------------------------------------------------------------------------------


def echo_app(keys: Keys) -> Exchanges:
    """One WebSocket behind what every route stands behind."""

    async def echo(socket: WebSocket) -> None:
        await socket.accept(subprotocol="realtime" if "realtime" in socket.scope["subprotocols"] else None)
        if await socket.receive_text() == "leave":
            await socket.close(1013)
        else:
            await socket.receive_text()

    app = Starlette(routes=[WebSocketRoute("/echo", echo)])
    return Exchanges(KeyCheck(app, keys), Metrics(ScriptedRuntime().status))


@pytest.mark.anyio
async def test_a_websocket_needs_a_key_by_header_subprotocol_or_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "omniflow.access")
    keys = Keys(["sesame"])
    secret = keys.issue(60).value
    async with serve(echo_app(keys), port=0) as address:
        url = f"ws://{address.host}:{address.port}/echo"
        refusals: list[dict[str, Any]] = [{}, {"subprotocols": ["realtime", "openai-insecure-api-key.no"]}]
        for refused in refusals:
            with pytest.raises(websockets.InvalidStatus) as caught:
                async with websockets.connect(url, **refused):
                    pass
            assert caught.value.response.status_code == 401
            assert json.loads(caught.value.response.body)["error"]["code"] == "invalid_api_key"
            assert caught.value.response.headers["x-request-id"].startswith("req_")
        welcome: list[dict[str, Any]] = [
            {"additional_headers": {"authorization": "Bearer sesame"}},
            {"additional_headers": {"authorization": f"Bearer {secret}"}},
            {"subprotocols": ["realtime", "openai-insecure-api-key.sesame"]},
            {"subprotocols": ["realtime", f"openai-insecure-api-key.{secret}"]},
        ]
        for accepted in welcome:
            async with websockets.connect(url, **accepted) as socket:
                assert socket.response is not None and socket.response.headers["x-request-id"].startswith("req_")
                assert socket.subprotocol == ("realtime" if "subprotocols" in accepted else None)
        async with websockets.connect(url, additional_headers={"authorization": "Bearer sesame"}) as socket:
            await socket.send("leave")
            await socket.wait_closed()
            assert socket.close_code == 1013
        with anyio.fail_after(HANGS_S):
            while len(lines := [line for line in caplog.messages if "path=/echo" in line]) < 7:
                await anyio.sleep(0.01)
    assert [line.split("status=")[1].split(" ")[0] for line in lines[:2]] == ["401", "401"]
    assert all("method=WS" in line and "status=101 outcome=ok" in line for line in lines[2:])
    assert "close=1000" in lines[2] and "close=1013" in lines[6]
