"""Spoken conversations with the real server: real speech through the real voice activity detector, ears and voice."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
from openai.resources.realtime.realtime import RealtimeConnection

from omniflow.media import AudioChunk
from omniflow.server.realtime.audio import AudioOut, Pcmu
from tests.e2e.conftest import ROOT, Server
from tests.e2e.hearing import MISHEARD, heard, word_errors
from tests.speech import FOX, samples_of
from tests.test_docs import blocks

HZ = 24_000


@contextmanager
def connected(server: Server, query: str = "model=ming_omni") -> Iterator[RealtimeConnection]:
    client = server.client(websocket_base_url=server.url.replace("http:", "ws:") + "/v1")
    pairs = dict(pair.split("=") for pair in query.split("&"))
    extra = {key: value for key, value in pairs.items() if key != "model"}
    options: Any = {"model": pairs["model"]} if "model" in pairs else {}
    with client.realtime.connect(extra_query=extra, **options) as connection:
        yield connection


def recorded(name: str = "fox") -> np.ndarray:
    """Recorded speech at 24 kHz, between half a second and a second and a half of silence."""
    speech = soxr.resample(samples_of(name), 16_000, HZ)
    return np.concatenate([np.zeros(HZ // 2), speech, np.zeros(3 * HZ // 2)])


def say(connection: RealtimeConnection, samples: np.ndarray) -> None:
    """As a microphone would, in 40 ms, but as fast as it is taken."""
    data = (samples * 32767).astype("<i2").tobytes()
    for start in range(0, len(data), 1920):
        audio = base64.b64encode(data[start : start + 1920]).decode()
        connection.input_audio_buffer.append(audio=audio)


def until(connection: RealtimeConnection, *kinds: str) -> list[Any]:
    read: list[Any] = [connection.recv()]
    while read[-1].type not in kinds:
        assert read[-1].type != "error", read[-1]
        read.append(connection.recv())
    return read


def kinds_of(events: list[Any]) -> list[str]:
    return [event.type for event in events]


def wav_of(events: list[Any]) -> bytes:
    pcm = b"".join(base64.b64decode(e.delta) for e in events if e.type == "response.output_audio.delta")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, HZ, 0, "NONE", ""))
        out.writeframes(pcm)
    return file.getvalue()


def quiet(server: Server) -> bool:
    """No stage works on anything."""
    return server.health()["in_flight"] == 0


def test_a_spoken_question_gets_a_spoken_answer(server: Server) -> None:
    with connected(server) as connection:
        transcription: Any = {"input": {"transcription": {"model": "whisper-1"}}}
        connection.session.update(session={"type": "realtime", "max_output_tokens": 24, "audio": transcription})
        say(connection, recorded())
        events = until(connection, "response.done")
        names = kinds_of(events)
        if "conversation.item.input_audio_transcription.completed" not in names:
            events += until(connection, "conversation.item.input_audio_transcription.completed")
    started = next(e for e in events if e.type == "input_audio_buffer.speech_started")
    stopped = next(e for e in events if e.type == "input_audio_buffer.speech_stopped")
    assert 0 <= started.audio_start_ms <= 700 and 2000 < stopped.audio_end_ms - started.audio_start_ms < 4500
    written = next(e for e in events if e.type == "conversation.item.input_audio_transcription.completed")
    wrong, count = word_errors(FOX, written.transcript)
    assert wrong / count <= 0.2
    response = next(e for e in events if e.type == "response.done").response
    said = response.output[0].content[0].transcript
    assert response.status in ("completed", "incomplete") and response.usage.output_tokens > 0
    wrong, count = word_errors(said, heard(wav_of(events)))
    assert wrong / count <= MISHEARD, said


def test_speech_interrupts_the_answer_and_is_answered(server: Server) -> None:
    with connected(server) as connection:
        connection.session.update(session={"type": "realtime", "instructions": "Tell a very long story."})
        say(connection, recorded())
        until(connection, "response.output_audio.delta")
        say(connection, recorded())
        events = until(connection, "response.done")
        names = kinds_of(events)
        assert events[-1].response.status == "cancelled"
        assert events[-1].response.status_details.reason == "turn_detected"
        assert "input_audio_buffer.speech_started" in names
        assert names.index("input_audio_buffer.speech_started") < names.index("response.output_item.done")
        item = events[-1].response.output[0]
        connection.conversation.item.truncate(item_id=item.id, content_index=0, audio_end_ms=300)
        connection.session.update(session={"type": "realtime", "max_output_tokens": 8})
        later = until(connection, "conversation.item.truncated")
        connection.conversation.item.retrieve(item_id=item.id)
        later += until(connection, "conversation.item.retrieved")
        assert len(later[-1].item.content[0].transcript) < len(item.content[0].transcript)
        answered = [e for e in later if e.type == "response.created"]
        if not answered:
            answered = until(connection, "response.created")
        connection.response.cancel(response_id=answered[-1].response.id)
    server.wait_until("nothing is left of it", lambda: quiet(server))


def test_a_telephone_and_its_button(server: Server) -> None:
    """mu-law at 8 kHz, committed by hand, answered in text."""
    codec = AudioOut(Pcmu())
    speech = codec.push(AudioChunk(samples_of("fox"), 16_000)) + codec.flush()
    settings: Any = {
        "type": "realtime",
        "output_modalities": ["text"],
        "max_output_tokens": 8,
        "audio": {"input": {"format": {"type": "audio/pcmu"}, "turn_detection": None, "transcription": {}}},
    }
    with connected(server) as connection:
        connection.session.update(session=settings)
        connection.input_audio_buffer.append(audio=base64.b64encode(speech).decode())
        connection.input_audio_buffer.commit()
        events = until(connection, "conversation.item.input_audio_transcription.completed")
        assert "response.created" not in kinds_of(events)
        wrong, count = word_errors(FOX, events[-1].transcript)
        assert wrong / count <= 0.25
        connection.response.create()
        done = until(connection, "response.done")[-1].response
    assert done.output[0].content[0].text


@pytest.mark.parametrize("turns", ["server_vad", "semantic_vad"])
def test_a_transcription_session(server: Server, turns: Any) -> None:
    with connected(server, "intent=transcription") as connection:
        assert connection.recv().session.type == "transcription"
        settings: Any = {"input": {"transcription": {"language": "en"}, "turn_detection": {"type": turns}}}
        connection.session.update(session={"type": "transcription", "audio": settings})
        say(connection, np.concatenate([recorded(), recorded("hello")]))
        said = [until(connection, "conversation.item.input_audio_transcription.completed")[-1] for _ in range(2)]
    texts = sorted((event.transcript.lower() for event in said), key=len)
    assert "hello" in texts[0] and "fox" in texts[1]


def test_a_tool_is_called_and_answered(server: Server) -> None:
    weather: Any = {
        "type": "function",
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    question: Any = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "How is the weather in Paris?"}],
    }
    with connected(server) as connection:
        connection.session.update(session={"type": "realtime", "tools": [weather], "tool_choice": "required"})
        connection.conversation.item.create(item=question)
        connection.response.create(response={"parallel_tool_calls": False, "max_output_tokens": 60})
        events = until(connection, "response.done")
        call = next(e for e in events if e.type == "response.function_call_arguments.done")
        assert call.name == "get_weather" and set(json.loads(call.arguments)) == {"city"}
        assert [item.type for item in events[-1].response.output] == ["function_call"]
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
        connection.conversation.item.create(item=output)
        connection.response.create(response={"tool_choice": "none", "max_output_tokens": 16})
        done = until(connection, "response.done")[-1].response
    assert done.output[0].content[0].transcript and done.usage.input_tokens > 50


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_example_of_the_page(server: Server, tmp_path: Path) -> None:
    program = "\n".join(code for code, needs_server in blocks(ROOT / "docs/realtime.md", "python") if needs_server)
    at = server.url.removeprefix("http://")
    assert program.count("127.0.0.1:8000") == 2
    ran = subprocess.run(
        [sys.executable, "-c", program.replace("127.0.0.1:8000", at)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    wrong, count = word_errors(ran.stdout, heard((tmp_path / "answer.wav").read_bytes()))
    assert wrong / count <= MISHEARD, ran.stdout


def test_a_client_that_goes_away_ends_all_work(server: Server) -> None:
    with connected(server) as connection:
        connection.session.update(session={"type": "realtime", "instructions": "Tell a very long story."})
        say(connection, recorded())
        until(connection, "response.output_audio.delta")
        assert not quiet(server)
    server.wait_until("nothing is left of it", lambda: quiet(server))
