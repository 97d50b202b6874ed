from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from actors.ming.config import AudioVae, Folders, Talker
from actors.ming.speaking import MingTalker
from actors.ming.vocoder import MingVocoder
from omniflow.errors import WeightsError
from omniflow.media import AudioChunk, Latents, Segment
from tests.actors.ming.tiny import write_checkpoint, write_flash_checkpoint
from tests.doubles import ListEmit, ListStream, context

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_flash_checkpoint(tmp_path_factory.mktemp("flash"))


async def say(talker: Path, vae: Path) -> tuple[np.ndarray, np.ndarray]:
    """The latents of "Hi." and their sound."""
    speaker, vocoder = MingTalker(model=str(talker)), MingVocoder(model=str(vae))
    await speaker.setup()
    await vocoder.setup()
    latents: ListEmit[Latents] = ListEmit()
    sound: ListEmit[AudioChunk] = ListEmit()
    await speaker.run(ListStream([Segment("Hi.", 0)]), latents, context(seed=3))
    await vocoder.run(ListStream(latents.items), sound, context())
    await speaker.close()
    return np.concatenate([x.frames for x in latents.items]), np.concatenate([x.samples for x in sound.items])


async def test_both_layouts_say_the_same(whole: Path, flash: Path) -> None:
    wanted = await say(whole, whole)
    assert wanted[1].std() > 0.05
    for talker, vae in ((flash, flash), (flash / "talker", flash / "talker" / "vae")):
        for one, other in zip(await say(talker, vae), wanted, strict=True):
            assert np.array_equal(one, other)


def test_both_layouts_tell_the_same_sizes(whole: Path, flash: Path) -> None:
    assert Talker.load(whole) == Talker.load(flash) == Talker.load(flash / "talker")
    assert AudioVae.load(whole) == AudioVae.load(flash / "talker" / "vae")
    assert Folders.of(whole) == Folders(whole, whole, whole)


def test_a_talker_and_an_audio_vae_of_other_latents_are_refused(tmp_path: Path) -> None:
    folder = write_flash_checkpoint(tmp_path) / "talker"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"latent_dim": 64}))
    with pytest.raises(WeightsError, match="the talker's latents have 64 values, and those of its AudioVAE 8"):
        Talker.load(folder)
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(WeightsError, match="vae: config.json is no Ming talker's"):
        AudioVae.load(folder)
