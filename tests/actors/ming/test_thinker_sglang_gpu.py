"""Ming's thinker on SGLang in bfloat16, by the kernels of a GPU: what they give is near the reference's float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from actors.ming.config import AUDIO, IMAGE
from actors.ming.prompt import Grid, places
from actors.ming.thinker_model import load_thinker
from omniflow.engine.base import EngineOutput, EngineRequest, Sampling
from omniflow.engine.transformers import TransformersEngine
from tests.actors.ming.thinker_folder import write_thinker
from tests.engine.tiny import ids_of, run

if TYPE_CHECKING:
    from omniflow.engine.sglang import SGLangEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.timeout(300),
]
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "head_dim": 128,
    "rope_scaling": {"type": "video_rope"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("ming"), **SHAPE)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[SGLangEngine]:
    from actors.ming.thinker_sglang import load_sglang_thinker

    engine = load_sglang_thinker(folder, dtype="bfloat16", kv_tokens=4096, max_running=8, deterministic=True)
    yield engine
    engine.close()


def ask(id: str, number: int, **sampling: Any) -> EngineRequest:
    """Text, an image and audio in it, 51 to 99 inputs."""
    parts: list[int | Grid] = [10, Grid(1, 3, 4 + number % 5), 20 + number, 9]
    where = torch.from_numpy(places(parts))
    kinds = torch.zeros(where.shape[1], dtype=torch.uint8)
    kinds[10 : 10 + 3 * (4 + number % 5)], kinds[-9:-2] = IMAGE, AUDIO
    generator = torch.Generator().manual_seed(number)
    at = tuple(kinds.nonzero().flatten().tolist())
    return EngineRequest(
        id=id,
        ids=torch.randint(0, 300, (len(kinds),), generator=generator).tolist(),
        sampling=Sampling(**{"max_tokens": 4, **sampling}),
        embeds=torch.randn(len(at), SHAPE["hidden_size"], generator=generator),
        positions=at,
        places=where,
        kinds=kinds,
        hidden="all",
    )


def first(outputs: list[EngineOutput]) -> tuple[int, torch.Tensor]:
    """The first token, and the hidden states of the prompt."""
    hidden = outputs[0].hidden
    assert hidden is not None
    return ids_of(outputs)[0], hidden.float().cpu()


def test_prompts_come_out_as_in_the_reference(engine: SGLangEngine, folder: Path) -> None:
    reference = TransformersEngine(load_thinker(folder), media=True)
    asked = [ask(str(seed), seed) for seed in range(24)]
    ours, theirs = run(engine, asked), run(reference, asked)
    pairs = [(first(ours[each.id]), first(theirs[each.id])) for each in asked]
    # Experts that are nearly even are chosen by the last bits: a few inputs go elsewhere, and what attends to them.
    apart = torch.cat([(a - b).norm(dim=-1) / b.norm(dim=-1) for (_, a), (_, b) in pairs])
    assert apart.median() < 0.15, apart.quantile(torch.tensor([0.1, 0.5, 0.9]))
    assert sum(a == b for (a, _), (b, _) in pairs) >= 14


def test_a_seed_draws_the_same_tokens_alone_and_in_company(engine: SGLangEngine) -> None:
    def drawn(id: str, seed: int) -> EngineRequest:
        return ask(id, 3, temperature=1.0, top_p=0.95, seed=seed, max_tokens=24)

    alone = ids_of(run(engine, [drawn("a", 7)])["a"])
    others = [ask(f"o{seed}", seed, max_tokens=30) for seed in range(5)]
    company = run(engine, [*others[:3], drawn("a", 7), drawn("b", 8), *others[3:]])
    assert ids_of(company["a"]) == alone
    assert ids_of(company["b"]) != alone
