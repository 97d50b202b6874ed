from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from omniflow.actor import Actor, Emit, NamedVoice, Stream
from omniflow.graph import Graph
from omniflow.loader import load_graph
from omniflow.media import AudioChunk, TextDelta
from omniflow.planner import Cluster, Plan, cluster_named, plan
from omniflow.runtime import Output
from omniflow.server.app import build_app
from omniflow.server.service import STOCK_VOICES
from omniflow.server.voices import voices_of

from .scripted import ScriptedRuntime, tone

pytestmark = pytest.mark.anyio


class Choir(Actor):
    """Has as many voices as it is told."""

    def __init__(self, *, size: int = 2) -> None:
        self._size = size

    def voices(self) -> Sequence[NamedVoice]:
        return [NamedVoice(name, "en-GB") for name in ("ann", "bob", "cyd")[: self._size]]

    async def run(self, texts: Stream[TextDelta], audio: Emit[AudioChunk]) -> None:
        raise AssertionError("the runtime is scripted")


def choir_plan(**settings: object) -> Plan:
    graph = Graph("choir")
    choir = graph.stage("choir", Choir, **settings)
    graph.input(speech=choir)
    graph.output(audio=choir)
    return plan(graph.spec(), Cluster("test", cpu_cores=2, memory_bytes=2**30, single_process=True))


@pytest.fixture
def runtime() -> ScriptedRuntime:
    return ScriptedRuntime([Output("audio", tone(8))], choir_plan())


@pytest.fixture
async def client(runtime: ScriptedRuntime) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(runtime, model="choir")  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://choir") as client:
        yield client


async def say(client: httpx.AsyncClient, voice: object) -> httpx.Response:
    body = {"model": "choir", "input": "Hello.", "response_format": "pcm", "voice": voice}
    return await client.post("/v1/audio/speech", json=body)


async def test_the_list_says_what_the_talker_has(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/audio/voices")).json()
    assert listed == {
        "object": "list",
        "data": [{"id": name, "name": name, "language": "en-GB", "object": "audio.voice"} for name in ("ann", "bob")],
        "voices": ["ann", "bob"],
        "uploaded_voices": [],
    }


def test_settings_decide_and_absent_stages_have_no_voice() -> None:
    assert [voice.name for voice in voices_of(choir_plan(size=3))] == ["ann", "bob", "cyd"]
    assert voices_of(ScriptedRuntime().plan) == ()
    assert voices_of(plan(load_graph("ming_omni").spec(), cluster_named("cpu"))) == (NamedVoice("joe", "en-US"),)


@pytest.mark.parametrize("voice", ["bob", {"id": "bob"}])
async def test_a_voice_is_passed_on(client: httpx.AsyncClient, runtime: ScriptedRuntime, voice: object) -> None:
    assert (await say(client, voice)).status_code == 200
    assert runtime.submissions[0].options is not None and runtime.submissions[0].options.voice == "bob"


async def test_stock_names_are_the_default_voice(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    for voice in (*sorted(STOCK_VOICES), None):
        assert (await say(client, voice)).status_code == 200
    chosen = [submission.options and submission.options.voice for submission in runtime.submissions]
    assert chosen == ["ann"] * len(STOCK_VOICES) + [None]


async def test_an_unknown_voice_is_refused_with_those_that_there_are(
    client: httpx.AsyncClient, runtime: ScriptedRuntime
) -> None:
    for voice in ("zoe", "Ann", {"id": "zoe"}):
        response = await say(client, voice)
        assert response.status_code == 400 and response.json()["error"]["param"] == "voice"
        assert "there are ann, bob" in response.json()["error"]["message"]
    assert not runtime.submissions
    assert (await say(client, "ann")).status_code == 200


async def test_a_talker_without_a_list_takes_any_name() -> None:
    runtime = ScriptedRuntime([Output("audio", tone(8))])
    transport = httpx.ASGITransport(build_app(runtime, model="choir"))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://choir") as client:
        assert (await client.get("/v1/audio/voices")).json()["data"] == []
        assert (await say(client, "zoe")).status_code == 200
    assert runtime.submissions[0].options is not None and runtime.submissions[0].options.voice == "zoe"


async def test_voices_cannot_be_added_or_taken_away(client: httpx.AsyncClient) -> None:
    files = {"audio_sample": ("me.wav", b"RIFF", "audio/wav")}
    upload = await client.post("/v1/audio/voices", data={"name": "me", "consent": "yes"}, files=files)
    assert upload.status_code == 400 and upload.json()["error"]["code"] == "unsupported_value"
    assert "cannot learn" in upload.json()["error"]["message"]
    assert (await client.post("/v1/audio/voices")).status_code == 400
    kept = await client.delete("/v1/audio/voices/ann")
    assert kept.status_code == 400 and "cannot be deleted" in kept.json()["error"]["message"]
    unknown = await client.delete("/v1/audio/voices/zoe")
    assert unknown.status_code == 404 and "there are ann, bob" in unknown.json()["error"]["message"]
    assert (await client.get("/v1/audio/voices")).json()["voices"] == ["ann", "bob"]
