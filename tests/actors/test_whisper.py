from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ctranslate2
import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.mel import log_mel, mel_filters
from actors.whisper import model, transcriber, windows
from actors.whisper.model import Whisper
from actors.whisper.transcriber import WhisperTranscriber, transcribe
from actors.whisper.windows import Cutter, cut, window_s
from omniflow.actor import BatchPolicy, ports_of
from omniflow.errors import InvalidInputError, ProtocolError, WeightsError
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


def test_a_model_of_many_languages_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ctranslate2.models, "Whisper", lambda *_, **__: SimpleNamespace(is_multilingual=True))
    with pytest.raises(WeightsError, match="English models"):
        Whisper(tmp_path)


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
    monkeypatch.setattr(windows, "WINDOWS_S", (4, 30))
    monkeypatch.setattr(model, "WINDOWS_S", (4, 30))
    monkeypatch.setattr(windows, "MARGIN_S", 1)
    fox = samples_of("fox")
    assert whisper.generate(whisper.encode([fox], 4), [fox], 4) == [None]
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


def test_a_sound_that_comes_bit_by_bit_is_cut_as_a_whole_one_and_not_kept() -> None:
    turn = np.concatenate([noise(7, 0.1), silence(1.5), noise(3, 0.2), silence(40)])
    sound = np.concatenate([silence(3), np.tile(turn, 4)])
    cutter, held = Cutter(), 0
    found = []
    for start in range(0, len(sound), 5000):
        found += cutter.push(sound[start : start + 5000])
        held = max(held, len(cutter._waiting))
    found += cutter.rest()
    assert held <= 30 * RATE_HZ + 5000
    assert len(found) == 4
    for window in found:
        assert np.array_equal(window.samples, sound[window.start : window.start + len(window.samples)])
    heard = np.concatenate([window.samples for window in found])
    assert np.array_equal(heard[heard != 0], sound[sound != 0])


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


async def test_a_clip_is_heard_once(actor: WhisperTranscriber, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a conversation, where each turn comes with all that was said before."""
    fox, hello = samples_of("fox"), samples_of("hello")
    (first,) = await actor.run([Waveforms([fox], (0,))])
    heard: list[int] = []
    hear = actor._whisper.hear
    monkeypatch.setattr(actor._whisper, "hear", lambda windows: heard.append(len(windows)) or hear(windows))
    (again,) = await actor.run([Waveforms([fox.copy()], (0,))])
    assert again == first and heard == []
    (second,) = await actor.run([Waveforms([fox, hello, hello], (0, 1, 3))])
    assert [plain(text) for text in second.texts] == [FOX, HELLO, HELLO] and heard == [1]


async def test_only_so_many_clips_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = WhisperTranscriber(cached_clips=2)
    await actor.setup()
    heard: list[float] = []
    hear = actor._whisper.hear
    monkeypatch.setattr(actor._whisper, "hear", lambda windows: heard.append(len(windows[0])) or hear(windows))
    for length in (4000, 5000, 4000, 6000, 4000, 5000):
        await actor.run([Waveforms([samples_of("hello")[:length]], (0,))])
    assert heard == [4000, 5000, 6000, 5000] and len(actor._texts) == 2


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


def test_the_limit_of_a_window_is_its_own(whisper: Whisper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is too long for 1 s of sound is a loop, also where 4 s are heard beside it."""

    def looping(_encoded: object, prompts: list[object], *, max_length: int, **_more: object) -> list[Any]:
        ids = [whisper._tokenizer.encode(" no", add_special_tokens=False).ids[0]] * min(40, max_length // 2)
        return [SimpleNamespace(sequences_ids=[ids], no_speech_prob=0.1, scores=[-0.2]) for _ in prompts]

    monkeypatch.setattr(whisper, "_model", SimpleNamespace(generate=looping))
    monkeypatch.setattr(whisper, "encode", lambda windows, length_s: None)
    short, long = np.ones(16_000, np.float32), np.ones(64_000, np.float32)
    alone = whisper.generate(None, [short], 10.0)  # type: ignore[arg-type]
    beside = whisper.generate(None, [short, long], 10.0)  # type: ignore[arg-type]
    assert alone[0] is None and beside[0] is None and beside[1] is not None
