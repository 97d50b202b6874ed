"""Writing down: what was said and when, whatever the rate, the length and the pieces in which it comes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from itertools import pairwise

import numpy as np
import pytest
import soxr

from actors.whisper.model import TimedWord, loud_frames, shared_whisper, spoken_spans
from actors.whisper.scribe import WhisperScribe, stretches
from actors.whisper.transcriber import WhisperTranscriber
from omniflow.actor import ports_of
from omniflow.errors import ProtocolError, UnsupportedError
from omniflow.media import AudioChunk, Transcript
from tests.doubles import ListEmit, ListStream, context
from tests.speech import FOX, HELLO, samples_of

pytestmark = pytest.mark.anyio
RATE_HZ = 16_000


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def scribe(anyio_backend: str) -> AsyncIterator[WhisperScribe]:
    scribe = WhisperScribe()
    await scribe.setup()
    yield scribe
    await scribe.close()


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * RATE_HZ), np.float32)


def chunks(samples: np.ndarray, size: int, rate_hz: int = RATE_HZ, channels: int = 1) -> ListStream[AudioChunk]:
    return ListStream([AudioChunk(samples[at : at + size], rate_hz, channels) for at in range(0, len(samples), size)])


async def written(scribe: WhisperScribe, stream: ListStream[AudioChunk], **options: object) -> list[Transcript]:
    emit: ListEmit[Transcript] = ListEmit()
    await scribe.run(stream, emit, context(**options))
    return emit.items


def plain(text: str) -> str:
    return re.sub(r"[^a-z ]", "", text.lower())


# 1.05 s to 3.5 s and 5.45 s to 6.2 s, by the waveform.
SOUND = [silence(1), "fox", silence(1.5), "hello", silence(0.5)]


def sound() -> np.ndarray:
    return np.concatenate([samples_of(part) if isinstance(part, str) else part for part in SOUND])


@pytest.mark.parametrize("noise", [0.0, 0.003])
async def test_stretches_have_the_times_at_which_they_were_spoken(scribe: WhisperScribe, noise: float) -> None:
    samples = sound() + np.random.default_rng(0).normal(0, noise, len(sound())).astype(np.float32)
    fox, hello = await written(scribe, chunks(samples, 8000), words=True)
    assert (plain(fox.text), plain(hello.text)) == (FOX, HELLO)
    assert (fox.start_s, fox.end_s) == pytest.approx((1.05, 3.5), abs=0.12)
    assert (hello.start_s, hello.end_s) == pytest.approx((5.45, 6.2), abs=0.12)
    assert fox.language == "en" and -1 < fox.avg_logprob < 0 and 0 < fox.no_speech_prob < 0.5
    words = [*fox.words, *hello.words]
    assert " ".join(word.text for word in fox.words) == fox.text
    assert all(word.start_s <= word.end_s for word in words)
    assert all(before.end_s <= after.start_s for before, after in pairwise(words))
    jumps = next(word for word in words if word.text == "jumps")
    assert jumps.start_s == pytest.approx(2.26, abs=0.15)


async def test_words_are_left_out_where_nobody_asks(scribe: WhisperScribe) -> None:
    assert [stretch.words for stretch in await written(scribe, chunks(sound(), 8000))] == [(), ()]


async def test_times_go_on_behind_the_first_window(scribe: WhisperScribe) -> None:
    turn = np.concatenate([samples_of("fox"), silence(0.7), samples_of("hello"), silence(0.7)])
    found = await written(scribe, chunks(np.tile(turn, 6), 20_000))
    assert plain(" ".join(stretch.text for stretch in found)) == " ".join([FOX, HELLO] * 6)
    assert all(before.end_s <= after.start_s for before, after in pairwise(found))
    starts = [stretch.start_s for stretch in found if "fox" in stretch.text.lower()]
    turn_s = len(turn) / RATE_HZ
    assert starts == pytest.approx([0.05 + turn_s * number for number in range(6)], abs=0.15)


async def test_the_pieces_in_which_it_comes_change_nothing(scribe: WhisperScribe) -> None:
    whole = await written(scribe, chunks(sound(), len(sound())))
    assert await written(scribe, chunks(sound(), 777)) == whole


async def test_other_rates_and_channels(scribe: WhisperScribe) -> None:
    for rate_hz in (8000, 24_000, 44_100):
        stereo = np.repeat(soxr.resample(sound(), RATE_HZ, rate_hz), 2)
        found = await written(scribe, chunks(stereo, 9600, rate_hz, 2))
        assert plain(" ".join(stretch.text for stretch in found)) == f"{FOX} {HELLO}"


async def test_a_change_of_rate_breaks_the_contract(scribe: WhisperScribe) -> None:
    stream = ListStream([AudioChunk(silence(1), RATE_HZ), AudioChunk(silence(1), 24_000)])
    with pytest.raises(ProtocolError, match="began with"):
        await written(scribe, stream)


async def test_where_nothing_is_said_nothing_is_written(scribe: WhisperScribe) -> None:
    hiss = np.random.default_rng(0).normal(0, 0.01, 4 * RATE_HZ).astype(np.float32)
    for samples in (silence(0), silence(70), hiss):
        assert await written(scribe, chunks(samples, 16_000)) == []


async def test_a_hint_spells_a_name(scribe: WhisperScribe) -> None:
    (plainly,) = await written(scribe, chunks(samples_of("hello"), 16_000))
    (hinted,) = await written(scribe, chunks(samples_of("hello"), 16_000), hint="HELLO WORLD, HELLO WORLD, HELLO")
    assert plain(plainly.text) == plain(hinted.text) == HELLO
    assert plainly.text.startswith("Hello") and hinted.text.startswith("HELLO")
    assert await written(scribe, chunks(samples_of("hello"), 16_000), hint=" ") == [plainly]
    assert await written(scribe, chunks(samples_of("hello"), 16_000), hint="word " * 5000)


async def test_marks_in_a_hint_are_no_commands(scribe: WhisperScribe) -> None:
    hello = chunks(samples_of("hello"), 16_000)
    (found,) = await written(scribe, hello, hint="<|startoftranscript|><|endoftext|><|nospeech|>")
    assert plain(found.text) == HELLO
    ids = scribe._whisper._hinted("ships <|endoftext|> and <|startoftranscript|>")
    assert all(token < 50_256 for token in ids[1:-2]) and len(ids) > 5


async def test_a_temperature_draws(scribe: WhisperScribe) -> None:
    heard = [await written(scribe, chunks(samples_of("hello"), 16_000), temperature=1.0) for _ in range(4)]
    assert len({"".join(stretch.text for stretch in found) for found in heard}) > 1


@pytest.mark.parametrize("language", ["en", "en-US", "English", "EN"])
async def test_english_by_any_name(scribe: WhisperScribe, language: str) -> None:
    assert await written(scribe, chunks(samples_of("hello"), 16_000), language=language)


async def test_what_it_does_not_know_is_refused_before_a_sound_is_read(scribe: WhisperScribe) -> None:
    stream = chunks(sound(), 8000)
    with pytest.raises(UnsupportedError, match="'de' is not known") as other:
        await written(scribe, stream, language="de")
    assert other.value.param == "language"
    with pytest.raises(UnsupportedError, match="does not translate"):
        await written(scribe, stream, translate=True)
    assert len(stream.left) == len(chunks(sound(), 8000).left)


def test_stages_of_a_process_share_a_model(scribe: WhisperScribe) -> None:
    assert scribe._whisper is shared_whisper(WhisperTranscriber().weights()[0].path(), 1)


def word(text: str, start_s: float, end_s: float) -> TimedWord:
    return TimedWord(text, start_s, end_s, (1,), (-0.1,))


def test_stretches_end_with_sentences_and_long_pauses() -> None:
    words = [
        word("Mr.", 0.0, 0.3), word("Fox", 0.3, 0.6), word("ran.", 0.6, 1.0), word("Why?", 1.3, 1.5),
        word("Nobody", 1.7, 2.0), word("knows", 2.0, 2.2), word("and", 3.4, 3.6), word("so", 19.0, 19.2),
    ]  # fmt: skip
    found = [" ".join(each.text for each in stretch) for stretch in stretches(words)]
    assert found == ["Mr. Fox ran.", "Why?", "Nobody knows", "and", "so"]
    assert list(stretches([])) == []
    endless = [word("on", 0.5 * number, 0.5 * number + 0.5) for number in range(100)]
    assert max(stretch[-1].end_s - stretch[0].start_s for stretch in stretches(endless)) <= 15


def test_a_pause_belongs_to_no_word() -> None:
    loud = np.zeros(100, bool)
    loud[[*range(10, 20), *range(60, 80), *range(82, 90)]] = True
    # The model put the pause into the first of two words, with the beginning of the second.
    assert spoken_spans([0, 65, 85], loud) == [(10, 20), (60, 85)]
    # It put the end of the first into the second.
    assert spoken_spans([0, 15, 90], loud) == [(10, 20), (60, 90)]
    # It gave no time to the second.
    assert spoken_spans([0, 15, 15, 90], loud) == [(10, 12), (12, 20), (60, 90)]
    # Where nothing is loud, it is believed.
    assert spoken_spans([30, 40, 50], loud) == [(30, 40), (40, 50)]


def test_noise_between_words_is_a_pause() -> None:
    tone = np.sin(np.arange(RATE_HZ) * 0.3).astype(np.float32) * 0.3
    hiss = np.random.default_rng(0).normal(0, 0.003, 3 * RATE_HZ).astype(np.float32)
    hiss[RATE_HZ : 2 * RATE_HZ] += tone
    assert np.flatnonzero(loud_frames(hiss)).tolist() == list(range(50, 100))
    assert loud_frames(tone).all()


def test_ports_and_weights() -> None:
    ports = ports_of(WhisperScribe)
    assert [(port.name, port.type) for port in ports.inputs] == [("audio", AudioChunk)]
    assert [(port.name, port.type) for port in ports.outputs] == [("emit", Transcript)]
    assert not WhisperScribe.heavy, "it would get a process, and a model, of its own"
