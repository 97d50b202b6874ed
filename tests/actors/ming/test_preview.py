"""The talker and the AudioVAE of Ming-flash-omni-preview, against what the program of its authors made of the same."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.checkpoint import read_tensors
from actors.ming.audio_slots import AudioSlots
from actors.ming.audio_vae import AudioVaeDecoder, AudioVaeEncoder, load_audio_vae, load_audio_vae_encoder
from actors.ming.config import AudioVae, Manner, Talker
from actors.ming.script import ALONE, MingScript
from actors.ming.speaking import MingTalker
from actors.ming.talker import TalkerModel, load_talker
from actors.ming.vocoder import MingVocoder
from actors.ming.voices import MingVoiceEncoder, Voice, VoiceEncoder, decode_voice, listed_voices, load_voice
from actors.streaming_decoder import check_streaming_decoder
from omniflow.engine import flow_engine
from omniflow.engine.base import EngineOutput, EngineRequest, Sampling
from omniflow.engine.flow import FlowKnobs, flow_noise
from omniflow.engine.flow_engine import FlowEngine
from omniflow.engine.flow_slots import SlottedFlow
from omniflow.errors import InvalidInputError, WeightsError
from omniflow.media import AudioChunk, Latents, Segment, VoiceSample
from tests.actors.ming.preview import CHECKPOINT, SAID, TEXT, expected, first_noise, link_checkpoint, write_voices
from tests.actors.ming.reference import apart
from tests.doubles import ListEmit, ListStream, context

pytestmark = pytest.mark.anyio
CONFIG = Talker.load(CHECKPOINT)
VAE = CONFIG.audio_tokenizer_config
LATENTS = expected()["vae.latents"].numpy()
SAMPLES = expected()["vae.samples"]
HOP = VAE.dec_kwargs.output_dim
PATCH = CONFIG.ditar_config.patch_size


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model() -> TalkerModel:
    return load_talker(CONFIG, read_tensors(CHECKPOINT / "talker"))


@pytest.fixture(scope="module")
def decoder() -> AudioVaeDecoder:
    return load_audio_vae(VAE, read_tensors(CHECKPOINT / "talker" / "vae"))


@pytest.fixture(scope="module")
def encoder() -> AudioVaeEncoder:
    return load_audio_vae_encoder(VAE, read_tensors(CHECKPOINT / "talker" / "vae", ("encoder.",)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = link_checkpoint(tmp_path_factory.mktemp("preview"))
    write_voices(folder)
    return folder


def test_its_config_tells_how_it_is_run() -> None:
    assert CONFIG.manner == Manner(solver_steps=7, guidance=1.5, min_steps=11, in_chat=False)
    assert (CONFIG.ditar_config.history, VAE.sample_rate, VAE.patch_size) == (PATCH, 16000, -1)


def test_the_audio_vae_sounds_as_the_authors_does(decoder: AudioVaeDecoder) -> None:
    assert SAMPLES.std() > 0.05  # silence would agree with anything
    assert apart(torch.from_numpy(decoder.step(decoder.init(), LATENTS, True)), SAMPLES) <= 1e-5
    assert (decoder.sample_rate_hz, decoder.samples_per_frame, decoder.holdback) == (16000, HOP, 2)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 30), st.lists(st.integers(0, 9), max_size=12))
def test_any_chunking_gives_the_whole(decoder: AudioVaeDecoder, count: int, sizes: list[int]) -> None:
    whole = decoder.step(decoder.init(), LATENTS[:count], True)
    check_streaming_decoder(decoder, LATENTS[:count], whole, sizes, 1e-6)


def test_latent_after_latent_is_as_the_authors_whole(decoder: AudioVaeDecoder) -> None:
    """Also from a first chunk of one, with which their own streaming fails."""
    check_streaming_decoder(decoder, LATENTS, SAMPLES.numpy(), [1] * 30, 2e-6)
    state = decoder.init()
    assert len(decoder.step(state, LATENTS[:PATCH], False)) == (PATCH - 1) * HOP - HOP // 2
    assert len(decoder.step(state, LATENTS[PATCH : 2 * PATCH], False)) == PATCH * HOP


def test_in_slots_it_sounds_the_same() -> None:
    decoder = load_audio_vae(VAE, read_tensors(CHECKPOINT / "talker" / "vae"))
    slots = AudioSlots(decoder, slots=2, positions=64, dtype=torch.float32)
    check_streaming_decoder(slots, LATENTS, SAMPLES.numpy(), [PATCH, 1, 0, 2 * PATCH, 3], 1e-5)


def test_the_encoder_hears_what_the_authors_does(encoder: AudioVaeEncoder) -> None:
    """4090 samples are 26 frames, the last of them padded: a latent each, of which whole steps are kept."""
    wanted = expected()
    mean, spread = encoder.distribution(wanted["encoder.samples"])
    assert wanted["encoder.hidden"].std() > 0.5
    assert apart(mean, wanted["encoder.hidden"][:, :64]) <= 1e-5
    assert apart(spread, torch.nn.functional.softplus(wanted["encoder.hidden"][:, 64:]) + 1e-4) <= 1e-5
    latents = encoder(wanted["encoder.samples"], wanted["encoder.noise"])
    assert latents.shape == (26, 64) and apart(latents[:25], wanted["voice.latents"]) <= 1e-5
    assert encoder.max_latents == 512


@pytest.mark.parametrize("name", ["voice", "plain"])
def test_a_segment_is_the_authors_step_by_step(model: TalkerModel, name: str) -> None:
    """To its end, each step from what ours made before. Steps before the twelfth, whose stop head says so, end none."""
    wanted, manner = expected(), CONFIG.manner
    before = wanted["voice.latents"] if name == "voice" else None
    stream, inputs = model.init(before), model.embedding(wanted[f"{name}.ids"])
    if before is not None:
        rows = model.head.feedback(before.reshape(-1, PATCH, 64))
        assert apart(rows, wanted["voice.rows"]) <= 1e-5
        inputs = torch.cat([inputs, rows])
    knobs = FlowKnobs(torch.tensor([manner.guidance]), torch.zeros(1))
    noise = first_noise(wanted[f"{name}.noise"], model.head.noise_shape)
    stops = wanted[f"{name}.stop"]
    assert (stops - 0.5).abs().min() > 0.001 and stops[:11].max() > 0.5
    for number in range(len(stops)):
        made = model.step([stream], [inputs], torch.from_numpy(noise[number : number + 1]), knobs)
        inputs = made.feedback
        assert apart(made.latents[0], wanted[f"{name}.steps"][number]) <= 1e-5
        assert apart(made.feedback[0], wanted[f"{name}.feedback"][number]) <= 1e-5
        assert bool(made.stopped) == (number > 10 and float(stops[number]) > 0.5)
    assert bool(made.stopped)


@pytest.mark.parametrize("name", ["voice", "plain"])
@pytest.mark.parametrize("in_slots", [False, True])
def test_the_engine_says_a_text_as_the_authors_program(
    model: TalkerModel, decoder: AudioVaeDecoder, monkeypatch: pytest.MonkeyPatch, name: str, in_slots: bool
) -> None:
    """From the words to the sound: the prompt, the steps, the end, and the samples."""
    wanted, shape = expected(), model.head.noise_shape
    noise = first_noise(wanted[f"{name}.noise"], shape)
    monkeypatch.setattr(
        flow_engine, "flow_noise", lambda _seed, step, _count, _shape: noise[[min(step, len(noise) - 1)]]
    )
    latents = wanted["voice.latents"].half().numpy()
    voice = Voice(64, latents.tobytes(), text=SAID) if name == "voice" else None
    prompt = MingScript(CHECKPOINT).prompt(TEXT, voice)
    assert prompt is not None and prompt.rows is None and prompt.ids == wanted[f"{name}.ids"].tolist()
    before = None if prompt.before is None else wanted["voice.latents"]  # a voice keeps them in 16 bits
    flow: Any = SlottedFlow(model, slots=2, positions=128) if in_slots else model
    engine = FlowEngine[Any](flow, guidance=CONFIG.manner.guidance, sigma=0.25, max_running=2, kv_tokens=1024)
    sampling = Sampling(temperature=0.0, max_tokens=prompt.max_steps)
    engine.start(EngineRequest(id="a", ids=prompt.ids, sampling=sampling, before=before))
    outputs: list[EngineOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += engine.step()
    steps = torch.stack([each.frames for each in outputs if each.frames is not None])
    assert outputs[-1].finish_reason == "stop" and apart(steps, wanted[f"{name}.steps"]) <= 1e-5
    state, samples = decoder.init(), wanted[f"{name}.samples"]
    parts = [decoder.step(state, each.numpy(), each is steps[-1]) for each in steps[:-1]]
    parts.append(decoder.step(state, steps[-1].numpy(), True))
    assert samples.std() > 0.05 and apart(torch.from_numpy(np.concatenate(parts)), samples) <= 2e-5


def test_a_voice_is_its_recording_and_its_words(folder: Path, encoder: AudioVaeEncoder) -> None:
    """It keeps whole steps, and no embedding, whatever lies in the folder."""
    listed = listed_voices(folder)
    assert list(listed) == ["DB30"] and listed_voices(folder / "talker") == {}
    encode = VoiceEncoder(folder)
    voice = load_voice(folder, "DB30", listed["DB30"], encode)
    noise = torch.from_numpy(flow_noise(0, 0, 1, (26, 64))[0])
    heard = encoder(expected()["encoder.samples"], noise)[:25]
    assert voice.before is not None and voice.embedding is None and voice.text == SAID
    assert apart(voice.before, heard) <= 1e-3
    prompt = MingScript(folder).prompt(TEXT, voice)
    assert prompt is not None and prompt.ids == expected()["voice.ids"].tolist() and prompt.positions == ()


def test_a_voice_without_its_words_or_of_another_release_is_refused() -> None:
    latents = bytes(2 * 64 * PATCH)
    code = msgspec.msgpack.encode(Voice(64, latents))
    assert decode_voice(code, "said", 64, PATCH, MingScript(CHECKPOINT).speaker_dim).before is not None
    with pytest.raises(InvalidInputError, match="ref_text: this model takes a voice from a recording") as refused:
        decode_voice(code, " ", 64, PATCH, 0)
    assert refused.value.param == "ref_text"
    with pytest.raises(InvalidInputError, match="the voice is none of this model"):
        decode_voice(msgspec.msgpack.encode(Voice(64, latents, bytes(4 * 192))), "said", 64, PATCH, 0)


async def speak(talker: MingTalker, **options: object) -> list[Latents]:
    emit: ListEmit[Latents] = ListEmit()
    await talker.run(ListStream([Segment(TEXT, 0)]), emit, context(seed=1, **options))
    return emit.items


async def test_its_actors_speak_with_its_voice_and_with_a_learned_one(talker: MingTalker, folder: Path) -> None:
    assert [(each.name, each.language) for each in talker.voices()] == [("DB30", "en-US")]
    assert talker.guidance == 1.5
    spoken = await speak(talker)
    vocoder, learner = MingVocoder(model=str(folder)), MingVoiceEncoder(model=str(folder), least_s=0.1)
    await vocoder.setup()
    await learner.setup()
    sound: ListEmit[AudioChunk] = ListEmit()
    await vocoder.run(ListStream(spoken), sound, context())
    samples = np.concatenate([each.samples for each in sound.items])
    assert {each.sample_rate_hz for each in sound.items} == {16000} and samples.std() > 0.02
    assert len(samples) == len(spoken) * PATCH * HOP and len(spoken) >= 12
    wav = io.BytesIO()
    soundfile.write(wav, expected()["encoder.samples"].numpy(), 16000, "FLOAT", format="WAV")
    code = await learner.run(VoiceSample(wav.getvalue(), "ref_audio"))
    learned = await speak(talker, voice_code=code.data, voice_text=SAID)
    assert all(np.array_equal(one.frames, other.frames) for one, other in zip(learned, spoken, strict=True))
    with pytest.raises(InvalidInputError, match="ref_text: this model takes a voice from a recording"):
        await speak(talker, voice_code=code.data)


async def test_without_voices_it_speaks_as_it_likes(tmp_path: Path) -> None:
    talker = MingTalker(model=str(link_checkpoint(tmp_path)))
    assert [each.name for each in talker.voices()] == ["default"]
    await talker.setup()
    assert len(await speak(talker)) >= 12
    await talker.close()


def test_what_is_not_of_its_kind_is_refused(tmp_path: Path) -> None:
    weights = read_tensors(CHECKPOINT / "talker")
    with pytest.raises(WeightsError, match="the talker's spk_head do not fit"):
        load_talker(CONFIG, weights | {"spk_head.bias": torch.zeros(32)})
    shutil.copytree(CHECKPOINT / "talker", tmp_path / "talker")
    tokenizer = tmp_path / "talker" / "llm" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace(ALONE[0], "<|other|>"))
    with pytest.raises(WeightsError, match=r"knows no <\|endoftext\|>: it is no Ming talker's"):
        MingScript(tmp_path)
    vae = json.loads((tmp_path / "talker" / "vae" / "config.json").read_text())
    (tmp_path / "talker" / "vae" / "config.json").write_text(
        json.dumps(vae | {"semantic_module_kwargs": {"casual": True}})
    )
    with pytest.raises(WeightsError, match="what that adds to its sound is not built here"):
        AudioVae.load(tmp_path)
    config = json.loads((tmp_path / "talker" / "config.json").read_text())
    (tmp_path / "talker" / "vae" / "config.json").write_text(json.dumps(vae))
    config["flowmodel"]["pe_attn_head"] = 1
    (tmp_path / "talker" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"flowmodel\.pe_attn_head"):
        Talker.load(tmp_path)
