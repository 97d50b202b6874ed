"""Ming-flash-omni-2.0 whole, with tiny random weights: real processes, unmodified clients, and no network."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
import soundfile
from PIL import Image
from websockets.sync.client import connect

from actors.ming.tiny import SAID
from tests.e2e.conftest import Server, serving
from tests.waiting import HANGS_S

TEXT = "The children built a small boat. After dinner they played cards."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ming_tiny")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Server]:
    """As on a fresh machine: nothing in the cache, no package index, no hub."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    nowhere = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "HF_HUB_OFFLINE": "1"}
    environment = {**ours, **nowhere, "OMNIFLOW_CACHE": str(folder / "cache")}
    with serving(folder, "--profile", "tiny", environment=environment) as running:
        yield running


def png(rows: int, columns: int) -> str:
    pixels = np.random.default_rng(0).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def wav(seconds: float) -> str:
    samples = np.sin(np.arange(int(16000 * seconds)) * 0.2) * 0.3
    out = io.BytesIO()
    soundfile.write(out, samples, 16000, format="WAV")
    return base64.b64encode(out.getvalue()).decode()


def mp4(num_frames: int) -> str:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for number in range(num_frames):
            pixels = np.full((64, 64, 3), 30 * number, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode(None))
    return f"data:video/mp4;base64,{base64.b64encode(out.getvalue()).decode()}"


MEDIA: list[dict[str, Any]] = [
    {"type": "text", "text": "What is all this?"},
    {"type": "image_url", "image_url": {"url": png(64, 96)}},
    {"type": "input_audio", "input_audio": {"data": wav(1.0), "format": "wav"}},
    {"type": "video_url", "video_url": {"url": mp4(8)}},
]


def asked(*parts: dict[str, Any], **more: object) -> dict[str, Any]:
    return {"model": "ming_omni", "messages": [{"role": "user", "content": list(parts)}], "seed": 1, **more}


def speech(server: Server, seed: int, voice: str = "alloy") -> bytes:
    body: dict[str, Any] = {"response_format": "wav", "extra_body": {"seed": seed}}
    return server.client().audio.speech.create(model="ming_omni", voice=voice, input=TEXT, **body).content


def test_it_starts_without_a_network_and_says_what_is_missing(tiny: Server, folder: Path) -> None:
    log = (folder / "log.txt").read_text()
    assert "profile tiny (by --profile): all of Ming-flash-omni-2.0" in " ".join(log.split())
    assert "ming-tiny: writing" in log
    assert "/v1/realtime will find no turns by itself: silero-vad: pip finds no silero-vad" in " ".join(log.split())
    assert [each.name.rsplit("-", 1)[0] for each in (folder / "cache/weights").iterdir()] == ["ming-tiny"]


def test_it_hears_sees_and_answers_in_text_and_sound(tiny: Server) -> None:
    spoken: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
    reply = tiny.client().chat.completions.create(**asked(*MEDIA, **spoken))
    audio, usage = reply.choices[0].message.audio, reply.usage
    assert audio is not None and len(audio.transcript.split()) > 3
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(audio.data)), dtype="float32")
    assert rate == 44100 and samples.ndim == 1 and len(samples) > rate
    assert 0.02 < np.std(samples) < 0.5 and np.abs(samples).max() <= 1
    assert usage is not None and usage.prompt_tokens_details is not None
    details = usage.prompt_tokens_details.to_dict()
    only_image = tiny.client().chat.completions.create(**asked(*MEDIA[:2], max_completion_tokens=1)).usage
    assert only_image is not None and only_image.prompt_tokens_details is not None
    assert only_image.prompt_tokens_details.to_dict()["image_tokens"] == 2 * 3  # of 32 pixels each
    assert details["audio_tokens"] == 25  # of 40 ms each
    assert int(str(details["image_tokens"])) > 2 * 3  # the clip's are among them
    assert usage.prompt_tokens == sum(int(str(details[f"{each}_tokens"])) for each in ("text", "audio", "image"))
    assert usage.completion_tokens > 3


def test_what_is_heard_and_seen_changes_the_answer(tiny: Server) -> None:
    """Of random weights, too: the rows of media reach the thinker."""

    def logprobs(*parts: dict[str, Any]) -> list[float]:
        more: dict[str, Any] = {"logprobs": True, "max_completion_tokens": 1}
        reply = tiny.client().chat.completions.create(**asked(*parts, **more))
        found = reply.choices[0].logprobs
        assert found is not None and found.content
        return [each.logprob for each in found.content]

    other = {"type": "image_url", "image_url": {"url": png(96, 64)}}
    quiet = {"type": "input_audio", "input_audio": {"data": wav(0.6), "format": "wav"}}
    answers = [logprobs(MEDIA[0], *media) for media in ([], [MEDIA[1]], [other], [MEDIA[2]], [quiet], [MEDIA[3]])]
    assert len({tuple(each) for each in answers}) == len(answers)


def test_a_stream_is_the_whole_answer(tiny: Server) -> None:
    whole = tiny.client().chat.completions.create(**asked(MEDIA[0]))
    text, usage = "", None
    streaming: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in tiny.client().chat.completions.create(**asked(MEDIA[0], **streaming)):
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_speech_is_the_same_alone_beside_others_and_streamed(tiny: Server) -> None:
    alone = speech(tiny, 3)
    samples, rate = soundfile.read(io.BytesIO(alone), dtype="float32")
    assert rate == 44100 and samples.ndim == 1 and len(samples) > rate and 0.02 < np.std(samples) < 0.5
    with ThreadPoolExecutor(6) as pool:
        together = dict(zip(range(6), pool.map(lambda seed: speech(tiny, seed), range(6)), strict=True))
    assert together[3] == alone
    assert len(set(together.values())) == 6
    body = {"model": "ming_omni", "input": TEXT, "response_format": "wav", "seed": 3, "stream_format": "sse"}
    streamed = b""
    with httpx.stream("POST", f"{tiny.url}/v1/audio/speech", json=body, timeout=HANGS_S) as reply:
        for line in reply.iter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            streamed += base64.b64decode(event.get("audio", ""))
    assert streamed[-1000:] == alone[-1000:] and abs(len(streamed) - len(alone)) < 100  # of sizes in the head


def test_a_spoken_answer_is_the_same_beside_others(tiny: Server) -> None:
    def answer(seed: int) -> tuple[str, bytes]:
        spoken: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
        body = {**asked(MEDIA[0], MEDIA[2], **spoken), "seed": seed}
        audio = tiny.client().chat.completions.create(**body).choices[0].message.audio
        assert audio is not None
        return audio.transcript, base64.b64decode(audio.data)

    alone = answer(2)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(answer, range(4)))
    assert together[2] == alone
    assert len({transcript for transcript, _ in together}) == 4


def test_it_speaks_with_the_voices_of_its_checkpoint(tiny: Server) -> None:
    listed = httpx.get(f"{tiny.url}/v1/audio/voices", timeout=HANGS_S).json()
    assert {"DB30", "low"} <= set(re.findall(r"\w+", json.dumps(listed)))
    assert speech(tiny, 3, "DB30") == speech(tiny, 3)  # a voice of OpenAI's is the checkpoint's first
    assert speech(tiny, 3, "low") != speech(tiny, 3)
    with pytest.raises(openai.BadRequestError, match="bob") as refused:
        speech(tiny, 3, "bob")
    assert refused.value.param == "voice"


def test_it_learns_a_voice_from_a_recording(tiny: Server, folder: Path) -> None:
    """That of one of its own voices gives its own sound; who it is without what is said is another."""
    (recording,) = folder.glob("cache/weights/ming-tiny*/talker/data/wavs/low.wav")
    sample = base64.b64encode(recording.read_bytes()).decode()
    body = {"model": "ming_omni", "input": TEXT, "response_format": "wav", "seed": 3}

    def cloned(**fields: str) -> bytes:
        return httpx.post(f"{tiny.url}/v1/audio/speech", json=body | fields, timeout=HANGS_S).content

    wanted = speech(tiny, 3, "low")
    assert cloned(ref_audio=f"data:audio/wav;base64,{sample}", ref_text=SAID) == wanted
    assert cloned(ref_audio=sample) not in (wanted, speech(tiny, 3))
    files = {"audio_sample": ("me.wav", recording.read_bytes(), "audio/wav")}
    form = {"name": "me", "consent": "yes", "ref_text": SAID}
    assert httpx.post(f"{tiny.url}/v1/audio/voices", data=form, files=files, timeout=HANGS_S).json()["id"] == "me"
    assert speech(tiny, 3, "me") == wanted
    spoken: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "me", "format": "wav"}}
    assert tiny.client().chat.completions.create(**asked(MEDIA[0], **spoken)).choices[0].message.audio is not None
    short = httpx.post(f"{tiny.url}/v1/audio/speech", json=body | {"ref_audio": wav(0.5)}, timeout=HANGS_S)
    assert short.status_code == 400 and short.json()["error"]["param"] == "ref_audio"
    assert "a recording of 0.5 s is not taken; send 1 to 30 s" in short.json()["error"]["message"]


def test_a_killed_talker_fails_its_request_and_comes_back(tiny: Server) -> None:
    before = speech(tiny, 1)
    pid = tiny.pid_of("talker")
    body = {"model": "ming_omni", "input": TEXT * 20, "response_format": "pcm"}
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{tiny.url}/v1/audio/speech", json=body, timeout=HANGS_S) as reply,
    ):
        for number, _ in enumerate(reply.iter_raw()):
            if number == 1:
                os.kill(pid, signal.SIGKILL)
    assert speech(tiny, 1) == before
    assert tiny.pid_of("talker") != pid


def test_what_it_cannot_do_is_a_400(tiny: Server) -> None:
    client = tiny.client()
    with pytest.raises(openai.BadRequestError, match="write down: .* in a chat: send the audio"):
        client.audio.transcriptions.create(model="ming_omni", file=("a.wav", base64.b64decode(wav(0.5))))
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError, match="knows no tools") as refused:
        client.chat.completions.create(**asked(MEDIA[0], tools=[tool]))
    assert refused.value.param == "tools"


def test_tools_of_a_realtime_session_are_an_error_event(tiny: Server) -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    with connect(f"{tiny.url.replace('http', 'ws', 1)}/v1/realtime?model=ming_omni") as socket:
        session = {"type": "realtime", "output_modalities": ["text"], "tools": [tool]}
        said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]}
        socket.send(json.dumps({"type": "session.update", "session": session}))
        socket.send(json.dumps({"type": "conversation.item.create", "item": said}))
        socket.send(json.dumps({"type": "response.create"}))
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] != "response.done":
            events.append(json.loads(socket.recv(timeout=HANGS_S)))
    (error,) = [event["error"] for event in events if event["type"] == "error"]
    assert error["param"] == "tools" and "knows no tools" in error["message"]
    assert events[-1]["response"]["status_details"]["error"] == error
