"""Every tensor of Ming-flash-omni-2.0 at its real sizes, and of the preview's speech, has its place here, or a reason
why it has none.

fixtures/flash_omni_2.json says where its names are from: no index file of the released checkpoint was in reach.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from actors.checkpoint import built, load, read_tensors
from actors.ming.audio_tower import AUDIO_PREFIXES, AudioTower
from actors.ming.audio_vae import AudioVaeDecoder, AudioVaeEncoder
from actors.ming.config import AudioConfig, AudioVae, Pixels, Talker, Thinker, VisionConfig
from actors.ming.talker import TalkerModel
from actors.ming.tensors import Shapes, model_shapes, talker_shapes, vae_shapes
from actors.ming.thinker_model import ThinkerModel
from actors.ming.tiny import TALKER, VAE, write_checkpoint
from actors.ming.vision_tower import VISION_PREFIXES, VisionTower, unused_weights
from actors.ming.weights import thinker_part
from omniflow.errors import WeightsError
from tests.actors.ming.preview import CHECKPOINT, TINY_TALKER, TINY_VAE

Weights = dict[str, torch.Tensor]
Take = Callable[[Weights], None]
FIXTURE = json.loads((Path(__file__).with_name("fixtures") / "flash_omni_2.json").read_text())
UNUSED = {
    "vision.deepstack_merger_list.": "of the layers that Ming's thinker does not add to its own",
    "cfm.model.rotary_embed.inv_freq": "the sizes tell it",
    "aggregator.rotary_embed.inv_freq": "the sizes tell it",
    "decoder.head.istft.window": "the sizes tell it",
    "encoder.encoder.embed_tokens.": "its inputs are no tokens",
    "encoder.aggregator.embed_tokens.": "its inputs are no tokens",
    "decoder.decoder.embed_tokens.": "its inputs are no tokens",
    "encoder.norm.": "the reference makes it and never calls it",
}


def expanded(pattern: str) -> Iterator[str]:
    """As a shell does it: {a,b} and {0..3}, also inside each other."""
    start = pattern.find("{")
    if start < 0:
        yield pattern
        return
    depth, ends = 0, [start]
    for at in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[at], 0)
        if depth == 0 or (depth == 1 and pattern[at] == ","):
            ends.append(at)
        if depth == 0:
            break
    for begin, end in zip(ends, ends[1:], strict=False):
        first, _, last = pattern[begin + 1 : end].partition("..")
        choices = map(str, range(int(first), int(last) + 1)) if last.isdigit() else [pattern[begin + 1 : end]]
        for choice in choices:
            yield from expanded(pattern[:start] + choice + pattern[ends[-1] + 1 :])


def index(folder: str) -> Shapes:
    """Names and shapes of a folder's tensors in the real checkpoint."""
    names = [
        (name, tuple(shape)) for pattern, shape in FIXTURE["tensors"][folder].items() for name in expanded(pattern)
    ]
    assert len({name for name, _ in names}) == len(names)
    return dict(names)


def config(*folders: str) -> list[dict[str, Any]]:
    return [copy.deepcopy(FIXTURE["configs"][folder]) for folder in folders]


def test_the_names_are_those_that_a_tiny_checkpoint_is_written_with() -> None:
    root, talker, llm, vae = config(".", "talker", "talker/llm", "talker/vae")
    assert model_shapes(root) == index(".")
    assert talker_shapes(talker, llm) == index("talker")
    assert vae_shapes(vae) == index("talker/vae")


def thinker(root: dict[str, Any]) -> Take:
    with torch.device("meta"):
        model = ThinkerModel(msgspec.convert(root["llm_config"], Thinker))
    return lambda weights: load(model, thinker_part(weights), "the thinker")


def vision(root: dict[str, Any]) -> Take:
    sizes = msgspec.convert(root, VisionConfig)
    unused = unused_weights(sizes.vision_config)
    return lambda weights: discard(
        built(
            lambda: VisionTower(sizes, Pixels()),
            {name: each for name, each in weights.items() if name not in unused},
            "vision",
        )
    )


def audio(root: dict[str, Any]) -> Take:
    sizes = msgspec.convert(root, AudioConfig)
    return lambda weights: discard(built(lambda: AudioTower(sizes), weights, "hearing"))


def discard(_tower: torch.nn.Module) -> None: ...


PARTS: dict[tuple[str, ...], Callable[[dict[str, Any]], Take]] = {
    ("model.",): thinker,
    VISION_PREFIXES: vision,
    AUDIO_PREFIXES: audio,
}
"""The parts in a checkpoint's first folder. Each is strict: what is missing or too many of its own is an error."""


def of_part(weights: Weights, prefixes: tuple[str, ...]) -> Weights:
    return {name: each for name, each in weights.items() if name.startswith(prefixes)}


def empty(shapes: Shapes) -> Weights:
    """As they are stored: 16 bits, but for the biases of gates."""
    types = {name: torch.float32 if name.endswith("expert_bias") else torch.bfloat16 for name in shapes}
    return {name: torch.empty(shape, dtype=types[name], device="meta") for name, shape in shapes.items()}


def test_the_thinker_and_the_towers_take_all_of_the_model() -> None:
    """Of the thinker two layers, the dense one and one of 256 experts; tests/actors/ming/test_thinker.py has all."""
    weights, (root,) = empty(index(".")), config(".")
    assert sum(each.numel() for each in of_part(weights, ("model.",)).values()) > 100e9
    later = tuple(f"model.model.layers.{layer}." for layer in range(2, 32))
    root["llm_config"] |= {"num_hidden_layers": 2}
    parts = {prefixes: of_part(weights, prefixes) for prefixes in PARTS}
    assert sum(map(len, parts.values())) == len(weights) > 24000
    for prefixes, part in PARTS.items():
        part(root)({name: each for name, each in parts[prefixes].items() if not name.startswith(later)})


def talker_config(talker: dict[str, Any], llm: dict[str, Any], vae: dict[str, Any], folder: Path) -> Talker:
    for place, content in (("", talker), ("llm", llm), ("vae", vae)):
        (folder / "talker" / place).mkdir(parents=True, exist_ok=True)
        (folder / "talker" / place / "config.json").write_text(json.dumps(content))
    return Talker.load(folder)


def talker_of(sizes: Talker) -> Take:
    with torch.device("meta"):
        return TalkerModel(sizes).load


def vae_of(sizes: AudioVae) -> Take:
    with torch.device("meta"):
        halves = AudioVaeDecoder(sizes), AudioVaeEncoder(sizes)

    def take(weights: Weights) -> None:
        for half in halves:
            half.load(weights)

    return take


def test_the_talker_and_its_audio_vae_take_all_of_theirs(tmp_path: Path) -> None:
    talker, vae = empty(index("talker")), empty(index("talker/vae"))
    sizes = talker_config(*config("talker", "talker/llm", "talker/vae"), tmp_path)
    talker_of(sizes)(talker)
    vae_of(sizes.audio_tokenizer_config)(vae)
    # Neither looks at names of another beginning.
    own = ("model.", "cfm.model.", "aggregator.", "stop_head.", "spk_head.")
    assert of_part(talker, own).keys() == talker.keys()
    assert of_part(vae, ("encoder.", "decoder.")).keys() == vae.keys()


def test_the_names_of_the_previews_talker_are_those_of_its_authors_modules(tmp_path: Path) -> None:
    """They wrote the fixture; and of what a tiny checkpoint of the kind is written with, all is needed."""
    own, llm, vae = (
        json.loads((CHECKPOINT / "talker" / each / "config.json").read_text()) for each in (".", "llm", "vae")
    )
    shapes = {name: tuple(each.shape) for name, each in read_tensors(CHECKPOINT / "talker").items()}
    assert talker_shapes(own, llm, in_chat=False) == shapes
    wanted = {name: tuple(each.shape) for name, each in read_tensors(CHECKPOINT / "talker" / "vae").items()}
    assert vae_shapes(vae) == wanted
    write_checkpoint(tmp_path, talker=TINY_TALKER, vae=TINY_VAE)
    sizes = Talker.load(tmp_path)
    llm = json.loads((tmp_path / "talker/llm/config.json").read_text())
    talker, vae = empty(talker_shapes(TINY_TALKER, llm, in_chat=False)), empty(vae_shapes(TINY_VAE))
    found = needed(talker, talker_of(sizes)) | needed(vae, vae_of(sizes.audio_tokenizer_config))
    left = {kind_of(name) for name in [*talker, *vae]} - found
    assert {kind for kind in left if not kind.startswith(tuple(UNUSED))} == set()


def needed(weights: Weights, take: Take) -> set[str]:
    """The kinds of names, numbers left out, without one of which `take` fails."""
    found = set()
    for kind, name in {kind_of(name): name for name in weights}.items():
        try:
            take({other: each for other, each in weights.items() if other != name})
        except WeightsError:
            found.add(kind)
    return found


def kind_of(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)


def test_each_tensor_is_needed_or_known_to_be_of_no_use(tmp_path: Path) -> None:
    """In the sizes of the tiny checkpoint, whose names are the real one's: each kind is left out once."""
    write_checkpoint(tmp_path)
    root, llm = (json.loads((tmp_path / each / "config.json").read_text()) for each in (".", "talker/llm"))
    sizes = Talker.load(tmp_path)
    model, talker, vae = empty(model_shapes(root)), empty(talker_shapes(TALKER, llm)), empty(vae_shapes(VAE))
    found = needed(talker, talker_of(sizes)) | needed(vae, vae_of(sizes.audio_tokenizer_config))
    for prefixes, part in PARTS.items():
        found |= needed(of_part(model, prefixes), part(root))
    left = {kind_of(name) for name in [*model, *talker, *vae]} - found
    assert {kind for kind in left if not kind.startswith(tuple(UNUSED))} == set()
    assert {beginning for beginning in UNUSED if not any(kind.startswith(beginning) for kind in left)} == set()
