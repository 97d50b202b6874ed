from __future__ import annotations

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile
import soxr
import torch

from actors.ming.audio_vae import load_audio_vae_encoder
from actors.ming.script import AFTER, BEFORE, SPEAKER, MingScript
from actors.ming.speaking import MingTalker
from actors.ming.voices import MingVoiceEncoder, Voice, VoiceEncoder, decode_voice, listed_voices, load_voice
from actors.speaker import SpeakerEncoder
from omniflow.engine.flow import flow_noise
from omniflow.errors import InvalidInputError, WeightsError
from omniflow.media import Latents, Segment, VoiceSample
from tests.actors.ming.reference import CONFIG, weights
from tests.actors.ming.tiny import (
    VOICES,
    recording,
    tiny_tokenizer,
    write_checkpoint,
    write_flash_checkpoint,
    write_voices,
)
from tests.doubles import ListEmit, ListStream, context

pytestmark = pytest.mark.anyio
STEP = 4 * 392
"""Samples of a step of the talker."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_flash_checkpoint(tmp_path_factory.mktemp("flash"))
    write_voices(folder / "talker")
    return folder


@pytest.fixture(scope="module")
def encode(folder: Path) -> VoiceEncoder:
    return VoiceEncoder(folder)


@pytest.fixture(scope="module")
async def learner(anyio_backend: str, folder: Path) -> MingVoiceEncoder:
    actor = MingVoiceEncoder(model=str(folder), least_s=0.02, most_s=0.5)
    await actor.setup()
    return actor


async def speak(talker: MingTalker, **options: object) -> np.ndarray:
    emit: ListEmit[Latents] = ListEmit()
    await talker.run(ListStream([Segment("Hi!", 0)]), emit, context(seed=1, **options))
    return np.concatenate([each.frames for each in emit.items])


def wav(samples: np.ndarray, rate_hz: int = 44100) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, "FLOAT", format="WAV")
    return file.getvalue()


@pytest.mark.parametrize("layout", ["flash", "whole"])
def test_a_recording_is_filled_up_with_silence_where_the_reference_does(
    layout: str, folder: Path, tmp_path: Path
) -> None:
    """In front in the layout of Ming-flash-omni, behind in that of Ming-omni-tts."""
    encode = VoiceEncoder(folder if layout == "flash" else write_checkpoint(tmp_path))
    samples = recording(2 * STEP - 500)
    silence = np.zeros(500, np.float32)
    padded = np.concatenate([silence, samples] if layout == "flash" else [samples, silence])
    vae = load_audio_vae_encoder(CONFIG.audio_tokenizer_config, weights())
    wanted = vae(torch.from_numpy(padded), torch.from_numpy(flow_noise(0, 0, 1, (8, 8))[0]))
    voice = msgspec.structs.replace(encode(samples), text="said")
    assert voice.before is not None and voice.before.shape == (8, 8)
    assert (voice.before - wanted).abs().max() <= 2e-3 * wanted.abs().max()
    assert encode(samples) == encode(samples)
    if layout == "flash":
        speaker = SpeakerEncoder(folder / "talker" / "campplus.onnx")(soxr.resample(samples, 44100, 16000))
        assert voice.embedding is not None and np.array_equal(voice.embedding, speaker)
    else:
        assert voice.embedding is None


def test_a_prompt_tells_who_speaks_and_what_was_heard(folder: Path, encode: VoiceEncoder) -> None:
    script, tokenizer = MingScript(folder), tiny_tokenizer()
    voice = load_voice(folder, "Alto", listed_voices(folder)["Alto"], encode)
    prompt = script.prompt("Say 2 <|vision_pad|>.", voice)
    assert prompt is not None and prompt.rows is not None and prompt.before is not None
    known = [id for piece in (*BEFORE[:3], *SPEAKER, *BEFORE[3:]) for id in tokenizer.encode(piece).ids]
    after = [id for piece in AFTER for id in tokenizer.encode(piece).ids]
    assert prompt.ids[: len(known)] == known and prompt.ids[-len(after) :] == after
    assert [prompt.ids[at] for at in prompt.positions] == tokenizer.encode(SPEAKER[2]).ids
    assert prompt.ids[prompt.positions[0] - 1] == tokenizer.token_to_id("<|vision_start|>")
    tokenizer.encode_special_tokens = True
    spoken = [*tokenizer.encode("a low voice").ids, *tokenizer.encode("Say two <|vision_pad|>.").ids]
    assert prompt.ids[len(known) : -len(after)] == spoken
    row = weights()["spk_head.weight"] @ torch.from_numpy(np.array(voice.embedding)) + weights()["spk_head.bias"]
    assert torch.allclose(prompt.rows, row[None], atol=1e-5)
    assert prompt.before.shape == (8, 8)  # 2000 samples: two steps


def test_a_tokenizer_without_the_marks_of_a_speaker_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str().replace("<|vision_pad|>", "<|other|>"))
    with pytest.raises(WeightsError, match=r"knows no <\|vision_pad\|>: it is no Ming talker's"):
        MingScript(folder)


def test_a_recording_whose_words_are_unknown_tells_who_speaks_only(folder: Path, encode: VoiceEncoder) -> None:
    prompt = MingScript(folder).prompt("Hi.", encode(recording(2000)))
    assert prompt is not None and prompt.rows is not None and prompt.before is None


async def test_it_speaks_with_the_voices_of_the_checkpoint_the_preferred_one_by_default(talker: MingTalker) -> None:
    assert [(each.name, each.language) for each in talker.voices()] == [("DB30", "zh-CN"), ("Alto", "en-US")]
    said = {name: await speak(talker, voice=name) for name in VOICES}
    assert np.array_equal(await speak(talker), said["DB30"])
    assert not np.array_equal(said["Alto"][:4], said["DB30"][:4])
    with pytest.raises(InvalidInputError, match="there is no voice 'Lost'; there are DB30, Alto") as refused:
        await speak(talker, voice="Lost")
    assert refused.value.param == "voice"


async def test_a_learned_voice_is_that_of_the_same_recording(talker: MingTalker, learner: MingVoiceEncoder) -> None:
    code = await learner.run(VoiceSample(wav(recording(2000)), "ref_audio"))
    assert code.audio_s == pytest.approx(2000 / 44100) and len(code.data) < 1200
    learned = await speak(talker, voice_code=code.data, voice_text=VOICES["Alto"])
    assert np.array_equal(learned, await speak(talker, voice="Alto"))
    assert not np.array_equal((await speak(talker, voice_code=code.data))[:4], learned[:4])


async def test_a_recording_of_another_rate_and_channels_is_heard_too(learner: MingVoiceEncoder) -> None:
    stereo = np.stack([recording(4000)] * 2, axis=1)
    voices = [
        msgspec.msgpack.decode((await learner.run(VoiceSample(data, "x"))).data, type=Voice)
        for data in (wav(stereo), wav(soxr.resample(recording(4000), 44100, 48000), 48000))
    ]
    one, other = (np.frombuffer(each.speaker, np.float32) for each in voices)
    assert np.corrcoef(one, other)[0, 1] > 0.99
    assert len(voices[0].latents) == len(voices[1].latents) == 2 * 8 * 12


async def test_no_recording_is_taken_that_the_audio_vae_has_no_room_for(folder: Path) -> None:
    """As long as there is room it is; longer, it is refused by its length."""
    actor = MingVoiceEncoder(model=str(folder), least_s=0.02)
    await actor.setup()
    most = VoiceEncoder(folder).most_s
    longest = np.resize(recording(4000), int(most * 44100))
    assert (await actor.run(VoiceSample(wav(longest), at="ref_audio"))).audio_s == pytest.approx(most, abs=1e-4)
    with pytest.raises(InvalidInputError, match=rf"send 0\.02 to {most:.3g} s") as refused:
        await actor.run(VoiceSample(wav(np.resize(longest, len(longest) + 4410)), at="ref_audio"))
    assert refused.value.param == "ref_audio"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the audio is empty"),
        (b"no sound", "cannot be decoded"),
        (wav(recording(500)), "a recording of 0.0 s is not taken; send 0.02 to 0.5 s"),
        (wav(recording(30000)), "a recording of 0.7 s is not taken"),
        (wav(recording(300_000)), "a recording of more than 0.5 s is not taken"),
    ],
)
async def test_what_it_does_not_hear_is_said(learner: MingVoiceEncoder, data: bytes, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^ref_audio: .*{message}") as refused:
        await learner.run(VoiceSample(data, "ref_audio"))
    assert refused.value.param == "ref_audio"


def test_a_voice_of_another_model_is_refused() -> None:
    fits = Voice(8, bytes(2 * 8 * 4), bytes(4 * 192))
    assert decode_voice(msgspec.msgpack.encode(fits), " said ", 8, 4).text == "said"
    for other in (
        Voice(64, fits.latents),
        Voice(8, bytes(2 * 8 * 3)),
        Voice(8, b"", bytes(8)),
        Voice(8, b"", bytes(4 * 384)),
    ):
        with pytest.raises(InvalidInputError, match="the voice is none of this model"):
            decode_voice(msgspec.msgpack.encode(other), "", 8, 4)
    with pytest.raises(InvalidInputError, match="the voice is none of this model"):
        decode_voice(b"\xc1", "", 8, 4)


async def test_a_checkpoint_without_voices_has_one_without_a_name(tmp_path: Path) -> None:
    talker = MingTalker(model=str(write_checkpoint(tmp_path)))
    assert [each.name for each in talker.voices()] == ["default"]
    await talker.setup()
    assert np.array_equal(await speak(talker), await speak(talker, voice="default"))
    with pytest.raises(InvalidInputError, match="there is no voice 'DB30'; there are default"):
        await speak(talker, voice="DB30")
    await talker.close()


def test_a_broken_list_or_recording_is_named(tmp_path: Path) -> None:
    folder = write_flash_checkpoint(tmp_path)
    write_voices(folder / "talker")
    (folder / "talker" / "data" / "wavs" / "Alto.wav").write_bytes(b"no sound")
    with pytest.raises(WeightsError, match="recording of voice 'Alto' cannot be heard: Alto.wav: the audio cannot"):
        load_voice(folder, "Alto", listed_voices(folder)["Alto"], VoiceEncoder(folder))
    (folder / "talker" / "data" / "voice_name.json").write_text("[]")
    with pytest.raises(WeightsError, match="voice_name.json is no list of voices"):
        listed_voices(folder)
