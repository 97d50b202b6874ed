"""Files in, text out, in every form; the graph behind is real, and what hears in it counts seconds."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest

from omniflow.actor import Actor, Context, Emit, Stream
from omniflow.config import ServerConfig
from omniflow.errors import StageError, UnsupportedError
from omniflow.graph import Graph
from omniflow.media import AudioChunk, Transcript, Word
from omniflow.planner import Cluster, Plan, plan
from omniflow.runtime import Runtime
from omniflow.server import decoding
from omniflow.server.app import build_app
from omniflow.server.encoders import pcm16, wav_header
from omniflow.server.serve import Address, serve

from ..waiting import HANGS_S
from .scripted import ScriptedRuntime
from .sound import RATE_HZ, encoded

pytestmark = pytest.mark.anyio
TONE = (np.sin(np.arange(3 * RATE_HZ) * 0.2) / 3).astype(np.float32)


class Ear(Actor):
    """Writes how many samples it heard, two seconds at a time; what it was asked for is what the hint says of it."""

    options: Any = None

    async def run(self, audio: Stream[AudioChunk], emit: Emit[Transcript], ctx: Context) -> None:
        Ear.options = ctx.options
        if ctx.options.translate:
            raise UnsupportedError("this model does not translate")
        if ctx.options.hint == "fail":
            raise StageError("the ear fell off")
        at, waiting = 0, 0
        async for chunk in audio:
            assert (chunk.sample_rate_hz, chunk.channels) == (RATE_HZ, 1)
            waiting += len(chunk.samples)
            while waiting >= 2 * RATE_HZ:
                at, waiting = await self._write(at, 2 * RATE_HZ, emit, ctx), waiting - 2 * RATE_HZ
            if ctx.options.hint == "wait":
                await anyio.sleep_forever()
        if waiting:
            await self._write(at, waiting, emit, ctx)

    async def _write(self, at: int, count: int, emit: Emit[Transcript], ctx: Context) -> int:
        start_s, end_s = at / RATE_HZ, (at + count) / RATE_HZ
        words = (Word("heard", start_s, start_s + 0.5), Word(f"{count}.", start_s + 0.5, end_s))
        text = " ".join(word.text for word in words)
        kept = words if ctx.options.words else ()
        await emit.send(Transcript(text, start_s, end_s, "en", kept, (1, 2, 3), -0.25, 0.125))
        return at + count


def ear_graph() -> Graph:
    graph = Graph("ear")
    ear = graph.stage("ear", Ear)
    graph.input(transcription=ear)
    graph.output(transcript=ear)
    return graph


def ear_plan() -> Plan:
    return plan(ear_graph().spec(), Cluster("test", cpu_cores=2, memory_bytes=2**30, single_process=True))


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with Runtime(ear_plan()) as runtime:
        app = build_app(runtime, model="ear", config=ServerConfig(max_body_bytes=1_000_000))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://ear") as client:
            yield client
        assert runtime.status().in_flight == 0


def wav(samples: np.ndarray = TONE, rate_hz: int = RATE_HZ, channels: int = 1) -> bytes:
    data = pcm16(samples)
    return wav_header(rate_hz, channels, len(data)) + data


async def write(
    client: httpx.AsyncClient, file: bytes | None = None, path: str = "transcriptions", **fields: Any
) -> httpx.Response:
    files = {"file": ("speech.wav", wav() if file is None else file, "audio/wav")}
    return await client.post(f"/v1/audio/{path}", data={"model": "ear"} | fields, files=files)


HEARD = "heard 32000. heard 16000."
USAGE = {"type": "duration", "seconds": 3.0}


async def test_json_is_the_default(client: httpx.AsyncClient) -> None:
    for fields in ({}, {"response_format": "json"}, {"response_format": ""}):
        response = await write(client, **fields)
        assert response.status_code == 200 and response.headers["content-type"] == "application/json"
        assert response.json() == {"text": HEARD, "usage": USAGE}


async def test_plain_texts(client: httpx.AsyncClient) -> None:
    text = await write(client, response_format="text")
    assert text.headers["content-type"] == "text/plain; charset=utf-8" and text.text == f"{HEARD}\n"
    srt = await write(client, response_format="srt")
    assert srt.headers["content-type"].startswith("text/plain")
    assert srt.text == (
        "1\n00:00:00,000 --> 00:00:02,000\nheard 32000.\n\n2\n00:00:02,000 --> 00:00:03,000\nheard 16000.\n\n"
    )
    vtt = await write(client, response_format="vtt")
    assert vtt.headers["content-type"].startswith("text/vtt")
    assert vtt.text == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.000\nheard 32000.\n\n00:00:02.000 --> 00:00:03.000\nheard 16000.\n\n"
    )


async def test_verbose_json(client: httpx.AsyncClient) -> None:
    body = (await write(client, response_format="verbose_json", temperature="0.5")).json()
    first, second = body.pop("segments")
    assert body == {"task": "transcribe", "language": "english", "duration": 3.0, "text": HEARD, "usage": USAGE}
    assert first.pop("compression_ratio") == pytest.approx(0.6, abs=0.05)
    assert first == {
        "id": 0, "seek": 0, "start": 0.0, "end": 2.0, "text": "heard 32000.", "tokens": [1, 2, 3],
        "temperature": 0.5, "avg_logprob": -0.25, "no_speech_prob": 0.125,
    }  # fmt: skip
    assert (second["id"], second["seek"], second["start"]) == (1, 200, 2.0)
    assert Ear.options.temperature == 0.5 and not Ear.options.words


@pytest.mark.parametrize(
    ("granularities", "parts"), [(["word"], {"words"}), (["word", "segment"], {"words", "segments"})]
)
async def test_times_of_words(client: httpx.AsyncClient, granularities: list[str], parts: set[str]) -> None:
    body = (await write(client, response_format="verbose_json", **{"timestamp_granularities[]": granularities})).json()
    assert body.keys() & {"words", "segments"} == parts
    assert body["words"][0] == {"word": "heard", "start": 0.0, "end": 0.5}
    assert [word["word"] for word in body["words"]] == HEARD.split()


@pytest.mark.parametrize("form", [None, "json", "text"])
async def test_events(client: httpx.AsyncClient, form: str | None) -> None:
    response = await write(client, stream="true", response_format=form or "")
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.removesuffix("\n\n").split("\n\n")
    *deltas, done = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert [delta["type"] for delta in deltas] == ["transcript.text.delta"] * 2
    assert "".join(delta["delta"] for delta in deltas) == HEARD
    usage = {"type": "tokens", "input_tokens": 30, "output_tokens": 6, "total_tokens": 36}
    assert done == {"type": "transcript.text.done", "text": HEARD, "usage": usage}


async def test_what_helps_to_understand_reaches_the_graph(client: httpx.AsyncClient) -> None:
    fields = {"prompt": "About ships.", "keywords[]": ["Aubrey", "Maturin"], "language": "en"}
    assert (await write(client, **fields, chunking_strategy="auto", no_such_field="x")).status_code == 200
    assert (Ear.options.hint, Ear.options.language) == ("About ships. Aubrey, Maturin", "en")
    assert (await write(client, **{"languages[]": ["en"]})).status_code == 200
    assert (Ear.options.hint, Ear.options.language) == (None, "en")
    assert (await write(client, **{"languages[]": ["en", "de"]})).status_code == 200
    assert Ear.options.language is None


FILES: dict[str, tuple[str, str, dict[str, str]]] = {
    "flac": ("flac", "flac", {}),
    "mp3": ("mp3", "libmp3lame", {}),
    "mp4": ("mp4", "aac", {"movflags": "faststart"}),
    "m4a": ("ipod", "aac", {}),
    "ogg": ("ogg", "libopus", {}),
    "webm": ("webm", "libopus", {}),
    "webm of a browser": ("webm", "libopus", {"live": "1"}),
    "wav": ("wav", "pcm_s24le", {}),
}


@pytest.fixture
def file_of(tmp_path: Path) -> Iterator[Callable[[str], bytes]]:
    def make(name: str) -> bytes:
        container, codec, options = FILES[name]
        return encoded(TONE, container, codec, tmp_path, **options)

    yield make


@pytest.mark.parametrize("name", FILES)
async def test_every_format(client: httpx.AsyncClient, file_of: Callable[[str], bytes], name: str) -> None:
    body = (await write(client, file_of(name), response_format="verbose_json")).json()
    assert body["duration"] == pytest.approx(3, abs=0.1)


async def test_other_rates_and_channels(client: httpx.AsyncClient) -> None:
    stereo = wav(np.repeat(TONE, 2), 48_000, 2)
    assert (await write(client, stereo, response_format="verbose_json")).json()["duration"] == 1
    unknown_size = wav_header(RATE_HZ, 1, None) + pcm16(TONE)
    assert (await write(client, unknown_size)).json()["text"] == HEARD


async def test_samples_that_are_no_numbers_do_no_harm(client: httpx.AsyncClient) -> None:
    broken = TONE.copy()
    broken[100:200], broken[300] = np.nan, 1e38
    head = bytearray(wav_header(RATE_HZ, 1, 4 * len(broken)))
    head[20:22], head[28:32], head[32:36] = b"\3\0", (4 * RATE_HZ).to_bytes(4, "little"), b"\4\0\x20\0"
    assert (await write(client, bytes(head) + broken.tobytes())).json()["text"] == HEARD


# -- what cannot be written down ---------------------------------------------------------------------------------------


async def refused(client: httpx.AsyncClient, response: httpx.Response, param: str | None, status: int = 400) -> str:
    """The message of an error; the next, valid request must not be refused."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["param"] == param
    assert (await write(client)).json()["text"] == HEARD
    return str(error["message"])


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "yaml"}, "response_format"),
    ({"response_format": "diarized_json"}, "response_format"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": "1.1"}, "temperature"),
    ({"temperature": "-0.1"}, "temperature"),
    ({"temperature": "nan"}, "temperature"),
    ({"timestamp_granularities[]": ["word"]}, "timestamp_granularities[]"),
    ({"timestamp_granularities[]": ["letter"], "response_format": "verbose_json"}, "timestamp_granularities[][0]"),
    ({"include[]": ["logprobs"]}, "include[]"),
    ({"stream": "maybe"}, "stream"),
    ({"stream": "true", "response_format": "srt"}, "stream"),
    ({"stream": "true", "response_format": "verbose_json"}, "stream"),
    ({"language": "x" * 65}, "language"),
    ({"languages[]": ["x" * 65]}, "languages[][0]"),
    ({"model": ""}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS, ids=lambda value: json.dumps(value)[:60])
async def test_a_wrong_field(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    await refused(client, await write(client, **fields), param)


async def test_an_unknown_model(client: httpx.AsyncClient) -> None:
    await refused(client, await write(client, model="whisper-1"), "model", status=404)


BAD_FILES = {
    "empty": b"",
    "text": b"these are words, not sounds. " * 40,
    "noise": np.random.default_rng(0).bytes(20_000),
    "zeros": bytes(5000),
    "a list of other files": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n",
    "another list": b"ffconcat version 1.0\nfile '/etc/hostname'\n",
    "a session description": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
    "an image": b"\x89PNG\r\n\x1a\n" + bytes(200),
    "a header": wav_header(RATE_HZ, 1, 0),
    "a header that says more": wav()[:44],
    "half a wav": wav()[:20_000],
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_file_that_cannot_be_read(client: httpx.AsyncClient, name: str, stream: str) -> None:
    assert (await refused(client, await write(client, BAD_FILES[name], stream=stream), "file")).startswith("file: ")


@pytest.mark.parametrize("name", ["flac", "mp4", "m4a", "webm", "wav"])
async def test_half_a_file_is_not_taken_for_a_whole_one(
    client: httpx.AsyncClient, file_of: Callable[[str], bytes], name: str
) -> None:
    file = file_of(name)
    await refused(client, await write(client, file[: len(file) * 2 // 3]), "file")


async def test_damage_behind_what_was_sent_already_ends_a_stream_with_an_error(
    client: httpx.AsyncClient, file_of: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_BLOCK_S", 0.1)
    file = bytearray(file_of("mp3"))
    file[-4000:-3000] = bytes(1000)
    response = await write(client, bytes(file), stream="true")
    frames = [json.loads(frame.removeprefix("data: ")) for frame in response.text.rstrip().split("\n\n")]
    assert frames[0]["type"] == "transcript.text.delta" and frames[-1]["error"]["param"] == "file"
    assert not any(frame.get("type") == "transcript.text.done" for frame in frames)


async def test_no_file_at_all(client: httpx.AsyncClient) -> None:
    for request in (
        {"data": {"model": "ear"}},
        {"data": {"model": "ear", "file": "speech.wav"}},
        {"files": {"model": (None, "ear"), "file": (None, "speech.wav")}},
        {"files": {"model": (None, "ear"), "sound": ("a.wav", wav())}},
    ):
        response = await client.post("/v1/audio/transcriptions", **request)  # type: ignore[arg-type]
        assert "file: is required" in await refused(client, response, "file")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "multipart/form-data"),
        (b"{}", "multipart/form-data; boundary=x"),
        (b"--x\r\nbroken", "multipart/form-data; boundary=x"),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\n\r\n--x--\r\n", "multipart/form-data; boundary=x"),
    ],
)
async def test_what_is_no_form(client: httpx.AsyncClient, content: bytes, kind: str) -> None:
    response = await client.post("/v1/audio/transcriptions", content=content, headers={"content-type": kind})
    assert response.status_code == 400 and response.json()["error"]["message"]
    assert (await write(client)).status_code == 200


async def test_a_form_with_too_much_in_it(client: httpx.AsyncClient) -> None:
    many = await client.post("/v1/audio/transcriptions", files={f"f{i}": ("a", b"x") for i in range(9)})
    assert many.status_code == 400 and many.json()["error"]["code"] == "invalid_json"
    assert (await write(client, prompt="long " * 20_000)).status_code == 400
    assert (await write(client, prompt="fine " * 2000)).status_code == 200


async def test_a_file_that_is_too_large(client: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        for _ in range(30):
            yield bytes(50_000)

    kind = {"content-type": "multipart/form-data; boundary=x"}
    for response in (
        await write(client, wav() + bytes(1_000_000)),
        await client.post("/v1/audio/transcriptions", content=pieces(), headers=kind),
    ):
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
    assert (await write(client)).status_code == 200


async def test_a_failure_is_an_error_and_no_text(client: httpx.AsyncClient) -> None:
    for form in ("json", "text", "srt"):
        response = await write(client, prompt="fail", response_format=form)
        assert response.status_code == 500 and response.json()["error"]["code"] == "stage_error"
    assert (await write(client, prompt="fail", stream="true")).status_code == 500


async def test_a_deadline_ends_it(client: httpx.AsyncClient) -> None:
    files = {"file": ("speech.wav", wav(), "audio/wav")}
    response = await client.post(
        "/v1/audio/transcriptions",
        data={"model": "ear", "prompt": "wait"},
        files=files,
        headers={"x-request-timeout": "0.2"},
    )
    assert response.status_code == 504


async def test_files_are_let_go(client: httpx.AsyncClient) -> None:
    await write(client)
    before = len(os.listdir("/proc/self/fd"))
    long = wav(np.tile(TONE, 10))
    for _ in range(3):
        await write(client, long)
        await write(client, long[:900_000])
        await write(client, long, prompt="fail")
    assert len(os.listdir("/proc/self/fd")) == before


async def leave_somewhere(address: Address, rng: random.Random) -> None:
    """Send an upload or a part of it, read a part of the answer, and go."""
    hint = rng.choice(["", "wait", "fail"])
    parts = {"model": (None, "ear"), "prompt": (None, hint), "stream": (None, rng.choice(["true", "false"]))}
    upload = httpx.Request("POST", "http://x", files=parts | {"file": ("a.wav", wav(np.tile(TONE, 9)))})
    head = "".join(f"{name}: {value}\r\n" for name, value in upload.headers.items())
    sent = f"POST /v1/audio/transcriptions HTTP/1.1\r\n{head}\r\n".encode() + upload.read()
    async with await anyio.connect_tcp(address.host, address.port) as stream:
        with contextlib.suppress(anyio.BrokenResourceError):
            await stream.send(sent[: rng.choice([rng.randint(1, len(sent)), len(sent)])])
        with anyio.move_on_after(rng.uniform(0, 0.1)):
            await stream.receive(rng.choice([1, 10_000]))


async def test_who_leaves_an_upload_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with Runtime(ear_plan()) as runtime, serve(build_app(runtime, model="ear"), port=0) as address:
        async with httpx.AsyncClient(base_url=address.url, timeout=HANGS_S) as client:
            await write(client)
            before = len(os.listdir("/proc/self/fd"))
            async with anyio.create_task_group() as tasks:
                for seed in range(30):
                    tasks.start_soon(leave_somewhere, address, random.Random(seed))
            with anyio.fail_after(HANGS_S):
                while runtime.status().in_flight or len(os.listdir("/proc/self/fd")) > before:
                    await anyio.sleep(0.01)
            assert (await write(client)).json()["text"] == HEARD
    assert [record.message for record in caplog.records if record.exc_info or record.levelname == "ERROR"] == []


async def test_a_model_that_does_not_translate_says_so(client: httpx.AsyncClient) -> None:
    message = await refused(client, await write(client, path="translations"), None)
    assert "does not translate" in message
    for fields, param in (
        ({"response_format": "diarized_json"}, "response_format"),
        ({"temperature": "2"}, "temperature"),
    ):
        await refused(client, await write(client, path="translations", **fields), param)


async def test_a_graph_without_ears_says_so(runtime: ScriptedRuntime) -> None:
    app = build_app(runtime, model="tiny")  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
        response = await write(client, model="tiny")
    assert response.status_code == 400 and "takes no speech to write down" in response.json()["error"]["message"]
