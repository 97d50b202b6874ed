"""Ming-flash-omni-preview: a checkpoint with its eyes and its talker finds its profile, sees, hears, and speaks."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from actors.ming.tiny import SAID, VISION, write_checkpoint
from tests.actors.ming.preview import TINY_TALKER, TINY_VAE
from tests.e2e.conftest import Server, serving
from tests.e2e.test_ming_tiny import MEDIA, asked, wav

EYES = {
    **VISION,
    "model_type": "qwen2_5_vit",
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [1],
    "hidden_act": "silu",
}
ON_A_CPU = """\
thinker = { engine = "transformers", tp = 1, device = "cpu", kv_tokens = 16384, max_tokens = 24, memory = {} }
audio_encoder = { device = "cpu", memory = {} }
image_encoder = { device = "cpu", memory = {} }
talker = { device = "cpu", kv_tokens = 16384, memory = {} }
vocoder = { device = "cpu", memory = {} }
voice = { device = "cpu", memory = {} }
"""
TEXT = "The boat waits."
STEP = 3200
"""Samples of a step of its talker."""


@pytest.fixture(scope="module")
def preview(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ming_preview")
    checkpoint = folder / "checkpoint"
    write_checkpoint(checkpoint, vision=EYES, talker=TINY_TALKER, vae=TINY_VAE)
    (folder / "cpu.toml").write_text(ON_A_CPU)
    with serving(folder, "--model", str(checkpoint), "--config", str(folder / "cpu.toml")) as running:
        assert "profile ming-flash-omni-preview" in " ".join((folder / "log.txt").read_text().split())
        yield running


def test_it_hears_and_sees_and_answers_in_text(preview: Server) -> None:
    reply = preview.client().chat.completions.create(**asked(*MEDIA))
    assert reply.choices[0].message.content and reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    details: dict[str, Any] = reply.usage.prompt_tokens_details.to_dict()
    image = preview.client().chat.completions.create(**asked(*MEDIA[:2], max_completion_tokens=1)).usage
    assert image is not None and image.prompt_tokens_details is not None
    assert image.prompt_tokens_details.to_dict()["image_tokens"] == 2 * 3  # 64 x 96 pixels are shown as 56 x 84
    assert details["audio_tokens"] == 25
    assert details["image_tokens"] > 2 * 3  # the clip's are among them


def speech(server: Server, voice: str = "alloy", **more: Any) -> bytes:
    body: dict[str, Any] = {"response_format": "wav", "extra_body": {"seed": 1, **more}}
    return server.client().audio.speech.create(model="ming_omni", voice=voice, input=TEXT, **body).content


def heard(sound: bytes) -> np.ndarray:
    samples, rate_hz = soundfile.read(io.BytesIO(sound), dtype="float32")
    assert rate_hz == 16000 and samples.ndim == 1 and 0.02 < np.std(samples) < 0.5
    found: np.ndarray = samples
    return found


def test_it_speaks_its_answer_while_it_is_made(preview: Server) -> None:
    """In the 24 kHz that clients expect of pcm."""
    spoken: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}
    words, parts = "", [b""]
    for chunk in preview.client().chat.completions.create(**asked(MEDIA[0], **spoken), stream=True):
        for choice in chunk.to_dict()["choices"]:
            audio: dict[str, Any] = choice["delta"].get("audio") or {}
            words += audio.get("transcript", "")
            parts += filter(None, [base64.b64decode(audio.get("data", ""))])
    samples = np.frombuffer(b"".join(parts), "<i2") / 32768
    assert len(words.split()) > 3 and len(parts) > 3
    assert len(samples) > 24000 and 0.02 < np.std(samples) < 0.5


def test_it_says_a_text_in_its_voices_and_in_that_of_a_recording(preview: Server) -> None:
    said = {voice: heard(speech(preview, voice)) for voice in ("alloy", "DB30", "low")}
    assert len(said["alloy"]) >= 12 * STEP  # after less no segment ends
    assert np.array_equal(said["alloy"], said["DB30"])
    assert not np.array_equal(said["low"][:STEP], said["DB30"][:STEP])
    recording = f"data:audio/wav;base64,{wav(1.5)}"
    learned = heard(speech(preview, ref_audio=recording, ref_text=SAID))
    assert not np.array_equal(learned[:STEP], said["DB30"][:STEP])
    with pytest.raises(openai.BadRequestError, match="this model takes a voice from a recording together") as refused:
        speech(preview, ref_audio=recording)
    assert refused.value.param == "ref_text"
