"""The voices of Ming's talker: what a recording becomes, the ones that a checkpoint brings, and the stage that learns.

sound -> AudioVAE's encoder -> latents before the first of the talker's own, with what is said in them
-> CAM++ -> an embedding that stands in the prompt
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from actors.clip import Clip
from actors.roles import VoiceEncoderRole
from actors.speaker import FILE, SPEAKER_DIM, SpeakerEncoder
from actors.speaker import SAMPLE_RATE_HZ as SPEAKER_HZ
from actors.stage import ModelStage
from omniflow.actor import NamedVoice
from omniflow.errors import InvalidInputError, WeightsError
from omniflow.media import VoiceCode, VoiceSample

if TYPE_CHECKING:
    import torch

    from actors.ming.audio_vae import AudioVaeEncoder

PREFERRED = "DB30"
"""The voice of Ming-flash-omni itself; where a checkpoint has no such one, its first is the default."""
LIST = "data/voice_name.json"
UNNAMED = "default"
"""Of a checkpoint that brings no voices: whatever its talker likes to speak with."""
_IDEOGRAPH = re.compile("[\u4e00-\u9fff]")


class Voice(msgspec.Struct, frozen=True):
    """A recording as the talker hears it. Encoded as msgpack it is `VoiceCode.data`: 49 KB for 30 s."""

    latent_dim: int
    latents: bytes
    """float16 [n, latent_dim], whole steps of the talker; empty where what is said is unknown, too."""
    speaker: bytes = b""
    """float32 [192]; empty where the checkpoint has no CAM++, or a talker that is told no embedding."""
    text: str = ""
    """What is said."""

    @property
    def before(self) -> torch.Tensor | None:
        """The latents, float32 [n, latent_dim]; None where there are none, or it is unknown what is said in them."""
        import torch

        if not self.latents or not self.text:
            return None
        return torch.from_numpy(np.frombuffer(self.latents, np.float16).astype(np.float32).reshape(-1, self.latent_dim))

    @property
    def embedding(self) -> np.ndarray | None:
        """Who speaks, float32 [192]."""
        return np.frombuffer(self.speaker, np.float32).copy() if self.speaker else None


def decode_voice(code: bytes, text: str, latent_dim: int, patch: int, speaker_dim: int = SPEAKER_DIM) -> Voice:
    """The voice that a `MingVoiceEncoder` gave, and in which `text` is said. `speaker_dim` 0: the model is told no
    embedding. Raises InvalidInputError for one of another model, and for one of which nothing could be told.
    """
    try:
        voice = msgspec.msgpack.decode(code, type=Voice)
    except msgspec.DecodeError as error:
        raise InvalidInputError(f"the voice is none of this model: {error}", param="voice") from error
    broken = len(voice.latents) % (2 * patch * latent_dim) or len(voice.speaker) not in (0, 4 * speaker_dim)
    if voice.latent_dim != latent_dim or broken:
        raise InvalidInputError("the voice is none of this model: its latents have other sizes", param="voice")
    if not voice.speaker and not text.strip():
        raise InvalidInputError(
            "ref_text: this model takes a voice from a recording together with its words: give what is said in it",
            param="ref_text",
        )
    return msgspec.structs.replace(voice, text=text.strip())


class VoiceEncoder:
    """Makes voices with the checkpoint in `folder`; used by one thread at a time.

    Raises WeightsError where its AudioVAE has no encoder, or its weights do not fit.
    """

    def __init__(self, folder: Path, device: str = "cpu", threads: int = 1) -> None:
        # Imports torch, so not at the top: a graph is checked and explained without it.
        import torch

        from actors.checkpoint import read_tensors
        from actors.ming.audio_vae import load_audio_vae_encoder
        from actors.ming.config import Folders, Talker

        torch.set_num_threads(threads)
        config, folders = Talker.load(folder), Folders.of(folder)
        self._device = torch.device(device)
        weights = read_tensors(folders.vae, ("audio.encoder.", "encoder."))
        self._vae: AudioVaeEncoder = load_audio_vae_encoder(config.audio_tokenizer_config, weights).to(self._device)
        self._patch, in_chat = config.ditar_config.patch_size, config.manner.in_chat
        self._step = self._vae.samples_per_latent * self._patch
        # As the programs of the three kinds of checkpoints do it; the preview's cuts what is no whole step.
        self._fills_up, self._silence_first = in_chat, folders.is_apart
        file = next((each for each in (folders.talker / FILE, folder / FILE) if in_chat and each.is_file()), None)
        self._speaker = SpeakerEncoder(file, threads) if file is not None else None

    @property
    def sample_rate_hz(self) -> int:
        """Of the sound that it takes."""
        return self._vae.sample_rate_hz

    @property
    def most_s(self) -> float:
        """The longest recording that it takes."""
        step_latents = self._step // self._vae.samples_per_latent
        return self._vae.max_latents // step_latents * self._step / self.sample_rate_hz

    def __call__(self, samples: np.ndarray) -> Voice:
        """Of mono float32 [n]. Raises InvalidInputError for more than the AudioVAE takes."""
        import soxr
        import torch

        from omniflow.engine.flow import flow_noise

        silence = np.zeros(-len(samples) % self._step if self._fills_up else 0, np.float32)
        padded = np.concatenate([silence, samples] if self._silence_first else [samples, silence])
        shape = -(-len(padded) // self._vae.samples_per_latent), self._vae.latent_dim
        noise = torch.from_numpy(flow_noise(0, 0, 1, shape)[0])  # the same recording is the same voice
        latents = self._vae(torch.from_numpy(padded).to(self._device), noise.to(self._device)).cpu().numpy()
        latents = latents[: len(latents) // self._patch * self._patch]
        speaker = b""
        if self._speaker is not None:
            speaker = self._speaker(soxr.resample(samples, self.sample_rate_hz, SPEAKER_HZ)).tobytes()
        return Voice(self._vae.latent_dim, latents.astype(np.float16).tobytes(), speaker)


class Listed(msgspec.Struct, frozen=True):
    """An entry of data/voice_name.json."""

    prompt_wav_path: str | tuple[str, ...] = ()
    prompt_text: str | None = None

    @property
    def language(self) -> str:
        """Of the recording, by its script; the voice speaks Chinese and English."""
        return "zh-CN" if _IDEOGRAPH.search(self.prompt_text or "") else "en-US"

    def files(self, home: Path) -> list[Path]:
        """Its recordings, one behind the other; paths are relative to `home`."""
        paths = [self.prompt_wav_path] if isinstance(self.prompt_wav_path, str) else self.prompt_wav_path
        return [home / path for path in paths]


def _home(folder: Path) -> Path:
    """Where the voices of the checkpoint in `folder` are: with the talker, or with the whole, as in the repository of
    the preview.
    """
    from actors.ming.config import Folders

    talker = Folders.of(folder).talker
    return next((each for each in (talker, folder) if (each / LIST).is_file()), talker)


def listed_voices(folder: Path) -> dict[str, Listed]:
    """What the checkpoint in `folder` says of its voices, the default first; those whose recording is not there are
    left out. Raises WeightsError.
    """
    home = _home(folder)
    file = home / LIST
    if not file.is_file():
        return {}
    try:
        listed = msgspec.json.decode(file.read_bytes(), type=dict[str, Listed])
    except msgspec.DecodeError as error:
        raise WeightsError(f"{file} is no list of voices: {error}") from error
    there = [name for name, each in listed.items() if (files := each.files(home)) and all(map(Path.is_file, files))]
    return {name: listed[name] for name in sorted(there, key=lambda name: name != PREFERRED)}


def named_voices(folder: Path) -> list[NamedVoice]:
    """The voices of the checkpoint in `folder`, the default first; one without a name of its own where it has none."""
    listed = listed_voices(folder)
    named = [NamedVoice(name, each.language) for name, each in listed.items()]
    return named or [NamedVoice(UNNAMED, "zh-CN")]


def load_voice(folder: Path, name: str, listed: Listed, encode: VoiceEncoder) -> Voice:
    """The voice `name` of the checkpoint in `folder`. Raises WeightsError where its recording cannot be heard."""
    try:
        sounds = [_sound(file, encode.sample_rate_hz) for file in listed.files(_home(folder))]
        voice = encode(np.concatenate(sounds))
    except (OSError, InvalidInputError) as error:
        raise WeightsError(f"the recording of voice {name!r} cannot be heard: {error}") from error
    return msgspec.structs.replace(voice, text=listed.prompt_text or "")


def _sound(file: Path, sample_rate_hz: int) -> np.ndarray:
    clip = Clip(file.read_bytes(), where=file.name, param="voice", sample_rate_hz=sample_rate_hz)
    blocks = []
    while not clip.ended:
        blocks.append(clip.read_block())
    return np.concatenate(blocks)


class MingVoiceEncoder(ModelStage, VoiceEncoderRole):
    """Learns voices for the talker of a Ming checkpoint (`model`) from recordings of `least_s` to `most_s` seconds,
    or to what its AudioVAE has room for.

    The same recording gives the same voice.
    """

    preload = ("torch", "actors.ming.audio_vae", "onnxruntime", "kaldi_native_fbank", "soundfile", "soxr")

    def __init__(
        self, *, model: str, device: str = "cpu", threads: int = 1, least_s: float = 1.0, most_s: float = 30.0
    ) -> None:
        super().__init__(model, device, threads)
        self._least_s, self._most_s = least_s, most_s
        self._encode: VoiceEncoder

    async def setup(self) -> None:
        """Load the AudioVAE's encoder and CAM++. Raises WeightsError where one cannot be loaded."""
        self._encode = await self.offload(VoiceEncoder, self._weights.path(), self._device, self._threads)
        self._most_s = min(self._most_s, self._encode.most_s)

    async def run(self, sample: VoiceSample) -> VoiceCode:
        """See the class. Raises InvalidInputError, naming `sample.at`, for what cannot be heard, or is too long."""
        at, rate_hz = sample.at, self._encode.sample_rate_hz
        clip = await self.offload(partial(Clip, sample.data, where=at, param=at, sample_rate_hz=rate_hz))
        blocks: list[np.ndarray] = []
        while not clip.ended and sum(map(len, blocks)) <= self._most_s * rate_hz:
            blocks.append(await self.offload(clip.read_block))
        samples = np.concatenate(blocks)
        audio_s = len(samples) / rate_hz
        if not self._least_s <= audio_s <= self._most_s:
            heard = f"{audio_s:.1f} s" if clip.ended else f"more than {self._most_s:.3g} s"
            raise InvalidInputError(
                f"{at}: a recording of {heard} is not taken; send {self._least_s:g} to {self._most_s:.3g} s", param=at
            )
        voice = await self.offload(self._encode, samples)
        return VoiceCode(msgspec.msgpack.encode(voice), audio_s)
