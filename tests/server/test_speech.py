from __future__ import annotations

import base64
import io
import json
import wave
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from omniflow.errors import OverloadedError, StageDiedError
from omniflow.media import Options, TextDelta
from omniflow.server.encoders import pcm16

from .scripted import Output, ScriptedRuntime, tone
from .sound import decoded

pytestmark = pytest.mark.anyio
SPOKEN = pcm16(tone(13).samples)


async def say(client: httpx.AsyncClient, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return await client.post("/v1/audio/speech", json={"model": "tiny", "input": "Hello."} | body, headers=headers)


def heard(response: httpx.Response) -> tuple[Any, int]:
    """int16 samples and rate."""
    return soundfile.read(io.BytesIO(response.content), dtype="int16")  # type: ignore[no-any-return]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(frame.removeprefix("data: ")) for frame in response.text.removesuffix("\n\n").split("\n\n")]


async def test_pcm_is_streamed_as_24_khz_mono(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    response = await say(client, response_format="pcm", voice="joe", speed=1.5)
    assert response.content == SPOKEN and response.headers["content-type"] == "audio/pcm"
    assert "content-length" not in response.headers
    submission = runtime.submissions[0]
    assert (submission.entry, submission.value, submission.outputs) == ("speech", [TextDelta("Hello.")], {"audio"})
    assert submission.options == Options(voice="joe", speed=1.5)


async def test_pcm_is_24_khz_mono_whatever_the_graph_gives(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    rate_hz = 48000
    sine = np.sin(np.arange(rate_hz) * 440 * 2 * np.pi / rate_hz).astype(np.float32) / 2
    stereo = np.stack([sine, sine], axis=1).reshape(-1)
    chunks = [tone(0, rate_hz, 2)] + [
        type(tone(0))(stereo[start : start + 9602], rate_hz, 2) for start in range(0, len(stereo), 9602)
    ]
    runtime.script = [Output("audio", chunk) for chunk in chunks]
    samples = np.frombuffer((await say(client, response_format="pcm")).content, "<i2") / 32767
    assert len(samples) == 24000
    expected = np.sin(np.arange(24000) * 440 * 2 * np.pi / 24000) / 2
    np.testing.assert_allclose(samples[500:-500], expected[500:-500], atol=1e-3)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"stream": True}, {}),
        ({"stream_format": "audio"}, {}),
        ({}, {"x-stainless-raw-response": "stream"}),
    ],
)
async def test_a_streamed_wav_has_one_header_with_open_sizes(
    client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]
) -> None:
    response = await say(client, headers, response_format="wav", **body)
    assert "content-length" not in response.headers and response.headers["content-type"] == "audio/wav"
    assert response.content[4:8] == response.content[40:44] == b"\xff\xff\xff\xff"
    assert response.content[44:] == SPOKEN
    samples, rate_hz = heard(response)
    assert samples.tobytes() == SPOKEN and rate_hz == 24000


@pytest.mark.parametrize("headers", [{}, {"x-stainless-raw-response": "true"}])
async def test_a_whole_wav_has_true_sizes_rate_and_channels(
    client: httpx.AsyncClient, runtime: ScriptedRuntime, headers: dict[str, str]
) -> None:
    runtime.script = [Output("audio", tone(6, 44100, 2)), Output("audio", tone(4, 44100, 2))]
    response = await say(client, headers, response_format="wav")
    assert int(response.headers["content-length"]) == len(response.content) == 44 + 10 * 2 * 2
    with wave.open(io.BytesIO(response.content)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (44100, 2, 10)
    assert int.from_bytes(response.content[4:8], "little") == len(response.content) - 8


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("format", "media_type", "magic"),
    [
        (None, "audio/mpeg", b"\xff\xf3"),
        ("mp3", "audio/mpeg", b"\xff\xf3"),
        ("opus", "audio/ogg", b"OggS"),
        ("aac", "audio/aac", b"\xff\xf1"),
        ("flac", "audio/flac", b"fLaC"),
        ("wav", "audio/wav", b"RIFF"),
    ],
)
async def test_formats_are_what_they_say(
    client: httpx.AsyncClient,
    runtime: ScriptedRuntime,
    stream: bool,
    format: str | None,
    media_type: str,
    magic: bytes,
) -> None:
    runtime.script = [Output("audio", tone(6000, start=start)) for start in range(0, 24000, 6000)]
    response = await say(client, response_format=format, stream=stream)
    assert response.headers["content-type"] == media_type and response.content.startswith(magic)
    assert ("content-length" in response.headers) is not stream
    samples, rate_hz, stated_s = decoded(response.content)
    assert len(samples) / rate_hz == pytest.approx(1, abs=0.1)
    if not stream and format in ("mp3", "flac", "wav"):
        assert stated_s == 1


async def test_files_that_state_their_length_are_whole_unless_a_stream_is_asked_for(client: httpx.AsyncClient) -> None:
    for format in ("mp3", "opus", "aac", "flac", "wav", "pcm"):
        response = await say(client, response_format=format)
        assert ("content-length" in response.headers) is (format in ("flac", "wav")), format


async def test_a_lossless_file_holds_the_same_sound_whole_and_streamed(client: httpx.AsyncClient) -> None:
    for stream in (True, False):
        response = await say(client, response_format="flac", stream=stream)
        assert pcm16(decoded(response.content)[0] * np.float32(32768 / 32767)) == SPOKEN


@pytest.mark.parametrize("format", ["pcm", "wav"])
async def test_server_sent_events(client: httpx.AsyncClient, format: str) -> None:
    response = await say(client, response_format=format, stream_format="sse")
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, done = events(response)
    assert {piece["type"] for piece in pieces} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(piece["audio"]) for piece in pieces)[-len(SPOKEN) :] == SPOKEN
    # 6 characters, and 13 samples of sound: less than 50 ms.
    assert done == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 6, "output_tokens": 1, "total_tokens": 7},
    }


async def test_events_of_an_mp3_are_a_stream_whatever_stream_says(client: httpx.AsyncClient) -> None:
    response = await say(client, response_format="mp3", stream_format="sse", stream=False)
    *pieces, done = events(response)
    assert done["type"] == "speech.audio.done"
    assert b"Xing" not in b"".join(base64.b64decode(piece["audio"]) for piece in pieces)


async def test_failed_events_end_with_an_error_and_without_done(
    client: httpx.AsyncClient, runtime: ScriptedRuntime
) -> None:
    runtime.script = [Output("audio", tone(8)), StageDiedError("killed", stage="vocoder")]
    response = await say(client, response_format="pcm", stream_format="sse")
    assert [event.get("type") for event in events(response)] == ["speech.audio.delta", None]
    assert events(response)[-1]["error"]["code"] == "stage_died"


async def test_a_failure_before_the_first_sound_is_a_plain_error(
    client: httpx.AsyncClient, runtime: ScriptedRuntime
) -> None:
    runtime.script = [StageDiedError("killed", stage="vocoder")]
    for body in ({}, {"stream_format": "sse"}, {"response_format": "wav"}):
        response = await say(client, **body)
        assert response.status_code == 503 and response.json()["error"]["code"] == "stage_died"
    runtime.refusal = OverloadedError("full")
    assert (await say(client)).status_code == 429


async def test_a_text_without_sound_is_the_callers_to_mend(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    runtime.script = []
    response = await say(client, input="...")
    assert response.status_code == 400 and response.json()["error"]["param"] == "input"


async def test_a_change_of_rate_is_an_error(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    runtime.script = [Output("audio", tone(8)), Output("audio", tone(8, 16000))]
    response = await say(client, response_format="wav")
    assert response.status_code == 500 and "16000 Hz" in response.json()["error"]["message"]


async def test_sound_that_is_no_number_is_an_error(client: httpx.AsyncClient, runtime: ScriptedRuntime) -> None:
    broken = tone(4)
    broken.samples[2] = np.nan
    runtime.script = [Output("audio", broken)]
    response = await say(client, response_format="pcm")
    assert response.status_code == 500 and response.json()["error"]["code"] == "protocol_error"


async def test_instructions_are_taken(client: httpx.AsyncClient) -> None:
    assert (await say(client, instructions="whisper")).status_code == 200
