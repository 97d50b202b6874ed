"""API keys and client secrets: who gets in, and what those see who do not."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from omniflow.config import ServerConfig
from omniflow.server.app import build_app
from omniflow.server.failures import AuthenticationError
from omniflow.server.keys import Keys, key_of

from .scripted import ScriptedRuntime

HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def client_of(**config: Any) -> httpx.AsyncClient:
    app = build_app(ScriptedRuntime(), model="tiny", config=ServerConfig(**config))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.anyio
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(""), {"authorization": "Basic b25l"}, bearer("on")])
async def test_nobody_gets_in_without_a_key(headers: dict[str, str]) -> None:
    async with client_of(api_keys=("one", "two")) as client:
        for method, path in [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/nowhere")]:
            response = await client.request(method, path, headers=headers)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert error["code"] == "invalid_api_key" and error["type"] == "invalid_request_error"
            assert response.headers["x-request-id"].startswith("req_") and "x-should-retry" not in response.headers
        assert (await client.get("/v1/models", headers=bearer("two"))).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_each_key_opens(scheme: str) -> None:
    async with client_of(api_keys=("one", "two")) as client:
        for key in ("one", "two"):
            headers = {"authorization": f"{scheme} {key}"}
            assert (await client.post("/v1/chat/completions", json=HI, headers=headers)).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize(("guarded", "status"), [(False, 200), (True, 401)])
async def test_probes_need_no_key_and_metrics_as_configured(guarded: bool, status: int) -> None:
    async with client_of(api_keys=("one",), guard_metrics=guarded) as client:
        for path in ("/live", "/ready", "/health"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/metrics")).status_code == status
        assert (await client.get("/metrics", headers=bearer("one"))).status_code == 200


@pytest.mark.anyio
async def test_without_keys_all_may_call() -> None:
    async with client_of() as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/v1/models", headers=bearer("any"))).status_code == 200


def test_a_client_secret_opens_what_secrets_may_until_it_expires() -> None:
    now = [1000.0]
    keys = Keys(["one"], clock=lambda: now[0])
    issued = keys.issue(60, b'{"type":"realtime"}')
    assert issued.value.startswith("ek_") and issued.expires_at == 1060
    keys.check(issued.value, secret=True)
    assert keys.secret(issued.value) == issued and keys.secret("ek_other") is None and keys.secret(None) is None
    with pytest.raises(AuthenticationError):
        keys.check(issued.value)
    now[0] = 1060
    assert keys.secret(issued.value) is None
    with pytest.raises(AuthenticationError):
        keys.check(issued.value, secret=True)


def test_secrets_are_bounded() -> None:
    keys = Keys(["one"], max_secrets=2)
    first, second, third = (keys.issue(60).value for _ in range(3))
    assert keys.secret(first) is None and keys.secret(second) and keys.secret(third)


@pytest.mark.parametrize(
    ("scope", "key"),
    [
        ({"headers": [(b"authorization", b"Bearer abc")]}, "abc"),
        ({"headers": [], "subprotocols": ["realtime", "openai-insecure-api-key.abc", "x"]}, "abc"),
        ({"headers": [(b"authorization", b"Bearer abc")], "subprotocols": ["openai-insecure-api-key.no"]}, "abc"),
        ({"headers": [], "subprotocols": ["openai-insecure-api-key."]}, None),
        ({"headers": []}, None),
    ],
)
def test_where_a_key_is_looked_for(scope: dict[str, Any], key: str | None) -> None:
    assert key_of(scope) == key
