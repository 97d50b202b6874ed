"""Text to speech through the real server: intelligible, the same streamed and whole, separate under load."""

from __future__ import annotations

import io
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
import soundfile

from tests.conftest import left_in_shared_memory, shared_memory
from tests.e2e.conftest import Server
from tests.e2e.hearing import heard, word_errors
from tests.waiting import HANGS_S

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Please bring two cups of coffee to the kitchen.",
    "The train to Boston leaves in twenty minutes.",
    "My sister planted yellow flowers behind the house.",
    "Could you tell me where the library is?",
    "It will rain tomorrow morning, so take an umbrella.",
    "The doctor said that he needs more sleep.",
    "We walked along the river until the sun went down.",
    "Nobody knows who painted the picture on the wall.",
    "She opened the window and listened to the birds.",
    "The bakery around the corner sells fresh bread.",
    "After dinner they played cards for an hour.",
    "The children built a small boat out of paper.",
    "Winter is coming, and the nights are getting longer.",
    "He forgot his keys on the table again.",
    "The old bridge was closed for repairs last week.",
]


def test_speech_can_be_understood(server: Server) -> None:
    client = server.client()
    errors = total = 0
    for sentence in SENTENCES:
        reply = client.audio.speech.create(
            model="ming_omni", voice="joe", input=sentence, response_format="wav", extra_body={"seed": 2}
        )
        wrong, count = word_errors(sentence, heard(reply.content))
        errors, total = errors + wrong, total + count
    assert errors / total <= 0.15


def test_wav_is_24_khz_mono_and_audible(server: Server) -> None:
    reply = server.client().audio.speech.create(
        model="ming_omni", voice="joe", input="Hello there, my friend.", response_format="wav",
        extra_body={"stream": False},
    )  # fmt: skip
    with soundfile.SoundFile(io.BytesIO(reply.content)) as file:
        assert (file.samplerate, file.channels) == (24000, 1)
        samples = file.read(dtype="float32")
    assert 0.8 < len(samples) / 24000 < 4
    assert 0.01 < float(np.sqrt(np.mean(samples**2))) < 0.5


def test_streamed_audio_equals_whole_audio(server: Server) -> None:
    """Sample for sample, over several sentences, for the same seed."""
    text = "First things first. Then, after a while, comes the second sentence. And the third one ends it."
    body = {"model": "ming_omni", "input": text, "voice": "joe", "response_format": "pcm", "seed": 7}
    whole = httpx.post(f"{server.url}/v1/audio/speech", json=body | {"stream": False}, timeout=60).content
    pieces = []
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body | {"stream": True}, timeout=60) as reply:
        for piece in reply.iter_raw():
            pieces.append(piece)
    assert len(pieces) > 3
    assert b"".join(pieces) == whole
    assert len(whole) / 2 / 24000 > 3


def test_eight_at_once_never_mix(server: Server) -> None:
    """With a seed, so that the same sound is heard each time."""
    client = server.client()

    def speak(sentence: str) -> tuple[int, int]:
        reply = client.audio.speech.create(
            model="ming_omni", voice="joe", input=sentence, response_format="wav", extra_body={"seed": 2}
        )
        return word_errors(sentence, heard(reply.content))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(speak, SENTENCES[:8]))
    for sentence, (wrong, count) in zip(SENTENCES[:8], results, strict=True):
        assert wrong <= count // 3, sentence
    assert sum(wrong for wrong, _ in results) / sum(count for _, count in results) <= 0.15


@pytest.mark.parametrize("stage", ["talker", "vocoder"])
def test_killed_stage_fails_its_request_and_comes_back(server: Server, stage: str) -> None:
    shm_before = shared_memory()
    body = {"model": "ming_omni", "input": "This sentence goes on for a while. " * 20, "response_format": "pcm"}
    pid = server.pid_of(stage)
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body, timeout=HANGS_S) as reply,
    ):
        for number, _ in enumerate(reply.iter_raw()):
            if number == 1:
                os.kill(pid, signal.SIGKILL)
    again = server.client().audio.speech.create(
        model="ming_omni", voice="joe", input="Back again so soon.", response_format="wav", extra_body={"seed": 2}
    )
    assert word_errors("Back again so soon.", heard(again.content))[0] <= 1
    assert server.pid_of(stage) != pid
    assert left_in_shared_memory(shm_before) == set()


def test_disconnect_cancels_in_every_stage(server: Server) -> None:
    body = {"model": "ming_omni", "input": "This sentence goes on for a while. " * 50, "response_format": "pcm"}
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body, timeout=HANGS_S) as reply:
        pieces = reply.iter_raw()  # kept: a collected iterator would close the reply
        next(pieces)
        assert server.health()["in_flight"] == 1
    server.wait_until("nothing is in flight", lambda: server.health()["in_flight"] == 0, 2.0)


@pytest.mark.parametrize(
    ("text", "param"), [("", "input"), ("   ", "input"), ("你好，世界。", "input"), ("🙂🙂", "input")]
)
def test_what_cannot_be_spoken_is_refused(server: Server, text: str, param: str) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.speech.create(model="ming_omni", voice="joe", input=text, response_format="wav")
    assert refused.value.param == param
    assert client.audio.speech.create(model="ming_omni", voice="joe", input="Fine.", response_format="wav").content
