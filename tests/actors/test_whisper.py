from __future__ import annotations

import re
from collections.abc import AsyncIterator

import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.whisper import transcriber
from actors.whisper.mel import log_mel, mel_filters
from actors.whisper.transcriber import Whisper, WhisperTranscriber, cut, transcribe, window_s
from omniflow.actor import BatchPolicy, ports_of
from omniflow.errors import InvalidInputError, ProtocolError
from omniflow.media import AudioFeatures, Waveforms
from tests.speech import FOX, HELLO, samples_of

pytestmark = pytest.mark.anyio

RATE_HZ = 16_000


def plain(text: str) -> str:
    return re.sub(r"[^a-z ]", "", text.lower())


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * RATE_HZ), np.float32)


def noise(seconds: float, amplitude: float) -> np.ndarray:
    return np.random.default_rng(0).normal(0, amplitude, int(seconds * RATE_HZ)).astype(np.float32)


@pytest.fixture(scope="module")
def whisper() -> Whisper:
    return transcriber._tiny_en()


@pytest.fixture
async def actor() -> AsyncIterator[WhisperTranscriber]:
    actor = WhisperTranscriber(max_seconds=100)
    await actor.setup()
    yield actor
    await actor.close()


def test_features_are_those_whisper_was_trained_on() -> None:
    from transformers import WhisperFeatureExtractor

    samples = noise(7, 0.1)
    reference = WhisperFeatureExtractor(feature_size=80)(samples, sampling_rate=RATE_HZ, return_tensors="np")
    features = log_mel(samples, mel_filters(), 30)
    assert features.shape == (80, 3000) and features.dtype == np.float32
    assert np.abs(features - reference.input_features[0]).max() < 1e-5


def test_speech_becomes_text() -> None:
    assert plain(transcribe(samples_of("fox"), RATE_HZ)) == FOX
    assert plain(transcribe(samples_of("hello"), RATE_HZ)) == HELLO


def test_other_rates_are_resampled() -> None:
    for rate_hz in (24_000, 44_100):
        assert plain(transcribe(soxr.resample(samples_of("fox"), RATE_HZ, rate_hz), rate_hz)) == FOX


def test_where_nothing_is_said_the_text_is_empty(whisper: Whisper) -> None:
    for sound in (silence(0), silence(3), noise(4, 0.01), noise(40, 0.3)):
        assert whisper.transcribe(sound) == ""


def test_loop_is_heard_again_in_the_window_of_the_training(whisper: Whisper, monkeypatch: pytest.MonkeyPatch) -> None:
    # With 1 s of silence after it, this clip makes the model repeat the sentence until it is stopped.
    monkeypatch.setattr(transcriber, "WINDOWS_S", (4, 30))
    monkeypatch.setattr(transcriber, "MARGIN_S", 1)
    fox = samples_of("fox")
    assert whisper._generate([fox], 4) == [None]
    assert [plain(text) for text in whisper.hear([fox])] == [FOX]


def test_long_speech_is_cut_in_its_pauses(whisper: Whisper) -> None:
    turn = np.concatenate([samples_of("fox"), silence(0.7), samples_of("hello"), silence(0.7)])
    first, second = cut(np.tile(turn, 6))
    assert len(first) + len(second) == 6 * len(turn)
    assert not first[-1600:].any() and not second[:1600].any()
    assert plain(whisper.transcribe(np.tile(turn, 6))) == " ".join([FOX, HELLO] * 6)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.floats(0.1, 25), st.sampled_from([0.0, 0.01, 0.2])), max_size=6))
def test_windows_hold_every_sound_once_and_in_order(sounds: list[tuple[float, float]]) -> None:
    samples = np.concatenate([silence(0), *(noise(seconds, amplitude) for seconds, amplitude in sounds)])
    windows = cut(samples)
    assert all(0 < len(window) <= 30 * RATE_HZ for window in windows)
    joined = np.concatenate([silence(0), *windows])
    assert np.array_equal(joined[joined != 0], samples[samples != 0])


def test_window_leaves_room_after_the_clip() -> None:
    assert [window_s(silence(seconds)) for seconds in (0.1, 4, 4.1, 14, 14.1, 30)] == [10, 10, 20, 20, 30, 30]


async def test_clips_of_several_requests_are_told_apart(actor: WhisperTranscriber) -> None:
    fox, hello = samples_of("fox"), samples_of("hello")
    several = Waveforms([hello, silence(1), fox], (0, 2, 3))
    single = Waveforms([fox], (0,))
    first, second = await actor.run([several, single])
    assert [plain(text) for text in first.texts] == [HELLO, "", FOX]
    assert first.index == (0, 2, 3)
    assert first.audio_s == pytest.approx((len(hello) + len(fox)) / RATE_HZ + 1)
    assert second == AudioFeatures(index=(0,), audio_s=len(fox) / RATE_HZ, texts=(first.texts[2],))


async def test_text_is_the_same_alone_and_in_a_batch(actor: WhisperTranscriber) -> None:
    requests = [Waveforms([samples_of("fox") + noise(20, 0.003)[: len(samples_of("fox"))]], (0,)) for _ in range(2)]
    requests[1] = Waveforms([samples_of("hello")], (0,))
    together = await actor.run(requests)
    alone = [(await actor.run([request]))[0] for request in requests]
    assert together == alone


async def test_too_much_audio_names_the_limit(actor: WhisperTranscriber) -> None:
    with pytest.raises(InvalidInputError) as caught:
        await actor.run([Waveforms([noise(60, 0.1), noise(40.5, 0.1)], (0, 1))])
    assert str(caught.value) == "the conversation holds 100.5 s of audio; this model takes at most 100 s"
    assert caught.value.param == "messages"


async def test_other_rate_breaks_the_contract(actor: WhisperTranscriber) -> None:
    with pytest.raises(ProtocolError, match="audio arrived at 8000 Hz, not at 16000 Hz"):
        await actor.run([Waveforms([silence(1)], (0,), 8000)])


def test_ports_and_weights() -> None:
    ports = ports_of(WhisperTranscriber)
    assert [(port.name, port.type) for port in ports.inputs] == [("audio", Waveforms)]
    assert [port.type for port in ports.outputs] == [AudioFeatures]
    assert WhisperTranscriber.batch == BatchPolicy(2, 0)
    assert WhisperTranscriber.heavy
    assert [weights.name for weights in WhisperTranscriber().weights()] == ["whisper-tiny-en"]
