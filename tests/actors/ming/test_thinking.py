from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import anyio
import msgspec
import numpy as np
import pytest
import soundfile
import torch

from actors.detokenize import Detokenize
from actors.ming.config import AUDIO, IMAGE
from actors.ming.merging import MingMerge
from actors.ming.thinker_model import ThinkerModel, load_thinker
from actors.ming.thinking import MingThinker
from actors.preprocess import Preprocess
from omniflow.engine.base import EngineRequest, Sampling
from omniflow.engine.ranks import Ranks
from omniflow.engine.rows import Row, Span
from omniflow.errors import ContextLengthError, InvalidInputError
from omniflow.media import (
    AudioFeatures,
    AudioPart,
    Chat,
    ChatMessage,
    Generated,
    ImageFeatures,
    ImagePart,
    TextDelta,
    TextPart,
    TokenPrompt,
    Tokens,
    VideoPart,
)
from tests.actors.ming.thinker_folder import HIDDEN, byte_tokenizer, write_thinker
from tests.doubles import ListEmit, ListStream, context

pytestmark = pytest.mark.anyio

TOKENIZER = byte_tokenizer()
PNG = b"\x89PNG\r\n\x1a\nrest"
MP4 = b"\x00\x00\x00\x18ftypmp42rest"
LENGTH = 5
GREEDY = {"temperature": 0.0, "max_tokens": LENGTH}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("ming"), seed=4)


@asynccontextmanager
async def started(folder: Path, **settings: object) -> AsyncIterator[MingThinker]:
    thinker = MingThinker(model=str(folder), **settings)
    await thinker.setup()
    try:
        yield thinker
    finally:
        await thinker.close()


@pytest.fixture(scope="module")
async def thinker(folder: Path) -> AsyncIterator[MingThinker]:
    async with started(folder) as thinker:
        yield thinker


async def think(thinker: MingThinker, prompt: TokenPrompt, **options: object) -> tuple[list[int], Generated]:
    emit: ListEmit[Tokens] = ListEmit()
    generated = await thinker.run(prompt, emit, ListEmit(wanted=False), context(**options))
    return [id for tokens in emit.items for id in tokens.ids], generated


def wav() -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(1600, np.float32), 16_000, format="WAV")
    return buffer.getvalue()


def rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN), np.float32)


async def merged(folder: Path) -> TokenPrompt:
    """A conversation with an image, sound and a clip, by the way that it goes in the graph."""
    preprocess, merge = Preprocess(max_videos=1), MingMerge(model=str(folder))
    await preprocess.setup()
    await merge.setup()
    first = (TextPart("See "), ImagePart(PNG), AudioPart(wav(), "wav"))
    second = (VideoPart(MP4), TextPart("What now?"))
    turns = (ChatMessage("user", first), ChatMessage("assistant", (TextPart("Yes."),)), ChatMessage("user", second))
    taken = await preprocess.run(Chat(turns))
    assert taken.audio is not None and taken.image is not None
    heard = AudioFeatures(index=taken.audio.index, audio_s=0.1, rows=rows(5, 1), num_rows=(5,))
    grids = ((1, 3, 4), (2, 2, 2))
    seen = ImageFeatures(rows(20, 2), taken.image.index, grids, taken.image.videos, ((), (0.25, 1.25)))
    return await merge.run(taken.prompt, heard, seen, context())


@pytest.fixture(scope="module")
async def prompt(folder: Path) -> TokenPrompt:
    return await merged(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> ThinkerModel:
    return load_thinker(folder)


def directly(model: ThinkerModel, prompt: TokenPrompt) -> list[int]:
    """The likeliest tokens, each by a pass of the whole model over all inputs so far."""
    ids = list(prompt.ids)
    assert prompt.rows is not None and prompt.places is not None and prompt.kinds is not None
    places, kinds = torch.tensor(prompt.places), torch.tensor(prompt.kinds)
    with torch.inference_mode():
        for _ in range(LENGTH):
            embeds = model.get_input_embeddings()(torch.tensor([ids]))
            embeds[0, list(prompt.positions)] = torch.tensor(prompt.rows)
            request = EngineRequest(id="direct", ids=ids, sampling=Sampling(), places=places, kinds=kinds)
            spans = [Span(Row(request, 3, len(ids)), 0, len(ids), 0, None)]
            logits = model(inputs_embeds=embeds, spans=spans, logits_to_keep=torch.tensor([len(ids) - 1])).logits[0, 0]
            best = logits.topk(2)
            assert best.values[0] - best.values[1] > 1e-4
            ids.append(int(best.indices[0]))
            places = torch.cat([places, places[0].max().expand(3, 1) + 1], dim=1)
            kinds = torch.cat([kinds, torch.zeros(1, dtype=torch.uint8)])
    return ids[len(prompt.ids) :]


async def test_the_answer_to_a_conversation_is_that_of_the_model(
    folder: Path, model: ThinkerModel, thinker: MingThinker, prompt: TokenPrompt
) -> None:
    tokens, generated = await think(thinker, prompt, **GREEDY)
    assert tokens == directly(model, prompt)
    assert generated == Generated("length", len(prompt.ids), LENGTH, audio_tokens=5, image_tokens=20)
    detokenize = Detokenize(model=str(folder))
    await detokenize.setup()
    text: ListEmit[TextDelta] = ListEmit()
    await detokenize.run(ListStream([Tokens(tuple(tokens))]), text, ListEmit(), context())
    assert "".join(delta.text for delta in text.items) == TOKENIZER.decode(tokens) != ""


async def test_an_answer_goes_on_after_the_last_time(
    model: ThinkerModel, thinker: MingThinker, prompt: TokenPrompt
) -> None:
    """A picture that is higher than the text after it reaches further than the last time; the answer is not."""
    assert prompt.places is not None
    places = prompt.places.copy()
    places[1, 80] += 400
    high = msgspec.structs.replace(prompt, places=places)
    tokens, _ = await think(thinker, high, **GREEDY)
    assert tokens == directly(model, high)


@pytest.mark.parametrize("what", ["rows", "places", "kinds", "sound"])
async def test_what_stands_in_a_prompt_matters(thinker: MingThinker, prompt: TokenPrompt, what: str) -> None:
    assert prompt.rows is not None and prompt.places is not None and prompt.kinds is not None
    swapped = np.where(prompt.kinds == IMAGE, AUDIO, prompt.kinds).astype(np.uint8)
    others = {
        "rows": {"rows": prompt.rows[::-1].copy()},
        "places": {"places": np.broadcast_to(np.arange(len(prompt.ids)), (3, len(prompt.ids))).copy()},
        "kinds": {"kinds": swapped},
        "sound": {"kinds": np.where(prompt.kinds == AUDIO, 0, prompt.kinds).astype(np.uint8)},
    }
    options = {"temperature": 0.0, "max_tokens": 30}
    tokens, _ = await think(thinker, prompt, **options)
    assert (await think(thinker, msgspec.structs.replace(prompt, **others[what]), **options))[0] != tokens


async def test_company_changes_no_answer(thinker: MingThinker, prompt: TokenPrompt) -> None:
    text = TokenPrompt(prompt.ids[:70])
    drawn = {"temperature": 1.0, "top_p": 0.95, "seed": 3, "max_tokens": 12}
    alone = [(await think(thinker, each, **drawn))[0] for each in (prompt, text)]
    together: dict[int, list[int]] = {}

    async def one(number: int, given: TokenPrompt, **options: object) -> None:
        together[number] = (await think(thinker, given, **options))[0]

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(lambda n=number: one(10 + n, prompt if n % 2 else text, temperature=1.0, max_tokens=20))
        tasks.start_soon(lambda: one(0, prompt, **drawn))
        tasks.start_soon(lambda: one(1, text, **drawn))
    assert [together[0], together[1]] == alone
    assert alone[0] != alone[1]


async def test_the_end_of_a_turn_ends_the_answer(thinker: MingThinker, prompt: TokenPrompt) -> None:
    end = TOKENIZER.token_to_id("<|role_end|>")
    tokens, generated = await think(thinker, prompt, logit_bias=((end, 100.0),), **GREEDY)
    assert tokens == []
    assert generated.finish_reason == "stop"


async def test_an_answer_is_held_to_a_schema(thinker: MingThinker, prompt: TokenPrompt) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": ["cat", "dog"]}}, "required": ["name"]}
    schema["additionalProperties"] = False
    no_blanks = tuple((id, -100.0) for blank in " \n\t" for id in TOKENIZER.encode(blank).ids)
    options = {"json_schema": json.dumps(schema), "logit_bias": no_blanks, "temperature": 0.0, "max_tokens": 60}
    tokens, generated = await think(thinker, prompt, **options)
    assert json.loads(TOKENIZER.decode(tokens))["name"] in ("cat", "dog")
    assert generated.finish_reason == "stop"


async def test_what_does_not_fit_is_refused_and_the_next_is_served(thinker: MingThinker, prompt: TokenPrompt) -> None:
    with pytest.raises(ContextLengthError):
        await think(thinker, TokenPrompt(prompt.ids * 5))
    with pytest.raises(InvalidInputError, match="temperature must be from 0 to 5"):
        await think(thinker, prompt, temperature=9.0)
    assert len((await think(thinker, prompt, **GREEDY))[0]) == LENGTH


@pytest.mark.parametrize(("size", "graphs"), [(1, True), (1, False), (2, True)])
def test_any_number_of_gpus_has_graphs_of_prompts_where_they_are_wanted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: int, graphs: bool
) -> None:
    told: dict[str, object] = {}
    loader = SimpleNamespace(load_sglang_thinker=lambda folder, **settings: told.update(settings))
    monkeypatch.setitem(sys.modules, "actors.ming.thinker_sglang", loader)
    thinker = MingThinker(model=str(folder), engine="sglang", device="gpu", prompt_graphs=graphs)
    thinker.ranks = Ranks(0, size)
    thinker.load_engine(thinker._load())
    assert told["prompt_graphs"] is graphs
    assert told["ranks"] is thinker.ranks


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
async def test_sglang_answers_as_the_reference_does(folder: Path, thinker: MingThinker, prompt: TokenPrompt) -> None:
    wanted = [await think(thinker, each, **GREEDY) for each in (prompt, TokenPrompt(prompt.ids[:70]))]
    settings = {"engine": "sglang", "dtype": "float32", "kv_tokens": 1024, "max_running": 2, "max_waiting": 4}
    async with started(folder, **settings, device="gpu" if torch.cuda.is_available() else "cpu") as other:
        assert [await think(other, each, **GREEDY) for each in (prompt, TokenPrompt(prompt.ids[:70]))] == wanted
