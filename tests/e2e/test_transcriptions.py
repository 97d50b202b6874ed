"""Speech to text through the real server, by unmodified clients: every form, long sound in bounded memory."""

from __future__ import annotations

import io
import os
import signal
import wave
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import Server
from tests.e2e.hearing import word_errors, words
from tests.e2e.test_speech import SENTENCES
from tests.speech import FOX, HELLO, encoded

TEXT = " ".join(SENTENCES)
FILE = ("fox.wav", encoded("fox"), "audio/wav")


@pytest.fixture(scope="session")
def spoken(server: Server) -> bytes:
    """`TEXT`, 43 s of it, as 16-bit PCM at 24 kHz."""
    return (
        server.client(timeout=300)
        .audio.speech.create(
            model="ming_omni", voice="alloy", input=TEXT, response_format="pcm", extra_body={"seed": 1}
        )
        .content
    )


def wav(pcm: bytes) -> tuple[str, bytes]:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 24000, 0, "NONE", ""))
        file.writeframes(pcm)
    return ("speech.wav", out.getvalue())


def plain(text: str) -> str:
    return " ".join(words(text))


def test_every_form_by_the_sdk(server: Server) -> None:
    create = server.client().audio.transcriptions.create
    whole = create(model="ming_omni", file=FILE)
    assert plain(whole.text) == FOX and whole.usage is not None and whole.usage.to_dict()["type"] == "duration"
    assert plain(create(model="ming_omni", file=FILE, response_format="text")) == FOX
    srt = create(model="ming_omni", file=FILE, response_format="srt")
    assert srt.startswith("1\n00:00:00,0") and plain(srt.splitlines()[2]) == FOX
    vtt = create(model="ming_omni", file=FILE, response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:00.0") and plain(vtt.splitlines()[3]) == FOX
    verbose = create(
        model="ming_omni",
        file=FILE,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        language="en",
        prompt="A pangram.",
        temperature=0,
    )
    assert (verbose.language, verbose.duration) == ("english", pytest.approx(2.89, abs=0.01))
    assert verbose.segments is not None and [plain(segment.text) for segment in verbose.segments] == [FOX]
    assert verbose.words is not None and plain(" ".join(word.word for word in verbose.words)) == FOX
    assert all(before.end <= after.start for before, after in pairwise(verbose.words))
    assert 0 <= verbose.words[0].start < verbose.words[-1].end <= verbose.duration


def test_streamed_by_the_sdk(server: Server) -> None:
    *deltas, done = server.client().audio.transcriptions.create(model="ming_omni", file=FILE, stream=True)
    text = "".join(event.delta for event in deltas if event.type == "transcript.text.delta")
    assert done.type == "transcript.text.done" and done.text == text and plain(text) == FOX
    assert done.usage is not None and 28 <= done.usage.input_tokens <= 30 and done.usage.output_tokens > 8


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_translations_need_a_model_that_translates(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="does not translate"):
        server.client().audio.translations.create(model="ming_omni", file=FILE)


def test_another_language_is_refused_and_the_next_request_works(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.transcriptions.create(model="ming_omni", file=FILE, language="de")
    assert refused.value.param == "language"
    assert plain(client.audio.transcriptions.create(model="ming_omni", file=FILE).text) == FOX


@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac", "wav"])
def test_what_is_spoken_in_a_format_is_understood(server: Server, format: str) -> None:
    """With a seed: of 83 without one, 7 were said so that Whisper took a word for another."""
    client = server.client()
    with client.audio.speech.with_streaming_response.create(
        model="ming_omni", voice="joe", input=SENTENCES[0], response_format=format, extra_body={"seed": 2}
    ) as reply:
        sound = reply.read()
    heard = client.audio.transcriptions.create(model="ming_omni", file=(f"speech.{format}", sound)).text
    assert word_errors(SENTENCES[0], heard)[0] <= 1


def test_a_minute_and_a_half(server: Server, spoken: bytes) -> None:
    """Nearly word for word, and in order of time."""
    verbose = server.client(timeout=100).audio.transcriptions.create(
        model="ming_omni",
        file=wav(spoken * 2),
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    wrong, count = word_errors(f"{TEXT} {TEXT}", verbose.text)
    assert wrong / count <= 0.15
    assert verbose.duration == pytest.approx(len(spoken) / 24000, abs=0.1) and verbose.duration > 80
    assert verbose.words is not None and verbose.segments is not None
    assert all(before.end <= after.start for before, after in pairwise(verbose.words))
    halfway = verbose.duration / 2
    second = [word for word in verbose.words if word.start >= halfway - 0.5]
    assert second[0].start == pytest.approx(halfway + verbose.words[0].start, abs=0.3)


def test_several_at_once_never_mix(server: Server) -> None:
    client = server.client(timeout=60)

    def write(name: str) -> str:
        file = (f"{name}.wav", encoded(name))
        return plain(client.audio.transcriptions.create(model="ming_omni", file=file).text)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(write, ["fox", "hello"] * 3)) == [FOX, HELLO] * 3


def peak_bytes(pid: int) -> int:
    """The most that a process had in memory since `reset_peak`."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_minutes_take_no_more_memory_than_one(server: Server, spoken: bytes) -> None:
    client = server.client(timeout=500)

    def peaks(times: int) -> list[int]:
        pids = [server.process.pid, server.pid_of("transcribe")]
        for pid in pids:
            reset_peak(pid)
        text = client.audio.transcriptions.create(
            model="ming_omni", file=wav(spoken * times), extra_headers={"x-request-timeout": "480"}
        ).text
        wrong, count = word_errors(" ".join([TEXT] * times), text)
        assert wrong / count <= 0.15
        return [peak_bytes(pid) for pid in pids]

    short, long = peaks(2), peaks(15)
    # Decoded, the sound is 42 MB, as floats in the server and as floats in the stage.
    assert [after - before < 24 * 2**20 for before, after in zip(short, long, strict=True)] == [True, True]


def test_a_client_that_leaves_ends_the_work_for_it(server: Server, spoken: bytes) -> None:
    form = {"model": "ming_omni", "stream": "true"}
    with httpx.stream(
        "POST", f"{server.url}/v1/audio/transcriptions", data=form, files={"file": wav(spoken * 4)}, timeout=60
    ) as reply:
        pieces = reply.iter_raw()  # kept: a collected iterator would close the reply
        next(pieces)
        assert server.health()["in_flight"] == 1
    server.wait_until("nothing is in flight", lambda: server.health()["in_flight"] == 0, 4.0)


def test_a_killed_stage_fails_its_request_and_comes_back(server: Server, spoken: bytes) -> None:
    form = {"model": "ming_omni", "stream": "true"}
    with httpx.stream(
        "POST", f"{server.url}/v1/audio/transcriptions", data=form, files={"file": wav(spoken * 2)}, timeout=60
    ) as reply:
        pieces = reply.iter_text()
        next(pieces)
        os.kill(server.pid_of("transcribe"), signal.SIGKILL)
        rest = "".join(pieces)
    assert '"code":"stage_died"' in rest and "transcript.text.done" not in rest
    assert plain(server.client(timeout=60).audio.transcriptions.create(model="ming_omni", file=FILE).text) == FOX
