"""Ming-flash-omni-preview: a checkpoint with its eyes finds its profile, sees, hears, and answers in text alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from actors.ming.tiny import VISION, write_checkpoint
from tests.e2e.conftest import Server, serving
from tests.e2e.test_ming_tiny import MEDIA, asked

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
"""


@pytest.fixture(scope="module")
def preview(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ming_preview")
    checkpoint = folder / "checkpoint"
    write_checkpoint(checkpoint, vision=EYES)
    shutil.rmtree(checkpoint / "talker")
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


def test_speech_is_refused_by_what_is_missing(preview: Server) -> None:
    spoken: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}
    with pytest.raises(openai.BadRequestError, match="the talker of Ming-flash-omni-preview is not built here"):
        preview.client().chat.completions.create(**asked(MEDIA[0], **spoken))
    with pytest.raises(openai.BadRequestError, match="the talker of Ming-flash-omni-preview is not built here"):
        preview.client().audio.speech.create(model="ming_omni", voice="alloy", input="Hello.")
