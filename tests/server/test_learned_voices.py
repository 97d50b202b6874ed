"""Voices that are learned from recordings: over /v1/audio/speech, and uploaded to /v1/audio/voices."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence

import anyio
import httpx
import msgspec
import pytest

from omniflow.actor import Actor, Emit, NamedVoice, Stream
from omniflow.config import ServerConfig
from omniflow.errors import InvalidInputError, StageDiedError
from omniflow.graph import Graph
from omniflow.media import AudioChunk, Options, TextDelta, VoiceCode, VoiceSample
from omniflow.planner import Cluster, Plan, plan
from omniflow.runtime import Output
from omniflow.server.app import build_app
from omniflow.server.learned import MAX_SAMPLE_BYTES, LearnedVoices, NamedCode
from omniflow.server.remote import Fetched, RemoteMedia
from omniflow.topology import absent

from .scripted import HELLO, Parrot, ScriptedRuntime, tone

pytestmark = pytest.mark.anyio
SOUND = b"RIFF a recording"
URI = "data:audio/wav;base64," + base64.b64encode(SOUND).decode()
LEARNED = [Output("voice", VoiceCode(b"a code", 2.0))]


class Singer(Actor):
    """Has one voice, and what it sings is in the script."""

    def voices(self) -> Sequence[NamedVoice]:
        return [NamedVoice("ann", "en-GB")]

    async def run(self, texts: Stream[TextDelta], audio: Emit[AudioChunk]) -> None: ...


class Learner(Actor):
    """Declares that voices are learned."""

    async def run(self, sample: VoiceSample) -> VoiceCode:
        raise AssertionError("the runtime is scripted")


def singing(learns: str | None = None) -> Plan:
    """A graph that chats, speaks and learns; or does not, for the reason given."""
    graph = Graph("singing")
    parrot, singer, learner = (
        graph.stage("parrot", Parrot),
        graph.stage("singer", Singer),
        graph.stage("learn", Learner),
    )
    graph.stream(parrot["text"], singer)
    graph.input(chat=parrot, speech=singer, voice=learner)
    graph.output(text=parrot["text"], usage=parrot["result"], audio=singer, voice=learner)
    spec = graph.spec()
    if learns is not None:
        graph.profile("mute", "for tests", learn=absent(learns))
        spec = graph.spec("mute")
    return plan(spec, Cluster("test", cpu_cores=2, memory_bytes=2**30, single_process=True))


@pytest.fixture
def runtime() -> ScriptedRuntime:
    return ScriptedRuntime([Output("audio", tone(8)), *LEARNED, *HELLO], singing())


@pytest.fixture
async def client(runtime: ScriptedRuntime) -> AsyncIterator[httpx.AsyncClient]:
    async with to(runtime) as client:
        yield client


def to(runtime: ScriptedRuntime) -> httpx.AsyncClient:
    app = build_app(runtime, model="tiny")  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://tiny")


async def say(client: httpx.AsyncClient, **fields: object) -> httpx.Response:
    return await client.post(
        "/v1/audio/speech", json={"model": "tiny", "input": "Hi.", "response_format": "pcm"} | fields
    )


async def upload(client: httpx.AsyncClient, data: bytes = SOUND, **fields: str) -> httpx.Response:
    files = {"audio_sample": ("me.wav", data, "audio/wav")}
    return await client.post("/v1/audio/voices", data={"name": "me", "consent": "yes"} | fields, files=files)


def submitted(runtime: ScriptedRuntime, entry: str) -> list[Options | None]:
    return [each.options for each in runtime.submissions if each.entry == entry]


@pytest.mark.parametrize("given", [URI, base64.b64encode(SOUND).decode()])
async def test_a_recording_is_learned_and_spoken_with(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, given: str
) -> None:
    assert (await say(client, ref_audio=given, ref_text="What I say.", voice="zoe", seed=3)).status_code == 200
    first, second = runtime.submissions
    assert (first.entry, first.value) == ("voice", VoiceSample(SOUND, "ref_audio"))
    assert second.entry == "speech"
    assert second.options == Options(voice_code=b"a code", voice_text="What I say.", seed=3)
    assert first.request_id != second.request_id


async def test_the_same_recording_is_heard_once(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    """By eight at the same time, and by who comes later; another one is another."""
    heard = anyio.Event()
    runtime.scripts = [[heard, *LEARNED]]
    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(lambda: say(client, ref_audio=URI))
        while not runtime.submissions:
            await anyio.lowlevel.checkpoint()
        heard.set()
    await say(client, ref_audio=URI, ref_text="other words")
    assert len(submitted(runtime, "voice")) == 1 and len(submitted(runtime, "speech")) == 9
    await say(client, ref_audio=base64.b64encode(b"another").decode())
    assert len(submitted(runtime, "voice")) == 2


async def test_what_cannot_be_heard_is_told_and_the_next_is_served(
    client: httpx.AsyncClient, runtime: ScriptedRuntime
) -> None:
    for error, status in (
        (InvalidInputError("ref_audio: no sound", param="ref_audio"), 400),
        (StageDiedError("gone"), 503),
    ):
        runtime.scripts = [[error]]
        response = await say(client, ref_audio=URI)
        assert response.status_code == status
        assert not submitted(runtime, "speech")
    assert (await say(client, ref_audio=URI)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"ref_text": "words"}, "ref_text", "needs ref_audio"),
        ({"ref_audio": URI, "ref_text": " "}, "ref_text", "is empty"),
        ({"ref_audio": ""}, "ref_audio", "is empty"),
        ({"ref_audio": "file:///etc/passwd"}, "ref_audio", "is not base64"),
        ({"ref_audio": "data:text/plain;base64,AAAA"}, "ref_audio", "expected a data URI like data:audio/"),
        ({"ref_audio": "http://example.org/me.wav"}, "ref_audio", "this server fetches no media"),
        ({"ref_audio": "A" * (MAX_SAMPLE_BYTES // 3 * 4 + 8)}, "ref_audio", "at most 10485760 are taken"),
    ],
)
async def test_recordings_that_are_none_are_refused(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, fields: dict[str, str], param: str, message: str
) -> None:
    response = await say(client, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and message in error["message"]
    assert not runtime.submissions


async def test_a_recording_by_url_is_fetched(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(self: RemoteMedia, wanted: Sequence[object], deadline_s: float | None = None) -> dict[str, Fetched]:
        return {each.url: Fetched("audio/wav", SOUND) for each in wanted}  # type: ignore[attr-defined]

    monkeypatch.setattr(RemoteMedia, "fetch", fetch)
    app = build_app(runtime, model="tiny", config=ServerConfig(remote_media=True))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny") as fetching:
        assert (await say(fetching, ref_audio="https://example.org/me.wav")).status_code == 200
    assert runtime.submissions[0].value == VoiceSample(SOUND, "ref_audio")


async def test_items_of_a_batch_have_voices_of_their_own(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    items = [{"input": "1"}, {"input": "2", "voice": "ann"}, {"input": "3", "ref_text": "words"}]
    batch = {"model": "tiny", "items": items, "ref_audio": URI, "ref_text": "what is said"}
    results = (await client.post("/v1/audio/speech/batch", json=batch)).json()["results"]
    assert [(each["status"], each["param"]) for each in results[:2]] == [("success", None)] * 2
    assert results[2]["param"] == "items[2].ref_text"
    spoken = submitted(runtime, "speech")
    assert {(each.voice, each.voice_code, each.voice_text) for each in spoken if each is not None} == {
        (None, b"a code", "what is said"),
        ("ann", None, ""),
    }


async def test_an_upload_is_a_voice_like_others(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    created = (await upload(client, ref_text=" What I say. ", speaker_description="calm")).json()
    assert (created["id"], created["object"], created["success"]) == ("me", "audio.voice", True)
    assert created["voice"]["file_size"] == len(SOUND) and created["voice"]["speaker_description"] == "calm"
    listed = (await client.get("/v1/audio/voices")).json()
    assert listed["voices"] == ["ann", "me"] and [each["name"] for each in listed["uploaded_voices"]] == ["me"]
    schema = (await client.get("/openapi.json")).json()["components"]["schemas"]["SpeechRequest"]["properties"]
    assert "me" in schema["voice"]["anyOf"][0]["enum"] and schema["ref_audio"]["anyOf"][0] == {"type": "string"}
    assert (await say(client, voice="me")).status_code == (await say(client, voice={"id": "me"})).status_code == 200
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "modalities": ["text", "audio"]}
    answer = await client.post("/v1/chat/completions", json=chat | {"audio": {"voice": "me", "format": "wav"}})
    assert answer.status_code == 200
    whom = [*submitted(runtime, "speech"), *submitted(runtime, "chat")]
    assert [(each.voice, each.voice_code, each.voice_text) for each in whom if each is not None] == [
        (None, b"a code", "What I say.")
    ] * 3
    assert (await client.delete("/v1/audio/voices/me")).json()["deleted"] is True
    refused = await say(client, voice="me")
    assert refused.status_code == 400 and "there are ann" in refused.json()["error"]["message"]
    assert (await client.delete("/v1/audio/voices/me")).status_code == 404
    assert (await client.delete("/v1/audio/voices/ann")).status_code == 400


@pytest.mark.parametrize("name", ["ann", "alloy", "", " me", "a/b", "x" * 65])
async def test_names_that_cannot_be_given(client: httpx.AsyncClient, runtime: ScriptedRuntime, name: str) -> None:
    response = await upload(client, name=name)
    assert response.status_code == 400 and response.json()["error"]["param"] == "name"
    assert not runtime.submissions


async def test_the_rule_for_names_is_said_in_words(client: httpx.AsyncClient) -> None:
    message = (await upload(client, name="a/b")).json()["error"]["message"]
    assert message == (
        "name: expected 1 to 64 characters in one line, none of them a slash, with no space at either end"
    )


@pytest.mark.parametrize("path", ["/v1/audio/voices", "/v1/audio/transcriptions"])
async def test_json_where_a_form_is_wanted(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={"name": "me"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "expected a form, of type multipart/form-data; application/json came"
    )
    empty = await client.post(path)
    assert "a body of no type came" in empty.json()["error"]["message"]


async def test_uploads_that_are_no_recordings(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    missing = await client.post("/v1/audio/voices", data={"name": "me"})
    assert missing.status_code == 400 and missing.json()["error"]["param"] == "audio_sample"
    large = await upload(client, bytes(MAX_SAMPLE_BYTES + 1))
    assert large.status_code == 400 and large.json()["error"]["param"] == "audio_sample"
    runtime.scripts = [[InvalidInputError("audio_sample: no sound", param="audio_sample")]]
    assert (await upload(client)).json()["error"]["param"] == "audio_sample"
    assert (await client.get("/v1/audio/voices")).json()["voices"] == ["ann"]


def test_a_new_upload_replaces_the_old_one_and_there_is_an_end() -> None:
    voices = LearnedVoices()
    voice = NamedCode(name="0", code=b"", text="", consent="", description="", sample_bytes=1, created_at=0)
    for number in range(256):
        voices.put(msgspec.structs.replace(voice, name=str(number)))
    voices.put(msgspec.structs.replace(voice, code=b"new"))
    assert len(voices.named()) == 256 and voices.find("0") == msgspec.structs.replace(voice, code=b"new")
    with pytest.raises(InvalidInputError, match="256 voices are kept already"):
        voices.put(msgspec.structs.replace(voice, name="one more"))


async def test_a_graph_that_learns_nothing_says_why() -> None:
    runtime = ScriptedRuntime([Output("audio", tone(8))], singing(learns="it is too old to learn"))
    async with to(runtime) as client:
        asked = await say(client, ref_audio=URI)
        assert asked.json()["error"]["param"] == "ref_audio" and "too old to learn" in asked.json()["error"]["message"]
        assert asked.json()["error"]["code"] == "unsupported_value"
        assert "too old to learn" in (await upload(client)).json()["error"]["message"]
        assert (await say(client)).status_code == 200
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
        assert schemas["SpeechRequest"]["properties"]["ref_audio"]["type"] == "null"
    assert not submitted(runtime, "voice")
