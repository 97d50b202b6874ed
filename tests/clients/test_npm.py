"""npm's openai and @openai/agents-realtime, unmodified."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import KEY, ROOT, Served, free_port, running

MODULES = ROOT / ".venv-clients/node_modules"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(not (MODULES / "openai").exists(), reason="npm's clients are not installed: make test-clients"),
]


def run(program: str, served: Served, **environment: str) -> Any:
    """What a program of tests/clients/npm prints."""
    told = {"BASE_URL": served.base_url, "API_KEY": served.key, "MODEL": served.model, "NODE_PATH": str(MODULES)}
    ran = subprocess.run(
        ["node", ROOT / "tests/clients/npm" / program],
        env=os.environ | told | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0 and ran.stdout, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_http(real: Served) -> None:
    got = run("http.cjs", real)
    assert got["models"] == ["ming_omni"] and got["whole"] and got["whole"] == got["streamed"] == got["transcript"]
    assert got["usage"][0] == got["usage"][1] > 0
    assert got["sound"] > 4800 and got["wav"] == "RIFF" and "meeting" in got["heard"].lower()
    assert got["errors"] == [
        ["NotFoundError", 404, "model_not_found", "model", True],
        ["BadRequestError", 400, "invalid_value", "temperature", True],
        ["AuthenticationError", 401, "invalid_api_key", None, True],
    ]


def test_tools(caller: Served) -> None:
    assert run("tools.cjs", caller)["answers"] == ["It is sunny in Paris."] * 2


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """The real server over TLS, and the certificate of the authority that it is to be trusted by."""
    trustme = pytest.importorskip("trustme", reason="trustme is not installed: make test-clients")
    folder = tmp_path_factory.mktemp("secure")
    authority, port = trustme.CA(), free_port()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    command = ["-m", "omniflow", "run", "graphs/ming_omni.py", "--port", str(port)]
    url = f"https://localhost:{port}"
    trust = ssl.create_default_context(cafile=folder / "ca.pem")
    with running([*command, "--ssl-certfile", str(folder / "both.pem")], url, folder / "log.txt", trust):
        yield Served(f"{url}/v1", "ming_omni", KEY), folder / "ca.pem"


def test_realtime(secure: tuple[Served, Path]) -> None:
    served, authority = secure
    got = run("realtime.cjs", served, NODE_EXTRA_CA_CERTS=str(authority))
    by_socket, by_agent = got["byWebSocket"], got["byAgent"]
    assert by_socket["types"][:2] == ["session.created", "session.updated"] and by_socket["text"]
    assert by_socket["types"][-1] == "response.done" and by_socket["status"] in ("completed", "incomplete")
    assert by_agent["sound"] > 4800 and by_agent["output"] and by_agent["history"] == ["user", "assistant"]
