from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from omniflow.engine.stats import EngineStats
from omniflow.errors import StageDiedError
from omniflow.graph import Graph, absent
from omniflow.planner import Cluster, Plan, plan
from omniflow.runtime import State
from omniflow.server.app import build_app

from .scripted import Hum, Parrot, ScriptedRuntime, parrot_plan, stage_status

pytestmark = pytest.mark.anyio
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
SAY = {"model": "tiny", "input": "Hello.", "response_format": "pcm"}


ALOUD = HI | {"modalities": ["text", "audio"]}
CLUSTER = Cluster("test", cpu_cores=2, memory_bytes=2**30, single_process=True)


def mute_plan() -> Plan:
    """A profile that has no model for the stage that speaks."""
    graph = Graph("mute")
    parrot, hum = graph.stage("parrot", Parrot), graph.stage("hum", Hum)
    graph.stream(parrot["text"], hum)
    graph.input(chat=parrot)
    graph.output(text=parrot["text"], usage=parrot["result"], audio=hum)
    graph.profile("mute", "for tests", hum=absent("it lost its voice"))
    return plan(graph.spec(), CLUSTER)


def client_of(runtime: ScriptedRuntime) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(runtime, model="tiny"))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://tiny")


async def test_models(client: httpx.AsyncClient) -> None:
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert model["id"] == "tiny" and model["object"] == "model" and isinstance(model["created"], int)
    assert (await client.get("/v1/models/tiny")).json() == model
    assert (await client.get("/v1/models/tiny-alias")).json() == model
    missing = await client.get("/v1/models/some/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/chat", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_what_is_not_there(client: httpx.AsyncClient, method: str, path: str, status: int, code: str) -> None:
    response = await client.request(method, path)
    assert response.status_code == status and response.json()["error"]["code"] == code
    assert response.headers["x-request-id"].startswith("req_")
    if status == 405:
        assert response.headers.get_list("allow") == ["POST" if "chat" in path else "GET, HEAD"]


@pytest.mark.parametrize(
    ("plan", "path", "body", "reason", "param"),
    [
        (parrot_plan(inputs=["chat"]), "/v1/audio/speech", SAY, "no input 'speech', only chat", None),
        (parrot_plan(inputs=["speech"]), "/v1/chat/completions", HI, "no input 'chat', only speech", None),
        (parrot_plan(outputs=["text"]), "/v1/audio/speech", SAY, "no input 'speech'", None),
        (parrot_plan(outputs=["text"]), "/v1/chat/completions", ALOUD, "from chat it gives text, usage", "modalities"),
        (mute_plan(), "/v1/chat/completions", ALOUD, "gives no audio: it lost its voice", "modalities"),
    ],
)
async def test_what_the_graph_lacks_is_refused_with_the_reason(
    plan: Plan, path: str, body: dict[str, Any], reason: str, param: str | None
) -> None:
    async with client_of(ScriptedRuntime(plan=plan)) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["code"] == "unsupported_value"
    assert reason in response.json()["error"]["message"] and response.json()["error"]["param"] == param


async def test_a_graph_that_counts_no_tokens_still_answers() -> None:
    graph = Graph("uncounted")
    parrot = graph.stage("parrot", Parrot)
    graph.input(chat=parrot)
    graph.output(text=parrot["text"])
    async with client_of(ScriptedRuntime(plan=plan(graph.spec(), CLUSTER))) as client:
        body = (await client.post("/v1/chat/completions", json=HI)).json()
    assert body["usage"] is None and body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("state", "talker", "live", "ready", "reason"),
    [
        ("ready", "ready", 200, 200, None),
        ("starting", "starting", 200, 503, "stage 'talker' is starting"),
        ("ready", "down", 200, 503, "stage 'talker' is down"),
        ("draining", "ready", 200, 503, "the runtime is draining"),
        ("failed", "failed", 503, 503, "stage 'talker' is failed"),
    ],
)
async def test_health_names_what_is_down(
    client: httpx.AsyncClient,
    runtime: ScriptedRuntime,
    state: State,
    talker: str,
    live: int,
    ready: int,
    reason: str | None,
) -> None:
    runtime.state = state
    runtime.stages = (stage_status("thinker", "host0"), stage_status("talker", "host1", talker, 2))
    assert (await client.get("/live")).status_code == live
    assert (await client.get("/ready")).status_code == ready
    health = await client.get("/health")
    assert health.status_code == ready and health.json()["reason"] == reason
    assert health.json()["stages"][1] == {
        "name": "talker",
        "host": "host1",
        "state": talker,
        "restarts": 2,
        "in_flight": 0,
        "running": 0,
        "queued": 0,
        "pid": None,
        "engine": None,
    }
    readiness = (await client.get("/ready")).json()
    assert readiness == {key: value for key, value in health.json().items() if key in readiness} | {
        "stages": [
            {key: value for key, value in stage.items() if key not in ("host", "pid", "engine")}
            for stage in health.json()["stages"]
        ]
    }
    assert set(health.json()) - set(readiness) == {"model", "graph"}


async def samples(client: httpx.AsyncClient) -> dict[str, float]:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        sample.name + "".join(f"|{value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def test_metrics(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    runtime.stages = (stage_status("thinker", "host0"), stage_status("talker", "host1", "down", 2))
    await client.post("/v1/chat/completions", json=HI | {"modalities": ["text", "audio"]})
    await client.post("/v1/chat/completions", json=HI | {"temperature": 9})
    await client.post("/v1/audio/speech", json=SAY)
    runtime.script = [*runtime.script[:2], StageDiedError("killed")]
    await client.post("/v1/chat/completions", json=HI | {"stream": True})
    found = await samples(client)
    assert found["omniflow_requests_total|chat.completions|ok"] == 1
    assert found["omniflow_requests_total|chat.completions|invalid_value"] == 1
    assert found["omniflow_requests_total|chat.completions|stage_died"] == 1
    assert found["omniflow_requests_total|audio.speech|ok"] == 1
    assert found["omniflow_ttft_seconds_count|chat.completions"] == 2
    assert found["omniflow_ttfa_seconds_count|chat.completions"] == 1
    assert found["omniflow_itl_seconds_count|chat.completions"] == 1
    assert found["omniflow_rtf_count|audio.speech"] == 1
    assert found["omniflow_requests_in_flight"] == 0 and found["omniflow_ready"] == 1
    assert found["omniflow_stage_up|host0|thinker"] == 1 and found["omniflow_stage_up|host1|talker"] == 0
    assert found["omniflow_stage_restarts_total|host1|talker"] == 2


async def test_what_engines_hold(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    holds = EngineStats(3, 2, 700, 16384)
    runtime.stages = (stage_status("thinker", "host0", engine=holds), stage_status("vocoder", "host0"))
    health = (await client.get("/health")).json()
    assert [stage["engine"] for stage in health["stages"]] == [
        {"num_running": 3, "num_waiting": 2, "kv_tokens_used": 700, "kv_tokens_total": 16384},
        None,
    ]
    found = {name: value for name, value in (await samples(client)).items() if name.startswith("omniflow_engine_")}
    assert found == {
        "omniflow_engine_running|host0|thinker": 3,
        "omniflow_engine_waiting|host0|thinker": 2,
        "omniflow_engine_kv_tokens_used|host0|thinker": 700,
        "omniflow_engine_kv_tokens_capacity|host0|thinker": 16384,
    }


async def test_two_apps_share_no_metrics(client: httpx.AsyncClient) -> None:
    await client.post("/v1/chat/completions", json=HI)
    async with client_of(ScriptedRuntime()) as other:
        assert "omniflow_requests_total|chat.completions|ok" not in await samples(other)


async def test_one_line_a_request_in_the_log(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, runtime: ScriptedRuntime
) -> None:
    caplog.set_level(logging.INFO, "omniflow.access")
    response = await client.post("/v1/chat/completions", json=HI | {"modalities": ["text", "audio"]})
    await client.get("/health")
    await client.get("/a%0Ab%20c")
    runtime.script = [KeyError("bug")]
    await client.post("/v1/audio/speech", json=SAY)
    ours = [dict(pair.split("=", 1) for pair in line.split(" ")) for line in caplog.messages if "path=" in line]
    assert [line["path"] for line in ours] == ["/v1/chat/completions", "/a%0Ab%20c", "/v1/audio/speech"]
    assert [line["outcome"] for line in ours] == ["ok", "not_found", "internal_error"]
    assert ours[0]["request_id"] == response.headers["x-request-id"] and float(ours[0]["ttfa_ms"]) >= 0
